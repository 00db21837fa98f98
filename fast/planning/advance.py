"""Turn the batch of a decode step into the batch of the next step, on the device of the batch."""

from __future__ import annotations

import torch
from jaxtyping import Int, Int64
from torch import Tensor

from reference.interfaces import (
    ONE_RANK,
    CommonAttentionMetadata,
    GraphSupport,
    TokenOwnership,
    advanced_batch,
    check_advance,
    check_advance_values,
    check_type,
)

from .. import backends
from ..backends import BackendChoice


def advance_step(
    sampled_token_ids: Int[Tensor, " B"],
    input_ids: Int[Tensor, " T"],
    positions: Int64[Tensor, " T"],
    common: CommonAttentionMetadata,
    block_size: int,
    ownership: TokenOwnership | None = None,
    max_seq_len: int | None = None,
    *,
    graph: GraphSupport = GraphSupport.NONE,
    backend: BackendChoice = None,
) -> CommonAttentionMetadata:
    """Turn the batch of a step into the batch of the next step: each sampled token becomes the query of its request.

    See `reference.planning.advance.advance_step` for the rule, for padding rows, for requests without query tokens, and
    for a batch whose `seq_lens_cpu` or `query_start_loc_cpu` is None. On a GPU, one kernel writes all tensors in place,
    and nothing is copied between host and device. A CUDA graph may therefore capture several steps.

    On a GPU, the function cannot raise an error for a value in a tensor. Instead:

    - A request stops if its next length would exceed `max_seq_len` or its block table. A request that has stopped keeps
      its length and its last position. Its slot is -1, so it writes no cache entry, and its outputs in later steps are
      meaningless. The lengths on the CPU follow the same rule.
    - A token whose block number is negative gets slot -1.
    - A negative length counts as 0.

    Args:
        sampled_token_ids: [B] int32 or int64, the token that each request generated in this step.
        input_ids: [T], of the dtype of `sampled_token_ids`; written in place.
        positions: [T]; written in place.
        common: batch of this step. Its `seq_lens`, `query_start_loc` and `slot_mapping` (T slots) are written in place.
        block_size: tokens per block.
        ownership: the tokens that this context-parallel rank owns; None if one rank owns all tokens.
        max_seq_len: largest allowed length of a request; None if only the block table limits the lengths.
        graph: kind of the CUDA graph that captures this call; NONE without a graph.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        The batch of the next step. Its tensors on the device are the tensors of `common`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: shapes, dtypes or devices do not match. For CPU tensors also: the values are not a valid batch, the
            next step has more than T tokens, a request would exceed `max_seq_len` or its block table, or an upper bound
            is below the length of its request. Without `seq_lens_cpu` also: an upper bound is negative, or below the
            number of query tokens of its request. Without `query_start_loc_cpu` also: the number of tokens of the next
            step is unknown. When the error is raised, no tensor has been written yet.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    limit = check_advance(sampled_token_ids, input_ids, positions, common, block_size, ownership, max_seq_len)
    check_type("graph", graph, GraphSupport)
    request = backends.KernelRequest("advance_step", common.block_table.device, graph=graph)
    chosen = backends.select(request, backend)
    following = advanced_batch(common, limit)  # before the op, which may write the CPU fields of a batch on the CPU
    owned = ONE_RANK if ownership is None or ownership.size == 1 else ownership  # one rank: `interleave` has no effect
    _ADVANCES(
        sampled_token_ids,
        input_ids,
        positions,
        common.seq_lens,
        common.query_start_loc,
        common.slot_mapping,
        common.block_table,
        block_size,
        [owned.size, owned.rank, owned.interleave],
        limit,
        chosen.name,
    )
    return following


def _launch_advance(
    sampled_token_ids, input_ids, positions, seq_lens, query_start_loc, slot_mapping, block_table, block_size,
    ownership, limit, backend,
):  # fmt: skip
    owned = TokenOwnership(*ownership)
    if seq_lens.device.type == "cpu":
        check_advance_values(query_start_loc, seq_lens, block_table, input_ids.shape[0], block_size * owned.size, limit)
    backends.kernel(backend, "advance_step")(
        sampled_token_ids, input_ids, positions, seq_lens, query_start_loc, slot_mapping, block_table, block_size,
        owned, limit,
    )  # fmt: skip


_advance_step = torch.library.custom_op(
    "mla_twins::advance_step",
    _launch_advance,
    mutates_args=("input_ids", "positions", "seq_lens", "query_start_loc", "slot_mapping"),
    schema="(Tensor sampled_token_ids, Tensor(a!) input_ids, Tensor(b!) positions, Tensor(c!) seq_lens,"
    " Tensor(d!) query_start_loc, Tensor(e!) slot_mapping, Tensor block_table, SymInt block_size, SymInt[] ownership,"
    " SymInt limit, str backend) -> ()",
)


_ADVANCES = backends.DirectCalls(torch.ops.mla_twins.advance_step, _launch_advance, mutates=(1, 2, 3, 4, 5))


@_advance_step.register_fake
def _(
    sampled_token_ids, input_ids, positions, seq_lens, query_start_loc, slot_mapping, block_table, block_size,
    ownership, limit, backend,
):  # fmt: skip
    return None
