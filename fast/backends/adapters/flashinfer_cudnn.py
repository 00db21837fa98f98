"""Adapter to cuDNN's attention of prefills, through FlashInfer (`cudnn_batch_prefill_with_kv_cache`).

The call never waits for the GPU: cuDNN reads all lengths on the device. The library builds a graph of its own for
each new batch size and for each new upper bound of the lengths, which takes tens of milliseconds; newer versions of
cuDNN (9.24) and cudnn-frontend (1.29) build one graph for all lengths.

Rows without keys are repaired on the device, which costs one pass over the output of each call that may have such rows:
of every chunk of context, and of every direct call. cuDNN finds a request by 32-bit
offsets of elements, so the queries and the keys may have fewer than 2^31 elements.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.interfaces import GraphSupport, check

from ..error_texts import in_one_line
from ..own import missing
from ..registry import Backend, OpSupport
from .flashinfer import HALF_DTYPES, NATURAL, missing_library, state_without_keys, to_state

WORKSPACE_SIZE_PER_REQUEST = 12_800  # in bytes, the size that engines give to cuDNN
SHARED_WORKSPACE_SIZE = 4 * 2**20  # in bytes; the graph for all lengths needs 1 MiB for 4096 requests


def missing_parts() -> list[str]:
    """Return what cuDNN's attention needs and this machine lacks; an empty list if nothing is missing."""
    found = missing_library()
    if found:
        return found
    try:
        import cudnn
        from flashinfer.cudnn import cudnn_batch_prefill_with_kv_cache

        cudnn.backend_version()
    except (Exception, SystemExit) as error:  # the import of a library may raise any error
        return [f"cannot load cuDNN: {in_one_line(error)}"]
    needed = {"batch_offsets_units", "lse_base"} - set(inspect.signature(cudnn_batch_prefill_with_kv_cache).parameters)
    return [f"needs a version of flashinfer whose cuDNN call has {', '.join(sorted(needed))}"] if needed else []


def sees_no_key(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, tokens: int, causal: bool) -> Tensor:
    """Return which query tokens attend no key, bool [T], without waiting for the GPU.

    Args:
        cu_seqlens_q: [B + 1], first query token of each request.
        cu_seqlens_k: [B + 1], first key of each request.
        tokens: T, the number of query tokens.
        causal: whether the last query of a request sees all keys, and each earlier query sees one key less.
    """
    query_lens, key_lens, ends = cu_seqlens_q.diff(), cu_seqlens_k.diff(), cu_seqlens_q[1:]
    first = ends - key_lens if causal else torch.where(key_lens == 0, ends, 0)  # first query that sees a key
    of_token = first.repeat_interleave(query_lens, output_size=tokens)
    return torch.arange(tokens, device=cu_seqlens_q.device) < of_token


