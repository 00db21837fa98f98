"""The lengths of a call of attention over packed requests, on the CPU and on the device.

The plans of FlashInfer, and of the kernels behind FlashInfer's calls, need the lengths on the CPU.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor

from reference.interfaces import check_offsets


def rows_without_keys(q_offsets: Tensor, k_offsets: Tensor, causal: bool) -> Tensor:
    """Return the indices of the query tokens that attend no key, int64 on the CPU.

    Args:
        q_offsets: [B + 1], first query token of each request, on the CPU.
        k_offsets: [B + 1], first key of each request, on the CPU.
        causal: whether the last query of a request sees all keys, and each earlier query sees one key less.
    """
    queries, keys = q_offsets.diff().long(), k_offsets.diff().long()
    # the first `hidden` queries of a request see no key
    hidden = (queries - keys).clamp_(min=0) if causal else queries * (keys == 0)
    ends = hidden.cumsum(0)
    first = (q_offsets[:-1] - (ends - hidden)).repeat_interleave(hidden)
    return first + torch.arange(first.shape[0], device="cpu")


@dataclass(frozen=True, eq=False)
class RaggedCall:
    """The lengths of one call of attention over packed requests, on the CPU and on the device.

    Attributes:
        q_offsets: [B + 1], int32 on the CPU, first query token of each request.
        k_offsets: [B + 1], int32 on the CPU, first key of each request.
        cu_seqlens_q: [B + 1], `q_offsets` on the device.
        cu_seqlens_k: [B + 1], `k_offsets` on the device.
        causal: whether the call has a causal mask.
        state: what runs the call, such as a `RaggedWrapper`. The attribute is no field, because the checks of
            arguments keep the fields of a plan alive, and thus would keep the workspace alive.
        num_queries: number of query tokens T.
        num_keys: number of keys of all requests.
        empty_rows: int64 on the device, the query tokens that attend no key; None if every query attends a key.
    """

    q_offsets: Tensor
    k_offsets: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    causal: bool
    state: InitVar[object]
    num_queries: int = field(init=False)
    num_keys: int = field(init=False)
    empty_rows: Tensor | None = field(init=False)

    def __post_init__(self, state: object):
        rows = rows_without_keys(self.q_offsets, self.k_offsets, self.causal)
        made = {
            "state": state,
            "num_queries": int(self.q_offsets[-1]),
            "num_keys": int(self.k_offsets[-1]),
            "empty_rows": rows.to(self.cu_seqlens_q.device, non_blocking=True) if rows.numel() else None,
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)


def direct_call(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool, state: object
) -> RaggedCall:
    """Copy the offsets of a direct call to the CPU, which waits for the GPU, and check the offsets.

    Args:
        q: [T, N, D].
        k: [S, N, D].
        cu_seqlens_q: [B + 1], first query token of each request.
        cu_seqlens_k: [B + 1], first key of each request.
        causal: whether the call has a causal mask.
        state: what runs the call.

    Raises:
        ValueError: the offsets decrease, do not begin at 0, or exceed the number of queries or keys.
    """
    q_offsets, k_offsets = torch.stack((cu_seqlens_q, cu_seqlens_k)).cpu().unbind()
    check_offsets("cu_seqlens_q", q_offsets, q.shape[0])
    check_offsets("cu_seqlens_k", k_offsets, most=k.shape[0])
    return RaggedCall(q_offsets, k_offsets, cu_seqlens_q, cu_seqlens_k, causal, state)
