"""Zero the output of padding tokens, the tokens after the last request of a batch, in PyTorch."""

from __future__ import annotations

from torch import Tensor


def zero_padding_tokens(output: Tensor, query_start_loc: Tensor) -> None:
    """Write zeros to `output` [T, N, V] for the tokens from `query_start_loc[-1]` on."""
    output[int(query_start_loc[-1]) :] = 0
