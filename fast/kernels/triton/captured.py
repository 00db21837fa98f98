"""Kernels of captured batches: the mask of decodes, and zeros for padding tokens.

Both kernels read the query lengths on the device, so a CUDA graph that contains them serves other lengths in every
replay.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..device import device_facts

TOKENS = 128  # tokens of a program of `_visible_lens_kernel`
ELEMENTS = 2048  # elements that a program of `_zero_padding_kernel` writes at a time


def compute_visible_lens(
    query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int, size: int, rank: int, interleave: int
) -> Tensor:
    """Return the number of (rank-local) keys that each query token attends, [num_tokens] int32.

    A negative length counts as 0, and no token attends more keys than its request has.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths.
        seq_lens: [B], tokens of each whole sequence.
        num_tokens: length of the result; tokens from query_start_loc[-1] on are padding and attend no key.
        size: D, number of ranks.
        rank: this rank.
        interleave: I, consecutive tokens on one rank.
    """
    requests = seq_lens.shape[0]
    visible_lens = torch.empty(num_tokens, dtype=torch.int32, device=seq_lens.device)
    if num_tokens:
        following = device_facts(seq_lens.device).following
        with torch.cuda.device_of(seq_lens):
            _visible_lens_kernel[(triton.cdiv(num_tokens, TOKENS),)](
                query_start_loc.contiguous(), seq_lens.contiguous(), visible_lens, num_tokens, requests,
                requests.bit_length(), size, rank, interleave, TOKENS=TOKENS, num_warps=4, **following,
            )  # fmt: skip
    return visible_lens


@triton.jit(
    do_not_specialize=["num_tokens", "num_requests", "search_steps", "size", "rank", "interleave"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens"],
)
@no_type_check  # the tests' type checker must not wrap a kernel: Triton's interpreter reads its source
def _visible_lens_kernel(
    query_start_loc, seq_lens, visible_lens, num_tokens, num_requests, search_steps, size, rank, interleave,
    TOKENS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the visible lengths of TOKENS query tokens."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = tokens < num_tokens
    # find the request of each token by bisection: count the requests whose last token comes before this token
    request = tl.zeros([TOKENS], tl.int32)
    upper = request + num_requests
    for _ in range(search_steps):
        middle = (request + upper) // 2
        end = tl.load(query_start_loc + middle + 1, request < upper, 0)
        past = (request < upper) & (end <= tokens)
        upper = tl.where(past, upper, middle)
        request = tl.where(past, middle + 1, request)
    owned = inside & (request < num_requests)
    end = tl.load(query_start_loc + request + 1, owned, 0)
    length = tl.load(seq_lens + request, owned, 0)
    keys = tl.maximum(tl.minimum(length - (end - 1 - tokens), length), 0)
    rounds = keys // (size * interleave)
    rest = keys - rounds * (size * interleave)
    local_keys = rounds * interleave + tl.minimum(tl.maximum(rest - rank * interleave, 0), interleave)
    tl.store(visible_lens + tokens, tl.where(owned, local_keys, 0), inside)


def zero_padding_tokens(output: Tensor, query_start_loc: Tensor) -> None:
    """Write zeros to the rows of output [T, N, V] from `query_start_loc[-1]` on; the strides may have any values."""
    tokens, heads, value = output.shape
    if output.numel() == 0:
        return
    following = device_facts(output.device).following
    columns = triton.next_power_of_2(value)
    with torch.cuda.device_of(output):
        _zero_padding_kernel[(tokens,)](
            query_start_loc.contiguous(), output, query_start_loc.shape[0] - 1, *output.stride(),
            HEADS=heads, VALUE=value, ROWS=max(1, ELEMENTS // columns), COLUMNS=columns, num_warps=4, **following,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_requests"], do_not_specialize_on_alignment=["query_start_loc"])
@no_type_check
def _zero_padding_kernel(
    query_start_loc, output, num_requests, token_stride, head_stride, value_stride,
    HEADS: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write zeros to all heads of one token, ROWS heads at a time, if the token belongs to no request."""
    if DEPENDENT:
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
