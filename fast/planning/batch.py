"""Split a batch into decodes and prefills, and reorder a batch so that the decodes come first."""

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
    """Count the decodes at the start of a batch, the prefills after them, and the query tokens of both groups.

    See `reference.planning.batch.split_decodes_and_prefills` for the rule.

    Args:
        common: batch of the step.
        decode_threshold: largest number of query tokens of a decode, at least 1 (`reorder_batch_threshold`).
        require_uniform: if True, all decodes must have equal query lengths: the length of the first request with query
            tokens. The prefills start at the first request with another query length above 0.

    Returns:
        The numbers of requests and of query tokens of both groups.

    Raises:
        ValueError: `decode_threshold` is below 1.
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
    """Return the fewest swaps of two requests after which all decodes come first.

    See `reference.planning.batch.reorder_batch_to_split_decodes_and_prefills` for the proof.

    Args:
        decodes: [B], on the CPU; True for a request that decodes, for example because its query is short.

    Returns:
        Pairs of request indices (i, j), i < j, in the order of the swaps; the tuple is empty if the decodes already
        come first.

    Raises:
        ValueError: `decodes` is not a bool tensor on the CPU.
    """
    check_tensor("decodes", decodes, ("B",), (torch.bool,), torch.device("cpu"))
    num_decodes = int(decodes.count_nonzero())
    prefills = (~decodes[:num_decodes]).nonzero().flatten()
    late_decodes = decodes[num_decodes:].nonzero().flatten() + num_decodes
    return tuple(zip(prefills.tolist(), late_decodes.tolist(), strict=True))
