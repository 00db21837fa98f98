"""Tests of the exchange of attention states and context between context-parallel ranks."""
