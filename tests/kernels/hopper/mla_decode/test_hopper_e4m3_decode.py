"""Tests of the Hopper decode over caches in the format `fp8_e4m3`, against the reference over the same stored bytes.

Gluon has no interpreter, so these tests need a Hopper GPU. All bytes of a cache that belong to no token are 0xFF, which
is NaN in e4m3. `verdict` asserts that a result is within the budget, the largest error that docs/correctness.md allows.
`tests/__init__.py` lists the pitfalls by number.

A row is one (query token, head) pair. A row block is the 16 or 32 rows that a program processes together. A split is
consecutive tiles (64 keys each) of a request.

Some tests also decode in the modes `fp8_query` and `fp8_product`, whose row blocks have 64 rows. These tests take their
inputs from `StoredDecode`, and only a few numbers of heads in these modes, because the budget is computed slowly.
`test_hopper_e4m3_modes` has the other tests of these modes.
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
    CONVERTED,
    FP8_DS_MLA,
    FP8_E4M3,
    FP8_MODES,
    AttentionState,
    InvariantSplitRule,
    MLAConfig,
    ScheduleCosts,
)

from ....support import decode_inputs
from ....support.decode_inputs import (
    FORMS,
    SCALE,
    arguments,
    differences,
    make_stored_inputs,
    on_device,
    rising_inputs,
    schedule_for,
    schedule_of,
)
from ....support.factories import GARBAGE, assert_same_bits, integers
from ....support.fp8_modes import StoredDecode
from ....support.triton_mode import DEVICE, ON_HOPPER

if not ON_HOPPER:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from fast.kernels.hopper.mla_decode import launch as decode
from fast.kernels.hopper.mla_decode import select

from .test_hopper_decode import DTYPES, LENS, assert_same_rows, one_request

BF16, FP16 = DTYPES
HEADS = [3, 16, 32, 64, 128]
WIDTHS = [(latent, rope) for latent in (512, 256) for rope in (64, 32, 0)]
make_inputs = partial(make_stored_inputs, FP8_E4M3)


def heads_and_modes(converted, in_e4m3=(5, 100)):
    """Return pairs (heads, fp8 mode): all of `converted` in the mode `converted`, `in_e4m3` in the other modes."""
    return [(n, mode) for mode in FP8_MODES for n in (converted if mode == CONVERTED else in_e4m3)]


def launch(inputs, kv_scale, **options) -> AttentionState:
    return decode_inputs.launch(decode, *inputs, cache_format=FP8_E4M3, kv_scale=kv_scale, **options)


def verdict(state, inputs, kv_scale) -> None:
    decode_inputs.verdict(state, *inputs, FP8_E4M3, kv_scale)


def check_parity(*given, form="whole", **options) -> None:
    stored = make_inputs(*given, **options)
    verdict(launch(*stored, schedule=schedule_for(form, stored[0][3], given[2])), *stored)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_lengths(lens, heads, dtype):
    check_parity(*lens, heads, dtype)


@pytest.mark.parametrize("heads, mode", heads_and_modes([1, 2, 7, 8, 17, 33, 40, 96, 127, 192], (1, 2, 127)))
def test_heads(heads, mode):
    """A decode is within the budget for any number of heads; a row block may have rows of several tokens."""
    case = StoredDecode.make(mode, [1, 2, 0, 5], [66, 333, 5, 129], heads, BF16)
    case.verdict(case.launch(decode))


@pytest.mark.parametrize("query_len, mode", heads_and_modes(range(1, 6), (4,)))
@pytest.mark.parametrize("heads", [4, 16, 64])
def test_several_queries(heads, query_len, mode):
    """In a request with several query tokens, each token sees only keys up to its own position (pitfall 12)."""
    case = StoredDecode.make(mode, [query_len] * 3, [65, 330, query_len], heads, BF16)
    case.verdict(case.launch(decode))


@pytest.mark.parametrize("mode", FP8_MODES)
def test_many_keys(mode):
    """A decode of one request with 131072 keys is within the budget, also if it is batch-invariant."""
    case = StoredDecode.make(mode, [1], [131072], 4, BF16)
    for schedule in (None, schedule_of(None, 4, 0, True)):
        case.verdict(case.launch(decode, schedule))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [3, 16, 32, 64])
def test_forms(heads, form, monkeypatch):
    """A decode is within the budget for every way to divide requests among programs, and for odd numbers of tiles."""
    monkeypatch.setattr(select, "best_num_splits", lambda *_: 3 if form == "split" else 1)
    monkeypatch.setattr(select, "best_num_programs", lambda *_: 2)
    for dtype in DTYPES:
        check_parity([1, 0, 2, 1, 1], [2950, 9, 67, 0, 700], heads, dtype, form=form)


@pytest.mark.parametrize("splits", [2, 16])
@pytest.mark.parametrize("heads", [4, 32, 64])
def test_splits(heads, splits, monkeypatch):
    """A decode is within the budget even if some splits have no keys: there are fewer tiles than splits (pitfall 2)."""
    monkeypatch.setattr(select, "best_num_splits", lambda *_: splits)
    check_parity([1, 0, 2, 1], [590, 9, 267, 0], heads, BF16)


@pytest.mark.parametrize("form", ["whole", "scheduled", "batch-invariant"])
@pytest.mark.parametrize(
    "block_size, widths",
    [(64, widths) for widths in WIDTHS]
    + [(16, (512, 64)), (32, (512, 64)), (128, (512, 64)), (16, (256, 32)), (32, (256, 0)), (128, (256, 64))],
    ids=str,
)  # fmt: skip
def test_blocks_and_widths(block_size, widths, form):
    for heads in (4, 24, 64):
        check_parity([1, 2, 1], [129, 64, 700], heads, BF16, widths, block_size, form=form)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads", [4, 32, 64])
def test_short_before_long(heads, batch_invariant):
    """A decode ends and is within the budget if a program gets a short work item before a long work item."""
    for lens in ([64, 1300, 64, 2100], [0, 1300, 33, 1100], [64, 0, 70, 1300]):
        stored = make_inputs([1] * 4, lens, heads, BF16)
        schedule = schedule_of(stored[0][3], heads, 1, batch_invariant)
        for _ in range(20):  # the order of the warps differs between launches
            state = launch(*stored, schedule=schedule)
        verdict(state, *stored)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads, mode", heads_and_modes([4, 32, 128], (4, 128)))
def test_fewer_programs_than_requests(heads, mode, batch_invariant, monkeypatch):
    """A decode without a schedule is within the budget if each program processes several requests."""
    facts = decode.device_facts(DEVICE)
    monkeypatch.setattr(decode, "device_facts", lambda _: facts._replace(processors=3))
    case = StoredDecode.make(mode, [1, 2, 0, 1, 3, 1, 2], [130, 70, 20, 0, 700, 64, 300], heads, BF16)
    case.verdict(case.launch(decode, schedule_of(None, heads, 0, batch_invariant)))


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("heads, block_size, widths, dtype", [
    (16, 64, (512, 64), BF16), (32, 64, (512, 64), BF16), (64, 64, (512, 64), BF16), (16, 16, (256, 32), FP16),
    (40, 32, (256, 64), FP16), (12, 128, (512, 0), BF16),
], ids=str)  # fmt: skip
def test_batch_invariance(heads, block_size, widths, dtype, torn, monkeypatch):
    """A batch-invariant decode gives a request the same bits alone and in a batch (pitfall 19).

    With 16 heads or fewer, row blocks have 16 rows for a request alone and 32 rows in the batch. The number of programs
    changes no bit either. With `torn`, some requests have a block number outside the cache.
    """
    lens, query_lens = [1085, 70, 5200, 64, 0, 2500], [1, 1, 1, 2, 1, 3]  # 1085 tokens: the last split has one tile
    inputs, kv_scale = make_inputs(query_lens, lens, heads, dtype, widths, block_size)
    plan = inputs[3]
    if torn:
        for request, key in ((0, 64), (2, 2560), (5, 450)):
            plan.block_table[request, key // block_size] = GARBAGE
    beside = {}
    for request in range(len(lens)):
        one = one_request(inputs, request)
        wanted = launch(one, kv_scale, schedule=schedule_of(one[3], heads, 1, True))
        for programs, runs in ((3, 0), (132, 0), (0, 1), (0, 2), (0, 5)):
            monkeypatch.setattr(select, "best_num_programs", lambda *_, runs=runs: runs)
            alone = launch(one, kv_scale, schedule=schedule_of(one[3], heads, programs, True))
            assert_same_bits(alone.out, wanted.out)
            assert_same_bits(alone.lse, wanted.lse)
            if request == 0:
                schedule = schedule_of(plan, heads, programs, True)
                beside[programs, runs] = launch(inputs, kv_scale, schedule=schedule)
            assert_same_rows(wanted, beside[programs, runs], plan, request)


@pytest.mark.parametrize("cut", [InvariantSplitRule(2, 3, 6, 7), InvariantSplitRule(8, 1, 8, 1)], ids=str)
@pytest.mark.parametrize("heads", [5, 32, 64])
def test_any_invariant_cut(heads, cut):
    """For any `InvariantSplitRule`, a batch-invariant decode is within the budget, with and without a schedule."""
    stored = make_inputs([1, 2, 0, 1], [2950, 70, 20, 700], heads, BF16)
    planned = reference.plan_decode(stored[0][3].seq_lens, 3, ScheduleCosts(split_rule=cut), True)
    unplanned = replace(planned, tile_ranges=None, split_offsets=None)
    states = [launch(*stored, schedule=schedule) for schedule in (planned, unplanned)]
    verdict(states[0], *stored)
    assert_same_bits(states[1].out, states[0].out)
    assert_same_bits(states[1].lse, states[0].lse)


@pytest.mark.parametrize("form", ["whole", "split", "scheduled", "batch-invariant"])
@pytest.mark.parametrize("heads, mode", heads_and_modes([3, 16, 32, 64], (3, 64)))
def test_rising_scores(heads, mode, form, monkeypatch):
    """A decode is within the budget if the largest score of some rows rises from one tile to the next.

    Each consumer attends every second tile, so both must rescale their sums, and the merge must weight them.
    """
    ql, q_pe, cache, plan = rising_inputs(heads, BF16)
    kv_scale, entries = torch.tensor(2.0), cache.flatten(0, 1)
    codes = reference.quantize_entries(entries[:, :512], entries[:, 512:], FP8_E4M3, kv_scale).view(cache.shape)
    case = StoredDecode.of(mode, ql, q_pe, codes, plan, kv_scale)
    monkeypatch.setattr(select, "best_num_splits", lambda *_: 3 if form == "split" else 1)
    monkeypatch.setattr(select, "best_num_programs", lambda *_: 1)
    case.verdict(case.launch(decode, schedule_for(form, plan, heads)))


@pytest.mark.parametrize("heads, mode", heads_and_modes([5, 32, 100]))
def test_mask_is_data(heads, mode):
    """A decode is within the budget for any `visible_lens`: a token may even see fewer keys than an earlier token."""
    case = StoredDecode.make(mode, [4, 2, 3], [250, 170, 40], heads, BF16)
    case = replace(case, plan=replace(case.plan, visible_lens=integers(250, 0, 64, 1, 0, 0, 39, 40, 3)))
    case.verdict(case.launch(decode))


@pytest.mark.parametrize("scale", [0.0, -0.13, 1.0])
@pytest.mark.parametrize("heads, mode", heads_and_modes([5, 64], (5, 64)))
def test_any_scale(heads, mode, scale):
    """A decode works with any softmax scale, also 0 or negative; rows without keys have output 0 and LSE -inf.

    If the queries and the scale both change their signs, the bits of the result stay the same.
    """
    case = StoredDecode.make(mode, [1, 2, 1], [250, 170, 0], heads, BF16)
    case = replace(case, plan=replace(case.plan, visible_lens=integers(250, 0, 170, 0)))
    state = case.launch(decode, scale=scale)
    turned = replace(case, queries=case.negated).launch(decode, scale=-scale)
    assert_same_bits(state.out, turned.out)
    assert_same_bits(state.lse, turned.lse)
    assert state.out[[1, 3]].eq(0).all() and state.lse[:, [1, 3]].eq(-torch.inf).all()
    assert state.out.isfinite().all() and state.lse[:, [0, 2]].isfinite().all()
    if scale == 0:
        assert torch.allclose(state.lse[:, 0], torch.tensor(250.0).log().expand(heads), atol=1e-5)


@pytest.mark.parametrize("mode", FP8_MODES)
def test_scales_whose_product_underflows(mode):
    """With a softmax scale of 0 and very small scales of the cache and of the queries, all keys have equal weights.

    The product of the three scales is 0 in float32. A row without keys still has output 0 and LSE -inf, because a
    masked score is not multiplied by 0.
    """
    case = StoredDecode.make(mode, [1, 2], [250, 70], 20, BF16)
    small = torch.tensor(1e-12)
    case = replace(case, kv_scale=small, q_scale=None if mode == CONVERTED else torch.full((20,), 1e-12))
    case = replace(case, plan=replace(case.plan, visible_lens=integers(250, 0, 70)))
    state = case.launch(decode, scale=0.0)
    for token, keys in ((0, 250.0), (2, 70.0)):
        assert torch.allclose(state.lse[:, token], torch.tensor(keys).log().expand(20), atol=1e-5)
    assert state.out.isfinite().all() and state.out[1].eq(0).all() and state.lse[:, 1].eq(-torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [16, 40])
def test_large_queries(heads, dtype):
    """A decode is within the budget for queries up to 1e5 (6e4 in float16), which the kernel scales row by row."""
    (ql, q_pe, cache, plan), kv_scale = make_inputs([1, 2], [70, 130], heads, dtype)
    size = 6e4 if dtype == FP16 else 1e5
    ql, q_pe = ((x.float() * (size / x.float().abs().max())).to(dtype) for x in (ql, q_pe))
    ql[0] /= 2**20  # the rows of a block have very different sizes
    inputs = (ql, q_pe, cache, plan)
    verdict(launch(inputs, kv_scale), inputs, kv_scale)


@pytest.mark.parametrize("form", ["whole", "split", "scheduled", "batch-invariant"])
@pytest.mark.parametrize("heads, dtype", [(4, BF16), (16, FP16), (64, BF16)], ids=str)
def test_wide_output(heads, dtype, form, monkeypatch):
    """Outputs may have another dtype than the queries; a 16-bit output is the rounded float32 output."""
    monkeypatch.setattr(select, "best_num_splits", lambda *_: 3 if form == "split" else 1)
    stored = make_inputs([1, 2], [1300, 131], heads, dtype)
    schedule = schedule_for(form, stored[0][3], heads)
    wide = launch(*stored, schedule=schedule, out_dtype=torch.float32)
    assert wide.out.dtype == torch.float32
    for narrow in DTYPES:
        assert not torch.equal(wide.out.to(narrow).float(), wide.out), "float32 outputs were rounded"
        assert torch.equal(wide.out.to(narrow), launch(*stored, schedule=schedule, out_dtype=narrow).out)


@pytest.mark.parametrize("heads", [3, 40])
def test_nan_stays_with_its_owner(heads):
    """NaN in the query of one row changes only this row; NaN in a cache entry changes only the request that owns it."""
    (ql, q_pe, cache, plan), kv_scale = make_inputs([2, 1, 1], [70, 130, 17], heads, BF16)
    clean = launch((ql, q_pe, cache, plan), kv_scale)
    spoilt = ql.clone()
    spoilt[1, 2, 5] = torch.nan
    state = launch((spoilt, q_pe, cache, plan), kv_scale)
    assert state.out[1, 2].isnan().all() and state.lse[2, 1].isnan()
    state.out[1, 2], state.lse[2, 1] = clean.out[1, 2], clean.lse[2, 1]
    assert_same_bits(state.out, clean.out)
    codes = cache.view(torch.uint8).clone()
    codes[plan.block_table[1, 0], 3] = FP8_E4M3.poison
    state = launch((ql, q_pe, codes.view(cache.dtype), plan), kv_scale)
    assert state.out[2].isnan().any()
    assert_same_bits(state.out[[0, 1, 3]], clean.out[[0, 1, 3]])


@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("heads", [4, 64])
def test_values_outside_the_tensors(heads, block_size):
    """The kernel masks the tokens of blocks outside the cache, and clamps lengths to the block table (pitfall 8)."""
    lens = [3 * block_size - 2, block_size]
    (ql, q_pe, cache, plan), kv_scale = make_inputs([1, 1], lens, heads, BF16, block_size=block_size)
    table = plan.block_table[:, :3].clone()
    table[0, 1], table[1, 1:] = GARBAGE, -1
    far = replace(plan, block_table=table, seq_lens=integers(2**31 - 1, block_size))
    far = replace(far, visible_lens=integers(lens[0], block_size))
    state = launch((ql, q_pe, cache, far), kv_scale)
    assert state.out.isfinite().all() and state.lse.isfinite().all()
    own = integers(2 * block_size - 2, block_size)
    same = (ql, q_pe, cache, replace(plan, block_table=table[:, [0, 2, 1]], seq_lens=own, visible_lens=own))
    verdict(state, same, kv_scale)


@pytest.mark.parametrize("form", ["whole", "split", "scheduled", "batch-invariant", "batch-invariant, planned"])
@pytest.mark.parametrize("heads, block_size, widths, dtype", [
    (8, 64, (512, 64), BF16), (16, 64, (512, 64), BF16), (32, 64, (512, 64), BF16), (64, 64, (512, 64), BF16),
    (16, 16, (256, 32), FP16),
], ids=str)  # fmt: skip
def test_same_bits_many_times(heads, block_size, widths, dtype, form, monkeypatch):
    """500 decodes of the same inputs give the same bits."""
    monkeypatch.setattr(select, "best_num_splits", lambda *_: 3 if form == "split" else 1)
    monkeypatch.setattr(select, "best_num_programs", lambda *_: 2)
    inputs, kv_scale = make_inputs([1, 2, 1, 1], [900, 265, 0, 1501], heads, dtype, widths, block_size)
    schedule = schedule_for(form, inputs[3], heads)
    given = arguments(*inputs, schedule=schedule, cache_format=FP8_E4M3, kv_scale=kv_scale)
    first = decode.mla_decode(*given)
    verdict(AttentionState(*(x.cpu() for x in first)), inputs, kv_scale)
    assert differences(decode.mla_decode, given, first, 500) == 0


@pytest.mark.parametrize("heads", [4, 40])
def test_strides(heads):
    """A cache that is one layer of a larger tensor, or has gaps between entries, gives the same bits (pitfall 18)."""
    (ql, q_pe, cache, plan), kv_scale = make_inputs([1, 2], [130, 64], heads, BF16)
    dense, codes = launch((ql, q_pe, cache, plan), kv_scale), cache.view(torch.uint8).to(DEVICE)
    layers = torch.full((codes.shape[0], 3, *codes.shape[1:]), FP8_E4M3.poison, dtype=torch.uint8, device=DEVICE)
    layers[:, 1] = codes
    wide = torch.full((*codes.shape[:2], codes.shape[2] + 16), FP8_E4M3.poison, dtype=torch.uint8, device=DEVICE)
    wide[..., 16:] = codes
    for pages in (layers[:, 1], wide[..., 16:]):
        state = launch((ql.transpose(0, 1).contiguous().transpose(0, 1), q_pe, pages.view(cache.dtype), plan), kv_scale)
        assert_same_bits(state.out, dense.out)
        assert_same_bits(state.lse, dense.lse)


@pytest.mark.parametrize("heads, mode", heads_and_modes([16, 64], (64,)))
def test_offsets_beyond_32_bit(heads, mode):
    """A decode is within the budget if its blocks lie behind byte 2^32 of the cache (pitfall 8)."""
    case = StoredDecode.make(mode, [1, 1], [130, 67], heads, BF16)
    cache, plan = case.cache, case.plan
    away = 2**32 // cache[0].numel() + 5
    if torch.cuda.mem_get_info()[0] < 2 * (away + 100) * cache[0].numel():
        pytest.skip("too little memory")
    large = torch.empty(away + cache.shape[0], *cache.shape[1:], dtype=torch.uint8, device=DEVICE)
    large[away:] = cache.view(torch.uint8).to(DEVICE)
    moved = replace(plan, block_table=plan.block_table.clamp(max=2**30) + away)
    case.verdict(replace(case, cache=large.view(cache.dtype), plan=moved).launch(decode))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads", [16, 32, 128])
def test_graph_replays_with_other_lengths_and_scale(heads, batch_invariant):
    """A replay of a captured decode reads the lengths and the scale that were written after the capture."""
    (ql, q_pe, cache, plan), kv_scale = make_inputs([2, 1], [300, 150], heads, BF16)
    buffers, scale = on_device(plan), kv_scale.to(DEVICE)
    schedule = schedule_of(plan, heads, 0, batch_invariant)
    given = arguments(ql, q_pe, cache, buffers, schedule=schedule, cache_format=FP8_E4M3, kv_scale=scale)
    decode.mla_decode(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = decode.mla_decode(*given)
    for lens, visible in (((65, 0), (64, 65, 0)), ((0, 150), (0, 0, 150)), ((300, 1), (299, 300, 1))):
        other = replace(plan, seq_lens=integers(*lens), visible_lens=integers(*visible))
        buffers.seq_lens.copy_(other.seq_lens)
        buffers.visible_lens.copy_(other.visible_lens)
        scale.mul_(2)
        kv_scale = kv_scale * 2
        graph.replay()
        verdict(AttentionState(out.cpu(), lse.cpu()), (ql, q_pe, cache, other), kv_scale)


def test_who_serves_a_call():
    """`hopper` is chosen over `fp8_e4m3`, and `triton` over `fp8_ds_mla`."""
    config, settings = MLAConfig.from_preset("deepseek-v3"), {"device": DEVICE, "dtype": BF16}
    for op in backends.own.DECODES:
        served = backends.explain(config, **settings, cache_format=FP8_E4M3)
        assert f"\n{op}: hopper, chosen by priority" in f"\n{served}"
        other = backends.explain(config, **settings, cache_format=FP8_DS_MLA)
        assert f"\n{op}: triton, chosen by priority (" in f"\n{other}"
    (ql, q_pe, cache, plan), kv_scale = make_inputs([1, 2], [700, 64], 16, BF16)
    given = ql.to(DEVICE), q_pe.to(DEVICE), cache.to(DEVICE), on_device(plan), SCALE
    stored = dict(cache_format=FP8_E4M3, kv_scale=kv_scale.to(DEVICE))
    by_hopper, by_triton = (fast.mla_decode(*given, **stored, backend=name) for name in ("hopper", "triton"))
    chosen = fast.mla_decode(*given, **stored)
    assert_same_bits(chosen.out, by_hopper.out)
    assert not torch.equal(by_triton.out, by_hopper.out), "the two kernels round differently"
    settings |= {"block_size": 64, "cache_format": FP8_E4M3}
    programs = fast.decode_programs(config, **settings)
    assert programs == decode.device_facts(DEVICE).processors // 4  # 128 rows are four row blocks of 32 rows
    assert fast.schedule_costs(config, **settings) == measured_schedule_costs(config.num_heads, True)
