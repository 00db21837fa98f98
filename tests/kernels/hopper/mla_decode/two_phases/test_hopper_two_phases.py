"""Tests that a batch-invariant Hopper decode in two phases gives the same bits as the kernel `row_blocks_64`.

In two phases, programs first compute the scores of all tiles (64 keys each), and then the columns of all outputs. A
*score block* is the scores of one pair of tiles for up to 64 rows; a row is one (query token, head) pair. A *column
block* is some columns of an output. The kernel `row_blocks_64` has one phase: it computes the scores of a pair of
tiles, adds the pair to the outputs, and continues with the next pair. The launcher chooses one of the two kernels for a
batch-invariant decode, and the choice must not change any bit. `verdict` asserts that a result is within the budget,
the largest error that docs/correctness.md allows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from reference.interfaces import AttentionState

from .....support import decode_inputs
from .....support.decode_inputs import (
    arguments,
    captured,
    differences,
    make_inputs,
    on_device,
    rising_inputs,
    schedule_of,
    verdict,
)
from .....support.factories import GARBAGE, assert_same_bits, integers, offsets
from .....support.triton_mode import ON_HOPPER

if not ON_HOPPER or torch.cuda.get_device_properties(0).multi_processor_count < 132:
    pytest.skip("needs a Hopper GPU of 132 multiprocessors", allow_module_level=True)

from fast.kernels.hopper.mla_decode import launch as decode
from fast.kernels.hopper.mla_decode import select

BF16, FP16 = torch.bfloat16, torch.float16
UNPLANNED = schedule_of(None, 64, 0, True)  # batch-invariant, without work items; for any number of heads above 32
launch = partial(decode_inputs.launch, decode, schedule=UNPLANNED)
taken = []


@pytest.fixture(autouse=True)
def noted(monkeypatch):
    """Record every launch of a decode in two phases in the list `taken`."""
    launcher = decode.launch_two_phases
    taken.clear()
    monkeypatch.setattr(decode, "launch_two_phases", lambda *args: taken.append(args) or launcher(*args))


def in_one_phase(*inputs, **options) -> AttentionState:
    """Decode with the kernel `row_blocks_64`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "_scored_at_once", lambda *_: False)
        return launch(*inputs, **options)


def check_same_bits(*inputs, **options) -> None:
    state = launch(*inputs, **options)
    assert taken, "not in two phases"
    taken.clear()
    wanted = in_one_phase(*inputs, **options)
    assert not taken
    assert_same_bits(state.out, wanted.out)
    assert_same_bits(state.lse, wanted.lse)


@pytest.mark.parametrize("lens", [
    ([1], [8320]),  # 65 pairs of tiles: with 128 heads 130 score blocks; at most 132 fit, one on each multiprocessor
    ([1, 1, 1, 1, 1, 1], [1, 63, 65, 127, 129, 1025]), ([1, 1, 1], [1024, 1085, 1049]), ([2, 1], [1500, 1170]),
    ([3, 0, 1], [331, 0, 530]), ([1, 1], [0, 0]), ([8], [700]),
    ([1] * 22, list(range(0, 253, 12))),  # each program has several column blocks, some of them without keys
], ids=str)  # fmt: skip
@pytest.mark.parametrize("heads, dtype", [(128, BF16), (100, FP16), (40, BF16), (64, BF16)], ids=str)
def test_bits_of_one_phase(heads, dtype, lens):
    """A decode in two phases gives the same bits as a decode in one phase, and is within the budget."""
    *inputs, plan = make_inputs(*lens, heads, dtype)
    if plan.max_seq_len == 0:  # only padding rows: set `max_seq_len` as an engine does, to one pair of tiles
        plan = replace(plan, max_seq_len=128)
    check_same_bits(*inputs, plan)
    verdict(launch(*inputs, plan), *inputs, plan)


@pytest.mark.parametrize("lens", [[16768], [1085] * 13], ids=["one split", "several shares"])
def test_more_pairs_than_wait_in_shared_memory(lens):
    """Both kernels give the same bits if a program needs more pairs of tiles than the 8 that fit in its shared memory.

    In one case a split has 16 pairs. In the other case a program computes two column blocks of 8 pairs each.
    """
    inputs = make_inputs([1] * len(lens), lens, 64, BF16)
    check_same_bits(*inputs)


@pytest.mark.parametrize("block_size, widths, dtype", [
    (16, (512, 64), BF16), (32, (512, 32), FP16), (128, (512, 0), BF16),
])  # fmt: skip
def test_pages_and_widths(block_size, widths, dtype):
    inputs = make_inputs([1, 2, 1], [1300, 70, 555], 48, dtype, widths, block_size)
    check_same_bits(*inputs)
    verdict(launch(*inputs), *inputs)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("heads", [64, 128])
def test_rising_scores(heads, block_size):
    """Both kernels give the same bits if the largest score rises, in the first or in the second tile of a pair.

    The programs that share a split must then all rescale their sums by the same largest scores.
    """
    inputs = rising_inputs(heads, BF16, block_size=block_size)
    check_same_bits(*inputs)
    verdict(launch(*inputs), *inputs)


