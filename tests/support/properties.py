"""Provide `given`, `st` and `assume` of hypothesis; if it is not installed, substitutes that skip property tests."""

from __future__ import annotations

import pytest

try:
    from hypothesis import assume, given
    from hypothesis import strategies as st
except ModuleNotFoundError:

    class _Strategies:
        """Substitute for every strategy; each attribute and each call returns the same object."""

        def __getattr__(self, name):
            return self

        def __call__(self, *args, **kwargs):
            return self

    st = _Strategies()

    def given(*_args, **_kwargs):
        """Return a decorator that replaces a property test by a test that is skipped."""

        def replace(test):
            def skipped():
                pytest.skip("hypothesis is not installed")

            skipped.__name__, skipped.__doc__ = test.__name__, test.__doc__
            return skipped

        return replace

    def assume(_condition):
        """Raise an error; without hypothesis no property test runs, so nothing calls this function."""
        raise AssertionError("hypothesis is not installed")


__all__ = ["assume", "given", "st"]
