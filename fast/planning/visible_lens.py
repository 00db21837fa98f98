"""Compute masks as numbers of each query token: how many keys it attends, and the first one of these keys.

`reference.planning.visible_lens` explains what determines these numbers.
"""

from __future__ import annotations

import torch
from jaxtyping import Int32
from torch import Tensor

from reference.interfaces import (
    DECODE_TILE,
    ONE_RANK,
    GraphSupport,
    TokenOwnership,
    check,
    check_int,
    check_lengths,
    check_ownership,
    check_tensor,
    check_type,
)

from .. import backends
from ..backends import BackendChoice
from .owned_keys import first_keys, local_counts


def compute_visible_lens(
    query_start_loc: Int32[Tensor, " offsets"],
    seq_lens: Int32[Tensor, " B"],
    num_tokens: int,
    ownership: TokenOwnership | None = None,
    *,
    graph: GraphSupport = GraphSupport.NONE,
    backend: BackendChoice = None,
) -> Int32[Tensor, " num_tokens"]:
    """Return the number of keys that each query token of a decode attends; 0 for padding tokens.

    See `reference.planning.visible_lens.compute_visible_lens` for the rule. On a GPU, one kernel computes the numbers
    and the host does not wait.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths Sq.
        seq_lens: [B], tokens S of each request after this step, counted over all ranks; 0 for padding rows.
        num_tokens: length of the result; tokens from `query_start_loc[-1]` on are padding.
        ownership: the tokens that this context-parallel rank owns; the result then counts only keys of this rank. None
            if one rank owns all tokens.
        graph: kind of the CUDA graph that captures this call; NONE without a graph.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        [num_tokens] int32.

    Raises:
        ValueError: shapes, dtypes or devices do not match. For CPU tensors also: a value of `query_start_loc` is
            smaller than the value before it, a request has 0 < S < Sq, or `num_tokens` is too small. (On a GPU, invalid
            values raise no error, and the results are still in [0, S].)
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    check_int("num_tokens", num_tokens, 0)
    check_tensor("seq_lens", seq_lens, ("B",), (torch.int32,))
    check_tensor("query_start_loc", query_start_loc, (seq_lens.shape[0] + 1,), (torch.int32,), seq_lens.device)
    check_ownership(ownership)
    check_type("graph", graph, GraphSupport)
    owned = ONE_RANK if ownership is None else ownership
    request = backends.KernelRequest("compute_visible_lens", seq_lens.device, graph=graph)
    chosen = backends.select(request, backend).name
    return _LENS(query_start_loc, seq_lens, num_tokens, owned.size, owned.rank, owned.interleave, chosen)


def _launch_visible_lens(query_start_loc, seq_lens, num_tokens, size, rank, interleave, backend):
    if seq_lens.device.type == "cpu":
        check_lengths(query_start_loc, seq_lens)
        total = int(query_start_loc[-1])
        check(num_tokens >= total, "num_tokens", f"at least {total}", num_tokens)
    launch = backends.kernel(backend, "compute_visible_lens")
    return launch(query_start_loc, seq_lens, num_tokens, size, rank, interleave)


_compute_visible_lens = torch.library.custom_op(
    "mla_twins::compute_visible_lens",
    _launch_visible_lens,
    mutates_args=(),
    schema="(Tensor query_start_loc, Tensor seq_lens, SymInt num_tokens, SymInt size, SymInt rank, SymInt interleave,"
    " str backend) -> Tensor",
)


_LENS = backends.DirectCalls(torch.ops.mla_twins.compute_visible_lens, _launch_visible_lens)


@_compute_visible_lens.register_fake
def _(query_start_loc, seq_lens, num_tokens, size, rank, interleave, backend):
    return seq_lens.new_empty(num_tokens)


def compute_first_visible(
    query_start_loc: Int32[Tensor, " offsets"],
    seq_lens: Int32[Tensor, " B"],
    num_tokens: int,
    sliding_window: int | None,
    ownership: TokenOwnership | None = None,
    attention_chunk_size: int | None = None,
    *,
    graph: GraphSupport = GraphSupport.NONE,
    backend: BackendChoice = None,
) -> Int32[Tensor, " num_tokens"]:
    """Return the first key that each query token attends with a window or attention chunks; 0 for padding tokens.

    See `reference.planning.visible_lens.compute_first_visible` for the rule. The numbers are computed on the device
    from the result of `compute_visible_lens`, and the host does not wait.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths.
        seq_lens: [B], tokens S of each request after this step, counted over all ranks; 0 for padding rows.
        num_tokens: length of the result; tokens from `query_start_loc[-1]` on are padding.
        sliding_window: W, number of keys in the window; None means no window.
        ownership: the tokens that this context-parallel rank owns; the result then counts only keys of this rank. None
            if one rank owns all tokens.
        attention_chunk_size: C, number of positions in an attention chunk; None means no attention chunks.
        graph: kind of the CUDA graph that captures this call; NONE without a graph.
        backend: backend of `compute_visible_lens`: a name, a mapping from op to backend name, or None for an automatic
            choice (`fast.backends`).

    Returns:
        [num_tokens] int32.

    Raises:
        ValueError: for the same reasons as `compute_visible_lens`; `sliding_window` or `attention_chunk_size` is below
            1.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    _check_sizes(sliding_window, attention_chunk_size)
    visible = compute_visible_lens(query_start_loc, seq_lens, num_tokens, graph=graph, backend=backend)
    check_ownership(ownership)
    first = first_keys(visible - 1, sliding_window, attention_chunk_size, ownership)
    return torch.zeros_like(visible) if first is None else first


