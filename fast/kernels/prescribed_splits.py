"""Prescribe what launchers choose from the sizes of a batch, so that `fast.warmup` compiles every kernel variant.

- A launcher may divide the keys of a prefill into splits only if the context is long. Other kernel variants then run.
  The inputs of a warm-up are short, so that they need little memory; no launcher would divide their keys by itself.
- The number of splits of a decode without a schedule determines the variant of the combine kernel. It depends on the
  number of requests, and a warm-up would need batches of many sizes for all variants.
- The Hopper decode in the mode `fp8_product` has partial outputs in float32, and in bfloat16 if there are many.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import torch

from ..backends import check_every_call

# For several requests without a schedule, `combine.launch` has no variant of its kernel for other numbers of splits.
NUMBERS_OF_SPLITS = (4, 8, 16, 32, 64)
PARTIAL_DTYPES = (torch.float32, torch.bfloat16)  # dtypes of partial outputs
_PRESCRIBED = contextvars.ContextVar[int | None]("prescribed_splits", default=None)
_PARTIAL_DTYPE = contextvars.ContextVar[torch.dtype | None]("prescribed_partial_dtype", default=None)


def prescribed_splits() -> int | None:
    """Return the number of splits that `prescribe_splits` prescribes; None if the launcher chooses the number."""
    return _PRESCRIBED.get()


@contextlib.contextmanager
def prescribe_splits(count: int) -> Iterator[None]:
    """Let every prefill and every decode in this context divide its keys into `count` splits, if its kernel can.

    A prefill divides the keys of each query tile, and a decode those of each request. A decode with a schedule, and a
    batch-invariant decode, do not change.

    No op in this context keeps its launches for later calls, or reuses launches of earlier calls. The signature of a
    call does not contain the prescribed number, so a call outside the context could otherwise repeat these launches.
    """
    token = _PRESCRIBED.set(count)
    try:
        with check_every_call():
            yield
    finally:
        _PRESCRIBED.reset(token)


def prescribed_partial_dtype() -> torch.dtype | None:
    """Return the dtype that `prescribe_partial_dtype` prescribes; None if the launcher chooses the dtype."""
    return _PARTIAL_DTYPE.get()


@contextlib.contextmanager
def prescribe_partial_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let every decode in this context that can have partial outputs of `dtype` have them; `dtype`: `PARTIAL_DTYPES`.

    As in `prescribe_splits`, no op in this context keeps its launches or reuses earlier ones.
    """
    token = _PARTIAL_DTYPE.set(dtype)
    try:
        with check_every_call():
            yield
    finally:
        _PARTIAL_DTYPE.reset(token)
