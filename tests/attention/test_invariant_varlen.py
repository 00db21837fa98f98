"""Tests of batch-invariant calls of `flash_attn_varlen`: a request gets the same bits alone and in any batch.

On a GPU, the tests run the kernels of "triton" and, on a Hopper GPU, of "hopper". Without a GPU, they run the kernel of
"cpu", and one test runs this file again in Triton's interpreter. Each test calls the launchers.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from ..support.factories import assert_same_bits, offsets
from ..support.triton_mode import (
    DEVICE,
    INTERPRETED,
    ON_GPU,
    ON_HOPPER,
    gpu_only,
    run_in_interpreter,
    starts_interpreter,
)

BACKENDS = (["triton"] + ["hopper"] * ON_HOPPER) if ON_GPU or INTERPRETED else ["cpu"]
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
SMALL = [(5, 70), (37, 37), (1, 0), (64, 131), (0, 9), (33, 40)]  # query and key lengths
WIDTHS = (128, 64, 128) if ON_GPU else (16, 16, 16)  # P, R and V


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


def requests_of(lens, heads):
    """Return q, k_nope, k_pe and v of each request."""
    nope, rope, value = WIDTHS
    shapes = [
        ((queries, heads, nope + rope), (keys, heads, nope), (keys, rope), (keys, heads, value))
        for queries, keys in lens
    ]
    return [[torch.randn(shape).to(DTYPE).to(DEVICE) for shape in each] for each in shapes]


def attend(backend, requests, causal, batch_invariant=True):
    """Attend all requests in one call; return [(out, lse)] of each request."""
    kernels = importlib.import_module(f"fast.kernels.{backend}")
    lens = [[len(each[place]) for each in requests] for place in (0, 1)]
    arguments = [torch.cat(each) for each in zip(*requests, strict=True)]
    state = kernels.flash_attn_varlen(
        *arguments, *(offsets(each).to(DEVICE) for each in lens), *map(max, lens), 0.1, causal, torch.float32,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    return list(zip(state[0].split(lens[0]), state[1].split(lens[0], dim=1), strict=True))


def same_bits(found, wanted):
    return all(torch.equal(*(x.nan_to_num() for x in pair)) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_among_others(backend, causal):
    """Each request has the same bits alone, in a batch, and in the batch in the other order."""
    requests = requests_of(SMALL, 3)
    together, reverse = attend(backend, requests, causal), attend(backend, requests[::-1], causal)[::-1]
    for request, first, second in zip(requests, together, reverse, strict=True):
        (alone,) = attend(backend, [request], causal)
        for found in (first, second):
            assert_same_bits(found[0], alone[0])
            assert_same_bits(found[1], alone[1])


@gpu_only
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_beside_a_long_one(backend, causal):
    """A request of few query tokens and many keys has the same bits beside a request that fills the GPU.

    Alone, both kernels would choose another launch: "hopper" splits of the keys, and "triton" smaller tiles.
    """
    few, long = requests_of([(200, 16384), (8192, 8192)], 16)
    (alone,) = attend(backend, [few], causal)
    for requests in ([few, long], [long, few], [few, few, long]):
        found = attend(backend, requests, causal)[next(i for i, each in enumerate(requests) if each is few)]
        assert_same_bits(found[0], alone[0])
        assert_same_bits(found[1], alone[1])


@gpu_only
@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_of_ordinary_calls(backend):
    """The control of the test above: without the flag, the long request changes the bits."""
    few, long = requests_of([(200, 16384), (8192, 8192)], 16)
    (alone,) = attend(backend, [few], True, False)
    assert not same_bits(attend(backend, [few, long], True, False)[0], alone)
