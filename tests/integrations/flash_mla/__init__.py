"""Tests of FlashMLA's calls over the kernels of `fast`."""
