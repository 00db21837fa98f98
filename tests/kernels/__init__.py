"""Tests of kernels: they call a backend's launchers, the Python functions that launch kernels, directly."""
