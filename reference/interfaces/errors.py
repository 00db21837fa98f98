"""Exceptions of this project: an unsupported configuration, and a failed exchange between ranks."""

from __future__ import annotations

from collections.abc import Iterable


class UnsupportedConfiguration(ValueError):
    """Error for a configuration that is not supported. The message lists every reason.

    Attributes:
        reasons: the reasons, one line of text each; never empty.
    """

    def __init__(self, reasons: Iterable[str]):
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))


class GroupError(RuntimeError):
    """Error for an exchange between ranks that failed. The message names the group, the operation and the reason."""
