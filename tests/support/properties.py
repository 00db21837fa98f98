"""Hypothesis, or, where it is not installed, stand-ins under which a property test is skipped with the reason."""

from __future__ import annotations

import pytest

try:
    from hypothesis import assume, given
    from hypothesis import strategies as st
except ModuleNotFoundError:

    class _Strategies:
        """Any strategy, called with anything, mapped and filtered."""

        def __getattr__(self, name):
            return self

        def __call__(self, *args, **kwargs):
            return self

    st = _Strategies()

    def given(*_args, **_kwargs):
        """A test that says what is missing, in place of one that draws its arguments."""

        def replace(test):
            def skipped():
                pytest.skip("hypothesis is not installed")

            skipped.__name__, skipped.__doc__ = test.__name__, test.__doc__
            return skipped

        return replace

    def assume(_condition):
        """Never reached: no property test runs."""
        raise AssertionError("hypothesis is not installed")


__all__ = ["assume", "given", "st"]
