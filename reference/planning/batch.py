"""Split a batch into decodes (requests with few new tokens) and prefills, and reorder it: decodes first."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from ..interfaces import (
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
    """Count the leading requests that decode, the prefills after them, and the query tokens of both parts.

    The first request with more than `decode_threshold` query tokens and all requests after it are prefills. All
    requests before the first prefill decode, also requests without query tokens.

    Args:
        common: the batch.
        decode_threshold: largest number of query tokens of a decode, at least 1 (`reorder_batch_threshold`).
        require_uniform: whether all decodes with query tokens must have the same query length. The first request with
            another length (above 0) and all requests after it are then prefills.

    Returns:
        The numbers of requests and of query tokens in the two parts.

    Raises:
        ValueError: `decode_threshold` is below 1.
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
    num_prefill_tokens = starts[-1] - num_decode_tokens
    return BatchSplit(num_decodes, common.num_reqs - num_decodes, num_decode_tokens, num_prefill_tokens)


def reorder_batch_to_split_decodes_and_prefills(decodes: Bool[Tensor, " B"]) -> tuple[tuple[int, int], ...]:
    """Return the fewest swaps of two requests after which all decodes come first in the batch.

    With n decodes, every prefill among the first n requests must be swapped with a decode behind the first n requests.
    Each swap moves one prefill, so the number of swaps is the number of these prefills. All other requests keep their
    index.

    Args:
        decodes: [B] bool on the CPU, True for the requests that decode (`choose_paths`, or `query_lens <= threshold`).

    Returns:
        Pairs of indices (i, j), i < j, to be swapped one after another; empty if the decodes already come first.

    Raises:
        ValueError: the argument is not a bool tensor [B] on the CPU.
    """
    check_tensor("decodes", decodes, ("B",), (torch.bool,), torch.device("cpu"))
    flags = decodes.tolist()
    num_decodes = sum(flags)
    misplaced_prefills = [request for request in range(num_decodes) if not flags[request]]
    misplaced_decodes = [request for request in range(num_decodes, len(flags)) if flags[request]]
    return tuple(zip(misplaced_prefills, misplaced_decodes, strict=True))
