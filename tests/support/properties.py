"""Names of hypothesis; where it is not installed, stand-ins that skip each property test with the reason."""

from __future__ import annotations

import pytest

try:
    from hypothesis import assume, given
    from hypothesis import strategies as st
except ModuleNotFoundError:

    class _Strategies:
        """Stand-in for every strategy: each attribute and each call returns it again."""

        def __getattr__(self, name):
            return self

        def __call__(self, *args, **kwargs):
            return self

    st = _Strategies()

    def given(*_args, **_kwargs):
        """Replace a property test by a test that is skipped."""

        def replace(test):
            def skipped():
                pytest.skip("hypothesis is not installed")

            skipped.__name__, skipped.__doc__ = test.__name__, test.__doc__
            return skipped

        return replace

    def assume(_condition):
        """Fail: this is never called, as no property test runs without hypothesis."""
        raise AssertionError("hypothesis is not installed")


__all__ = ["assume", "given", "st"]
