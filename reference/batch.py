"""Who decodes and who prefills, and where each token's cache entry goes. Plain loops over requests."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int32, Int64
from torch import Tensor

from .interfaces import (
    CommonAttentionMetadata,
    check,
    check_batch_block_size,
    check_blocks,
    check_common,
    check_flag,
    check_int,
    check_lengths,
    check_table_width,
    check_tensor,
)


def split_decodes_and_prefills(
    common: CommonAttentionMetadata, decode_threshold: int = 1, require_uniform: bool = False
) -> tuple[int, int, int, int]:
    """Where the leading requests that may decode end.

    A request decodes where its query is at most `decode_threshold` tokens long; the first longer one starts the
    prefills, and everything after it is a prefill too. Rows of length 0 are padding and count as decodes.

    Args:
        common: the batch.
        decode_threshold: longest query that may decode, at least 1 (`reorder_batch_threshold`).
        require_uniform: the first row of another (non-zero) length starts the prefills.

    Returns:
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens.

    Raises:
        ValueError: `decode_threshold` below 1.
    """
    check_common(common)
    check_int("decode_threshold", decode_threshold, 1, "at least 1")
    check_flag("require_uniform", require_uniform)
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


def reorder_batch_to_split_decodes_and_prefills(decodes: Bool[Tensor, " B"]) -> tuple[tuple[int, int], ...]:
    """The fewest swaps of two requests after which all decodes lead the batch.

    The decodes will fill the first places. Every prefill that stands there must leave, a swap removes one of them at
    most, and exchanging it with a decode from behind removes one each time: as many swaps as misplaced prefills, and no
    fewer. Requests in their right part stay where they are.

    Args:
        decodes: [B], on the CPU: which requests decode (query_lens <= threshold, or what `choose_paths` says).

    Returns:
        Pairs of places (i, j), i < j, to be swapped one after another; empty where the order stands.

    Raises:
        ValueError: not a bool tensor on the CPU.
    """
    check_tensor("decodes", decodes, ("B",), (torch.bool,), torch.device("cpu"))
    flags = decodes.tolist()
    num_decodes = sum(flags)
    misplaced_prefills = [place for place in range(num_decodes) if not flags[place]]
    misplaced_decodes = [place for place in range(num_decodes, len(flags)) if flags[place]]
    return tuple(zip(misplaced_prefills, misplaced_decodes, strict=True))


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
    check_int("block_size", block_size, 1, "at least 1")
    check_int("num_tokens", num_tokens, 0)
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


def make_local_attention_virtual_batches(
    common: CommonAttentionMetadata, attention_chunk_size: int, block_size: int
) -> CommonAttentionMetadata:
    """Chunked local attention as ordinary attention of virtual requests.

    A token at position i attends the positions from i // chunk x chunk to i. So the part of a request's query that lies
    in one chunk is a request of its own, whose keys are that chunk's: it starts on a block boundary and takes those
    columns of the block table. Tokens keep their order and their slots.

    Args:
        common: the batch.
        attention_chunk_size: positions in a chunk; a multiple of `block_size`.
        block_size: tokens a block.

    Returns:
        The virtual batch; a padding row (S = 0) stays one row, a request without new tokens has none.

    Raises:
        ValueError: a size below 1, slots that were made for another block size, a chunk that is not made of whole
            blocks, or a block table narrower than the longest request.
    """
    check_batch_block_size(common, block_size)
    check_table_width(common, block_size)
    check_int("attention_chunk_size", attention_chunk_size, 1, f"a multiple of the block size {block_size}")
    whole = attention_chunk_size >= 1 and attention_chunk_size % block_size == 0
    check(whole, "attention_chunk_size", f"a multiple of the block size {block_size}", attention_chunk_size)
    starts, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu.tolist()
    columns, width = attention_chunk_size // block_size, common.block_table.shape[1]
    virtual_starts, virtual_lens, tables = [0], [], []
    for request, length in enumerate(lengths):
        query_len = starts[request + 1] - starts[request]
        position = max(0, length - query_len)
        while query_len > 0:
            first = position // attention_chunk_size * attention_chunk_size
            taken = min(query_len, first + attention_chunk_size - position) if length > 0 else query_len
            virtual_starts.append(virtual_starts[-1] + taken)
            virtual_lens.append(position + taken - first if length > 0 else 0)
            tables.append([(request, min(first // block_size + i, width - 1)) for i in range(columns if width else 0)])
            position, query_len = position + taken, query_len - taken
    device = common.block_table.device
    where = torch.tensor(tables, dtype=torch.int64, device=device).view(len(tables), columns if width else 0, 2)
    return CommonAttentionMetadata.make(
        torch.tensor(virtual_starts, dtype=torch.int32, device="cpu"),
        torch.tensor(virtual_lens, dtype=torch.int32, device="cpu"),
        common.block_table[where[..., 0], where[..., 1]],
        common.slot_mapping,
        common.block_size,
    )
