"""Calls of PyTorch's SDPA on a GPU for requests of equal lengths, without the checks that every call makes.

An `EqualLengthsCall` serves all calls with one signature (`fast.backends.kept_calls`): it looks once at shapes, strides
and alignments. Besides the call of SDPA, a call has one padded copy of `v` if the kernel needs wider values, and one
copy of the output if its width or its place differs.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from . import torch_sdpa
from .conversion import Widened, is_in_words
from .torch_sdpa import CUDNN, FLASH, OnlyKernel, columns_of_values, equal_requests, in_requests


class EqualLengthsCall:
    """Attention of requests of equal lengths by one kernel of SDPA, for calls with equal properties.

    Later calls have the shapes, strides, dtypes, devices, alignments and numbers of the first call. But a signature
    does not show whether queries and keys have the same offsets, so each call finds this out: if they do not, it runs
    the launcher of the backend, which copies the offsets to the CPU.

    Args:
        kernel: `FLASH` or `CUDNN`.
        launch: the launcher of the backend.
        q: [T, N, D], queries of the first call.
        k: [S, N, D], keys of the first call.
        v: [S, N, V], values of the first call.
        requests: number of requests.
        length: tokens of each request.

    Attributes:
        allocates: True, because an object made for calls with `out` also serves calls without `out`
            (`OpSupport.kept_call`).
    """

    allocates = True

    def __init__(self, kernel: str, launch: Callable, q: Tensor, k: Tensor, v: Tensor, requests: int, length: int):
        self._kernel, self._launch = OnlyKernel(kernel), launch
        columns, self._values = columns_of_values(kernel, q.shape[2], v.shape[2]), v.shape[2]
        self._columns, self._widened = columns, Widened() if columns > self._values else None
        wide = v if self._widened is None else v.new_empty(*v.shape[:2], columns)
        views = [in_requests(x, requests, length).transpose(1, 2) for x in (q, k, wide)]
        self._of_q, self._of_k, self._of_v = ((view.shape, view.stride()) for view in views)
        self._batch = requests, length

    def __call__(
        self, q: Tensor, k: Tensor, k_pe: None, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool, out_dtype,
        out: Tensor | None = None, lse: None = None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Compute attention of packed requests; `torch_sdpa.flash_attn_varlen` explains arguments and result."""
        if cu_seqlens_q.data_ptr() != cu_seqlens_k.data_ptr():
            return self._launch(
                q, k, k_pe, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, out_dtype,
                out, lse,
            )  # fmt: skip
        if self._widened is not None:
            v = self._widened(v, None, self._columns)
        with self._kernel:
            made = scaled_dot_product_attention(
                q.as_strided(*self._of_q), k.as_strided(*self._of_k), v.as_strided(*self._of_v), is_causal=causal,
                scale=softmax_scale,
            ).transpose(1, 2)  # fmt: skip
        if out is None:
            if self._widened is None and made.is_contiguous():
                return made.flatten(0, 1), None
            out = q.new_empty(q.shape[0], q.shape[1], self._values)
        in_requests(out, *self._batch).copy_(made[..., : self._values])
        return out, None


def _kept(kernel: str, launch: Callable, q, k, k_pe, v, cu_seqlens_q, cu_seqlens_k, longest, *_) -> Callable | None:
    """Return the function for later calls with the same signature; None if each call must run the launcher."""
    requests = 0 if q.is_cpu else equal_requests(q, cu_seqlens_q, cu_seqlens_k, longest)
    in_place = all(is_in_words(x) for x in (q, k)) if kernel == FLASH else all(x.is_contiguous() for x in (q, k))
    widens = columns_of_values(kernel, q.shape[2], v.shape[2]) > v.shape[2]
    ready = in_place and (widens or (is_in_words(v) if kernel == FLASH else v.is_contiguous()))
    if requests == 0 or not ready or (kernel == CUDNN and longest == 1):
        return None
    return EqualLengthsCall(kernel, launch, q, k, v, requests, longest)


def kept_flash(*arguments) -> Callable | None:
    """Return the function of "torch_flash" for later calls with the same signature; None if there is none."""
    return _kept(FLASH, torch_sdpa.flash_attn_varlen, *arguments)


def kept_cudnn(*arguments) -> Callable | None:
    """Return the function of "torch_cudnn" for later calls with the same signature; None if there is none."""
    return _kept(CUDNN, torch_sdpa.cudnn_attn_varlen, *arguments)
