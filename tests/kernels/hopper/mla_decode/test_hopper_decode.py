"""Tests of the Hopper decode kernels against the reference: lengths, schedules, batch invariance, invalid values.

Gluon has no interpreter, so these tests need a Hopper GPU. A result is "within the budget" if its error against the
reference is small enough. `tests/__init__.py` lists the pitfalls by number.

A row is one (query token, head) pair. A row block is 16, 32 or 64 rows that a program processes together. A split is
consecutive tiles (64 keys each) of a request. `cut` says how requests are divided: "whole" (one split each), "split"
(several splits) or "scheduled" (by a schedule). Three values are for batch-invariant decodes: one program combines
all splits of a request ("folded"), two programs share the splits ("runs"), or there is a schedule ("folded, planned").
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import fast
import reference
from fast import backends
from fast.kernels.schedule_costs import measured_schedule_costs
from reference.interfaces import (
    AttentionState,
    DecodeMetadata,
    DecodeSchedule,
    InvariantSplitRule,
    MLAConfig,
    ScheduleCosts,
    UnsupportedConfiguration,
    most_invariant_splits,
)

from ....support import decode_inputs
from ....support.decode_inputs import (
    SCALE,
    arguments,
    captured,
    differences,
    make_inputs,
    on_device,
    rising_inputs,
    schedule_of,
    verdict,
)
from ....support.factories import GARBAGE, assert_same_bits, far_heads, integers, offsets
from ....support.triton_mode import DEVICE, ON_HOPPER

if not ON_HOPPER:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from fast.kernels.hopper.mla_decode import launch as decode
from fast.kernels.hopper.mla_decode import select

DTYPES = [torch.bfloat16, torch.float16]
BF16, FP16 = DTYPES
FEW_AND_MANY = [3, 16, 32, 64, 128]
LENS = {  # query lengths and sequence lengths; length 0 with a query token is a padding row
    "one each": ([1, 1, 1], [1, 130, 67]),
    "page edges": ([1, 1, 1, 1, 1], [63, 64, 65, 127, 128]),
    "long": ([1, 1, 1], [1025, 640, 1536]),
    "uniform": ([2, 2, 2], [97, 2, 64]),
    "ragged": ([3, 0, 1, 8], [331, 20, 0, 270]),
    "padding rows": ([1, 1], [0, 0]),
    "no requests": ([], []),
}
launch = partial(decode_inputs.launch, decode)


rows_where_alone, scored_at_once = select._rows_where_alone, select._scored_at_once


@pytest.fixture(autouse=True)
def rows_as_of_many_requests(monkeypatch):
    """Make the launcher choose kernels as for many requests, although these tests have few and short requests.

    Without this fixture, the launcher would choose row blocks of 16 or 32 rows for single requests. For batch-invariant
    decodes without a schedule, it would choose two phases, which `test_hopper_two_phases` tests.
    """
    monkeypatch.setattr(select, "_rows_where_alone", lambda program_rows, *_: program_rows)
    monkeypatch.setattr(select, "_scored_at_once", lambda *_: False)


def check_parity(*args, **options):
    inputs = make_inputs(*args, **options)
    verdict(launch(*inputs), *inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", FEW_AND_MANY)
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_lengths(lens, heads, dtype):
    check_parity(*lens, heads, dtype)


@pytest.mark.parametrize("splits", [2, 3, 16])
@pytest.mark.parametrize("heads", [4, 32, 64])
def test_splits(heads, splits, monkeypatch):
    """A decode is within the budget even if some splits have no keys: there are fewer tiles than splits (pitfall 2)."""
    monkeypatch.setattr(select, "best_num_splits", lambda *bounds: splits)
    check_parity([1, 0, 2, 1], [590, 9, 267, 0], heads, BF16)


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("heads", [20, 64, 128])
def test_blocks_of_few_rows(heads, splits, rows, monkeypatch):
    """A decode is within the budget if a row block has rows of two tokens, or only rows behind the last token."""
    monkeypatch.setattr(select, "_rows_where_alone", lambda *_: rows)
    monkeypatch.setattr(select, "best_num_splits", lambda *_: splits)
    for dtype, block_size, widths in ((BF16, 64, (512, 64)), (torch.float16, 16, (256, 32))):
        check_parity([1, 0, 3, 2], [590, 9, 267, 2], heads, dtype, widths, block_size)


@pytest.mark.parametrize("length", [40, 700, 3000, 9000])
@pytest.mark.parametrize("heads", [40, 64, 128])
def test_one_request(heads, length, monkeypatch):
    """A decode of one or two requests is within the budget, with row blocks and splits as the launcher chooses them."""
    monkeypatch.setattr(select, "_rows_where_alone", rows_where_alone)
    check_parity([1], [length], heads, BF16)
    check_parity([2, 1], [length, 70], heads, BF16)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("programs", [0, 1, 3, 40])
@pytest.mark.parametrize("heads", [4, 32, 40, 128])
def test_scheduled(heads, programs, batch_invariant):
    """A decode with a schedule is within the budget.

    The schedule splits some of the requests. Some requests have no keys or no query tokens, and some programs have no
    work. With `programs` = 0 the decode is batch-invariant and has no schedule.
    """
    if programs == 0 and not batch_invariant:
        pytest.skip("neither scheduled nor batch-invariant")
    lens, query_lens = [0, 1100, 70, 9, 0, 300, 64, 33, 0], [1, 1, 2, 3, 2, 1, 0, 1, 1]
    for dtype, overhead in zip(DTYPES, (0, 5), strict=True):
        inputs = make_inputs(query_lens, lens, heads, dtype)
        schedule = schedule_of(inputs[3], heads, programs, batch_invariant, overhead)
        verdict(launch(*inputs, schedule=schedule), *inputs)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads", [4, 32, 40, 128])
def test_short_before_long(heads, batch_invariant):
    """A decode ends and is within the budget if a program gets a short work item before a long work item.

    If the first work item is long, the producer waits until the queries of this work item have arrived. If a later work
    item is long, the producer must not wait for queries.
    """
    for lens in ([64, 1300, 64, 2100], [0, 1300, 33, 1100], [64, 0, 70, 1300]):
        inputs = make_inputs([1] * 4, lens, heads, BF16)
        schedule = schedule_of(inputs[3], heads, 1, batch_invariant)
        for _ in range(20):  # the order of the warps differs between launches
            state = launch(*inputs, schedule=schedule)
        verdict(state, *inputs)


def one_request(inputs, request, more=0):
    """Return queries, cache and plan of one request of a batch, with `more` columns of GARBAGE in the block table."""
    ql, q_pe, cache, plan = inputs
    first, last = plan.query_start_loc[request], plan.query_start_loc[request + 1]
    table = plan.block_table[request : request + 1]
    alone = replace(
        plan, block_table=torch.cat((table, table.new_full((1, more), GARBAGE)), 1),
        seq_lens=plan.seq_lens[request : request + 1], query_start_loc=integers(0, last - first),
        max_query_len=int(last - first), visible_lens=plan.visible_lens[first:last],
    )  # fmt: skip
    return ql[first:last], q_pe[first:last], cache, alone


def assert_same_rows(alone, beside, plan, request):
    """Assert that the state `alone` of one request has the same bits as its rows in the state `beside` of a batch."""
    first, last = plan.query_start_loc[request], plan.query_start_loc[request + 1]
    assert_same_bits(alone.out, beside.out[first:last])
    assert_same_bits(alone.lse, beside.lse[:, first:last])


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("heads, block_size, widths, dtype", [
    (16, 64, (512, 64), BF16), (32, 64, (512, 64), BF16), (128, 64, (512, 64), BF16), (16, 16, (256, 32), FP16),
    (40, 32, (256, 64), FP16), (64, 128, (512, 0), BF16),
], ids=str)  # fmt: skip
def test_batch_invariance(heads, block_size, widths, dtype, torn, monkeypatch):
    """A batch-invariant decode gives a request the same bits alone and in a batch (pitfall 19).

    The number of programs changes no bit either, with a schedule and without a schedule. With `torn`, some requests
    have a block number outside the cache, so that programs run the main loop with a mask.
    """
    lens, query_lens = [1085, 70, 5200, 64, 0, 2500], [1, 1, 1, 2, 1, 3]  # 1085 tokens: the last split has one tile
    inputs = make_inputs(query_lens, lens, heads, dtype, widths, block_size)
    plan = inputs[3]
    if torn:
        for request, key in ((0, 64), (2, 2560), (5, 450)):
            plan.block_table[request, key // block_size] = GARBAGE
    beside = {}
    for request in range(len(lens)):
        one = one_request(inputs, request)
        wanted = launch(*one, schedule=schedule_of(one[3], heads, 1, True))
        for programs, runs in ((3, 0), (39, 0), (132, 0), (0, 1), (0, 2), (0, 5)):
            monkeypatch.setattr(select, "best_num_programs", lambda *_, runs=runs: runs)
            alone = launch(*one, schedule=schedule_of(one[3], heads, programs, True))
            assert_same_bits(alone.out, wanted.out)
            assert_same_bits(alone.lse, wanted.lse)
            if request == 0:
                beside[programs, runs] = launch(*inputs, schedule=schedule_of(plan, heads, programs, True))
            assert_same_rows(wanted, beside[programs, runs], plan, request)


@pytest.mark.parametrize("heads, block_size, widths, dtype", [
    (16, 64, (512, 64), BF16), (32, 16, (256, 32), FP16), (64, 64, (512, 64), BF16), (128, 64, (512, 32), BF16),
], ids=str)  # fmt: skip
def test_no_bit_tells_how_wide_the_table_is(heads, block_size, widths, dtype, monkeypatch):
    """The width of the block table changes no bit of a batch-invariant decode without a schedule.

    The launcher uses this width to choose the number of programs, and whether the decode has two phases.
    """
    monkeypatch.setattr(select, "_scored_at_once", scored_at_once)
    lens, query_lens = [1085, 70, 2500, 0], [1, 1, 2, 1]
    inputs = make_inputs(query_lens, lens, heads, dtype, widths, block_size)
    invariant = schedule_of(None, heads, 0, True)
    beside = launch(*inputs, schedule=invariant)
    for request in range(len(lens)):
        for more in (0, 3, 20, 200, 2000):
            alone = launch(*one_request(inputs, request, more), schedule=invariant)
            assert_same_rows(alone, beside, inputs[3], request)


@pytest.mark.parametrize("length", [5000, 2**31 - 1])  # with 2^31 - 1 keys, positions in the last tile overflow int32
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_lengths_beyond_the_table(batch_invariant, length):
    """A length beyond the block table is clamped to the table and changes no other request."""
    for heads in (4, 64):
        ql, q_pe, cache, plan = make_inputs([1, 1, 1], [1100, 64, 70], heads, BF16)
        far = replace(plan, seq_lens=integers(1100, length, 70))
        # `fast.plan_decode` makes the schedule, because `reference.plan_decode` would loop over 2^25 tiles
        schedule = fast.plan_decode(far.seq_lens, 5, measured_schedule_costs(heads), batch_invariant=batch_invariant)
        state = launch(ql, q_pe, cache, far, schedule=schedule)
        verdict(state, ql, q_pe, cache, plan)  # the second request sees 64 keys, as in `visible_lens`


@pytest.mark.parametrize("heads, dtype", [(4, BF16), (16, FP16), (64, BF16)], ids=str)
@pytest.mark.parametrize("cut", ["whole", "split", "scheduled", "folded", "folded, planned"])
def test_wide_output(cut, heads, dtype, monkeypatch):
    """Outputs may have another dtype than the queries; a 16-bit output is the rounded float32 output.

    A float32 output is for attention states that are merged later.
    """
    monkeypatch.setattr(select, "best_num_splits", lambda *_: 3 if cut == "split" else 1)
    monkeypatch.setattr(select, "best_num_programs", lambda *_: 1)
    inputs = make_inputs([1, 2], [1300, 131], heads, dtype)
    schedule = None
    if cut not in ("whole", "split"):
        schedule = schedule_of(inputs[3], heads, 0 if cut == "folded" else 3, cut != "scheduled")
    wide = launch(*inputs, schedule=schedule, out_dtype=torch.float32)
    assert wide.out.dtype == torch.float32
    for narrow in DTYPES:
        assert not torch.equal(wide.out.to(narrow).float(), wide.out), "float32 outputs were rounded"
        assert torch.equal(wide.out.to(narrow), launch(*inputs, schedule=schedule, out_dtype=narrow).out)


@pytest.mark.parametrize("heads", [5, 32, 100])
def test_mask_is_data(heads):
    """A decode is within the budget for any `visible_lens`: a token may even see fewer keys than an earlier token."""
    ql, q_pe, cache, plan = make_inputs([4, 2, 3], [250, 170, 40], heads, BF16)
    plan = replace(plan, visible_lens=integers(250, 0, 64, 1, 0, 0, 39, 40, 3))
    verdict(launch(ql, q_pe, cache, plan), ql, q_pe, cache, plan)


@pytest.mark.parametrize("cut", ["whole", "split", "scheduled", "folded"])
@pytest.mark.parametrize("heads", FEW_AND_MANY)
@pytest.mark.parametrize("block_size", [16, 64])
def test_rising_scores(heads, cut, block_size, monkeypatch):
    """A decode is within the budget if the largest score of some rows rises from one tile to the next.

    The kernel must then rescale its sums. With "folded" and up to 16 heads, the largest score also rises from one split
    to the next.
    """
    inputs = rising_inputs(heads, BF16, block_size=block_size)
    monkeypatch.setattr(select, "best_num_splits", lambda *_: 3 if cut == "split" else 1)
    monkeypatch.setattr(select, "best_num_programs", lambda *_: 1)
    schedule = schedule_of(inputs[3], heads, 3) if cut == "scheduled" else None
    if cut == "folded":
        schedule = schedule_of(inputs[3], heads, 0, True)
    verdict(launch(*inputs, schedule=schedule), *inputs)


@pytest.mark.parametrize("scale", [0.0, -0.13, 1.0, 30.0])
@pytest.mark.parametrize("heads", [5, 64])
def test_any_scale(heads, scale):
    """A decode works with any softmax scale, also 0 or negative; rows without keys have output 0 and LSE -inf.

    If the queries and the scale both change their signs, the bits of the result stay the same.
    """
    ql, q_pe, cache, plan = make_inputs([1, 2, 1], [250, 170, 0], heads, BF16)
    plan = replace(plan, visible_lens=integers(250, 0, 170, 0))
    state = launch(ql, q_pe, cache, plan, scale=scale)
    turned = launch(-ql, -q_pe, cache, plan, scale=-scale)
    assert_same_bits(state.out, turned.out)
    assert_same_bits(state.lse, turned.lse)
    assert state.out[[1, 3]].eq(0).all() and state.lse[:, [1, 3]].eq(-torch.inf).all()
    assert state.out.isfinite().all() and state.lse[:, [0, 2]].isfinite().all()
    if scale == 0:
        assert torch.allclose(state.lse[:, 0], torch.tensor(250.0).log().expand(heads), atol=1e-5)


@pytest.mark.parametrize("cut", [InvariantSplitRule(2, 3, 6, 7), InvariantSplitRule(8, 1, 8, 1)], ids=str)
@pytest.mark.parametrize("heads", [5, 32, 64, 128])
def test_any_invariant_cut(heads, cut, monkeypatch):
    """For any `InvariantSplitRule`, a batch-invariant decode gives the same bits with and without a schedule.

    Without a schedule, the number of programs changes no bit.
    """
    inputs = make_inputs([1, 2, 0, 1], [2950, 70, 20, 700], heads, BF16)
    planned = reference.plan_decode(inputs[3].seq_lens, 3, ScheduleCosts(split_rule=cut), True)
    unplanned = DecodeSchedule(batch_invariant=True, split_rule=cut)
    states = [launch(*inputs, schedule=planned), launch(*inputs, schedule=unplanned)]
    monkeypatch.setattr(select, "_scored_at_once", lambda *_: False)
    for programs in (1, 3):
        monkeypatch.setattr(select, "best_num_programs", lambda *_, programs=programs: programs)
        states.append(launch(*inputs, schedule=unplanned))
    verdict(states[0], *inputs)
    for state in states[1:]:
        assert_same_bits(state.out, states[0].out)
        assert_same_bits(state.lse, states[0].lse)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads", [4, 64])
def test_a_length_that_was_not_planned(heads, batch_invariant):
    """If a length grows to almost 2^31 after `plan_decode`, the kernel ends, and other requests keep their bits."""
    ql, q_pe, cache, plan = make_inputs([1, 1, 1], [1100, 64, 70], heads, BF16)
    schedule = schedule_of(plan, heads, 5, batch_invariant)
    wanted = launch(ql, q_pe, cache, plan, schedule=schedule)
    for hostile in (2**31 - 1, 2147480000):
        state = launch(ql, q_pe, cache, replace(plan, seq_lens=integers(1100, hostile, 70)), schedule=schedule)
        assert_same_bits(state.out[[0, 2]], wanted.out[[0, 2]])
        assert_same_bits(state.lse[:, [0, 2]], wanted.lse[:, [0, 2]])


@pytest.mark.parametrize("cut", ["unplanned", "scheduled", "batch-invariant", "batch-invariant, planned"])
@pytest.mark.parametrize("heads", [4, 40, 64])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_values_outside_the_tensors(heads, block_size, cut):
    """The kernels mask tokens of blocks outside the cache, and clamp lengths to the block table (pitfall 8)."""
    latent, rope = 512, 64
    cache = torch.randn(9, block_size, latent + rope).to(BF16)
    table = integers(3, GARBAGE, 0, 7, -1, 9, 8, -(2**31), 2**31 - 1, -5, 9, 10).view(3, 4)
    lengths, visible = integers(2**31 - 1, 2 * block_size + 5, 3 * block_size), integers(2**31 - 1, 2**30, 2**29)
    ql, q_pe = torch.randn(3, heads, latent).to(BF16) / latent**0.5, torch.randn(3, heads, rope).to(BF16)
    plan = DecodeMetadata(table, lengths, offsets([1, 1, 1]), 1, visible, 2**31 - 1, block_size)

    def decoded(plan):
        schedule = schedule_of(None, heads, 0, True) if cut == "batch-invariant" else None
        if cut in ("scheduled", "batch-invariant, planned"):
            lens = plan.seq_lens.clamp(min=0)  # on a CPU, `plan_decode` refuses lengths below 0
            schedule = fast.plan_decode(lens, 3, measured_schedule_costs(heads), batch_invariant=cut != "scheduled")
        return launch(ql, q_pe, cache, plan, schedule=schedule)

    state = decoded(plan)
    # `same` has the same requests without the masked tokens, each request in one large block
    kept = [[(0, cache[3]), (2, cache[0]), (3, cache[7])], [(2, cache[8])], []]
    own = [torch.cat([page[: max(0, int(n) - at * block_size)] for at, page in pages] or [cache[0, :0]])
           for pages, n in zip(kept, lengths, strict=True)]  # fmt: skip
    packed = torch.zeros(3, max(map(len, own)), latent + rope, dtype=BF16)
    for block, entries in enumerate(own):
        packed[block, : len(entries)] = entries
    counts = integers(*map(len, own))
    same = DecodeMetadata(
        integers(0, 1, 2)[:, None], counts, offsets([1, 1, 1]), 1, counts, int(counts.max()), packed.shape[1]
    )
    verdict(state, ql, q_pe, packed, same)

    below = replace(plan, seq_lens=integers(-1, 0, -(2**31)), visible_lens=integers(5, -3, -(2**31)))
    state = decoded(below)
    assert state.out.eq(0).all() and state.lse.eq(-torch.inf).all()
    assert decoded(replace(plan, block_table=table[:, :0])).lse.eq(-torch.inf).all()


@pytest.mark.parametrize("heads", [3, 40, 64])
def test_nan_stays_with_its_owner(heads):
    """NaN in the query of one row changes only this row; NaN in a cache entry changes only the request that owns it."""
    ql, q_pe, cache, plan = make_inputs([2, 1, 1], [70, 130, 17], heads, BF16)
    clean = launch(ql, q_pe, cache, plan)
    spoilt = ql.clone()
    spoilt[1, 2, 5] = torch.nan
    state = launch(spoilt, q_pe, cache, plan)
    assert state.out[1, 2].isnan().all() and state.lse[2, 1].isnan()
    state.out[1, 2], state.lse[2, 1] = clean.out[1, 2], clean.lse[2, 1]
    assert_same_bits(state.out, clean.out)
    assert_same_bits(state.lse, clean.lse)

    spoilt = cache.clone()
    spoilt[plan.block_table[1, 0], 3] = torch.nan
    state = launch(ql, q_pe, spoilt, plan)
    assert state.out[2].isnan().any()
    assert_same_bits(state.out[[0, 1, 3]], clean.out[[0, 1, 3]])


@pytest.mark.parametrize("cut", ["whole", "split", "scheduled", "folded", "runs", "folded, planned"])
@pytest.mark.parametrize("heads, block_size, widths, dtype", [
    (8, 64, (512, 64), BF16), (16, 64, (512, 64), BF16), (32, 64, (512, 64), BF16), (128, 64, (512, 64), BF16),
    (16, 16, (256, 32), FP16), (64, 32, (256, 64), FP16),
], ids=str)  # fmt: skip
def test_same_bits_a_thousand_times(heads, block_size, widths, dtype, cut, monkeypatch):
    """1000 decodes of the same inputs give the same bits, for every size of row block and every way to divide requests.

    With "runs", the combine kernel adds the partial outputs of the two programs.
    """
    monkeypatch.setattr(select, "best_num_splits", lambda *_: 3 if cut == "split" else 1)
    monkeypatch.setattr(select, "best_num_programs", lambda *_: 2 if cut == "runs" else 1)
    inputs = make_inputs([1, 2, 1, 1], [900, 265, 0, 1501], heads, dtype, widths, block_size)
    schedule = None
    if cut in ("scheduled", "folded, planned"):
        lens = inputs[3].seq_lens.to(DEVICE)
        schedule = fast.plan_decode(lens, 7, measured_schedule_costs(heads), batch_invariant=cut != "scheduled")
    elif cut in ("folded", "runs"):
        schedule = schedule_of(inputs[3], heads, 0, True)
    given = arguments(*inputs, schedule=schedule)
    first = decode.mla_decode(*given)
    verdict(AttentionState(*(x.cpu() for x in first)), *inputs)
    assert differences(decode.mla_decode, given, first, 1000) == 0


@pytest.mark.parametrize("heads", [4, 40])
def test_strides(heads):
    """Strided inputs give the same bits as contiguous inputs (pitfall 18).

    The cache is one layer in a tensor of several layers. The queries and index tensors are slices of larger tensors.
    """
    ql, q_pe, cache, plan = (x.to(DEVICE) if isinstance(x, torch.Tensor) else x
                             for x in make_inputs([1, 2], [130, 64], heads, BF16))  # fmt: skip
    dense = launch(ql, q_pe, cache, plan)
    layers = torch.full((cache.shape[0], 3, *cache.shape[1:]), torch.nan, dtype=cache.dtype, device=DEVICE)
    layers[:, 1] = cache
    wide = torch.full((*cache.shape[:2], cache.shape[2] + 8), torch.nan, dtype=cache.dtype, device=DEVICE)
    wide[..., 8:] = cache
    heads_first = ql.transpose(0, 1).contiguous().transpose(0, 1)
    odd = torch.stack((q_pe, q_pe), dim=-1)[..., 1]
    table = torch.stack((plan.block_table,) * 2, dim=-1)[..., 0]
    cut = replace(plan, block_table=table, visible_lens=torch.stack((plan.visible_lens,) * 2, dim=-1)[:, 0])
    # The rows of `uneven` do not start at multiples of 16 bytes. The strides of `shifted` are multiples of 16 bytes,
    # but the address of `shifted` is not.
    uneven = torch.cat((ql, ql), dim=-1)[..., 1 : ql.shape[-1] + 1].copy_(ql)
    shifted = ql.new_empty(ql.numel() + 1)[1:].view(ql.shape).copy_(ql)
    for queries, pages in ((heads_first, layers[:, 1]), (uneven, wide[..., 8:]), (shifted, cache)):
        state = launch(queries, odd, pages, cut)
        assert_same_bits(state.out, dense.out)
        assert_same_bits(state.lse, dense.lse)


@pytest.mark.parametrize("starts", [(2**31 - 1, 8), (-(2**31), 8), (0, 2**31 - 1), (5, 2), (9, 9)], ids=str)
@pytest.mark.parametrize("heads", [4, 40, 64])
def test_query_offsets_out_of_range(heads, starts, monkeypatch):
    """The kernels clamp invalid query offsets, and write no output for tokens that belong to no request."""
    ql, q_pe, cache, plan = make_inputs([8], [40], heads, BF16)
    clean = launch(ql, q_pe, cache, plan)
    empty = torch.empty

    def nan_at_first(*shape, **options):
        made = empty(*shape, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", nan_at_first)
    state = launch(ql, q_pe, cache, replace(plan, query_start_loc=integers(*starts)))
    if starts in ((-(2**31), 8), (0, 2**31 - 1)):  # clamped to (0, 8), which are all tokens
        assert_same_bits(state.out, clean.out)
        assert_same_bits(state.lse, clean.lse)
    else:
        assert state.out.isnan().all() and state.lse.isnan().all()


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads", [4, 40, 64, 128])
def test_fewer_programs_than_requests(heads, batch_invariant, monkeypatch):
    """A decode without a schedule is within the budget if each program processes several requests.

    The outputs of a request pass through the same shared memory as the queries of the next request.
    """
    facts = decode.device_facts(DEVICE)
    monkeypatch.setattr(decode, "device_facts", lambda _: facts._replace(processors=3))
    inputs = make_inputs([1, 2, 0, 1, 3, 1, 2], [130, 70, 20, 0, 700, 64, 300], heads, BF16)
    verdict(launch(*inputs, schedule=schedule_of(None, heads, 0, batch_invariant)), *inputs)


def test_query_strides_beyond_32_bit():
    """Queries whose heads are 2^30 elements apart give the same bits as packed queries (pitfall 8)."""
    for query_lens in ([2, 1], [22, 3]):  # 6 and 66 rows give row blocks of 16 and of 64 rows
        ql, q_pe, cache, plan = make_inputs(query_lens, [40, 17], 3, BF16)
        near = launch(ql, q_pe, cache, plan)
        far = launch(far_heads(ql.to(DEVICE)), far_heads(q_pe.to(DEVICE)), cache, plan)
        assert_same_bits(far.out, near.out)
        assert_same_bits(far.lse, near.lse)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("block_size", [16, 64])
def test_offsets_beyond_32_bit(heads, block_size):
    """A decode is within the budget if its blocks lie behind element 2^31 of the cache (pitfall 8)."""
    ql, q_pe, cache, plan = make_inputs([1, 1], [130, 67], heads, BF16, block_size=block_size)
    away = 2**31 // cache[0].numel() + 5
    if torch.cuda.mem_get_info()[0] < 2 * (away + 100) * cache[0].numel() * 2:
        pytest.skip("too little memory")
    large = torch.empty(away + cache.shape[0], *cache.shape[1:], dtype=cache.dtype, device=DEVICE)
    large[away:] = cache.to(DEVICE)
    state = launch(ql, q_pe, large, replace(plan, block_table=plan.block_table.clamp(max=2**30) + away))
    verdict(state, ql, q_pe, cache, plan)


@pytest.mark.parametrize("heads, requests", [(16, 2500), (128, 620)])
@pytest.mark.parametrize("planned", [False, True])
def test_parts_beyond_32_bit(planned, heads, requests, monkeypatch):
    """A request gets the same bits if its partial outputs lie behind element 2^31 of their buffer (pitfall 8)."""
    pages = 2048  # with 2048 blocks of 64 tokens a request has the largest number of splits
    slots = requests * most_invariant_splits(pages, measured_schedule_costs(heads).split_rule)
    if torch.cuda.mem_get_info()[0] < 3 * slots * heads * 512 * 4:
        pytest.skip("too little memory")
    ql, q_pe, cache, plan = make_inputs([1], [40_000], heads, BF16)
    monkeypatch.setattr(select, "best_num_programs", lambda *_: 1)
    wanted = launch(ql, q_pe, cache, plan, schedule=schedule_of(None, heads, 0, True))
    monkeypatch.setattr(select, "best_num_programs", lambda *_: 3)
    table = torch.full((requests, pages), GARBAGE, dtype=torch.int32)
    table[-1, : plan.block_table.shape[1]] = plan.block_table[0]
    lens = torch.zeros(requests, dtype=torch.int32)
    lens[-1] = 40_000
    many = replace(
        plan, block_table=table, seq_lens=lens, visible_lens=lens, query_start_loc=offsets([1] * requests)
    )  # fmt: skip
    schedule = schedule_of(None, heads, 0, True)
    if planned:
        schedule = fast.plan_decode(lens, 7, measured_schedule_costs(heads), batch_invariant=True)
    rows = torch.zeros(requests, heads, 512).to(BF16), torch.zeros(requests, heads, 64).to(BF16)
    for row, query in zip(rows, (ql, q_pe), strict=True):
        row[-1] = query[0]
    state = launch(*rows, cache, many, schedule=schedule)
    assert slots * heads * 512 > 2**31 + 2**28
    assert_same_bits(state.out[-1:], wanted.out)
    assert_same_bits(state.lse[:, -1:], wanted.lse)
    assert state.out[:-1].eq(0).all() and state.lse[:, :-1].eq(-torch.inf).all()


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
def test_graph_replays_with_other_lengths(heads, batch_invariant):
    """A decode in a CUDA graph uses the lengths that the plan's buffers hold at the time of each replay."""
    ql, q_pe, cache, plan = make_inputs([2, 1], [300, 150], heads, BF16)
    buffers = on_device(plan)
    graph, out, lse = captured(decode, ql, q_pe, cache, buffers, schedule=schedule_of(plan, heads, 0, batch_invariant))
    for lens, visible in (((65, 0), (64, 65, 0)), ((0, 150), (0, 0, 150)), ((300, 1), (299, 300, 1))):
        other = replace(plan, seq_lens=integers(*lens), visible_lens=integers(*visible))
        buffers.seq_lens.copy_(other.seq_lens)
        buffers.visible_lens.copy_(other.visible_lens)
        graph.replay()
        verdict(AttentionState(out.cpu(), lse.cpu()), ql, q_pe, cache, other)


