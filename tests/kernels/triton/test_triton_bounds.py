"""Tests that the sizes of a Triton decode follow from `max_seq_len` and not from the width of the block table.

The sizes are the number of splits of a request and the lengths of the buffers. The tests run four kinds of decodes:

- `evenly`: without a schedule; every request has the same number of splits
- `scheduled`: with a schedule, not batch-invariant
- `batch-invariant`: batch-invariant, and the schedule has no work items
- `batch-invariant, planned`: batch-invariant, and the schedule has work items

In a batch-invariant decode, a request has the same bits in every batch. Without a GPU, one test runs this file again in
Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ...support.decode_inputs import arguments, schedule_of, verdict
from ...support.factories import GARBAGE, assert_same_bits, integers
from ...support.triton_decode_inputs import DTYPES, launch, make_inputs
from ...support.triton_mode import INTERPRETED, ON_GPU, run_in_interpreter, runs, starts_interpreter

if ON_GPU or INTERPRETED:
    from fast.kernels.triton import decode

KEYS = 1024 if ON_GPU else 200
CUTS = ["evenly", "scheduled", "batch-invariant", "batch-invariant, planned"]


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


def schedule_for(cut, plan, heads):
    if cut == "evenly":
        return None
    return schedule_of(plan, heads, 0 if cut == "batch-invariant" else 3, cut != "scheduled")


def widened(plan, columns):
    """Return the plan with `columns` more columns in the block table; the added entries belong to no request."""
    tails = torch.full((plan.block_table.shape[0], columns), GARBAGE, dtype=torch.int32)
    return replace(plan, block_table=torch.cat((plan.block_table, tails), 1))


@runs
@pytest.mark.parametrize("cut", CUTS)
def test_a_wide_table_costs_nothing(cut):
    """A much wider block table changes neither the sizes of the buffers nor any bit of the output."""
    ql, q_pe, cache, plan = make_inputs([1], [KEYS], 16)
    schedule = schedule_for(cut, plan, 16)
    wide = widened(plan, 2544)
    assert plan.max_seq_len == wide.max_seq_len == KEYS
    found = decode.decode_splits(*arguments(ql, q_pe, cache, plan, schedule=schedule))
    wider = decode.decode_splits(*arguments(ql, q_pe, cache, wide, schedule=schedule))
    assert (wider.partial_out.shape, wider.partial_lse.shape) == (found.partial_out.shape, found.partial_lse.shape)
    assert_same_bits(
        launch(ql, q_pe, cache, wide, schedule=schedule).out, launch(ql, q_pe, cache, plan, schedule=schedule).out
    )


@runs
def test_one_short_request_is_cut_into_few_splits():
    """A request of 1024 keys gets 16 splits, and a request of 40960 keys gets 66 splits.

    Each request is alone in its batch and has 128 rows. The GPU has 132 multiprocessors.
    """
    found = [decode._num_splits(programs=2, rows=128, keys=keys, resident=132) for keys in (1024, 40960)]
    assert found == [16, 66]


@runs
@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else DTYPES[:1], ids=str)
@pytest.mark.parametrize("cut", CUTS)
def test_longer_lengths_are_read_as_the_bound(cut, dtype):
    """If a length in `seq_lens` exceeds `max_seq_len`, the kernel reads `max_seq_len` keys.

    The width of the block table does not matter.
    """
    ql, q_pe, cache, plan = make_inputs([1, 2, 1], [200, 150, 130], 3, dtype)
    bound = 140
    lying = replace(plan, max_seq_len=bound)
    seen = plan.visible_lens.clamp(max=bound)
    honest = replace(plan, seq_lens=plan.seq_lens.clamp(max=bound), visible_lens=seen, max_seq_len=bound)
    schedule = schedule_for(cut, honest, 3)
    state = launch(ql, q_pe, cache, lying, schedule=schedule)
    verdict(state, ql, q_pe, cache, honest)
    for far in (2**31 - 1, 141, 64 * plan.block_table.shape[1]) if ON_GPU else (2**31 - 1,):
        hostile = replace(lying, seq_lens=integers(far, far, 130))
        verdict(launch(ql, q_pe, cache, hostile, schedule=schedule), ql, q_pe, cache, honest)


@runs
@pytest.mark.parametrize("cut", CUTS)
def test_a_bound_of_zero(cut):
    """If `max_seq_len` is 0, the kernel reads no key, whatever `seq_lens` says: outputs are 0 and LSEs are -inf."""
    ql, q_pe, cache, plan = make_inputs([1, 1], [0, 0], 3)
    assert plan.max_seq_len == 0
    hostile = replace(plan, seq_lens=integers(5, 2**31 - 1), visible_lens=integers(5, 7))
    state = launch(ql, q_pe, cache, hostile, schedule=schedule_for(cut, plan, 3))
    assert state.out.eq(0).all() and state.lse.eq(-torch.inf).all()
