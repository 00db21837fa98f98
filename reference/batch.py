"""Who decodes and who prefills, and where each token's cache entry goes. Plain loops over requests."""

from __future__ import annotations

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from .interfaces import CommonAttentionMetadata, check, check_blocks, check_lengths, check_tensor


def split_decodes_and_prefills(
    common: CommonAttentionMetadata, decode_threshold: int = 1, require_uniform: bool = False
) -> tuple[int, int, int, int]:
    """Where the leading requests that may decode end.

    A request decodes where its query is at most `decode_threshold` tokens long; the first longer one starts the
    prefills, and everything after it is a prefill too. Rows of length 0 are padding and count as decodes.

    Args:
        common: the batch.
        decode_threshold: longest query that may decode, at least 1.
        require_uniform: the first row of another (non-zero) length starts the prefills.

    Returns:
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens.

    Raises:
        ValueError: `decode_threshold` below 1.
    """
    check(decode_threshold >= 1, "decode_threshold", "at least 1", decode_threshold)
    starts = common.query_start_loc_cpu.tolist()
    num_decodes, first_len = 0, None
    for request in range(common.num_reqs):
        query_len = starts[request + 1] - starts[request]
        if query_len > decode_threshold:
            break
        if require_uniform and query_len > 0:
            first_len = first_len or query_len
            if query_len != first_len:
                break
        num_decodes += 1
    num_decode_tokens = starts[num_decodes]
    return num_decodes, common.num_reqs - num_decodes, num_decode_tokens, starts[-1] - num_decode_tokens


def slot_mapping(
    query_start_loc: Int32[Tensor, " offsets"],
    seq_lens: Int32[Tensor, " B"],
    block_table: Int32[Tensor, "B W"],
    block_size: int,
    num_tokens: int,
) -> Int64[Tensor, " num_tokens"]:
    """Cache slot of every new token: the last Sq tokens of each request.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths.
        seq_lens: [B], lengths after this step; 0 for padding rows, whose slots are -1.
        block_table: [B, W].
        block_size: tokens a block.
        num_tokens: length of the result, at least query_start_loc[-1]; the rest is -1.

    Returns:
        [num_tokens] int64.

    Raises:
        ValueError: shapes or dtypes that do not fit; offsets that fall; 0 < S < Sq; too few columns or tokens.
    """
    check(block_size >= 1, "block_size", "at least 1", block_size)
    check_tensor("block_table", block_table, ("B", "W"), (torch.int32,))
    requests = block_table.shape[0]
    check_tensor("seq_lens", seq_lens, (requests,), (torch.int32,), block_table.device)
    check_tensor("query_start_loc", query_start_loc, (requests + 1,), (torch.int32,), block_table.device)
    check_lengths(query_start_loc, seq_lens)
    starts, lengths, tables = query_start_loc.tolist(), seq_lens.tolist(), block_table.tolist()
    check(num_tokens >= starts[-1], "num_tokens", f"at least {starts[-1]}", num_tokens)
    check_blocks(block_table, lengths, block_size, num_blocks=2**31)
    slots = [-1] * num_tokens
    for request, length in enumerate(lengths):
        for token in range(starts[request], starts[request + 1]):
            position = length - (starts[request + 1] - token)
            if length > 0:
                slots[token] = tables[request][position // block_size] * block_size + position % block_size
    return torch.tensor(slots, dtype=torch.int64, device=block_table.device)
