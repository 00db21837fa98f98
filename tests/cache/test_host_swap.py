"""Tests of `swap_blocks` between a GPU and pinned host memory, in the Triton backend.

On a GPU the kernel is compiled. Without a GPU, one test runs this file again in Triton's interpreter; both caches are
then on the CPU, and the tests call the function that copies between a GPU and pinned memory.
"""

from __future__ import annotations

import random

import pytest
import torch

import fast
import reference

from ..support.factories import assert_same_bits
from ..support.triton_mode import INTERPRETED, ON_GPU, gpu_only, run_in_interpreter, runs, starts_interpreter

if ON_GPU or INTERPRETED:
    from fast.kernels.triton import cache

MAPPINGS = {
    "one run": [[block + 2, block] for block in range(6)],
    "scattered": [[7, 0], [1, 5], [4, 2], [9, 9]],
    "runs and scattered": [[8, 1], [3, 4], [0, 9], [4, 5], [5, 6], [9, 2], [2, 3]],
    "source in two runs": [[2, 8], [3, 9], [2, 0], [3, 1]],
    "empty": [],
}


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


def pairs_of(values: list[list[int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu").view(-1, 2)


def copied(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Return the target after a copy of the pairs that are inside both caches."""
    wanted = target.clone()
    for read, written in pairs.tolist():
        if 0 <= read < len(source) and 0 <= written < len(target):
            wanted[written] = source[read].to(target.device)
    return wanted


@runs
def test_runs_of_blocks():
    """Divide random mappings into runs and a rest -> the pairs of a search that tries every run.

    The search finds the longest runs: for each pair without a predecessor, it counts the successors.
    """
    draw = random.Random(3)
    for _ in range(200):
        targets = draw.sample(range(14), draw.randint(0, 12))
        pairs = [(draw.randrange(8) if draw.random() < 0.3 else (target + 3) % 10, target) for target in targets]
        least = draw.randint(1, 4)
        found, rest = cache.divide_into_runs(pairs_of([list(pair) for pair in pairs]), least)
        wanted, left = [], []
        for a, b in sorted(pairs):
            if (a - 1, b - 1) in pairs:
                continue
            run = [(a, b)]
            while (run[-1][0] + 1, run[-1][1] + 1) in pairs:
                run.append((run[-1][0] + 1, run[-1][1] + 1))
            if len(run) >= least:
                wanted.append((a, b, len(run)))
            else:
                left += run
        assert sorted((run.source, run.target, run.length) for run in found) == sorted(wanted)
        assert sorted(map(tuple, rest.tolist())) == sorted(left)


@runs
@pytest.mark.skipif(ON_GPU, reason="both caches are on the CPU")
@pytest.mark.parametrize("least", [1, 3, 100], ids=lambda blocks: f"runs of {blocks}")
@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)
def test_copies_and_kernel(mapping, least, monkeypatch):
    """Copy blocks as runs and by the kernel -> every pair is copied once, pairs outside the caches are skipped.

    With `least` 100 the kernel copies all blocks. With `least` 1 no block is left for the kernel. The fault that a run
    is also left for the kernel changes no byte, so the test counts the pairs that the kernel gets.
    """
    source, target = torch.randn(10, 4, 12), torch.full((11, 4, 12), torch.nan)
    pairs = torch.cat((pairs_of(mapping), pairs_of([[-1, 10], [0, 11], [10, 10], [2**40, 10]])))
    monkeypatch.setattr(cache, "LEAST_COPY_BYTES", least * 4 * 12 * 4)
    kernel, counts = cache._copy_pairs, []
    monkeypatch.setattr(cache, "_copy_pairs", lambda *args: counts.append(len(args[2])) or kernel(*args))
    wanted, was = copied(source, target, pairs), source.clone()
    cache.copy_to_other_device(source, target, pairs, torch.device("cpu"))
    assert_same_bits(target, wanted)
    assert_same_bits(source, was)
    runs_found, rest = cache.divide_into_runs(pairs_of(mapping), least)
    assert counts == [len(rest)]
    assert sum(run.length for run in runs_found) + len(rest) == len(mapping)
    assert least != 1 or len(rest) == 0


@runs
@pytest.mark.skipif(ON_GPU, reason="both caches are on the CPU")
def test_a_strided_cache_goes_through_the_kernel(monkeypatch):
    """Copy a run from a cache whose blocks are not contiguous -> the kernel copies it, and neighbours do not change."""
    monkeypatch.setattr(cache, "LEAST_COPY_BYTES", 1)
    monkeypatch.setattr(cache, "divide_into_runs", None)
    whole, target = torch.randn(10, 3, 4, 12), torch.full((11, 2, 4, 12), torch.nan)
    wanted = target.clone()
    pairs = pairs_of(MAPPINGS["one run"])
    wanted[:, 1] = copied(whole[:, 1], target[:, 1], pairs)
    cache.copy_to_other_device(whole[:, 1], target[:, 1], pairs, torch.device("cpu"))
    assert_same_bits(target, wanted)


def pinned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cpu").to(dtype).pin_memory()


@gpu_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8], ids=str)
@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)
@pytest.mark.parametrize("mapping_device", ["cpu", "cuda"])
@pytest.mark.parametrize("least", [1, 3, None], ids=lambda blocks: f"runs of {blocks}")
def test_pinned_memory(mapping_device, mapping, dtype, least, monkeypatch):
    """Swap blocks out to pinned memory and in again -> the result of `reference`, as soon as the call returns.

    The device is busy when the call starts, so a call that does not wait would return before the blocks are copied.
    """
    if least is not None:
        monkeypatch.setattr(cache, "LEAST_COPY_BYTES", least * 16 * 576 * dtype.itemsize)
    busy = torch.empty(1 << 28, dtype=torch.int32, device="cuda")
    pairs = pairs_of(mapping).to(mapping_device)
    for out in (True, False):
        source, target = pinned(10, 16, 576, dtype=dtype), pinned(11, 16, 576, dtype=dtype)
        wanted = target.clone()
        reference.swap_blocks(source, wanted, pairs_of(mapping))
        source, target = (source.cuda(), target) if out else (source, target.cuda())
        for _ in range(10):
            busy.zero_()
        fast.swap_blocks(source, target, pairs, backend="triton")
        if not out:
            source.fill_(0)  # the call has read the source before it returns
        assert_same_bits(target.cpu().view(torch.uint8), wanted.view(torch.uint8))


@gpu_only
@pytest.mark.parametrize("out", [True, False], ids=["out", "in"])
def test_pinned_memory_with_strides(out):
    """Swap blocks of one layer of a tensor with several layers -> only the blocks of this layer change."""
    source, target = pinned(10, 3, 16, 576, dtype=torch.bfloat16), pinned(11, 3, 16, 576, dtype=torch.bfloat16)
    pairs = pairs_of([*MAPPINGS["runs and scattered"], [10, 10], [-1, 10]])
    wanted = target.clone()
    wanted[:, 1] = copied(source[:, 1], target[:, 1], pairs)
    source, target = (source.cuda(), target) if out else (source, target.cuda())
    cache.swap_blocks(source[:, 1], target[:, 1], pairs)
    assert_same_bits(target.cpu(), wanted)


@gpu_only
def test_pinned_memory_in_a_graph():
    """Capture a swap out and replay it with other blocks -> the replay copies the blocks of the new mapping."""
    source, target = torch.randn(10, 16, 576, device="cuda").bfloat16(), pinned(11, 16, 576, dtype=torch.bfloat16)
    pairs = pairs_of(MAPPINGS["scattered"]).cuda()
    fast.swap_blocks(source, target, pairs, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fast.swap_blocks(source, target, pairs, backend="triton")
    pairs.copy_(pairs_of([[6, 10], [5, 4], [0, 0], [2, 7]]))
    wanted = copied(source, target, pairs)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(target, wanted)
