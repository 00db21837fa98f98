"""Tests of `row_blocks_16_or_64`, the decode kernel of one request that chooses its row blocks by the length.

A row is one (query token, head) pair, and a row block is the rows of the request that a program processes together. A
split is consecutive tiles (64 keys each) that one program of the schedule attends. Gluon has no interpreter, so the
tests that launch the kernel need a Hopper GPU. A result is "within the budget" if its error against the reference is
small enough.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from ....memory_checks import FAR
from ....support import decode_inputs
from ....support.decode_inputs import captured, make_inputs, on_device, schedule_of, verdict
from ....support.factories import assert_same_bits, integers
from ....support.triton_mode import DEVICE, INTERPRETED, ON_HOPPER

if INTERPRETED:
    pytest.skip("Gluon has no interpreter", allow_module_level=True)

from fast.kernels.hopper.mla_decode import launch as decode
from fast.kernels.hopper.mla_decode import select
from fast.kernels.hopper.mla_decode.main_loops.row_blocks_16_or_64 import MOST_RANGES, SMALL_ROWS

on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
launch = partial(decode_inputs.launch, decode)
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def launched(monkeypatch):
    """Return a list to which each launch of a decode kernel appends the name of the kernel."""
    names = []

    def noted(kernel, *given, **constants):
        names.append(kernel.fn.__name__)
        own_launch(kernel, *given, **constants)

    own_launch = decode.launch
    monkeypatch.setattr(decode, "launch", noted)
    return names


def programs_of(heads: int, query_len: int = 1, latent: int = 512) -> int:
    """Return the number of programs of a schedule that fills the GPU."""
    return decode.decode_programs(torch.device(DEVICE), BF16, heads, latent, 64, 64, query_len)


def test_when_the_length_decides():
    """Only a decode of one request with a schedule of at most MOST_RANGES programs is launched as this kernel."""
    most = MOST_RANGES.value
    assert [select.chooses_rows_by_length(ranges, 1) for ranges in (0, 1, most, most + 1)] == [False, True, True, False]
    assert not select.chooses_rows_by_length(66, 2)


@on_hopper
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 300, 1024, 2047, 2500, 9000, 20000])
@pytest.mark.parametrize("heads", [40, 64, 100, 128])
def test_lengths(heads, length, launched):
    """A decode of one request of any length is within the budget, and an empty request gives output 0 and LSE -inf."""
    inputs = make_inputs([1], [length], heads, BF16)
    schedule = schedule_of(inputs[3], heads, programs_of(heads))
    verdict(launch(*inputs, schedule=schedule), *inputs)
    assert launched == ["_row_blocks_16_or_64_kernel"]


@on_hopper
@pytest.mark.parametrize("query_lens, heads", [([2], 64), ([3], 40), ([5], 128), ([7], 16), ([2], 33)], ids=str)
@pytest.mark.parametrize(
    "widths, block_size, dtype", [((256, 32), 16, FP16), ((512, 0), 128, BF16), ((512, 64), 32, FP16)]
)
def test_shapes(widths, block_size, dtype, query_lens, heads):
    """Decodes with several query tokens, in other widths and block sizes, are within the budget."""
    for length in (40, 700, 5000):
        inputs = make_inputs(query_lens, [length], heads, dtype, widths, block_size)
        schedule = schedule_of(inputs[3], heads, max(67, programs_of(heads, query_lens[0])))
        verdict(launch(*inputs, schedule=schedule), *inputs)


@on_hopper
@pytest.mark.parametrize("heads", [64, 128])
def test_which_rows(heads, monkeypatch):
    """A long request gets the bits of `row_blocks_64`; a short one gets other bits, those of row blocks of 16 rows."""
    programs = programs_of(heads)
    for length, long in ((700, False), (60_000, True)):
        inputs = make_inputs([1], [length], heads, BF16)
        schedule = schedule_of(inputs[3], heads, programs)
        splits = int(schedule.split_offsets[1])
        assert (splits * -(-heads // SMALL_ROWS.value) > programs * -(-heads // 64)) == long
        own = launch(*inputs, schedule=schedule)
        with monkeypatch.context() as patch:
            patch.setattr(decode, "chooses_rows_by_length", lambda *_: False)
            other = launch(*inputs, schedule=schedule)
        assert (own.out.equal(other.out) and own.lse.equal(other.lse)) == long
        verdict(own, *inputs)


@on_hopper
@pytest.mark.parametrize("heads", [64, 128])
def test_replays_of_all_lengths(heads):
    """One CUDA graph serves short and long requests: each replay has the bits of a launch for the same length."""
    *tensors, plan = make_inputs([1], [9000], heads, BF16)
    ql, q_pe, cache = (tensor.to(DEVICE) for tensor in tensors)
    held, schedules = on_device(plan), {}
    for length in (9000, 1024, 1, 0, 5000):
        lens = integers(length)
        found = schedule_of(replace(plan, seq_lens=lens, visible_lens=lens), heads, programs_of(heads))
        schedules[length] = found.tile_ranges.to(DEVICE), found.split_offsets.to(DEVICE)
    ranges, starts = (tensor.clone() for tensor in schedules[9000])
    schedule = replace(found, tile_ranges=ranges, split_offsets=starts)
    graph, out, lse = captured(decode, ql, q_pe, cache, held, schedule=schedule)
    for length in (1024, 9000, 0, 5000, 1, 9000):
        for tensor, value in zip((ranges, starts), schedules[length], strict=True):
            tensor.copy_(value)
        for tensor in (held.seq_lens, held.visible_lens):
            tensor.fill_(length)
        graph.replay()
        fresh = launch(ql, q_pe, cache, held, schedule=schedule)
        assert_same_bits(out.cpu(), fresh.out)
        assert_same_bits(lse.cpu(), fresh.lse)


@on_hopper
@pytest.mark.parametrize("length", [300, 9000])
def test_indices_out_of_range(length):
    """A schedule with numbers out of range does not hang the kernel; memcheck finds accesses outside the tensors."""
    inputs = make_inputs([1], [length], 128, BF16)
    schedule = schedule_of(inputs[3], 128, 66)
    for value in (*FAR, 0, 1):
        for column in range(5):
            ranges = schedule.tile_ranges.clone()
            ranges[::7, column] = value
            launch(*inputs, schedule=replace(schedule, tile_ranges=ranges))
        offsets = schedule.split_offsets.clone()
        offsets[1] = value
        launch(*inputs, schedule=replace(schedule, split_offsets=offsets))
    verdict(launch(*inputs, schedule=schedule), *inputs)
