"""Errors of their own: what cannot be served, and an exchange between ranks that did not come back."""

from __future__ import annotations

from collections.abc import Iterable


class UnsupportedConfiguration(ValueError):
    """A configuration that cannot be served, with every reason.

    Attributes:
        reasons: one clear line each; never empty.
    """

    def __init__(self, reasons: Iterable[str]):
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))


class GroupError(RuntimeError):
    """An exchange that did not come back: it names the group, the operation and what the engine said."""