@pytest.mark.parametrize("heads", [64, 128])
def test_pages_outside_the_cache(heads):
    """Both kernels skip the tokens of blocks outside the cache and give the same bits, even if they skip a split."""
    ql, q_pe, cache, plan = make_inputs([1, 1, 1], [1600, 1085, 1500], heads, BF16)
    table = plan.block_table.clone()
    table[0, 3], table[1, 16], table[2, :17] = GARBAGE, -1, 2**31 - 1
    check_same_bits(ql, q_pe, cache, replace(plan, block_table=table))


def test_hostile_lists():
    """Invalid lengths and query offsets do not hang the kernel.

    With lengths below 0 or beyond the block table, both kernels give the same bits. With query offsets out of range,
    the test only checks that the kernel ends.
    """
    ql, q_pe, cache, plan = make_inputs([1, 1, 1], [1100, 640, 70], 64, BF16)
    for lens in ((2**31 - 1, 640, 70), (-5, 2147480000, 0)):
        check_same_bits(ql, q_pe, cache, replace(plan, seq_lens=integers(*lens)))
    # The kernel reads the flags of 32 pairs of tiles at a time; a flag says that the scores of a pair are written.
    # With these lengths, a split has more than 32 pairs.
    long = make_inputs([1], [8000], 64, BF16)
    for length in (2**31 - 1, 300_000, 262_145):
        check_same_bits(*long[:3], replace(long[3], seq_lens=integers(length), visible_lens=integers(length)))
    for starts in ((2**31 - 1, 8), (-(2**31), 8), (0, 2**31 - 1), (2, 1)):
        query_start_loc = offsets([1, 1, 1])
        query_start_loc[1:3] = integers(*starts)
        launch(ql, q_pe, cache, replace(plan, query_start_loc=query_start_loc))
    assert len(taken) == 4


@pytest.mark.parametrize("scale", [0.0, -0.13, 30.0])
def test_any_scale(scale):
    ql, q_pe, cache, plan = make_inputs([1, 2, 1], [250, 1170, 0], 64, BF16)
    check_same_bits(ql, q_pe, cache, replace(plan, visible_lens=integers(250, 0, 170, 0)), scale=scale)


def test_wide_output():
    check_same_bits(*make_inputs([1, 2], [2100, 70], 64, BF16), out_dtype=torch.float32)


def test_nan_stays_with_its_owner():
    """NaN in the query of one head changes only the row of this head, and the kernel ends.

    Programs wait while a score in global memory has the bits of the sentinel for "not written yet", which are the bits
    of a NaN. The kernel must therefore never store this NaN.
    """
    ql, q_pe, cache, plan = make_inputs([1, 1], [1300, 1170], 64, BF16)
    clean = launch(ql, q_pe, cache, plan)
    assert taken
    for value in (torch.nan, -torch.nan):
        spoilt = ql.clone()
        spoilt[0, 2] = value
        spoilt.view(torch.int16)[0, 5] = -1  # a NaN with all bits set
        state = launch(spoilt, q_pe, cache, plan)
        assert state.out[0, [2, 5]].isnan().all()
        state.out[0, [2, 5]], state.lse[[2, 5], 0] = clean.out[0, [2, 5]], clean.lse[[2, 5], 0]
        assert_same_bits(state.out, clean.out)
        assert_same_bits(state.lse, clean.lse)


@pytest.mark.parametrize("heads, lens", [(128, [8192]), (64, [900, 265, 0, 1501])])
def test_same_bits_a_thousand_times(heads, lens):
    """1000 decodes of the same inputs give the same bits, although the programs run in different orders."""
    inputs = make_inputs([1] * len(lens), lens, heads, BF16)
    given = arguments(*inputs, schedule=UNPLANNED)
    first = decode.mla_decode(*given)
    assert taken
    assert_same_bits(first[0].cpu(), in_one_phase(*inputs).out)
    assert differences(decode.mla_decode, given, first, 1000) == 0


def test_graph_replays_with_other_lengths():
    """A decode in a CUDA graph uses the lengths that the plan's buffers hold at the time of each replay."""
    ql, q_pe, cache, plan = make_inputs([2, 1], [1300, 1150], 128, BF16)
    buffers = on_device(plan)
    graph, out, lse = captured(decode, ql, q_pe, cache, buffers, schedule=UNPLANNED)
    assert len(taken) == 2
    for lens, visible in (((65, 0), (64, 65, 0)), ((0, 1150), (0, 0, 1150)), ((1300, 1), (1299, 1300, 1))):
        other = replace(plan, seq_lens=integers(*lens), visible_lens=integers(*visible))
        buffers.seq_lens.copy_(other.seq_lens)
        buffers.visible_lens.copy_(other.visible_lens)
        for _ in range(3):
            graph.replay()
        wanted = in_one_phase(ql, q_pe, cache, other)
        assert_same_bits(out.cpu(), wanted.out)
        assert_same_bits(lse.cpu(), wanted.lse)
