"""Tests that the Triton kernel of `plan_decode` gives the integers of `reference`.

A schedule assigns the keys of all requests, in tiles of 64 keys, to programs. A *part* is a whole request, or one of
the equal parts of a long request. The cases of these tests take every branch of the kernel. Without a GPU, one test
runs this file again in Triton's interpreter. On a GPU, `pytest --device cuda tests/planning/test_schedule.py` runs
random cases.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import reference
from fast.kernels.schedule_costs import measured_schedule_costs
from reference.interfaces import NEUTRAL_SPLIT_RULE

from ...support.factories import integers
from ...support.triton_mode import DEVICE, INTERPRETED, ON_GPU, run_in_interpreter, runs, starts_interpreter

if ON_GPU or INTERPRETED:
    from fast.kernels.triton import schedule


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


def check(lens, programs, heads, overhead, batch_invariant):
    costs = replace(measured_schedule_costs(heads), request_cost=overhead)
    wanted = reference.plan_decode(integers(*lens).cpu(), programs, costs, batch_invariant)
    lens = integers(*lens).to(DEVICE)
    strided = torch.stack((lens, lens + 77), 1)[:, 0]
    for given in (lens, strided) if programs == 3 else (lens,):
        ranges, offsets = schedule.plan_decode(
            given, programs, overhead, costs.split_cost, costs.splits_per_tile, costs.split_rule, batch_invariant
        )
        assert ranges.cpu().equal(wanted.tile_ranges) and offsets.cpu().equal(wanted.split_offsets)


@runs
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    "lens",
    [
        [],
        [0],
        [0, 0, 0],
        [1],
        [64, 0, 65],
        [0, 5000, 0, 0, 1, 130, 0],
        [9000] * 3,
        [17_000, 70_000, 140_000],
        [0, 4000, 0, 4050, 4090, 0],
        [500] * 14,
    ],
    ids=str,
)
def test_schedules(lens, batch_invariant):
    for programs, overhead in ((1, 5), (3, 5), (9, 0), (9, 5)):
        for heads in (16, 128):
            check(lens, programs, heads, overhead, batch_invariant)


@runs
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("requests", [64, 65, 128, 129, 256, 257, 1025])
def test_many_requests(requests, batch_invariant):
    """The kernel is right if the requests exactly fill one iteration of its loop, or need several iterations."""
    draw = random.Random(requests)
    check([draw.choice([0, 1, 70, 700, 3000]) for _ in range(requests)], 13, 128, 5, batch_invariant)


@runs
@pytest.mark.parametrize(
    "tiles, requests, programs, overhead",
    [(16, 256, 66, 8), (64, 128, 66, 8), (64, 16, 66, 8), (128, 1, 66, 8), (64, 16, 132, 5), (3, 1500, 132, 5)],
)
def test_whole_parts(tiles, requests, programs, overhead):
    """For equal lengths, and for similar lengths mixed with zeros, the kernel gives the integers of `reference`."""
    draw = random.Random(tiles)
    for shortest, empty in ((1, 0), (0.98, 0.2)) if requests > 1 else ((1, 0),):
        lens = [draw.randint(int(64 * tiles * shortest), 64 * tiles) for _ in range(requests)]
        check([0 if draw.random() < empty else length for length in lens], programs, 128, overhead, False)


@runs
def test_consecutive_parts_are_one_split():
    """The kernel is right if a program gets two parts of a request that has two or three parts."""
    for first_tiles, others in ((5, 17), (7, 15)):
        check([64 * first_tiles] + others * [64], 10, 128, 20, False)


@runs
@pytest.mark.parametrize("seed", range(4))
def test_random_lengths(seed):
    draw = random.Random(seed)
    for _ in range(8):
        longest, requests = draw.choice([64, 300, 4000, 40_000]), draw.choice([1, 2, 5, 16, 40])
        shortest = int(longest * draw.choice([0, 0.5, 0.9, 0.97, 1]))
        lens = [draw.randint(shortest, longest) for _ in range(requests)]
        check(lens, draw.choice([1, 2, 7, 66, 132]), 128, draw.choice([0, 1, 5, 8, 20]), False)


@runs
def test_extreme_lengths():
    """A negative length counts as 0, and the largest int32 length does not overflow.

    In the second schedule, the product of programs and tiles exceeds 32 bits.
    """
    lens = torch.tensor([-5, 2**31 - 1, -(2**31), 64], dtype=torch.int32, device=DEVICE)
    ranges, offsets = schedule.plan_decode(lens, 2, 5, 1, 8, NEUTRAL_SPLIT_RULE, False)
    assert offsets.tolist() == [0, 0, 2, 2, 3]
    half = -(-(2**25 + 5 + 1 + 5) // 2)
    assert ranges.tolist() == [[1, 1, 0, half - 5, 0], [1, 3, half - 5, 1, 1]]
    lens = torch.tensor([2**31 - 1, 2**31 - 1], dtype=torch.int32, device=DEVICE)
    ranges, offsets = schedule.plan_decode(lens, 256, 5, 1, 8, NEUTRAL_SPLIT_RULE, False)
    assert offsets.tolist() == [0, 128, 256]
    size = 2**25 // 128
    assert ranges.tolist() == [[r, r, size * i, size * (i + 1), i] for r in range(2) for i in range(128)]
