"""Zero the output of padding tokens: the tokens after the last request of a batch.

A CUDA graph has a fixed number of tokens, so a replay with fewer tokens has padding tokens at its end. The kernel reads
the number of real tokens on the GPU, so this number may differ from replay to replay.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...backends import launch
from ..device import device_facts, device_of
from ..integers import next_power_of_2

ELEMENTS = 2048  # elements that a program writes at a time


def zero_padding_tokens(output: Tensor, query_start_loc: Tensor) -> None:
    """Write zeros to the rows of `output` [T, N, V] from row `query_start_loc[-1]` on.

    `output` may have any strides.
    """
    tokens, heads, value = output.shape
    if output.numel() == 0:
        return
    if output.dtype == torch.float8_e4m3fn:  # Triton has no e4m3 on Ampere; 0 in e4m3 is the byte 0
        output = output.view(torch.uint8)
    following = device_facts(output.device).following
    columns = next_power_of_2(value)
    with device_of(output):
        launch(
            _zero_padding_kernel, (tokens,),
            query_start_loc.contiguous(), output, query_start_loc.shape[0] - 1, *output.stride(),
            HEADS=heads, VALUE=value, ROWS=max(1, ELEMENTS // columns), COLUMNS=columns, num_warps=4, **following,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_requests"], do_not_specialize_on_alignment=["query_start_loc"])
@no_type_check  # otherwise the tests' type checker wraps the kernel, and Triton's interpreter finds no module globals
def _zero_padding_kernel(
    query_start_loc, output, num_requests, token_stride, head_stride, value_stride,
    HEADS: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write zeros to all heads of this program's token, ROWS heads at a time, if the token belongs to no request."""
    if DEPENDENT:  # let the next kernel start early, and wait for the preceding kernel
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    if token >= tl.load(query_start_loc + num_requests):
        columns = tl.arange(0, COLUMNS)
        zeros = tl.zeros([ROWS, COLUMNS], output.dtype.element_ty)
        for first in range(0, HEADS, ROWS):
            heads = first + tl.arange(0, ROWS)
            offsets = heads.to(tl.int64)[:, None] * head_stride + columns.to(tl.int64)[None, :] * value_stride
            inside = (heads < HEADS)[:, None] & (columns < VALUE)[None, :]
            tl.store(output + token.to(tl.int64) * token_stride + offsets, zeros, inside)
