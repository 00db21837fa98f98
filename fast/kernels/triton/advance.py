"""Turn the batch of a step into the batch of the next step on the GPU, in one launch.

The host reads no value back, so a CUDA graph can capture this launch.

In the next step every request has at most one token, so the tokens of all B requests are among the first B tokens.
Program 0 writes the first B tokens. It processes CHUNK requests at a time, one chunk after another, because the place
of a request's token depends on how many earlier requests have a token. The other programs write padding into all later
tokens.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from reference.interfaces import TokenOwnership

from ...backends import launch
from ..device import device_facts, device_of
from ..integers import cdiv

CHUNK = 512  # requests that program 0 processes at a time, and tokens that every other program writes
WARPS = 4
STRIDES = ("sampled_stride", "ids_stride", "positions_stride", "lens_stride", "starts_stride", "slots_stride",
           "table_row", "table_column")  # fmt: skip
POINTERS = ("sampled", "input_ids", "positions", "seq_lens", "query_start_loc", "slot_mapping", "block_table")


@triton.jit
@no_type_check
def _write_padding(input_ids, positions, slot_mapping, tokens, written, ids_stride, positions_stride, slots_stride):
    """Write id 0, position 0 and slot -1 to the tokens whose `written` is true."""
    tl.store(input_ids + tokens * ids_stride, 0, written)
    tl.store(positions + tokens * positions_stride, 0, written)
    tl.store(slot_mapping + tokens * slots_stride, -1, written)


@triton.jit(
    do_not_specialize=["num_requests", "num_tokens", "num_columns", "limit", "rank", *STRIDES],
    do_not_specialize_on_alignment=list(POINTERS),
)
@no_type_check
def _advance_step_kernel(
    sampled, input_ids, positions, seq_lens, query_start_loc, slot_mapping, block_table,
    num_requests, num_tokens, num_columns, limit, rank,
    sampled_stride, ids_stride, positions_stride, lens_stride, starts_stride, slots_stride, table_row, table_column,
    BLOCK_SIZE: tl.constexpr, RANKS: tl.constexpr, INTERLEAVE: tl.constexpr, CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the next step of all requests (program 0), or padding into CHUNK tokens (every other program)."""
    if DEPENDENT:  # let the next kernel start early, and wait for the preceding kernel
        gdc_launch_dependents()
        gdc_wait()
    lane = tl.arange(0, CHUNK).to(tl.int64)
    if tl.program_id(0) > 0:
        tokens = num_requests + (tl.program_id(0) - 1) * CHUNK + lane
        _write_padding(input_ids, positions, slot_mapping, tokens, tokens < num_tokens, ids_stride, positions_stride,
                       slots_stride)  # fmt: skip
    else:
        # `last_end` is the last offset that the previous chunk read; the previous chunk has overwritten this offset
        total, last_end = tl.zeros([], tl.int32), tl.load(query_start_loc)
        for first in range(0, num_requests, CHUNK):
            request = first + lane
            inside = request < num_requests
            begin = tl.load(query_start_loc + request * starts_stride, inside & (lane > 0), last_end)
            end = tl.load(query_start_loc + (request + 1) * starts_stride, inside, -(2**31))
            has_token = inside & (end > begin)
            last_end = tl.max(end)  # offsets never decrease
            length = tl.load(seq_lens + request * lens_stride, inside, 0)
            token_id = tl.load(sampled + request * sampled_stride, inside, 0)
            real = has_token & (length > 0) & (limit > 0)
            group = length // INTERLEAVE  # index of the new token's group of INTERLEAVE tokens
            local = group // RANKS * INTERLEAVE + length % INTERLEAVE  # index of the new token among the rank's tokens
            column = local // BLOCK_SIZE
            owned = real & (length < limit) & (group % RANKS == rank) & (column < num_columns)
            block = tl.load(block_table + request * table_row + column.to(tl.int64) * table_column, owned, -1)

            tl.debug_barrier()  # wait until all threads have read their offsets, which are overwritten next
            new_end = total + tl.cumsum(has_token.to(tl.int32), 0)
            tl.store(query_start_loc + (request + 1) * starts_stride, new_end, inside)
            total += tl.sum(has_token.to(tl.int32))
            new_length = tl.where(real, tl.minimum(length, limit - 1) + 1, 0)
            tl.store(seq_lens + request * lens_stride, new_length, has_token)
            slot = tl.where(block >= 0, block.to(tl.int64) * BLOCK_SIZE + local % BLOCK_SIZE, -1)

            token = (new_end - 1).to(tl.int64)
            written = has_token & (token < num_tokens)
            tl.store(input_ids + token * ids_stride, tl.where(real, token_id, 0), written)
            tl.store(positions + token * positions_stride, tl.maximum(new_length - 1, 0).to(tl.int64), written)
            tl.store(slot_mapping + token * slots_stride, slot, written)
        for first in range(0, num_requests, CHUNK):  # padding among the first B tokens
            tokens = first + lane
            written = (tokens >= total) & (tokens < num_requests) & (tokens < num_tokens)
            _write_padding(input_ids, positions, slot_mapping, tokens, written, ids_stride, positions_stride,
                           slots_stride)  # fmt: skip


def advance_step(
    sampled_token_ids: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    block_size: int,
    ownership: TokenOwnership,
    limit: int,
) -> None:
    """Write the inputs of the next step of every request; see `fast.advance_step` for values that are out of range.

    Args:
        sampled_token_ids: [B] int32 or int64, the token that each request generated in this step.
        input_ids: [T], written.
        positions: [T] int64, written.
        seq_lens: [B] int32, written.
        query_start_loc: [B + 1] int32, written.
        slot_mapping: [T] int64, written.
        block_table: [B, W] int32.
        block_size: tokens per block.
        ownership: the tokens that this rank owns.
        limit: largest length of a request, in tokens.
    """
    requests, columns = block_table.shape
    tokens = input_ids.shape[0]
    vectors = (sampled_token_ids, input_ids, positions, seq_lens, query_start_loc, slot_mapping)
    strides = [x.stride(0) for x in vectors]
    following = device_facts(seq_lens.device).following
    with device_of(seq_lens):
        launch(
            _advance_step_kernel, (1 + cdiv(max(tokens - requests, 0), CHUNK),),
            *vectors, block_table, requests, tokens, columns, limit, ownership.rank,
            *strides, *block_table.stride(),
            BLOCK_SIZE=block_size, RANKS=ownership.size, INTERLEAVE=ownership.interleave, CHUNK=CHUNK,
            num_warps=WARPS, **following,
        )  # fmt: skip
