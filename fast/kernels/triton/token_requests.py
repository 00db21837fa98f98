"""The request of each token of a packed batch, for Triton kernels."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check  # the tests' type checker must not wrap a kernel: Triton's interpreter reads its source
def request_of(tokens, offsets, stride, num_requests, search_steps):
    """Return the request of each token, by bisection; `num_requests` for a token behind the last request.

    The result counts the requests whose last token comes before the token. It has the shape and dtype of `tokens`.

    Args:
        tokens: numbers of tokens.
        offsets: [B + 1], first token of each request, and the end of the last request.
        stride: stride of the offsets.
        num_requests: B.
        search_steps: number of bits of B.
    """
    request = tl.zeros_like(tokens)
    upper = request + num_requests
    for _ in range(search_steps):
        middle = (request + upper) // 2
        end = tl.load(offsets + (middle + 1) * stride, request < upper, 0)
        past = (request < upper) & (end <= tokens)
        upper = tl.where(past, upper, middle)
        request = tl.where(past, middle + 1, request)
    return request
