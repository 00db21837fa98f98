"""Argument checks of `advance_step`, and the CPU fields of the batch of the next step.

`advance_step` makes the batch of the next step, in which the sampled token of each request is its one query token.
"Read no values" means that a check looks at shapes, dtypes and devices alone, so it does not wait for a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .batch_arguments import check_batch_block_size, check_common
from .bounds import CPU, check_bound_values, check_decode_tokens, has_host_lens
from .cache_arguments import check_ownership
from .checks import check, check_blocks, check_int, check_lengths, check_readable, check_tensor
from .gqa.plan_arguments import without_encoder_slots
from .metadata import CommonAttentionMetadata
from .ownership import ONE_RANK, TokenOwnership, check_interleave


def check_advance(
    sampled_token_ids: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    common: CommonAttentionMetadata,
    block_size: int,
    ownership: TokenOwnership | None,
    max_seq_len: int | None,
) -> int:
    """Check the arguments of `advance_step`; return the largest length that a request may reach. Read no values.

    Args:
        sampled_token_ids: [B] int32 or int64.
        input_ids: [T], with the dtype of `sampled_token_ids`.
        positions: [T] int64.
        common: the batch, with or without lengths on the CPU. Its `slot_mapping` has T slots.
        block_size: tokens per block.
        ownership: the tokens that this rank owns; None means that one rank owns all tokens.
        max_seq_len: largest length that the caller allows; None means that only the block table limits the lengths.

    Returns:
        The number of tokens of one request that the block table can hold, or `max_seq_len` if `max_seq_len` is smaller.
    """
    check_int("block_size", block_size)
    check_batch_block_size(common, block_size)
    check_common(common, host_lens=False)
    check_ownership(ownership)
    owned = ONE_RANK if ownership is None else ownership
    check_interleave(owned.interleave, block_size)
    if max_seq_len is not None:
        check_int("max_seq_len", max_seq_len, 1, "a positive int or None")
    requests, device = common.num_reqs, common.block_table.device
    check_tensor("sampled_token_ids", sampled_token_ids, (requests,), (torch.int32, torch.int64), device)
    check_tensor("input_ids", input_ids, ("T",), (sampled_token_ids.dtype,), device)
    tokens = input_ids.shape[0]
    check_tensor("positions", positions, (tokens,), (torch.int64,), device)
    check_tensor("common.slot_mapping", common.slot_mapping, (tokens,), (torch.int64,), device)
    written = {"input_ids": input_ids, "positions": positions}
    written |= {f"common.{name}": getattr(common, name) for name in ("seq_lens", "query_start_loc", "slot_mapping")}
    for name, tensor in written.items():
        apart = tensor.shape[0] < 2 or tensor.stride(0) != 0
        check(apart, name, "elements at different addresses, because they are written", "a stride of 0")
    columns = common.block_table.shape[1] * block_size * owned.size
    return min(columns, 2**31 - 1 if max_seq_len is None else max_seq_len)


def check_advance_values(
    query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor, num_tokens: int, block_tokens: int, limit: int
) -> None:
    """Check the values of the batch that `advance_step` advances.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths before the call.
        seq_lens: [B], lengths before the call.
        block_table: [B, W]. Only the block of each new token is read; earlier blocks may have been freed.
        num_tokens: T, length of `input_ids`.
        block_tokens: tokens of a sequence for each column of the block table: `block_size` times the number of ranks.
        limit: largest length of a request after the call.

    Raises:
        ValueError: the offsets or lengths are not valid; the batch has more than T tokens; a request would exceed its
            blocks or `limit`; the block of a new token is negative.
    """
    check_readable("common.seq_lens", seq_lens)
    check_lengths(query_start_loc, seq_lens, ("common.query_start_loc", "common.seq_lens"))
    total = int(query_start_loc[-1])
    check(num_tokens >= total, "input_ids", f"at least {total} tokens, as common.query_start_loc has", num_tokens)
    grows = (query_start_loc.diff() > 0) & (seq_lens > 0)
    lens = torch.where(grows, seq_lens.long() + 1, 0).tolist()
    check_blocks(block_table, lens, block_tokens, 2**31, "common.block_table", seq_lens.cpu())  # the new block alone
    for request, length in enumerate(lens):
        check(length <= limit, "max_seq_len", f"at least {length}, the next length of request {request}", limit)


def next_num_tokens(common: CommonAttentionMetadata) -> int:
    """Return the number of query tokens of the next step, for a batch without `query_start_loc_cpu`.

    Every request with query tokens in this step has one query token in the next step. The CPU does not know the number
    of these requests; it knows two bounds. The number is at least `num_actual_tokens` / `max_query_len`, rounded up. It
    is at most the smaller of B and `num_actual_tokens`. The two bounds must be equal.

    Raises:
        ValueError: the bounds are not equal, or `num_actual_tokens` is above B * `max_query_len`.
    """
    check_decode_tokens(common)
    tokens = common.num_actual_tokens
    fewest, most = -(-tokens // max(1, common.max_query_len)), min(common.num_reqs, tokens)
    check(fewest == most, "common.query_start_loc_cpu",
          f"offsets on the CPU, because {fewest} to {most} requests may have tokens", None)  # fmt: skip
    return most


def advanced_batch(common: CommonAttentionMetadata, limit: int) -> CommonAttentionMetadata:
    """Return the batch of the next step: new lengths and offsets on the CPU, and the same tensors on the device.

    CPU fields that are None stay None. Lengths and their upper bounds rise by one for requests with query tokens. If
    `query_start_loc_cpu` is None, the CPU does not know which requests have query tokens, so the upper bounds of all
    requests rise. The encoder of an encoder-decoder model does not run in the next step (`CrossAttentionBatch`).

    Args:
        common: the batch before the call.
        limit: largest length of a request; a request that has reached `limit` keeps its length.

    Raises:
        ValueError: in one of the following cases:

            - `seq_lens_cpu` is None, and an upper bound is negative or below the number of query tokens of its request;
            - `seq_lens_cpu` is None, the batch is on the CPU, and an upper bound is below the length of its request;
            - `query_start_loc_cpu` is None, and `next_num_tokens` cannot find the number of requests with tokens.
    """
    if not has_host_lens(common):  # with lengths on the CPU, nothing reads the upper bounds
        check_bound_values(common)
    starts, longest = common.query_start_loc_cpu, common.max_seq_len
    if starts is None:
        tokens, has_token = next_num_tokens(common), torch.tensor(common.num_actual_tokens > 0, device=CPU)
    else:
        has_token = starts.diff() > 0
        starts = torch.nn.functional.pad(has_token.cumsum(0), (1, 0)).to(torch.int32)
        tokens = int(starts[-1])

    def risen(lens: Tensor | None) -> Tensor | None:
        return None if lens is None else torch.where(has_token & (lens > 0), lens.clamp(max=limit - 1) + 1, lens)

    return replace(
        without_encoder_slots(common),
        seq_lens_cpu=risen(common.seq_lens_cpu),
        seq_lens_cpu_upper_bound=risen(common.seq_lens_cpu_upper_bound),
        query_start_loc_cpu=starts,
        slot_mapping=common.slot_mapping[:tokens],
        max_query_len=min(common.max_query_len, 1),
        num_actual_tokens=tokens,
        max_seq_len=longest if longest >= limit else longest + 1,
    )
