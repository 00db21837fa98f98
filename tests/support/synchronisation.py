"""Check that the host (CPU) does not wait for the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """Make every call in the `with` block raise an error if the call waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
