"""Advance of a batch to its next step, on the device of the batch and without the host."""

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
    """Advance a batch to the next step, in place: every sampled token becomes the one query token of its request.

    See `reference.planning.advance.advance_step` for the rule, for padding rows and for requests without query tokens.
    On a GPU one kernel writes all tensors, and nothing is copied between host and device. A captured CUDA graph may
    therefore contain any number of steps.

    `common.seq_lens_cpu` may be None, if the engine does not know the lengths on the host. It then stays None, and
    `seq_lens_cpu_upper_bound`, if given, rises as the lengths do. If `query_start_loc_cpu` is None too, it stays None,
    and all bounds above 0 rise. The number of requests with query tokens must then follow from
    `common.num_actual_tokens` and `common.max_query_len`. This number is known if each request has at most one query
    token, or if all requests have `max_query_len` query tokens. The reference has the general rule.

    On a GPU nothing can be raised for a value on the device. Instead:

    - A request whose next length would exceed `max_seq_len` or the columns of its block table stops: it has this
      largest length and the last position, and slot -1, so it writes no cache entry. Its outputs have no meaning. The
      CPU fields of the result follow the same rule.
    - A token whose block has a negative number gets slot -1.
    - A negative length counts as 0.

    Args:
        sampled_token_ids: [B] int32 or int64, the sampled token of each request.
        input_ids: [T], of the dtype of `sampled_token_ids`; written.
        positions: [T]; written.
        common: batch of the step before. Its `seq_lens`, `query_start_loc` and `slot_mapping` (T slots) are written.
        block_size: tokens per block.
        ownership: the tokens that this context-parallel rank owns; None if one rank owns all tokens.
        max_seq_len: largest length of a request; None if only the block table limits the lengths.
        graph: kind of the CUDA graph that contains the call; NONE if no graph contains the call.
        backend: name of a backend, mapping from op to backend name, or None to choose by capability (`fast.backends`).

    Returns:
        The batch of the next step, with the tensors of `common` on the device.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: shapes, dtypes or devices do not match; for CPU tensors, the values are no batch, or have more than
            T tokens, or a request would exceed `max_seq_len` or its block table, or a bound in
            `seq_lens_cpu_upper_bound` is below the length; without `seq_lens_cpu`, a bound is negative or below the
            query tokens of its request; without `query_start_loc_cpu`, the number of tokens of the next step is
            unknown. The error is raised before anything is written.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    limit = check_advance(sampled_token_ids, input_ids, positions, common, block_size, ownership, max_seq_len)
    check_type("graph", graph, GraphSupport)
    request = backends.KernelRequest("advance_step", common.block_table.device, graph=graph)
    chosen = backends.select(request, backend)
    following = advanced_batch(common, limit)  # now: on a CPU the op may write the CPU fields of `common`
    owned = ONE_RANK if ownership is None or ownership.size == 1 else ownership  # one rank: no effect of the interleave
    torch.ops.mla_twins.advance_step(
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


@torch.library.custom_op(
    "mla_twins::advance_step",
    mutates_args=("input_ids", "positions", "seq_lens", "query_start_loc", "slot_mapping"),
    schema="(Tensor sampled_token_ids, Tensor(a!) input_ids, Tensor(b!) positions, Tensor(c!) seq_lens,"
    " Tensor(d!) query_start_loc, Tensor(e!) slot_mapping, Tensor block_table, SymInt block_size, SymInt[] ownership,"
    " SymInt limit, str backend) -> ()",
)
def _advance_step(
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


@_advance_step.register_fake
def _(
    sampled_token_ids, input_ids, positions, seq_lens, query_start_loc, slot_mapping, block_table, block_size,
    ownership, limit, backend,
):  # fmt: skip
    return None
