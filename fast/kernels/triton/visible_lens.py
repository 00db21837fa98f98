"""Compute how many keys each query token of a decode sees, on the GPU.

The host reads no value back. A CUDA graph that contains the kernel can therefore be replayed with other lengths.
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
from ..integers import cdiv
from .token_requests import request_of

TOKENS = 128  # query tokens that one program processes


def compute_visible_lens(
    query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int, size: int, rank: int, interleave: int
) -> Tensor:
    """Return the number of keys that each query token attends, [num_tokens] int32.

    With context parallelism, D ranks divide the tokens of a sequence among themselves. The result then counts the keys
    of rank `rank` alone. A negative length counts as 0.

    Args:
        query_start_loc: [B + 1], first query token of each request.
        seq_lens: [B], tokens of each sequence on all ranks.
        num_tokens: length of the result; tokens from `query_start_loc[-1]` on are padding and attend no key.
        size: D, number of ranks; 1 without context parallelism.
        rank: this rank.
        interleave: I, number of consecutive tokens that one rank gets before the next rank gets tokens.
    """
    requests = seq_lens.shape[0]
    visible_lens = torch.empty(num_tokens, dtype=torch.int32, device=seq_lens.device)
    if num_tokens:
        following = device_facts(seq_lens.device).following
        with device_of(seq_lens):
            launch(
                _visible_lens_kernel, (cdiv(num_tokens, TOKENS),),
                query_start_loc.contiguous(), seq_lens.contiguous(), visible_lens, num_tokens, requests,
                requests.bit_length(), size, rank, interleave, TOKENS=TOKENS, num_warps=4, **following,
            )  # fmt: skip
    return visible_lens


@triton.jit(
    do_not_specialize=["num_tokens", "num_requests", "search_steps", "size", "rank", "interleave"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens"],
)
@no_type_check  # otherwise the tests' type checker wraps the kernel, and Triton's interpreter finds no module globals
def _visible_lens_kernel(
    query_start_loc, seq_lens, visible_lens, num_tokens, num_requests, search_steps, size, rank, interleave,
    TOKENS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the number of visible keys of TOKENS query tokens."""
    if DEPENDENT:  # let the next kernel start early, and wait for the preceding kernel
        gdc_launch_dependents()
        gdc_wait()
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = tokens < num_tokens
    request = request_of(tokens, query_start_loc, 1, num_requests, search_steps)
    owned = inside & (request < num_requests)
    end = tl.load(query_start_loc + request + 1, owned, 0)
    length = tl.load(seq_lens + request, owned, 0)
    keys = tl.maximum(tl.minimum(length - (end - 1 - tokens), length), 0)
    # count the rank's tokens among the first `keys` tokens: in each round, every rank gets `interleave` tokens
    rounds = keys // (size * interleave)
    rest = keys - rounds * (size * interleave)
    local_keys = rounds * interleave + tl.minimum(tl.maximum(rest - rank * interleave, 0), interleave)
    tl.store(visible_lens + tokens, tl.where(owned, local_keys, 0), inside)