def _check_sizes(sliding_window: int | None, attention_chunk_size: int | None) -> None:
    """Check that the number of keys in a window and the positions in an attention chunk are positive ints or None."""
    for name, size in (("sliding_window", sliding_window), ("attention_chunk_size", attention_chunk_size)):
        if size is not None:
            check_int(name, size)


def scheduled_lens(
    query_start_loc: Int32[Tensor, " offsets"],
    seq_lens: Int32[Tensor, " B"],
    sliding_window: int | None = None,
    ownership: TokenOwnership | None = None,
    attention_chunk_size: int | None = None,
) -> Int32[Tensor, " B"]:
    """Return the number of keys of each request that count for the schedule of a decode.

    See `reference.planning.visible_lens.scheduled_lens` for the rule and for attention sinks. The numbers are computed
    on the device of the lengths, without a copy to the host.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths.
        seq_lens: [B], keys S of each request, counted over all ranks.
        sliding_window: W, number of keys in the window; None means no window.
        ownership: the tokens that this context-parallel rank owns; the result then counts only keys of this rank. None
            if one rank owns all tokens.
        attention_chunk_size: C, number of positions in an attention chunk; None means no attention chunks.

    Returns:
        [B] int32. Without a window and attention chunks and on one rank, the result is `seq_lens` itself.

    Raises:
        ValueError: shapes, dtypes or devices do not match; `sliding_window` or `attention_chunk_size` is below 1.
    """
    check_tensor("seq_lens", seq_lens, ("B",), (torch.int32,))
    check_tensor("query_start_loc", query_start_loc, (seq_lens.shape[0] + 1,), (torch.int32,), seq_lens.device)
    check_ownership(ownership)
    _check_sizes(sliding_window, attention_chunk_size)
    local = local_counts(seq_lens, ownership)
    if sliding_window is None and attention_chunk_size is None:
        return local
    context = (seq_lens - query_start_loc.diff()).clamp_(min=0)  # position of the first query token
    first = first_keys(context, sliding_window, attention_chunk_size, ownership)
    return local - first.div_(DECODE_TILE, rounding_mode="floor").mul_(DECODE_TILE)
