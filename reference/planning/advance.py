"""Advance a batch to its next step: the sampled tokens become the query tokens of one decode for each request."""

from __future__ import annotations

import torch
from jaxtyping import Int, Int64
from torch import Tensor

from ..interfaces import (
    ONE_RANK,
    CommonAttentionMetadata,
    TokenOwnership,
    advanced_batch,
    check_advance,
    check_advance_values,
)


def advance_step(
    sampled_token_ids: Int[Tensor, " B"],
    input_ids: Int[Tensor, " T"],
    positions: Int64[Tensor, " T"],
    common: CommonAttentionMetadata,
    block_size: int,
    ownership: TokenOwnership | None = None,
    max_seq_len: int | None = None,
) -> CommonAttentionMetadata:
    """Advance a batch to the next step, in place: every sampled token becomes the one query token of its request.

    An engine that samples on the device can run several steps without the host: it makes the plan of a step, runs the
    layers, samples, and calls `advance_step` before the next plan. The function writes the tensors that the next step
    reads, so one CUDA graph may contain several such steps.

    What the next step of each request is follows from the step before:

    - A request with S > 0 tokens, decode or prefill, takes its sampled token at position S, and its length becomes
      S + 1. The cache slot of the token follows from the block table as in `slot_mapping`; under context parallelism
      the slot is -1 on every rank that does not own the token. All requests of a step with prefills are decodes of one
      token in the next step. A request must therefore have its whole prompt before the call. All query tokens of the
      step before count: if drafted tokens were rejected, lower `common.seq_lens` first.
    - A padding row (S = 0) with query tokens stays a padding row, with one query token: id 0, position 0, slot -1.
    - A request without query tokens in the step before stays without query tokens, and keeps its length.

    Token t of the next step belongs to the t-th request that has query tokens. All later elements of `input_ids`,
    `positions` and `slot_mapping` become padding: id 0, position 0, slot -1.

    An engine may not know the lengths on the host: `common.seq_lens_cpu` is None. The tensors on the device are then
    advanced in the same way, and the CPU fields of the result follow from those of `common`:

    - `seq_lens_cpu` stays None. `max_seq_len` rises by one, as it does with lengths.
    - `seq_lens_cpu_upper_bound`, if given, rises by one for requests with query tokens. A bound of 0 marks a padding
      row and stays 0. No bound rises above the argument `max_seq_len` or above what fits into the block table.
    - `query_start_loc_cpu`, if given, is advanced to one query token for each request that has query tokens.
    - If `query_start_loc_cpu` is None, it stays None, and all bounds above 0 rise. The number of query tokens of the
      next step must then follow from `common.num_actual_tokens` and `common.max_query_len`. This number is known if
      each request has at most one query token, or if all requests have `max_query_len` query tokens. In general,
      ceil(`num_actual_tokens` / `max_query_len`) must equal the smaller of B and `num_actual_tokens`. Other batches
      need `query_start_loc_cpu`.

    Args:
        sampled_token_ids: [B] int32 or int64, the sampled token of each request; ignored for padding rows and for
            requests without query tokens. The tensor must not share memory with the tensors that are written.
        input_ids: [T], token ids of the step, of the dtype of `sampled_token_ids`; written.
        positions: [T], position of each token in its request; written.
        common: batch of the step before. Its tensors `seq_lens`, `query_start_loc` and `slot_mapping`, which has T
            slots, are written; the block table must have a block for the new token. After the call `common` itself is
            out of date, because its CPU fields may still have the lengths of the step before.
        block_size: tokens per block.
        ownership: the tokens that this context-parallel rank owns; None means that one rank owns all tokens. All ranks
            advance the lengths of the whole sequences.
        max_seq_len: largest length of a request, such as `max_model_len`; None means that only the block table limits
            the lengths.

    Returns:
        The batch of the next step. It has the tensors of `common` on the device, with `slot_mapping` cut to the tokens
        of the step, and new CPU fields, for which no value is copied from the device. If the CPU fields of `common` are
        upper bounds, as in a captured graph, the new fields are upper bounds too.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: shapes, dtypes or devices do not match; the values of `common` are no batch, or have more than T
            tokens; a request would exceed `max_seq_len` or the columns of the block table; without `seq_lens_cpu`, a
            bound in `seq_lens_cpu_upper_bound` is negative, or below the length or the query tokens of its request;
            without `query_start_loc_cpu`, the number of tokens of the next step is unknown. The error is raised before
            anything is written.
    """
    limit = check_advance(sampled_token_ids, input_ids, positions, common, block_size, ownership, max_seq_len)
    owned = ONE_RANK if ownership is None else ownership
    check_advance_values(
        common.query_start_loc, common.seq_lens, common.block_table, input_ids.shape[0], block_size * owned.size, limit
    )
    following = advanced_batch(common, limit)  # now: on a CPU the CPU fields may be the tensors that are written below
    starts, lens, tables = common.query_start_loc.tolist(), common.seq_lens.tolist(), common.block_table.tolist()
    sampled = sampled_token_ids.tolist()
    new_ids, new_positions, new_slots, new_starts = [], [], [], [0]
    for request, length in enumerate(lens):
        has_token = starts[request + 1] > starts[request]
        if has_token and length == 0:
            new_ids.append(0)
            new_positions.append(0)
            new_slots.append(-1)
        elif has_token:
            new_ids.append(sampled[request])
            new_positions.append(length)
            column, offset = divmod(owned.count(length), block_size)
            is_owned = owned.count(length + 1) > owned.count(length)
            new_slots.append(tables[request][column] * block_size + offset if is_owned else -1)
            lens[request] = length + 1
        new_starts.append(len(new_ids))
    padding = input_ids.shape[0] - len(new_ids)
    for target, values in (
        (input_ids, new_ids + [0] * padding),
        (positions, new_positions + [0] * padding),
        (common.slot_mapping, new_slots + [-1] * padding),
        (common.seq_lens, lens),
        (common.query_start_loc, new_starts),
    ):
        target.copy_(torch.tensor(values, dtype=target.dtype, device="cpu"))
    return following