# Tests of which backend serves a call.


def test_what_it_does_not_cover_goes_to_triton():
    """The backend `triton` serves the calls that `hopper` cannot serve, and `explain` gives the reason.

    With `backend="hopper"`, a call that `hopper` cannot serve raises an error with all reasons.
    """
    config = MLAConfig.from_preset("deepseek-v3")
    settings = {"device": DEVICE, "dtype": BF16}
    assert "mla_decode: hopper" in backends.explain(config, **settings)
    odd = backends.explain(config, **settings, block_size=48)
    assert "mla_decode: triton, chosen" in odd and "hopper: serves block sizes (16, 32, 64, 128), got 48" in odd
    assert "mla_decode: triton, chosen by priority (" in backends.explain(config, device=DEVICE, dtype=torch.float32)

    ql, q_pe, cache, plan = make_inputs([1, 2], [100, 40], 4, torch.float32, (40, 24), block_size=48)
    inputs = ql.to(DEVICE), q_pe.to(DEVICE), cache.to(DEVICE), on_device(plan), SCALE
    assert fast.mla_decode(*inputs).out.shape == ql.shape
    with pytest.raises(UnsupportedConfiguration) as error:
        fast.mla_decode(*inputs, backend="hopper")
    assert list(error.value.reasons) == [
        "hopper: serves torch.bfloat16, torch.float16, got torch.float32",
        "hopper: serves kv_lora_rank in (256, 512), got 40",
        "hopper: serves qk_rope_head_dim in (0, 32, 64), got 24",
        "hopper: serves block sizes (16, 32, 64, 128), got 48",
    ]


