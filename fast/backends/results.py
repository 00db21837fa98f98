"""Check what a backend of another project returns, and name the backend in the error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reference.interfaces import check, check_tensor, wide_dtype

from .own import OWN_BACKENDS


def check_state(
    backend: str, op: str, state: Any, shape: tuple[int, ...], out_dtype: torch.dtype,
    device: torch.device, lse: bool = True, written: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:  # fmt: skip
    """Check the attention state that a backend returned; do nothing for the backends of this package.

    Args:
        backend: name of the backend.
        op: name of the op, for the error.
        state: what the backend returned; it should be a pair (output, LSE).
        shape: (T, N, Dv), the shape of the output.
        out_dtype: dtype of the output.
        device: device of the output.
        lse: whether the call needs the LSE.
        written: tensors of the output and the LSE into which the backend had to write; None for a new tensor.

    Raises:
        TypeError: the output or the LSE is not a tensor.
        ValueError: the result is not a pair; the output or the LSE has a wrong shape, dtype or device, or is not the
            tensor into which the backend had to write. The message names the backend.
    """
    if backend in OWN_BACKENDS:
        return
    wanted = wide_dtype(out_dtype)
    if (
        type(state) is tuple
        and len(state) == 2
        and _fits(state[0], shape, out_dtype, device, written[0])
        and (_fits(state[1], (shape[1], shape[0]), wanted, device, written[1]) if lse else state[1] is written[1])
    ):
        return
    name = f"the result of the backend {backend} for {op}"
    pair = isinstance(state, tuple) and len(state) == 2
    check(pair, name, "a pair (out, lse)", type(state).__name__)
    check_tensor(f"{name}: out", state[0], shape, (out_dtype,), device)
    if lse:
        check_tensor(f"{name}: lse", state[1], (shape[1], shape[0]), (wanted,), device)
    for part, made, given in zip(("out", "lse"), state, written, strict=True):
        if given is not None and made is not given:
            check(False, f"{name}: {part}", "the tensor into which the backend had to write", "another tensor")


def _fits(
    tensor: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, written: Tensor | None
) -> bool:
    """Return whether a tensor is right for certain; False only means that `check_state` must look at each property."""
    return (
        (tensor is written or written is None)
        and type(tensor) is Tensor
        and tensor.shape == shape
        and tensor.dtype is dtype
        and tensor.device == device
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )
