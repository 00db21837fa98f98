"""Find the request of each token of a batch inside a Triton kernel."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check  # otherwise the tests' type checker wraps the kernel, and Triton's interpreter finds no module globals
def request_of(tokens, offsets, stride, num_requests, search_steps):
    """Return the request of each token; a token after the last request gets `num_requests`.

    The result has the shape and dtype of `tokens`. The function searches `offsets` by bisection.

    Args:
        tokens: indices of tokens in the batch, in which all tokens of a request follow each other.
        offsets: [B + 1], first token of each request, and the end of the last request.
        stride: stride of the offsets.
        num_requests: B.
        search_steps: number of bisection steps: the number of bits of B.
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
