"""Tests of `choose_schedule`: which decodes get a schedule by default. `plan.schedule_choice` records the choice.

A schedule assigns the keys of all requests, in tiles of 64 keys, to the programs of the decode kernel. A decode
with such an assignment is called *planned*. Without a schedule, each request is divided among the same number of
programs.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fast
import fast.mla.builder
import reference
from fast.kernels.schedule_costs import measured_schedule_costs
from reference.interfaces import DECODE_TILE, CommonAttentionMetadata, ScheduleChoice, ScheduleCosts, choose_schedule
from reference.planning import decode_schedule as reference_schedule

from ..benchmarks.decode import Row
from ..support.factories import CONFIGS, integers, make_batch
from ..support.planning import same
from ..support.properties import given, st

CONFIG = CONFIGS["direct"]
EQUAL, RAGGED = [3000] * 6, [30_000, 64, 200, 1000, 90, 130]
START = {1: 5, 32: 5, 33: 8, 128: 8}  # number of heads: measured cost of starting a request, in tiles


@pytest.fixture(params=["reference", "fast"])
def ops(request):
    return {"reference": reference, "fast": fast}[request.param]


@pytest.fixture
def eight_programs(monkeypatch):
    """Replace `decode_programs` by a function that returns 8, and return the list of its calls."""
    calls = []

    def decode_programs(config, **given):
        calls.append((config.num_heads, given))
        return 8

    fast.mla.device_choices.forget_choices()
    monkeypatch.setattr(fast.mla.device_choices, "decode_programs", decode_programs)
    yield calls
    fast.mla.device_choices.forget_choices()


def batch_of(seq_lens, query_len=1, ownership=None):
    width = -(-max([1, *seq_lens]) // 64)
    table = torch.arange(len(seq_lens) * width, dtype=torch.int32).view(len(seq_lens), width)
    return CommonAttentionMetadata.from_lens([query_len] * len(seq_lens), seq_lens, table, 64, ownership)


@given(st.lists(st.integers(0, 9000), max_size=8), st.integers(0, 9), st.sampled_from(sorted(START)), st.booleans())
def test_lengths_that_differ_are_planned(lens, programs, heads, invariant):
    """A decode is planned if a schedule saves more tiles than it costs.

    For each request, a schedule saves the difference between the longest request and this request, in tiles. A schedule
    costs START[heads] tiles for each request and for each program, and 4 times as much in a batch-invariant decode.
    """
    choice = choose_schedule(integers(*lens).cpu(), programs, measured_schedule_costs(heads), invariant)
    tiles = [len(range(0, length, DECODE_TILE)) for length in lens if length > 0]
    if programs == 0 or not lens:
        assert choice == ScheduleChoice(0, 0, 0, 0, False)
        return
    assert (choice.num_programs, choice.requests) == (programs, len(tiles))
    assert (choice.longest_tiles, choice.total_tiles) == (max(tiles, default=0), sum(tiles))
    saved = sum(max(tiles) - count for count in tiles) if tiles else 0
    starts = (len(tiles) + programs) * START[heads] * (4 if invariant else 1)
    assert choice.planned == (programs > 1 and saved > starts)


TIMES = json.loads((Path(__file__).parents[2] / "docs/results/h200-schedule-choice.json").read_text())["rows"]


@pytest.mark.parametrize("invariant, most", [(False, 1.042), (True, 1.056)])
def test_the_choice_is_nearly_the_faster_way(invariant, most):
    """The chosen decode, with or without a schedule, takes at most `most` x the time of the faster of these decodes.

    The times of 25 shapes were measured on an H200, in replays of a CUDA graph. `docs/log.md` has the same two limits
    `most`.
    """
    lost = {}
    for row in TIMES:
        dims, times = Row(**row["dims"]), row["times"]["replayed"]
        own = "fast, invariant" if invariant else "fast"
        by_way = {planned: times[own + (", planned" if planned else "")]["median_us"] for planned in (False, True)}
        programs = 132 // max(1, dims.N // 64)
        costs = measured_schedule_costs(dims.N)
        planned = choose_schedule(integers(*dims.seq_lens).cpu(), programs, costs, invariant).planned
        lost[dims] = by_way[planned] / min(by_way.values())
    assert len(lost) == 25 and max(lost.values()) <= most, lost


def test_ragged_steps_are_planned_by_default(eight_programs, plain_errors):
    """By default, a step with requests of unequal lengths is planned, and a step with equal lengths is not planned."""
    for make in (
        lambda common: fast.build_mla_metadata(common, 64, 4096, config=CONFIG),
        lambda common: fast.MLAMetadataBuilder(CONFIG, 64, 40_000, 8).build(0, common),
    ):
        plan = make(batch_of(RAGGED))
        assert plan.schedule_choice == ScheduleChoice(8, 6, 469, 469 + 1 + 4 + 16 + 2 + 3, True)
        here = {"device": torch.get_default_device(), "dtype": torch.bfloat16, "block_size": 64}
        same(plan.schedule, reference.plan_decode(integers(*RAGGED), 8, fast.schedule_costs(CONFIG, **here)))
        plan = make(batch_of(EQUAL))
        assert plan.schedule is None and plan.schedule_choice == ScheduleChoice(8, 6, 47, 6 * 47, False)
    heads, how = eight_programs[0]
    assert heads == CONFIG.num_heads
    assert (how["dtype"], how["block_size"], how["query_len"]) == (torch.bfloat16, 64, 1)
    assert len(eight_programs) == 1  # `fast` caches the number of programs


def test_zero_never_plans(ops, eight_programs):
    for plan in (
        ops.build_mla_metadata(batch_of(RAGGED), 64, 4096, config=CONFIG, num_programs=0),
        ops.MLAMetadataBuilder(CONFIG, 64, 40_000, 8, num_programs=0).build(0, batch_of(RAGGED)),
        ops.build_mla_metadata(batch_of(RAGGED), 64, 4096),  # no config, so the number of heads is unknown
    ):
        assert plan.schedule is None and plan.schedule_choice == ScheduleChoice(0, 0, 0, 0, False)
    assert eight_programs == []


def test_the_device_of_the_reference_runs_one_program():
    """In `reference`, and in `fast` on a CPU, `num_programs=None` means one program, so a decode gets no schedule."""
    plan = reference.build_mla_metadata(batch_of(RAGGED), 64, 4096, config=CONFIG)
    assert plan.schedule is None and plan.schedule_choice == ScheduleChoice(1, 6, 469, 495, False)
    plan = fast.build_mla_metadata(batch_of(RAGGED), 64, 4096, config=CONFIG)
    wanted = 1 if torch.get_default_device().type == "cpu" else plan.schedule_choice.num_programs
    assert plan.schedule_choice.num_programs == wanted


@pytest.mark.parametrize("lens", [EQUAL, RAGGED, [70, 0, 9000], [], [1]], ids=str)
@pytest.mark.parametrize("programs", [1, 5, 132])
@pytest.mark.parametrize("size", [1, 3])
def test_both_make_the_same_choice(lens, programs, size):
    """With the same number of programs and the same costs, both packages make the same choice.

    On ranks that share sequences (`size` = 3), the choice counts the tokens of this rank.
    """
    plans = []
    for ops in (reference, fast):
        ownership = None if size == 1 else ops.TokenOwnership(size, 1)
        common = batch_of(lens, ownership=ownership)
        plan = ops.build_mla_metadata(
            common, 64, 4096, config=CONFIG, num_programs=programs, ownership=ownership, schedule_costs=ScheduleCosts()
        )
        lens_here = [length if ownership is None else ownership.count(length) for length in lens]
        assert plan.decode.seq_lens.tolist() == lens_here
        if lens:
            assert plan.schedule_choice == choose_schedule(integers(*lens_here).cpu(), programs)
        plans.append(plan)
    same(*plans)


def test_invariant_cuts_are_chosen_alike(ops):
    """A batch-invariant builder gives every decode a batch-invariant schedule.

    If the decode is planned, the schedule has `tile_ranges`, the work of each program. Otherwise the schedule assigns
    no work and has only the rule for splits; `tile_ranges` is None.
    """
    builder = ops.MLAMetadataBuilder(CONFIG, 64, 40_000, 8, num_programs=5, batch_invariant=True)
    ragged, equal = (builder.build(0, batch_of(lens)) for lens in (RAGGED, EQUAL))
    assert ragged.schedule.batch_invariant and ragged.schedule.tile_ranges.shape == (5, 5)
    assert equal.schedule.batch_invariant and equal.schedule.tile_ranges is None


def test_captured_plans_do_not_look_at_lengths(ops, plain_errors):
    """A captured plan always has a schedule, because the lengths of later steps are unknown.

    `max_seq_len` of the plan is the `max_model_len` of the builder, or the number of tokens in the captured block table
    if this number is smaller.
    """
    builder = ops.MLAMetadataBuilder(CONFIG, 64, 1500, 8, num_programs=5, schedule_costs=ScheduleCosts())
    captured = builder.build_for_cudagraph_capture(batch_of([3] * 6))
    assert captured.schedule_choice.planned and captured.schedule.tile_ranges.shape == (5, 5)
    assert captured.decode.max_seq_len == 64  # the captured block table has one column of 64 tokens
    wide = replace(batch_of([3] * 6), block_table=torch.zeros(6, 40, dtype=torch.int32))
    captured = builder.build_for_cudagraph_capture(wide)
    assert captured.decode.max_seq_len == 1500
    builder.update_captured(captured, replace(batch_of([1500, 1, 3, 4, 5, 6])))
    ranges = captured.schedule.tile_ranges.clone()
    same(ranges, ops.plan_decode(integers(1500, 1, 3, 4, 5, 6), 5).tile_ranges)
    narrow = builder.build_for_cudagraph_capture(batch_of([3] * 6))
    with pytest.raises(ValueError, match="^common: expected at most 64 keys a request, as captured, got 65$"):
        builder.update_captured(narrow, batch_of([65, 1, 3, 4, 5, 6]))


@pytest.mark.parametrize("heads, programs", [(16, 132), (32, 132), (64, 132), (128, 66), (128, 1)])
def test_programs_of_one_request(heads, programs):
    """The schedule of a single request needs as many programs as the request has equal parts, for its longest length.

    A schedule of this many programs divides the longest request as a schedule of all programs does, but all of its
    programs have work.
    """
    costs = measured_schedule_costs(heads)
    needed = functools.partial(fast.mla.device_choices.programs_of_one_request, programs, costs=costs)
    most = 1
    for tiles in range(1, 600):
        (size,) = reference_schedule._equal_part_tiles([tiles], programs, costs.splits_per_tile)
        most = max(most, -(-tiles // size))
        assert needed(64 * tiles) == needed(64 * tiles - 63) == most
    assert needed(131072) == programs and needed(0) == 1
    assert fast.mla.device_choices.programs_of_one_request(0, 131072, costs) == 0
    few, every = (reference.plan_decode(integers(8192), count, costs) for count in (needed(8192), programs))
    assert {16: 64, 32: 64, 64: 32, 128: min(programs, 32)}[heads] == needed(8192) == few.split_offsets[1]
    same(few.split_offsets, every.split_offsets)
    first, last = every.tile_ranges.unbind(1)[:2]
    same(few.tile_ranges, every.tile_ranges[first <= last])


def test_captured_plans_of_one_request(eight_programs):
    """A graph of one request gets a schedule of as many programs as its longest length needs, on each update too."""
    given = {"schedule_costs": ScheduleCosts(), "device": "cpu"}
    builder = fast.MLAMetadataBuilder(CONFIG, 64, 200, 8, **given)
    table = torch.zeros(1, 40, dtype=torch.int32)
    captured = builder.build_for_cudagraph_capture(replace(batch_of([3]), block_table=table))
    assert captured.schedule.tile_ranges.shape == (4, 5) and captured.schedule_choice.num_programs == 4
    for length in (1, 64, 65, 200):
        builder.update_captured(captured, batch_of([length]))
        same(captured.schedule.tile_ranges, reference.plan_decode(integers(length), 4, ScheduleCosts()).tile_ranges)
    for batch, options in (([3], {"batch_invariant": True}), ([3], {"num_programs": 8}), ([3, 3], {})):
        builder = fast.MLAMetadataBuilder(CONFIG, 64, 200, 8, **given, **options)
        assert len(builder.build_for_cudagraph_capture(batch_of(batch)).schedule.tile_ranges) == 8


def test_bounds_of_a_plan(ops, plain_errors):
    """`max_seq_len` of a decode plan is the length of the longest decode, or a larger value that the engine gave.

    On ranks that share sequences, `max_seq_len` is the largest number of tokens that any rank holds of a decode. A
    batch whose `max_seq_len` is smaller than its longest request is refused.
    """
    common = make_batch([1, 1, 30], [20, 33, 400]).common
    plan = ops.build_mla_metadata(common, 16, 512)
    assert (common.max_seq_len, plan.decode.max_seq_len, plan.num_decodes) == (400, 33, 2)
    loose = replace(make_batch([1, 1], [20, 33]).common, max_seq_len=999)
    assert ops.build_mla_metadata(loose, 16, 512).decode.max_seq_len == 999  # the engine's `max_seq_len` is kept
    ownership = ops.TokenOwnership(2, 1)
    plan = ops.build_mla_metadata(
        replace(common, slot_mapping=common.slot_mapping * 0 - 1), 16, 512, ownership=ownership
    )
    assert plan.decode.max_seq_len == 17 and plan.decode.seq_lens.tolist() == [10, 16]  # the first rank owns 17 tokens
    with pytest.raises(ValueError, match="^common.max_seq_len: expected at least the longest request, 400, got 399$"):
        ops.build_mla_metadata(replace(common, max_seq_len=399), 16, 512)


def test_num_programs_needs_a_config(ops, plain_errors):
    common = batch_of(RAGGED)
    with pytest.raises(ValueError, match="^config: expected an MLAConfig if num_programs is above 0, got None$"):
        ops.build_mla_metadata(common, 64, 4096, num_programs=4)
    for number in (-1, 2.5, "4"):
        with pytest.raises(ValueError, match="^num_programs: expected an int >= 0 or None, got"):
            ops.build_mla_metadata(common, 64, 4096, config=CONFIG, num_programs=number)


def test_the_longest_lengths_do_not_overflow(plain_errors):
    choice = choose_schedule(integers(2**31 - 1, 1).cpu(), 8)
    assert (choice.longest_tiles, choice.total_tiles, choice.planned) == (2**25, 2**25 + 1, True)
    with pytest.raises(ValueError, match="^seq_lens: expected lengths >= 0, got -1 at request 1$"):
        choose_schedule(integers(5, -1).cpu(), 8)


def test_a_loose_bound_is_no_longer_request(ops, plain_errors):
    """`update_captured` checks the lengths of the requests and not `max_seq_len`, which an engine can set too large."""
    builder = ops.MLAMetadataBuilder(CONFIG, 64, 1500, 8, num_programs=5, schedule_costs=ScheduleCosts())
    captured = builder.build_for_cudagraph_capture(batch_of([3] * 6))
    builder.update_captured(captured, replace(batch_of([64, 1, 3, 4, 5, 6]), max_seq_len=1000))
    wanted = ops.plan_decode(integers(64, 1, 3, 4, 5, 6), 5)
    same(captured.schedule.tile_ranges, wanted.tile_ranges)
