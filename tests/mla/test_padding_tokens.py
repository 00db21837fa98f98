"""Tests of `zero_padding_tokens`, which writes zeros for padding tokens.

Padding tokens are the query tokens behind the last request. They exist because a captured CUDA graph has a fixed number
of tokens, and a batch can have fewer. Without a GPU, one test runs this file again in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from fast.mla.padding_tokens import zero_padding_tokens

from ..support.factories import offsets
from ..support.triton_mode import DEVICE, INTERPRETED, ON_GPU, run_in_interpreter, runs, starts_interpreter

if ON_GPU or INTERPRETED:
    from fast.kernels.triton import padding_tokens


def test_refusals(plain_errors):
    """Malformed arguments are refused in one line."""
    with pytest.raises(ValueError, match=r"^output: expected shape \[T, N, V\], got \[3, 4\]$"):
        zero_padding_tokens(torch.ones(3, 4), offsets([1]))
    with pytest.raises(ValueError, match="^query_start_loc: expected dtype torch.int32, got torch.int64$"):
        zero_padding_tokens(torch.ones(3, 4, 2), offsets([1]).long())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_zeros(dtype):
    """Only the tokens behind the last request become 0."""
    output = torch.full((5, 3, 4), torch.nan)
    output[:3] = 7
    output = output.to(dtype)
    zero_padding_tokens(output, offsets([2, 1, 0]))
    assert output[:3].float().eq(7).all() and output[3:].float().eq(0).all()


# Tests of the Triton kernel.


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_kernel_of_zeros(dtype):
    """The Triton kernel writes all elements of the padding tokens and no other element, for any strides."""
    for heads, value in ((3, 10), (16, 128), (1, 1), (130, 24)):
        for query_lens in ([2, 1, 0], [0, 0, 0], [5, 1, 0], [5, 1, 9]):
            starts, tokens = offsets(query_lens).to(DEVICE), 6
            held = torch.full((tokens, heads, 2 * value), 7.0, device=DEVICE).to(dtype)
            for output in (held.clone()[..., :value].contiguous(), held.clone()[..., :value],
                           held.clone().transpose(0, 1).contiguous().transpose(0, 1)[..., value:]):  # fmt: skip
                padding_tokens.zero_padding_tokens(output, starts)
                used = min(sum(query_lens), tokens)
                assert output[:used].float().eq(7).all() and output[used:].float().eq(0).all()
                base = (output if output._base is None else output._base).float()
                assert base.eq(0).sum() == (tokens - used) * heads * value, "a neighbour was written"
    padding_tokens.zero_padding_tokens(torch.empty(0, 3, 4, device=DEVICE), offsets([0]).to(DEVICE))
