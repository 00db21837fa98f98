"""Split a batch into decodes and prefills, and reorder it so that the decodes come first."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from reference.interfaces import (
    BatchSplit,
    CommonAttentionMetadata,
    check_common,
    check_flag,
    check_int,
    check_tensor,
)


def split_decodes_and_prefills(
    common: CommonAttentionMetadata, decode_threshold: int = 1, require_uniform: bool = False
) -> BatchSplit:
    """Count the leading requests that may decode, the prefills behind them, and the query tokens of both.

    A request decodes where its query is at most `decode_threshold` tokens long; the first longer one starts the
    prefills, and everything after it is a prefill too. Rows of length 0 are padding and count as decodes.

    Args:
        common: the batch.
        decode_threshold: longest query that may decode, at least 1 (`reorder_batch_threshold`).
        require_uniform: the first row of another (non-zero) length starts the prefills.

    Returns:
        Requests and query tokens of both parts; it unpacks in the order of the fields.

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
    return BatchSplit(num_decodes, common.num_reqs - num_decodes, num_decode_tokens, num_prefill_tokens)


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