@dataclass(frozen=True, eq=False)
class CudnnCall:
    """The offsets of one call, and what is computed from them once for all layers.

    Attributes:
        cu_seqlens_q: [B + 1], first query token of each request.
        cu_seqlens_k: [B + 1], first key of each request.
        max_seqlen_q: upper bound of the query lengths.
        max_seqlen_k: upper bound of the key lengths.
        causal: whether the last query of a request sees all keys, and each earlier query sees one key less.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool

    @functools.cached_property
    def lens(self) -> tuple[Tensor, Tensor]:
        """Query lengths and key lengths, [B, 1, 1, 1] each, on the device."""
        return tuple(offsets.diff().view(-1, 1, 1, 1) for offsets in (self.cu_seqlens_q, self.cu_seqlens_k))

    @functools.cached_property
    def _empty_rows(self) -> dict[int, Tensor]:
        return {}

    def empty_rows(self, tokens: int) -> Tensor | None:
        """Return which of T query tokens attend no key, bool [T]; None if every query attends at least its own key."""
        if self.causal and self.cu_seqlens_q is self.cu_seqlens_k:
            return None
        if tokens not in self._empty_rows:
            self._empty_rows[tokens] = sees_no_key(self.cu_seqlens_q, self.cu_seqlens_k, tokens, self.causal)
        return self._empty_rows[tokens]


def attend(
    call: CudnnCall, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, out_dtype: torch.dtype, return_lse: bool,
    out: Tensor | None = None, lse: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run one call of cuDNN's attention, and convert the result to an attention state.

    Args:
        call: the offsets of the call.
        q: [T, N, D].
        k: [S, N, D].
        v: [S, N, V].
        softmax_scale: factor of the scores.
        out_dtype: dtype of the output.
        return_lse: whether the kernel stores the LSE.
        out: [T, N, V] in `out_dtype`, any strides, written in place; None allocates a tensor.
        lse: [N, T], float32, written in place; None allocates a tensor.

    Returns:
        out [T, N, V], and lse [N, T] or None.

    Raises:
        ValueError: the queries or the keys have 2^31 elements or more.
    """
    tokens, requests = q.shape[0], call.cu_seqlens_q.shape[0] - 1
    if tokens == 0 or call.max_seqlen_q == 0 or k.shape[0] == 0 or call.max_seqlen_k == 0:
        return state_without_keys(q, v, out_dtype, return_lse, out, lse)
    for name, tensor in (("q", q), ("k", k)):
        check(tensor.numel() < 2**31, name, "fewer than 2^31 elements for cuDNN", tensor.numel())
    from flashinfer.cudnn import cudnn_batch_prefill_with_kv_cache

    in_place = out is not None and out.dtype == q.dtype and out.is_contiguous()
    made = out if in_place else q.new_empty(tokens, q.shape[1], v.shape[2])
    natural = q.new_empty(tokens, q.shape[1], dtype=torch.float32) if return_lse else None
    cudnn_batch_prefill_with_kv_cache(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        softmax_scale,
        q.new_empty(SHARED_WORKSPACE_SIZE + WORKSPACE_SIZE_PER_REQUEST * requests, dtype=torch.uint8),
        max_token_per_sequence=call.max_seqlen_q,
        max_sequence_kv=call.max_seqlen_k,
        actual_seq_lens_q=call.lens[0],
        actual_seq_lens_kv=call.lens[1],
        causal=call.causal,
        return_lse=return_lse,
        batch_offsets_q=call.cu_seqlens_q,
        batch_offsets_k=call.cu_seqlens_k,
        batch_offsets_stats=call.cu_seqlens_q if return_lse else None,
        batch_offsets_units="tokens",
        is_cuda_graph_compatible=True,
        lse_base="ln",
        out=made,
        lse=natural,
    )
    out, lse = to_state(made, natural, NATURAL, out_dtype, out, lse)
    empty = call.empty_rows(tokens)
    if empty is not None:
        out.masked_fill_(empty[:, None, None], 0.0)
        if lse is not None:
            lse.masked_fill_(empty, -torch.inf)
    return out, lse


def flash_attn_varlen(
    q: Tensor,
    k: Tensor,
    k_pe: None,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of packed requests in a direct call, which does not wait for the GPU.

    `fast.backends.adapters.flashinfer.flash_attn_varlen` explains the arguments and the result; here `max_seqlen_q`
    and `max_seqlen_k` are upper bounds of the lengths, and the rows after the last request may be read.
    """
    call = CudnnCall(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal)
    return attend(call, q, k, v, softmax_scale, out_dtype, out is None or lse is not None, out, lse)


FLASHINFER_CUDNN = Backend(
    name="flashinfer_cudnn",
    priority=0,
    device_type="cuda",
    capability=(9, 0),
    ops={
        "flash_attn_varlen": OpSupport(
            f"{__name__}:flash_attn_varlen",
            dtypes=HALF_DTYPES,
            out_dtypes=(torch.float32, *HALF_DTYPES),
            head_dims={"qk_head_dim": (128, 192), "v_head_dim": (128,)},
            masks=("causal",),
            graph=GraphSupport.NONE,
            batch_invariant=False,
            whole_keys=True,
        )
    },
    missing_package=missing("flashinfer") or ("nvidia-cudnn-frontend" if missing("cudnn") else None),
    library="cuDNN (FlashInfer)",
    install="pip install flashinfer-python nvidia-cudnn-frontend",
    missing_artifacts=f"{__name__}:missing_parts",
    only_named=True,
    hooks="fast.mla.flashinfer_hooks:CudnnHooks",
)
