"""Who decodes and who prefills, and where each token's cache entry goes. Vectorised over requests."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int32, Int64
from torch import Tensor

from reference.interfaces import (
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
    slots_of_tokens,
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
    query_lens = common.query_start_loc_cpu.diff()
    prefills = query_lens > decode_threshold
    if require_uniform and bool((query_lens > 0).any()):
        first_len = query_lens[int((query_lens > 0).int().argmax())]
        prefills |= (query_lens != first_len) & (query_lens > 0)
    num_decodes = int(prefills.int().argmax()) if bool(prefills.any()) else common.num_reqs
    num_decode_tokens = int(common.query_start_loc_cpu[num_decodes])
    num_prefill_tokens = int(common.query_start_loc_cpu[-1]) - num_decode_tokens
    return num_decodes, common.num_reqs - num_decodes, num_decode_tokens, num_prefill_tokens


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
    num_decodes = int(decodes.count_nonzero())
    prefills = (~decodes[:num_decodes]).nonzero().flatten()
    behind = decodes[num_decodes:].nonzero().flatten() + num_decodes
    return tuple(zip(prefills.tolist(), behind.tolist(), strict=True))


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
    check_int("block_size", block_size, 1, "at least 1")
    check_int("num_tokens", num_tokens, 0)
    check_tensor("block_table", block_table, ("B", "W"), (torch.int32,))
    requests, device = block_table.shape[0], block_table.device
    check_tensor("seq_lens", seq_lens, (requests,), (torch.int32,), device)
    check_tensor("query_start_loc", query_start_loc, (requests + 1,), (torch.int32,), device)
    if device.type == "cpu":
        check_lengths(query_start_loc, seq_lens)
        check(num_tokens >= int(query_start_loc[-1]), "num_tokens", f"at least {int(query_start_loc[-1])}", num_tokens)
        check_blocks(block_table, seq_lens.tolist(), block_size, num_blocks=2**31)
    return slots_of_tokens(query_start_loc, seq_lens, block_table, block_size, num_tokens)


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
    chunk = attention_chunk_size
    check(chunk >= 1 and chunk % block_size == 0, "attention_chunk_size", f"a multiple of the block size {block_size}",
          chunk)  # fmt: skip
    starts, lengths = common.query_start_loc_cpu.long(), common.seq_lens_cpu.long()
    query_lens = starts.diff()
    first_position = (lengths - query_lens).clamp_(min=0)
    pieces = (lengths - 1).div(chunk, rounding_mode="floor") - first_position.div(chunk, rounding_mode="floor") + 1
    pieces = torch.where(lengths > 0, pieces, 1) * (query_lens > 0)  # of each request; a padding row stays one
    request = torch.repeat_interleave(pieces)
    number = torch.arange(request.shape[0], device="cpu") - (pieces.cumsum(0) - pieces)[request]
    first_key = (first_position[request] // chunk + number) * chunk
    end = torch.minimum(first_key + chunk, lengths[request])
    taken = torch.where(lengths[request] > 0, end - torch.maximum(first_key, first_position[request]),
                        query_lens[request])  # fmt: skip
    virtual_lens = (end - first_key).to(torch.int32)
    virtual_starts = torch.nn.functional.pad(taken.cumsum(0), (1, 0)).to(torch.int32)

    width, device = common.block_table.shape[1], common.block_table.device
    columns = torch.arange(chunk // block_size if width else 0, device="cpu")
    columns = (first_key[:, None] // block_size + columns).clamp_(max=max(0, width - 1))
    table = common.block_table[request[:, None].to(device, non_blocking=True), columns.to(device, non_blocking=True)]
    return CommonAttentionMetadata(
        seq_lens=virtual_lens.to(device, non_blocking=True),
        query_start_loc=virtual_starts.to(device, non_blocking=True),
        seq_lens_cpu=virtual_lens,
        query_start_loc_cpu=virtual_starts,
        block_table=table,
        slot_mapping=common.slot_mapping,
        max_query_len=int(taken.max()) if taken.numel() else 0,
        num_actual_tokens=common.num_actual_tokens,
        max_seq_len=int(virtual_lens.max()) if virtual_lens.numel() else 0,
        block_size=common.block_size,
    )
