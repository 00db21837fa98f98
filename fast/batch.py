"""Who decodes and who prefills, and where each token's cache entry goes. Vectorised over requests."""

from __future__ import annotations

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from reference.interfaces import CommonAttentionMetadata, check, check_blocks, check_lengths, check_tensor


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
    query_lens = common.query_start_loc_cpu.diff()
    prefills = query_lens > decode_threshold
    if require_uniform and bool((query_lens > 0).any()):
        first_len = query_lens[int((query_lens > 0).int().argmax())]
        prefills |= (query_lens != first_len) & (query_lens > 0)
    num_decodes = int(prefills.int().argmax()) if bool(prefills.any()) else common.num_reqs
    num_decode_tokens = int(common.query_start_loc_cpu[num_decodes])
    num_prefill_tokens = int(common.query_start_loc_cpu[-1]) - num_decode_tokens
    return num_decodes, common.num_reqs - num_decodes, num_decode_tokens, num_prefill_tokens


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
        ValueError: shapes or dtypes that do not fit; on a CPU offsets that fall, 0 < S < Sq, too few columns or
            tokens.
    """
    check(block_size >= 1, "block_size", "at least 1", block_size)
    check_tensor("block_table", block_table, ("B", "W"), (torch.int32,))
    requests, device = block_table.shape[0], block_table.device
    check_tensor("seq_lens", seq_lens, (requests,), (torch.int32,), device)
    check_tensor("query_start_loc", query_start_loc, (requests + 1,), (torch.int32,), device)
    if device.type == "cpu":
        check_lengths(query_start_loc, seq_lens)
        check(num_tokens >= int(query_start_loc[-1]), "num_tokens", f"at least {int(query_start_loc[-1])}", num_tokens)
        check_blocks(block_table, seq_lens.tolist(), block_size, num_blocks=2**31)
    slots = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
    if requests == 0 or num_tokens == 0 or block_table.shape[1] == 0:
        return slots
    tokens = torch.arange(num_tokens, device=device)
    request = torch.searchsorted(query_start_loc[1:].long(), tokens, right=True)
    owned = request < requests
    request = request.clamp_(max=requests - 1)
    position = seq_lens[request].long() - query_start_loc[request + 1] + tokens
    owned &= seq_lens[request] > 0
    column = (position // block_size).clamp_(0, block_table.shape[1] - 1)
    slot = block_table[request, column].long() * block_size + position % block_size
    return torch.where(owned, slot, slots)
