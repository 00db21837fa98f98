"""Tests of the Triton decode in the fp8 modes `fp8_query` and `fp8_product`, over fp8 caches.

In both modes the queries are in e4m3 (8 bits). In `fp8_product` the probabilities are in e4m3 too.

On a GPU the kernels are compiled. Without a GPU, one test runs this file again in Triton's interpreter. All bytes of a
cache that belong to no token are 0xFF, which is NaN. The errors are measured against the reference in float64, which
reads the same stored numbers. The budget follows from `rounded_decode`, which rounds where the kernels round.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import reference
from fast.kernels.cpu.decode import mla_decode as cpu_decode
from fast.parity import compare_states
from reference.interfaces import COMPUTE_FORMAT, E4M3, FP8_DS_MLA, FP8_E4M3, FP8_MODES, AttentionState

from ...support import decode_inputs
from ...support.decode_inputs import (
    FORMS,
    LENS,
    SCALE,
    make_stored_inputs,
    on_device,
    schedule_for,
    schedule_of,
    stored_cache,
)
from ...support.factories import GARBAGE, assert_same_bits, integers, make_batch
from ...support.fp8_modes import check, quantised, rounded_decode
from ...support.triton_mode import DEVICE, INTERPRETED, ON_GPU, gpu_only, run_in_interpreter, runs, starts_interpreter

if ON_GPU or INTERPRETED:
    from fast.kernels.device import device_facts
    from fast.kernels.triton import decode, decode_shapes

IN_E4M3 = FP8_MODES[1:]
SMALL = (512, 64) if ON_GPU else (128, 32)  # latent width, rope width
FORMATS = {"fp8_e4m3": (FP8_E4M3, SMALL), "fp8_ds_mla": (FP8_DS_MLA, (512, 64))}
formats = pytest.mark.parametrize("cache_format, widths", FORMATS.values(), ids=FORMATS)
modes = pytest.mark.parametrize("mode", IN_E4M3)


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


def scale_of_heads(heads):
    """Return a different scale of the queries for each head, so that the scale of a wrong head changes the result."""
    return torch.linspace(0.5, 3, heads) * 0.004


def make_case(cache_format, lens, heads=3, widths=SMALL, block_size=64, scale=None):
    """Return queries in e4m3, a cache, a plan, and the options of a decode; `scale` is the scale of the queries."""
    (ql, q_pe, cache, plan), kv_scale = make_stored_inputs(
        cache_format, *lens, heads, torch.float32, widths, block_size
    )
    scale = scale_of_heads(heads) if scale is None else scale
    return quantised(ql, q_pe, scale), cache, plan, dict(cache_format=cache_format, kv_scale=kv_scale, q_scale=scale)


def launch(queries, cache, plan, out_dtype=torch.float32, schedule=None, scale=SCALE, out=None, **options):
    """Launch the decode kernel on DEVICE and return the attention state on the CPU."""
    modes = {"fp8_mode": options["fp8_mode"], "q_scale": options["q_scale"].to(DEVICE)}
    given = decode_inputs.arguments(
        *queries, cache, plan, scale, schedule, out_dtype, options["cache_format"], options["kv_scale"]
    )
    state = decode.mla_decode(*given, *(() if out is None else (out,)), **modes)
    return AttentionState(*(x.cpu() for x in state))


def verdict(state, queries, cache, plan, scale=SCALE, query_len=1, **options):
    """Assert that a state is within its budget, which depends on the number of rows of a row block.

    Row blocks have 64 rows on Hopper if a request has more than 16 rows, and otherwise 16 rows. A request is assumed to
    have `query_len` x heads rows.
    """
    given = [options[name] for name in ("cache_format", "kv_scale", "fp8_mode", "q_scale")]
    facts, rows = device_facts(DEVICE), queries[0].shape[1] * query_len
    rows = 64 if facts.capability[0] == 9 and rows > 16 else 16
    in_e4m3 = ON_GPU and decode_shapes.multiplies_e4m3(facts.capability, rows, 32, options["fp8_mode"])
    low = rounded_decode(queries, cache, plan, *given, state.out.dtype, in_e4m3, scale)
    check(state, low, queries, cache, plan, scale, **options)


def check_parity(cache_format, mode, lens, heads=3, widths=SMALL, block_size=64, form="whole", out_dtype=torch.float32):
    queries, cache, plan, options = make_case(cache_format, lens, heads, widths, block_size)
    options["fp8_mode"] = mode
    state = launch(queries, cache, plan, out_dtype, schedule_for(form, plan, heads), **options)
    assert state.out.dtype == out_dtype and state.lse.dtype == torch.float32
    verdict(state, queries, cache, plan, **options)


@runs
@modes
@formats
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_lengths(lens, cache_format, widths, mode):
    check_parity(cache_format, mode, lens, 3, widths)


@runs
@modes
@formats
@pytest.mark.parametrize("heads", [20] if INTERPRETED else [3, 20])  # the interpreter is slow
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, heads, cache_format, widths, mode, monkeypatch):
    """A decode is within the budget for every way to divide requests among programs."""
    monkeypatch.setattr(decode, "_num_splits", lambda *_: 3 if form == "split" else 1)
    check_parity(cache_format, mode, ([1, 0, 2, 1], [200, 9, 67, 0]), heads, widths, form=form)


@runs
@modes
@formats
@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
def test_block_sizes(block_size, cache_format, widths, mode):
    for heads in (20,) if INTERPRETED else (4, 20):
        check_parity(cache_format, mode, ([1, 2], [129, 64]), heads, widths, block_size)


@runs
@modes
@pytest.mark.parametrize("widths", [(32, 0), (24, 8), (40, 24), (8, 16), (64, 16)], ids=str)
def test_widths(widths, mode):
    """The format `fp8_e4m3` supports every latent width and every rope width, also rope width 0."""
    for heads in (4, 40):
        check_parity(FP8_E4M3, mode, ([1, 3], [34, 67]), heads, widths)


@runs
@modes
@formats
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_output_dtypes(out_dtype, cache_format, widths, mode):
    """An output in 16 bits is the rounded float32 output, also if it is written into a given tensor.

    Triton's interpreter does not round float32 to the nearest bfloat16. In the interpreter, the test therefore compares
    a bfloat16 output with the budget.
    """
    queries, cache, plan, options = make_case(cache_format, ([1, 2], [129, 64]), 5, widths)
    options["fp8_mode"] = mode
    wide = launch(queries, cache, plan, **options)
    out = torch.full(wide.out.shape, torch.nan, dtype=out_dtype, device=DEVICE)
    for given in (None, out):
        state = launch(queries, cache, plan, out_dtype, out=given, **options)
        if INTERPRETED and out_dtype == torch.bfloat16:
            assert state.out.dtype == out_dtype
            verdict(state, queries, cache, plan, **options)
        else:
            assert_same_bits(state.out, wide.out.to(out_dtype))
        assert_same_bits(state.lse, wide.lse)
    assert_same_bits(out.cpu(), state.out)


@runs
@modes
@formats
def test_one_scale_and_scales_of_heads(cache_format, widths, mode):
    """One scale for all heads, equal scales of the heads, and scales with gaps in memory give the same bits."""
    queries, cache, plan, options = make_case(cache_format, ([1, 2], [129, 64]), 20, widths, scale=torch.tensor(0.01))
    options["fp8_mode"] = mode
    state = launch(queries, cache, plan, **options)
    verdict(state, queries, cache, plan, **options)
    for scale in (torch.full((20,), 0.01), torch.tensor([[0.01, torch.nan]] * 20)[:, 0]):
        other = launch(queries, cache, plan, **options | {"q_scale": scale})
        assert_same_bits(other.out, state.out)
        assert_same_bits(other.lse, state.lse)


@runs
@modes
@formats
def test_large_scales(cache_format, widths, mode):
    """Queries of size 1e5 give finite results within the budget, for a large and for a small softmax scale."""
    scale = torch.tensor(1e5 / 448)
    (ql, q_pe, cache, plan), kv_scale = make_stored_inputs(cache_format, [1, 2], [70, 130], 20, widths=widths)
    queries = quantised(*(x * (1e5 / x.abs().max()) for x in (ql, q_pe)), scale)
    options = dict(cache_format=cache_format, kv_scale=kv_scale, q_scale=scale, fp8_mode=mode)
    for softmax_scale in (SCALE, 1e-5):
        state = launch(queries, cache, plan, scale=softmax_scale, **options)
        assert state.out.isfinite().all() and state.lse.isfinite().all()
        verdict(state, queries, cache, plan, softmax_scale, **options)


@runs
@modes
@pytest.mark.parametrize("form", ["whole", "batch-invariant"])
def test_scales_of_very_different_sizes(form, mode):
    """A decode is within the budget if the scales in cache entries differ by many powers of two from tile to tile.

    The kernel divides products of probabilities and scales by a power of two, which must fit the scales of every tile.
    """
    lens = ([1, 2], [230, 70])
    (ql, q_pe, _, plan), _ = make_stored_inputs(FP8_DS_MLA, *lens, 4)
    batch = make_batch(*lens, 64)
    plan = replace(plan, block_table=batch.common.block_table)
    exponents = torch.arange(300)[:, None] // 32 * 3 - 20 + torch.randint(-2, 3, (300, 4))
    exponents[150] = 11  # the largest scale; it comes after smaller scales in request 0
    entries = torch.randn(300, 576).clamp(-8, 8)
    entries[:, :512] *= torch.exp2(exponents.double()).float().repeat_interleave(128, -1)
    q_scale = torch.tensor(2.0**-16)
    queries, cache = (
        quantised(ql * 2.0**-8, q_pe * 2.0**-8, q_scale),
        stored_cache(batch, entries, (512, 64), FP8_DS_MLA),
    )
    options = dict(cache_format=FP8_DS_MLA, kv_scale=None, q_scale=q_scale, fp8_mode=mode)
    state = launch(queries, cache, plan, schedule=schedule_for(form, plan, 4), **options)
    verdict(state, queries, cache, plan, **options)


@runs
@formats
def test_probabilities_are_rounded(cache_format, widths):
    """`fp8_product` rounds probabilities to e4m3, and `fp8_query` to float16, which has seven more binary digits.

    Both modes have the same LSE, because the sum of exponentials is not rounded.
    """
    queries, cache, plan, options = make_case(cache_format, ([2, 1, 1], [500, 130, 64]), 20, widths)
    gold = reference.mla_decode(*queries, cache, plan, SCALE, None, torch.float64, fp8_mode="fp8_query", **options)
    one, other = (launch(queries, cache, plan, fp8_mode=mode, **options) for mode in IN_E4M3)
    assert (one.out - gold.out).abs().mean() < (other.out - gold.out).abs().mean() / 8
    if INTERPRETED:
        assert_same_bits(one.lse, other.lse)


@runs
def test_as_accurate_as_the_cpu():
    """In `fp8_product` over `fp8_e4m3`, the kernel is about as accurate as the backend "cpu".

    The budget of the kernel is computed from the error of "cpu", which rounds at the same places.
    """
    queries, cache, plan, options = make_case(FP8_E4M3, ([2, 1, 1], [500, 130, 64]), 12)
    options["fp8_mode"] = "fp8_product"
    gold = reference.mla_decode(*queries, cache, plan, SCALE, None, torch.float64, **options)
    state = launch(queries, cache, plan, **options)
    given = decode_inputs.arguments(*queries, cache, plan, SCALE, None, torch.float32, FP8_E4M3, options["kv_scale"])
    modes = {"fp8_mode": "fp8_product", "q_scale": options["q_scale"]}
    low = AttentionState(*cpu_decode(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in given), **modes))
    for parity in compare_states("mla_decode", state, low, gold):
        assert parity.passed, parity


@runs
def test_equal_probabilities():
    """Equal scores have exact probabilities in every dtype: both modes give the mean of the values."""
    queries, cache, plan, options = make_case(FP8_E4M3, ([1], [32]), 3)
    queries = [torch.zeros(x.shape).to(E4M3) for x in queries]
    one, other = (launch(queries, cache, plan, fp8_mode=mode, **options) for mode in IN_E4M3)
    entries = reference.gather_and_maybe_dequant_cache(
        cache, plan.block_table, integers(0, 32), integers(0), 32, FP8_E4M3, torch.float64, options["kv_scale"]
    )
    wanted = entries[:, : queries[0].shape[2]].mean(0).expand_as(one.out[0])
    for state in (one, other):
        assert ((state.out[0] - wanted).abs() <= 2.0**-12 * wanted.abs().max()).all()
        assert torch.allclose(state.lse, torch.tensor(32.0).log(), rtol=2.0**-20)


@runs
@modes
@formats
def test_batch_invariance(cache_format, widths, mode):
    """In a batch-invariant decode, a request has the same bits alone and in a batch, with and without a schedule."""
    heads = 20
    queries, cache, plan, options = make_case(cache_format, ([1, 2, 1], [700, 130, 64]), heads, widths)
    options["fp8_mode"] = mode
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


@runs
@modes
@formats
def test_nan_stays_with_its_owner(cache_format, widths, mode):
    """A NaN cache entry makes only the rows of its request NaN, and a NaN in a query row makes only this row NaN."""
    queries, cache, plan, options = make_case(cache_format, ([2, 1, 1], [70, 130, 17]), 3, widths)
    options["fp8_mode"] = mode
    clean = launch(queries, cache, plan, **options)
    codes = cache.view(torch.uint8).clone()
    codes[plan.block_table[1, 0], 3] = cache_format.poison
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


@runs
@modes
@formats
def test_nan_in_a_value(cache_format, widths, mode):
    """A NaN in one column of a latent makes all outputs and LSEs of its request NaN, and changes no other request.

    The latent is also a part of the key, so the score of this key is NaN in every row that sees the key.
    """
    queries, cache, plan, options = make_case(cache_format, ([1, 1], [40, 33]), 20, widths)
    codes = cache.view(torch.uint8).clone()
    codes[plan.block_table[0, 0], 39, 7] = 0x7F
    clean = launch(queries, cache, plan, fp8_mode=mode, **options)
    state = launch(queries, codes.view(cache.dtype), plan, fp8_mode=mode, **options)
    assert state.out[0].isnan().all() and state.lse[:, 0].isnan().all()
    assert_same_bits(state.out[1], clean.out[1])


@runs
@modes
@formats
def test_values_outside_the_tensors(cache_format, widths, mode):
    """The kernel skips the tokens of blocks outside the cache, and clamps lengths to the block table."""
    queries, cache, plan, options = make_case(cache_format, ([1, 1], [130, 60]), 4, widths)
    options["fp8_mode"] = mode
    table = plan.block_table[:, :3].clone()
    table[0, 1], table[1, 1:] = GARBAGE, -1
    far = replace(plan, block_table=table, seq_lens=integers(2**31 - 1, 60), visible_lens=integers(130, 60))
    state = launch(queries, cache, far, **options)
    assert state.out.isfinite().all() and state.lse.isfinite().all()
    own = replace(plan, block_table=table[:, [0, 2, 1]], seq_lens=integers(66, 60), visible_lens=integers(66, 60))
    verdict(state, queries, cache, own, **options)


@runs
@modes
@formats
def test_strides(cache_format, widths, mode):
    """Queries and caches that are parts of larger tensors give the same bits as contiguous tensors."""
    queries, cache, plan, options = make_case(cache_format, ([1, 2], [130, 64]), 20, widths)
    options["fp8_mode"] = mode
    dense = launch(queries, cache, plan, **options)
    joined = torch.cat([x.view(torch.uint8) for x in queries], -1)
    parts = [x.view(E4M3) for x in joined.split(list(widths), -1)]
    layers = torch.full((cache.shape[0], 3, *cache.shape[1:]), cache_format.poison, dtype=torch.uint8)
    layers[:, 1] = cache.view(torch.uint8)
    for given in ((parts, cache), (queries, layers[:, 1].view(cache.dtype))):
        state = launch(*given, plan, **options)
        assert_same_bits(state.out, dense.out)
        assert_same_bits(state.lse, dense.lse)


@runs
def test_arguments_that_are_refused(plain_errors):
    """Queries in another dtype than e4m3, and a cache without e4m3 numbers, raise an error of one line."""
    queries, cache, plan, options = make_case(FP8_E4M3, ([1], [20]), 3)
    options["fp8_mode"] = "fp8_query"
    with pytest.raises(ValueError, match="^ql_nope: expected dtype torch.float8_e4m3fn for fp8_mode fp8_query, got "):
        launch([x.float() for x in queries], cache, plan, **options)
    with pytest.raises(ValueError, match="^cache_format: expected a format in e4m3 for fp8_mode fp8_query, got comp"):
        launch(queries, cache.float(), plan, **options | {"cache_format": COMPUTE_FORMAT})
    with pytest.raises(ValueError, match="^ql_nope: expected dtype float32, bfloat16 or float16, got torch.float8"):
        launch(queries, cache, plan, **options | {"fp8_mode": "converted"})


@gpu_only
@modes
@formats
@pytest.mark.parametrize("heads", [16, 128])
def test_graph_replays_with_another_scale(heads, cache_format, widths, mode):
    """A replay of a captured decode reads the lengths and the scales that were written after the capture."""
    queries, cache, plan, options = make_case(cache_format, ([2, 1], [300, 150]), heads, widths)
    kv_scale, q_scale = options["kv_scale"], options["q_scale"].to(DEVICE)
    buffers, scale = on_device(plan), None if kv_scale is None else kv_scale.to(DEVICE)
    given = decode_inputs.arguments(*queries, cache, buffers, SCALE, None, torch.float32, cache_format, scale)
    decode.mla_decode(*given, fp8_mode=mode, q_scale=q_scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = decode.mla_decode(*given, fp8_mode=mode, q_scale=q_scale)
    other = replace(plan, seq_lens=integers(65, 0), visible_lens=integers(64, 65, 0))
    buffers.seq_lens.copy_(other.seq_lens)
    buffers.visible_lens.copy_(other.visible_lens)
    q_scale.mul_(0.5)
    options |= {"q_scale": options["q_scale"] * 0.5, "fp8_mode": mode}
    if scale is not None:
        scale.mul_(2)
        options["kv_scale"] = kv_scale * 2
    graph.replay()
    verdict(AttentionState(out.cpu(), lse.cpu()), queries, cache, other, query_len=2, **options)
