"""Compute how many keys each query token of a decode sees, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.interfaces import visible_lens_of_tokens


def compute_visible_lens(
    query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int, size: int, rank: int, interleave: int
) -> Tensor:
    """Return the number of keys that each query token attends, [num_tokens] int32.

    With context parallelism, only the keys of rank `rank` count. Padding tokens after the last request get 0.

    See `fast.kernels.triton.visible_lens.compute_visible_lens` for the arguments.
    """
    used = int(query_start_loc[-1])
    visible = torch.zeros(num_tokens, dtype=torch.int32, device=seq_lens.device)
    visible[:used] = visible_lens_of_tokens(query_start_loc, seq_lens, used, size, rank, interleave)
    return visible
