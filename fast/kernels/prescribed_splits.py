"""Prescribe the number of splits of prefills, so that `fast.warmup` compiles the kernels of prefills with splits.

A launcher may divide the keys of a prefill into splits only if the context is long. Other kernel variants then run. The
inputs of a warm-up are short, so that they need little memory; no launcher would divide their keys by itself.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from ..backends import check_every_call

_PRESCRIBED = contextvars.ContextVar[int | None]("prescribed_splits", default=None)


def prescribed_splits() -> int | None:
    """Return the number of splits that `prescribe_splits` prescribes; None if the launcher chooses the number."""
    return _PRESCRIBED.get()


@contextlib.contextmanager
def prescribe_splits(count: int) -> Iterator[None]:
    """Let every prefill in this context divide the keys of its query tiles into `count` splits, if its kernel can.

    No op in this context keeps its launches for later calls, or reuses launches of earlier calls. The signature of a
    call does not contain the prescribed number, so a call outside the context could otherwise repeat these launches.
    """
    token = _PRESCRIBED.set(count)
    try:
        with check_every_call():
            yield
    finally:
        _PRESCRIBED.reset(token)
