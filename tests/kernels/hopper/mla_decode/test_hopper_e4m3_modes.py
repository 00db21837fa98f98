"""Tests of the Hopper decode with queries in e4m3 over `fp8_e4m3`: the modes `fp8_query` and `fp8_product`.

Gluon has no interpreter, so these tests need a Hopper GPU. The errors are measured against the reference in float64,
which reads the same stored numbers. The budget follows from `rounded_decode`, which rounds where the kernel rounds.
`rounded_decode` is slow, so most requests are short. All bytes of a cache that belong to no token are 0xFF, which is
NaN in e4m3. `test_hopper_e4m3_decode` has the tests of the mode `converted`, and some tests of all modes; it explains
rows, splits and budgets.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast import backends
from fast.kernels.schedule_costs import measured_schedule_costs
from reference.interfaces import COMPUTE_FORMAT, E4M3, FP8_E4M3, FP8_MODES, AttentionState, MLAConfig

from ....support import decode_inputs
from ....support.decode_inputs import SCALE, differences, on_device, schedule_for, schedule_of
from ....support.factories import GARBAGE, assert_same_bits, integers
from ....support.fp8_modes import check, rounded_decode
from ....support.triton_mode import DEVICE, ON_HOPPER

if not ON_HOPPER:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from fast.kernels.hopper.common.own_length import TILE
from fast.kernels.hopper.mla_decode import launch as decode
from fast.kernels.hopper.mla_decode import select

from ...triton import test_triton_fp8_modes as portable

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
PRODUCT, QUERY = "fp8_product", "fp8_query"
WIDTHS = (512, 64)
modes = pytest.mark.parametrize("mode", FP8_MODES[1:])
RAGGED = ([1, 0, 2, 1, 1], [450, 9, 67, 0, 200])
LONGER = ([1, 0, 2, 1, 1], [1950, 9, 67, 0, 300])  # the first request has several splits in a batch-invariant decode
CASES = {  # mode, heads, form (FORMS), block size, widths, (query lens, seq lens), dtype of the output
    "one token": (PRODUCT, 64, "whole", 64, WIDTHS, ([1] * 3, [300, 65, 129]), BF16),
    "page edges": (PRODUCT, 64, "whole", 64, WIDTHS, ([1] * 6, [0, 1, 63, 64, 65, 129]), F32),
    "query tokens": (PRODUCT, 64, "whole", 64, WIDTHS, ([3, 1, 2], [3, 200, 130]), BF16),
    "ragged": (PRODUCT, 128, "whole", 64, WIDTHS, RAGGED, F32),
    "ragged, queries": (QUERY, 128, "whole", 64, WIDTHS, RAGGED, F32),
    "split": (PRODUCT, 64, "split", 16, WIDTHS, RAGGED, F32),
    "split, queries": (QUERY, 64, "split", 128, WIDTHS, RAGGED, BF16),
    "scheduled": (PRODUCT, 128, "scheduled", 128, WIDTHS, RAGGED, BF16),
    "invariant": (PRODUCT, 33, "batch-invariant", 64, WIDTHS, LONGER, F32),
    "invariant, planned": (PRODUCT, 40, "batch-invariant, planned", 64, WIDTHS, LONGER, BF16),
    "invariant, planned, queries": (QUERY, 40, "batch-invariant, planned", 16, WIDTHS, LONGER, BF16),
    "few heads": (PRODUCT, 3, "whole", 32, WIDTHS, ([2, 1, 9], [330, 65, 129]), F32),
    "16 heads, queries": (QUERY, 16, "scheduled", 64, WIDTHS, ([2, 1, 1], [330, 65, 129]), FP16),
    "40 heads": (PRODUCT, 40, "whole", 32, (256, 32), ([2, 1, 1], [330, 65, 129]), F32),
    "no rope": (PRODUCT, 64, "whole", 64, (512, 0), ([2, 1, 1], [330, 65, 129]), BF16),
    "no rope, queries": (QUERY, 48, "whole", 16, (256, 0), ([2, 1, 1], [330, 65, 129]), FP16),
    "narrow rope": (QUERY, 24, "whole", 128, (512, 32), ([2, 1, 1], [330, 65, 129]), F32),
    "narrow latents": (PRODUCT, 100, "split", 64, (256, 64), ([2, 1, 1], [330, 65, 129]), BF16),
}


def make_case(mode, lens, heads, widths=WIDTHS, block_size=64, scale=None):
    """Return queries in e4m3, a cache, a plan, and the options of a decode in `mode`."""
    queries, cache, plan, options = portable.make_case(FP8_E4M3, lens, heads, widths, block_size, scale)
    return queries, cache, plan, options | {"fp8_mode": mode}


def given_of(queries, cache, plan, out_dtype=F32, schedule=None, scale=SCALE, **options):
    """Return the positional and the keyword arguments of the launcher, with tensors on DEVICE."""
    arguments = decode_inputs.arguments(
        *queries, cache, plan, scale, schedule, out_dtype, FP8_E4M3, options["kv_scale"]
    )
    return arguments, {"fp8_mode": options["fp8_mode"], "q_scale": options["q_scale"].to(DEVICE)}


def launch(queries, cache, plan, out=None, **options) -> AttentionState:
    """Launch the decode kernel and return the attention state on the CPU."""
    arguments, in_mode = given_of(queries, cache, plan, **options)
    return AttentionState(*(x.cpu() for x in decode.mla_decode(*arguments, out, **in_mode)))


def verdict(state, queries, cache, plan, scale=SCALE, **options) -> None:
    """Assert that a state is within the budget of its mode."""
    names = ("cache_format", "kv_scale", "fp8_mode", "q_scale")
    keys = TILE.value if options["fp8_mode"] == PRODUCT else None
    given = (options[name] for name in names)
    low = rounded_decode(queries, cache, plan, *given, state.out.dtype, True, scale, keys)
    check(state, low, queries, cache, plan, scale, **options)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parity(case, monkeypatch):
    """A decode is within its budget, and gives the same bits in 30 launches."""
    mode, heads, form, block_size, widths, lens, out_dtype = case
    monkeypatch.setattr(select, "best_num_splits", lambda *_: 3 if form == "split" else 1)
    monkeypatch.setattr(select, "best_num_programs", lambda *_: 2)
    queries, cache, plan, options = make_case(mode, lens, heads, widths, block_size)
    arguments, in_mode = given_of(queries, cache, plan, out_dtype, schedule_for(form, plan, heads), **options)
    state = decode.mla_decode(*arguments, **in_mode)
    assert (state[0].dtype, state[1].dtype) == (out_dtype, F32)
    assert differences(lambda *given: decode.mla_decode(*given, **in_mode), arguments, state, 30) == 0
    verdict(AttentionState(*(x.cpu() for x in state)), queries, cache, plan, **options)


@pytest.mark.parametrize("heads, widths, lens, out_dtype", [
    (64, WIDTHS, RAGGED, F32), (128, (256, 64), ([2, 1, 1], [330, 65, 129]), BF16), (3, (512, 0), RAGGED, BF16),
])  # fmt: skip
def test_partial_outputs_in_bfloat16(heads, widths, lens, out_dtype, monkeypatch):
    """A decode in `fp8_product` with partial outputs in bfloat16 is within its budget, and repeats its bits.

    Its LSE has the bits of the decode with partial outputs in float32, and its output differs from that output.
    """
    monkeypatch.setattr(select, "best_num_splits", lambda *_: 3)
    queries, cache, plan, options = make_case(PRODUCT, lens, heads, widths)
    arguments, in_mode = given_of(queries, cache, plan, out_dtype, **options)
    wide = decode.mla_decode(*arguments, **in_mode)
    monkeypatch.setattr(decode, "LEAST_IN_BFLOAT16", 1)
    state = decode.mla_decode(*arguments, **in_mode)
    assert differences(lambda *given: decode.mla_decode(*given, **in_mode), arguments, state, 30) == 0
    assert_same_bits(state[1], wide[1])
    assert not torch.equal(state[0], wide[0])
    verdict(AttentionState(*(x.cpu() for x in state)), queries, cache, plan, **options)


@pytest.mark.parametrize("form", ["whole", "split", "scheduled", "batch-invariant"])
@pytest.mark.parametrize("heads", [16, 64])
def test_error_of_rounded_probabilities(heads, form, monkeypatch):
    """Decode one request in `fp8_product` -> about the error of a decode with a reference score for each tile.

    With one reference score for all keys, the error is at least twice as large. With the largest score so far in each
    split, it would be at least 1.47 times as large.
    """
    monkeypatch.setattr(select, "best_num_splits", lambda *_: 3 if form == "split" else 1)
    monkeypatch.setattr(select, "best_num_programs", lambda *_: 2)
    queries, cache, plan, options = make_case(PRODUCT, ([1], [4000]), heads)
    state = launch(queries, cache, plan, schedule=schedule_for(form, plan, heads), **options)
    names = ("cache_format", "kv_scale", "fp8_mode", "q_scale")
    given = queries, cache, plan, *(options[name] for name in names), F32
    gold = reference.mla_decode(*queries, cache, plan, SCALE, None, torch.float64, **options).out
    own, one, each = (
        (found.out.double() - gold).square().mean().sqrt().item()
        for found in (state, rounded_decode(*given, True), rounded_decode(*given, True, reference_keys=TILE.value))
    )
    assert each < one / 2 and own < 1.3 * each


@modes
def test_negative_softmax_scale(mode):
    """A decode with a negative softmax scale is within its budget; the largest score then belongs to another key."""
    queries, cache, plan, options = make_case(mode, ([2, 1], [130, 65]), 40)
    verdict(launch(queries, cache, plan, scale=-SCALE, **options), queries, cache, plan, -SCALE, **options)


@modes
@pytest.mark.parametrize("heads", [16, 64])
def test_batch_invariance(heads, mode):
    """In a batch-invariant decode, a request has the same bits alone and in a batch, with and without a schedule."""
    queries, cache, plan, options = make_case(mode, ([1, 2, 1], [2700, 130, 64]), heads)
    together = launch(queries, cache, plan, schedule=schedule_of(plan, heads, 0, True), **options)
    planned = launch(queries, cache, plan, schedule=schedule_of(plan, heads, 5, True), **options)
    assert_same_bits(planned.out, together.out)
    assert_same_bits(planned.lse, together.lse)
    for request, tokens in enumerate((slice(0, 1), slice(1, 3), slice(3, 4))):
        length = plan.seq_lens[request : request + 1]
        alone = replace(
            plan, block_table=plan.block_table[request : request + 1], seq_lens=length,
            query_start_loc=integers(0, tokens.stop - tokens.start), visible_lens=plan.visible_lens[tokens],
            max_query_len=tokens.stop - tokens.start, max_seq_len=int(length),
        )  # fmt: skip
        schedule = schedule_of(alone, heads, 0, True)
        own = launch([x[tokens] for x in queries], cache, alone, schedule=schedule, **options)
        assert_same_bits(own.out, together.out[tokens])
        assert_same_bits(own.lse, together.lse[:, tokens])


@modes
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_short_before_long(batch_invariant, mode):
    """A decode ends and is within the budget if a program gets a short work item before a long work item."""
    queries, cache, plan, options = make_case(mode, ([1] * 4, [64, 1100, 0, 900]), 20)
    schedule = schedule_of(plan, 20, 1, batch_invariant)
    for _ in range(20):  # the order of the warps differs between launches
        state = launch(queries, cache, plan, schedule=schedule, **options)
    verdict(state, queries, cache, plan, **options)


@modes
def test_output_dtypes(mode):
    """An output in 16 bits is the rounded float32 output, also if it is written into a given tensor."""
    queries, cache, plan, options = make_case(mode, ([1, 2], [129, 64]), 40)
    wide = launch(queries, cache, plan, **options)
    for out_dtype in (BF16, FP16):
        out = torch.full(wide.out.shape, torch.nan, dtype=out_dtype, device=DEVICE)
        for given in (None, out):
            state = launch(queries, cache, plan, given, out_dtype=out_dtype, **options)
            assert_same_bits(state.out, wide.out.to(out_dtype))
            assert_same_bits(state.lse, wide.lse)
        assert_same_bits(out.cpu(), state.out)


@modes
def test_scales_and_strides(mode):
    """Equal scales of the heads, scales with gaps, and parts of larger tensors give the bits of contiguous tensors."""
    queries, cache, plan, options = make_case(mode, ([1, 2], [130, 64]), 40, scale=torch.tensor(0.01))
    state = launch(queries, cache, plan, **options)
    verdict(state, queries, cache, plan, **options)
    joined = torch.cat([x.view(torch.uint8) for x in queries], -1)
    odd = torch.cat([torch.zeros_like(joined[..., :1]), joined], -1)[..., 1:]  # no word begins at an even address
    parts = [[x.view(E4M3) for x in each.split(list(WIDTHS), -1)] for each in (joined, odd)]
    layers = torch.full((cache.shape[0], 3, *cache.shape[1:]), FP8_E4M3.poison, dtype=torch.uint8)
    layers[:, 1] = cache.view(torch.uint8)
    for change, given in (
        ({"q_scale": torch.full((40,), 0.01)}, (queries, cache)),
        ({"q_scale": torch.tensor([[0.01, torch.nan]] * 40)[:, 0]}, (queries, cache)),
        ({}, (parts[0], cache)), ({}, (parts[1], cache)), ({}, (queries, layers[:, 1].view(cache.dtype))),
    ):  # fmt: skip
        other = launch(*given, plan, **options | change)
        assert_same_bits(other.out, state.out)
        assert_same_bits(other.lse, state.lse)


@modes
def test_nan_stays_with_its_owner(mode):
    """A NaN cache entry makes only the rows of its request NaN, and a NaN in a query row makes only this row NaN."""
    queries, cache, plan, options = make_case(mode, ([2, 1, 1], [70, 130, 17]), 40)
    clean = launch(queries, cache, plan, **options)
    codes = cache.view(torch.uint8).clone()
    codes[plan.block_table[1, 0], 3] = FP8_E4M3.poison
    state = launch(queries, codes.view(cache.dtype), plan, **options)
    assert state.out[2].isnan().all() and state.lse[:, 2].isnan().all()
    assert_same_bits(state.out[[0, 1, 3]], clean.out[[0, 1, 3]])
    for part, column in ((0, 5), (1, 2)):
        bad = [x.clone() for x in queries]
        bad[part].view(torch.uint8)[1, 2, column] = 0x7F
        state = launch(bad, cache, plan, **options)
        assert state.out[1, 2].isnan().all() and state.lse[2, 1].isnan()
        kept = torch.ones(state.out.shape[:2], dtype=torch.bool)
        kept[1, 2] = False
        assert_same_bits(state.out[kept], clean.out[kept])


@modes
def test_values_outside_the_tensors(mode):
    """The kernel skips the tokens of blocks outside the cache, and clamps lengths to the block table."""
    queries, cache, plan, options = make_case(mode, ([1, 1], [130, 60]), 40)
    table = plan.block_table[:, :3].clone()
    table[0, 1], table[1, 1:] = GARBAGE, -1
    far = replace(plan, block_table=table, seq_lens=integers(2**31 - 1, 60), visible_lens=integers(130, 60))
    state = launch(queries, cache, far, **options)
    own = replace(plan, block_table=table[:, [0, 2, 1]], seq_lens=integers(66, 60), visible_lens=integers(66, 60))
    verdict(state, queries, cache, own, **options)


@modes
@pytest.mark.parametrize("form", ["whole", "scheduled", "batch-invariant, planned"])
def test_graph_replays_with_other_values(form, mode):
    """A replay of a captured decode reads the lengths and the scales that were written after the capture."""
    heads = 40
    queries, cache, plan, options = make_case(mode, ([2, 1], [300, 150]), heads)
    buffers = on_device(plan)
    scales = {name: options[name].to(DEVICE) for name in ("kv_scale", "q_scale")}
    schedule = schedule_for(form, plan, heads)
    arguments, in_mode = given_of(queries, cache, buffers, schedule=schedule, **options | scales)
    decode.mla_decode(*arguments, **in_mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = decode.mla_decode(*arguments, **in_mode)
    for lens, visible in (((65, 0), (64, 65, 0)), ((300, 1), (299, 300, 1))):
        other = replace(plan, seq_lens=integers(*lens), visible_lens=integers(*visible))
        buffers.seq_lens.copy_(other.seq_lens)
        buffers.visible_lens.copy_(other.visible_lens)
        for name, factor in (("kv_scale", 2), ("q_scale", 0.5)):
            scales[name].mul_(factor)
            options[name] = options[name] * factor
        graph.replay()
        if form == "whole" or lens[0] == 300:  # the work items of a schedule cover requests of these lengths only
            verdict(AttentionState(out.cpu(), lse.cpu()), queries, cache, other, **options)


def test_arguments_that_are_refused(plain_errors):
    """Queries in another dtype than e4m3, and a cache in another format, raise an error of one line."""
    queries, cache, plan, options = make_case(QUERY, ([1], [20]), 3)
    with pytest.raises(ValueError, match="^ql_nope: expected dtype torch.float8_e4m3fn for fp8_mode fp8_query, got "):
        launch([x.bfloat16() for x in queries], cache, plan, **options)
    arguments, in_mode = given_of(queries, cache, plan, **options)
    with pytest.raises(ValueError, match="^cache_format: expected fp8_e4m3 for fp8_mode fp8_query, got compute_dtype"):
        decode.mla_decode(*arguments[:-2], COMPUTE_FORMAT, None, **in_mode)


@modes
def test_who_serves_a_call(mode):
    """`hopper` is chosen in both modes over `fp8_e4m3`; later calls, which replay the launch, read new tensors."""
    config, settings = MLAConfig.from_preset("deepseek-v3"), {"device": DEVICE, "dtype": BF16}
    served = backends.explain(config, **settings, cache_format=FP8_E4M3, fp8_mode=mode)
    for op in backends.own.DECODES:
        assert f"\n{op}: hopper, chosen by priority" in f"\n{served}"
    settings |= {"block_size": 64, "cache_format": FP8_E4M3, "fp8_mode": mode}
    programs = fast.decode_programs(config, **settings)
    assert programs == decode.device_facts(DEVICE).processors // 2  # 128 rows are two row blocks of 64 rows
    assert fast.schedule_costs(config, **settings) == measured_schedule_costs(config.num_heads, True)

    found = []
    for seed in range(5):
        torch.manual_seed(seed)
        queries, cache, plan, options = make_case(mode, ([1, 2], [300, 64]), 40)
        arguments, in_mode = given_of(queries, cache, plan, BF16, **options)
        wanted = decode.mla_decode(*arguments, **in_mode)
        q, q_pe, stored = arguments[:3]
        call = dict(cache_format=FP8_E4M3, kv_scale=arguments[-1], out_dtype=BF16, **in_mode)
        for backend in (None, "hopper"):
            state = fast.mla_decode(q, q_pe, stored, on_device(plan), SCALE, **call, backend=backend)
            assert_same_bits(state.out, wanted[0])
            assert_same_bits(state.lse, wanted[1])
        found.append(state.out)
        by_triton = fast.mla_decode(q, q_pe, stored, on_device(plan), SCALE, **call, backend="triton")
        assert not torch.equal(by_triton.out, state.out), "the two kernels round differently"
    assert not torch.equal(found[0], found[1])
