"""Tests that a Hopper decode chooses its splits and buffer sizes by `max_seq_len`, not by the block table's width.

A split is a part of the keys of one request that is attended independently. Tests that only compute sizes run on any
machine; tests that launch kernels need a Hopper GPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from ....support import decode_inputs
from ....support.decode_inputs import arguments, make_inputs, schedule_of, verdict
from ....support.factories import GARBAGE, assert_same_bits, integers
from ....support.triton_mode import INTERPRETED, ON_HOPPER

if INTERPRETED:
    pytest.skip("Gluon has no interpreter", allow_module_level=True)

from fast.kernels.combine import launch as combine
from fast.kernels.hopper.mla_decode import launch as decode
from fast.kernels.hopper.mla_decode import select
from fast.mla.device_choices import programs_of_all_variants

on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
launch = partial(decode_inputs.launch, decode)
# How requests are divided. "evenly": all requests get the same number of splits. "scheduled" and "planned": a schedule
# divides the requests. "batch-invariant": the length of a request alone determines its splits.
CUTS = ["evenly", "scheduled", "batch-invariant", "batch-invariant, planned"]


def schedule_for(cut, plan, heads):
    if cut == "evenly":
        return None
    return schedule_of(plan, heads, 0 if cut == "batch-invariant" else 3, cut != "scheduled")


def test_one_short_request_is_cut_into_few_splits():
    """A request of 1024 tokens gets 8 splits, and a request of 40960 tokens gets 64 splits.

    The partial outputs take 2 MiB and 16 MiB. The request has 128 heads, and the GPU has 132 multiprocessors.
    """
    processors, heads, latent = 132, 128, 512
    for keys, splits in ((1024, 8), (2560 * 16, 64)):
        rows = select.choose_program_rows(0, False, 1, heads, heads, keys, processors)
        deal = select.assign_evenly(1, heads, rows, heads // rows, keys, processors)
        assert (deal.num_splits, deal.partial_rows * latent * 4) == (splits, splits << 18)


def test_choices_are_made_once_in_a_tile_of_steps():
    """The number of splits is computed once for the lengths 1025 to 1088, which all have 17 tiles of 64 tokens."""
    select.best_num_splits.cache_clear()
    for keys in range(1025, 1089):
        select.assign_evenly(4, 4 * 128, 64, 2, keys, 132)
    assert select.best_num_splits.cache_info().misses == 1


def test_choice_of_rows():
    """A single request gets the smallest row blocks whose programs, with 4 tiles each, all run at the same time.

    If row blocks of 16 and of 32 rows would give too many programs, or if there are several requests,
    `_rows_where_alone` returns its argument `program_rows`.
    """
    for requests, rows, keys, chosen in (
        (1, 128, 8192, 32), (1, 64, 8192, 16), (1, 128, 1024, 16), (1, 128, 0, 16), (16, 128, 64, 64),
        (4, 128, 8192, 64), (1, 128, 131072, 64), (128, 128, 4096, 64), (128, 128, 64, 64), (1, 24, 131072, 32),
        (1, 24, 256, 16), (1, 3, 64, 16),
    ):  # fmt: skip
        program_rows = select.rows_of_a_program(rows)
        assert select._rows_where_alone(program_rows, requests, rows, keys, processors=132) == chosen
        blocks = -(-rows // chosen)
        assert chosen == program_rows or requests * blocks * -(-keys // 256) <= 132
    # with a schedule of a single request, its number of programs decides, and no length
    for ranges, rows, requests, chosen in (
        (33, 128, 1, 32), (34, 128, 1, 64), (33, 128, 2, 64), (66, 64, 1, 32), (67, 64, 1, 64), (1, 16, 1, 16),
        (33, 64, 1, 16), (34, 64, 1, 32), (66, 32, 1, 16), (67, 32, 1, 32), (16, 128, 1, 16), (17, 128, 1, 32),
    ):  # fmt: skip
        given = requests, rows, rows
        assert {select.choose_program_rows(ranges, False, *given, keys, 132) for keys in (64, 131072)} == {chosen}


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("processors", [78, 132])
@pytest.mark.parametrize("heads", [3, 4, 16, 20, 32, 40, 64, 126, 128])
def test_warmup_knows_schedules_of_a_request_alone(heads, processors, e4m3):
    """Warm-up launches every kernel of a single request with a schedule, of any number of programs that fills a GPU.

    The number of rows of a row block determines the variant of the decode kernel.
    """
    for query_len in (1, 2, 3, 9, 17):
        rows = heads * query_len
        programs = max(1, processors // -(-rows // select.rows_of_a_program(rows, e4m3)))

        def launched(ranges: int, rows=rows) -> set[int | tuple]:
            program_rows = select.choose_program_rows(ranges, False, 1, rows, heads, 4096, processors, e4m3)
            return {program_rows, combine._tile_of_a_schedule(ranges, rows, heads, 1)}

        ahead = {programs, *programs_of_all_variants(1, rows, processors)} - {0}
        assert set().union(*map(launched, range(1, programs + 1))) <= set().union(*map(launched, ahead))


@on_hopper
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("cut", CUTS)
def test_a_wide_table_costs_nothing(cut, heads):
    """A block table with 2544 more columns changes neither the sizes of the buffers nor any bit of the result."""
    ql, q_pe, cache, plan = make_inputs([1], [1024], heads, torch.bfloat16)
    schedule = schedule_for(cut, plan, heads)
    tails = torch.full((1, 2544), GARBAGE, dtype=torch.int32)
    wide = replace(plan, block_table=torch.cat((plan.block_table, tails), 1))
    found = decode.decode_splits(*arguments(ql, q_pe, cache, plan, schedule=schedule))
    wider = decode.decode_splits(*arguments(ql, q_pe, cache, wide, schedule=schedule))
    assert (wider.partial_out.shape, wider.partial_lse.shape) == (found.partial_out.shape, found.partial_lse.shape)
    states = [launch(ql, q_pe, cache, each, schedule=schedule) for each in (plan, wide)]
    assert_same_bits(states[0].out, states[1].out)
    assert_same_bits(states[0].lse, states[1].lse)


@on_hopper
@pytest.mark.parametrize("heads", [3, 16, 40, 64, 128])
@pytest.mark.parametrize("cut", CUTS)
def test_longer_lengths_are_read_as_the_bound(cut, heads):
    """If a length in `seq_lens` exceeds `max_seq_len`, the kernel reads only `max_seq_len` keys of that request."""
    ql, q_pe, cache, plan = make_inputs([1, 2, 1], [700, 650, 330], heads, torch.bfloat16)
    bound = 600
    lying = replace(plan, max_seq_len=bound)
    seen = plan.visible_lens.clamp(max=bound)
    honest = replace(plan, seq_lens=plan.seq_lens.clamp(max=bound), visible_lens=seen, max_seq_len=bound)
    schedule = schedule_for(cut, honest, heads)
    verdict(launch(ql, q_pe, cache, lying, schedule=schedule), ql, q_pe, cache, honest)
    for far in (2**31 - 1, 601, 64 * plan.block_table.shape[1]):
        hostile = replace(lying, seq_lens=integers(far, far, 330))
        verdict(launch(ql, q_pe, cache, hostile, schedule=schedule), ql, q_pe, cache, honest)


@on_hopper
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("cut", CUTS)
def test_a_bound_of_zero(cut, heads):
    """If `max_seq_len` is 0, the kernel reads no key, whatever `seq_lens` says: outputs are 0 and LSEs -inf."""
    ql, q_pe, cache, plan = make_inputs([1, 1], [0, 0], heads, torch.bfloat16)
    hostile = replace(plan, seq_lens=integers(5, 2**31 - 1), visible_lens=integers(5, 7))
    state = launch(ql, q_pe, cache, hostile, schedule=schedule_for(cut, plan, heads))
    assert state.out.eq(0).all() and state.lse.eq(-torch.inf).all()


@on_hopper
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_neighbours_bounds_change_no_bit(heads):
    """A batch-invariant decode gives a request the same bits for every `max_seq_len` >= the length of the request.

    The width of the block table changes no bit either. The longest request of a batch determines `max_seq_len` and the
    width.
    """
    ql, q_pe, cache, plan = make_inputs([1], [1500], heads, torch.bfloat16)
    schedule = schedule_of(plan, heads, 0, True)
    states = [launch(ql, q_pe, cache, replace(plan, max_seq_len=bound), schedule=schedule) for bound in
              (1500, 1536, 4000, 131072)]  # fmt: skip
    wide = torch.cat((plan.block_table, torch.full((1, 3000), GARBAGE, dtype=torch.int32)), 1)
    states += [launch(ql, q_pe, cache, replace(plan, max_seq_len=bound, block_table=wide), schedule=schedule) for bound
               in (1500, 4000, 131072)]  # fmt: skip
    for state in states[1:]:
        assert_same_bits(state.out, states[0].out)
        assert_same_bits(state.lse, states[0].lse)