def test_caches_the_copy_engine_cannot_read():
    """The backend `triton` serves a cache that is empty, or that does not consist of aligned 16-byte words."""
    ql, q_pe, cache, plan = make_inputs([1, 2], [130, 64], 4, BF16)
    wanted = launch(ql, q_pe, cache, plan)
    on = ql.to(DEVICE), q_pe.to(DEVICE)
    shifted = torch.zeros(cache.numel() + 1, dtype=BF16, device=DEVICE)[1:].view(cache.shape).copy_(cache)
    apart = torch.full((*cache.shape[:2], 577), torch.nan, dtype=BF16, device=DEVICE)[..., 1:].copy_(cache)
    for pages in (shifted, apart):
        state = fast.mla_decode(*on, pages, on_device(plan), SCALE)
        assert torch.allclose(state.out.cpu().float(), wanted.out.float(), atol=2e-2)
        with pytest.raises(UnsupportedConfiguration, match="hopper: needs a cache of whole, aligned 16-byte words"):
            fast.mla_decode(*on, pages, on_device(plan), SCALE, backend="hopper")
    empty = replace(plan, seq_lens=integers(0, 0), visible_lens=integers(0, 0, 0))
    assert fast.mla_decode(*on, cache[:0].to(DEVICE), on_device(empty), SCALE).lse.eq(-torch.inf).all()
