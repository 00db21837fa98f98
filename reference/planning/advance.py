"""Advance a batch to its next step: the sampled token of each request becomes its one query token."""

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
    """Advance a batch to the next step, in place: the sampled token of each request becomes its one query token.

    An engine that samples on the device can run several steps without the CPU. In each step, the engine makes the plan,
    runs the layers, samples, and calls this function. The function writes into the tensors of `common`, so one CUDA
    graph may contain several steps. Let S be the length of a request in `common`. The next step has:

    - For a request with S > 0 and query tokens: its sampled token at position S. The length becomes S + 1. The slot of
      the token follows from the block table (see `slot_mapping`); it is -1 on a context-parallel rank that does not own
      the token.
    - For a padding row (S = 0) with query tokens: one query token with id 0, position 0 and slot -1.
    - For a request without query tokens: no query token and the same length.

    Token t of the next step belongs to the t-th request that has query tokens. All later elements of `input_ids`,
    `positions` and `slot_mapping` become padding: id 0, position 0, slot -1.

    The caller must meet two conditions. All prompt tokens of a prefill must be in the cache before the call, because
    the request becomes a decode. If drafted tokens were rejected, the caller must first lower `common.seq_lens`.

    If an engine does not know the lengths on the CPU, `common.seq_lens_cpu` is None. The function then advances the
    tensors on the device in the same way, and the CPU fields of the result change as listed here. The limit in this
    list is the smaller of the argument `max_seq_len` and the number of tokens that the block table can hold.

    - `seq_lens_cpu` stays None.
    - The field `max_seq_len` rises by one, up to the limit.
    - `seq_lens_cpu_upper_bound` (if not None) rises by one, up to the limit, for requests with query tokens. The upper
      bound 0 of a padding row stays 0.
    - `query_start_loc_cpu` (if not None) gets one query token for each request with query tokens.

    If `query_start_loc_cpu` is None, it stays None. The upper bounds of requests without query tokens then rise too.
    The function must compute the number of query tokens of the next step from `num_actual_tokens` and `max_query_len`
    of `common`. It can do so if each request has at most one query token, or if all requests have `max_query_len` query
    tokens. In general, ceil(`num_actual_tokens` / `max_query_len`) must equal the smaller of B and `num_actual_tokens`.

    Args:
        sampled_token_ids: [B] int32 or int64, the sampled token of each request; ignored for padding rows and for
            requests without query tokens. The tensor must not share memory with the tensors that the function writes.
        input_ids: [T], in the dtype of `sampled_token_ids`. The function writes the token ids of the next step.
        positions: [T]. The function writes the position of each token of the next step in its request.
        common: the batch before the call. The function writes its tensors `seq_lens`, `query_start_loc` and
            `slot_mapping` (T slots). The block table must have a block for the new token. Do not use `common` after the
            call: its CPU fields may have the old lengths.
        block_size: tokens per block.
        ownership: the tokens that this context-parallel rank owns; None means that one rank owns all tokens. All ranks
            advance the lengths of the whole sequences.
        max_seq_len: largest length of a request, such as `max_model_len`; None means that only the block table limits
            the lengths.

    Returns:
        The batch of the next step, with the device tensors of `common` and new CPU fields. `slot_mapping` is cut to the
        tokens of the next step. No value is copied from the device. If the CPU fields of `common` are upper bounds, as
        in a captured graph, the new CPU fields are upper bounds too.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: in one of the following cases. If the function raises, it has written nothing.

            - Shapes, dtypes or devices do not match.
            - The lengths and offsets of `common` are not valid, or there are more than T query tokens.
            - A request would exceed `max_seq_len` or the columns of the block table.
            - The block of a new token is negative. Only these blocks are read.
            - `seq_lens_cpu` is None, and an upper bound is negative, or below the length or the number of query tokens
              of its request.
            - `query_start_loc_cpu` is None, and the number of query tokens of the next step is unknown.
    """
    limit = check_advance(sampled_token_ids, input_ids, positions, common, block_size, ownership, max_seq_len)
    owned = ONE_RANK if ownership is None else ownership
    check_advance_values(
        common.query_start_loc, common.seq_lens, common.block_table, input_ids.shape[0], block_size * owned.size, limit
    )
    following = advanced_batch(common, limit)  # before the loop below, which may overwrite the CPU fields on a CPU
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
