"""Tests of the Triton decode over fp8 caches against the reference, which reads the same stored bytes.

On a GPU the kernels are compiled. Without a GPU, one test runs this file again in Triton's interpreter. All bytes of a
cache that belong to no token are 0xFF, which is NaN in e4m3, bfloat16 and float32. `verdict` asserts that a result is
within the budget, the largest error that docs/correctness.md allows. The budget follows from the error of the reference
in the dtype of the queries, and the errors are measured against the reference in float64.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from reference.interfaces import FP8_DS_MLA, FP8_E4M3, AttentionState

from ...support import decode_inputs
from ...support.decode_inputs import (
    FORMS,
    LENS,
    make_stored_inputs,
    on_device,
    schedule_for,
    schedule_of,
    stored_cache,
    verdict,
)
from ...support.factories import GARBAGE, assert_same_bits, integers, make_batch
from ...support.triton_decode_inputs import DTYPES
from ...support.triton_mode import DEVICE, INTERPRETED, ON_GPU, gpu_only, run_in_interpreter, runs, starts_interpreter

if ON_GPU or INTERPRETED:
    import triton
    import triton.language as tl

    from fast.kernels.device import device_facts
    from fast.kernels.triton import decode, decode_shapes, fp8

SMALL = (512, 64) if ON_GPU else (64, 16)  # latent width, rope width
FORMATS = {"fp8_e4m3": (FP8_E4M3, SMALL), "fp8_ds_mla": (FP8_DS_MLA, (512, 64))}
formats = pytest.mark.parametrize("cache_format, widths", FORMATS.values(), ids=FORMATS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


def launch(inputs, cache_format, kv_scale, **options) -> AttentionState:
    return decode_inputs.launch(decode, *inputs, cache_format=cache_format, kv_scale=kv_scale, **options)


def check_parity(cache_format, query_lens, seq_lens, heads=3, dtype=DTYPES[-1], widths=SMALL, block_size=64, form=None):
    inputs, kv_scale = make_stored_inputs(cache_format, query_lens, seq_lens, heads, dtype, widths, block_size)
    schedule = schedule_for(form or "whole", inputs[3], heads)
    verdict(launch(inputs, cache_format, kv_scale, schedule=schedule), *inputs, cache_format, kv_scale)


if ON_GPU or INTERPRETED:

    @triton.jit
    def _convert_kernel(codes, values, NATIVE: tl.constexpr):
        index = tl.arange(0, 256)
        tl.store(values + index, fp8.e4m3_to(tl.load(codes + index), values.dtype.element_ty, NATIVE))

    @triton.jit
    def _order_kernel(x, found, undone, COLUMNS: tl.constexpr):
        places = tl.arange(0, 4)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        reordered = fp8.even_groups_first(tl.load(x + places))
        tl.store(found + places, reordered)
        tl.store(undone + places, fp8.in_order(reordered))


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("native", [False, True] if ON_GPU else [False])
def test_every_code_is_converted_exactly(native, dtype):
    """The kernel converts each of the 256 codes of e4m3 to the same number as torch, in each dtype; NaN stays NaN."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    values = torch.empty(256, dtype=dtype, device=DEVICE)
    _convert_kernel[(1,)](codes, values, native)
    wanted = codes.view(torch.float8_e4m3fn).to(dtype)
    assert torch.equal(values.isnan(), wanted.isnan()) and wanted.isnan().sum() == 2
    assert torch.equal(values.nan_to_num(0), wanted.nan_to_num(0))


@runs
@dtypes
@formats
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_lengths(lens, cache_format, widths, dtype):
    check_parity(cache_format, *lens, dtype=dtype, widths=widths)


@runs
@formats
@pytest.mark.parametrize("heads", [3, 40])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, heads, cache_format, widths, monkeypatch):
    """A decode is within the budget for every way to divide requests among programs."""
    monkeypatch.setattr(decode, "_num_splits", lambda *_: 3 if form == "split" else 1)
    for dtype in DTYPES if heads == 3 else DTYPES[-1:]:
        check_parity(cache_format, [1, 0, 2, 1], [200, 9, 67, 0], heads, dtype, widths, form=form)


@runs
@formats
@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
def test_block_sizes(block_size, cache_format, widths):
    for heads in (4, 40):
        check_parity(cache_format, [1, 2], [129, 64], heads, widths=widths, block_size=block_size)


@runs
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("processors, tile", [(1000, 32), (1, 64)])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_prefetched_tiles(dtype, processors, tile, block_size, monkeypatch):
    """A decode that prefetches tiles is within the budget, for both sizes of tiles.

    The size depends on the number of requests and of processors, except in a batch-invariant decode. With a schedule,
    row blocks of 32 rows depend on its number of programs.
    """
    facts, choose, chosen = device_facts(DEVICE), decode_shapes.prefetch_shape, []
    monkeypatch.setattr(decode, "device_facts", lambda _: facts._replace(processors=processors))
    monkeypatch.setattr(decode, "prefetch_shape", lambda *given: chosen.append(choose(*given)) or chosen[-1])
    for form in ("whole", "batch-invariant"):
        check_parity(FP8_E4M3, [1, 2, 1], [129, 200, 0], 8, dtype, block_size=block_size, form=form)
    assert [each["TILE"] for each in chosen] == [tile, 32]
    chosen.clear()
    for form in ("whole", "scheduled"):
        check_parity(FP8_E4M3, [1, 2, 1], [129, 200, 0], 13, dtype, block_size=block_size, form=form)  # 26 rows
    assert [each and each["ROWS"] for each in chosen] == [32 if tile == 64 else None] * 2


@runs
@pytest.mark.parametrize("columns", [16, 64, 128, 512])
def test_columns_in_another_order(columns):
    """From 128 columns on, the order begins with columns 0 to 7 and 16 to 23; `in_order` restores the first order."""
    x = torch.arange(4 * columns, dtype=torch.float32, device=DEVICE).view(4, columns)
    found, undone = torch.empty_like(x), torch.empty_like(x)
    _order_kernel[(1,)](x, found, undone, columns)
    wanted = x.view(4, columns // 16, 2, 8).transpose(1, 2).reshape(4, columns)
    assert torch.equal(found, wanted if columns >= 128 else x) and torch.equal(undone, x)


@runs
@pytest.mark.parametrize("widths", [(512, 64), (64, 128), (512, 128), (512, 0)], ids=str)
def test_reordered_columns(widths):
    """A decode whose column blocks or rope parts have 128 columns, which the kernel reorders, is within the budget."""
    check_parity(FP8_E4M3, [1, 2], [70, 3], 3, torch.float16, widths)


@runs
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_cache_that_cannot_be_read_in_words(dtype, monkeypatch):
    """A cache at an odd address has the same results within the budget; its tiles are not prefetched."""
    (ql, q_pe, cache, plan), kv_scale = make_stored_inputs(FP8_E4M3, [1, 2], [129, 64], 4, dtype, SMALL)
    odd = torch.zeros(cache.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].view(cache.shape)
    odd.copy_(cache.view(torch.uint8))
    monkeypatch.setattr(decode, "prefetch_shape", None)  # a call would be an error
    state = launch((ql, q_pe, odd.view(cache.dtype), plan), FP8_E4M3, kv_scale)
    verdict(state, ql, q_pe, cache, plan, FP8_E4M3, kv_scale)


@runs
@dtypes
@pytest.mark.parametrize("widths", [(32, 0), (24, 8), (40, 24), (32, 8)], ids=str)
def test_widths(widths, dtype):
    """The format `fp8_e4m3` supports every latent width and every rope width, also rope width 0."""
    for heads in (4, 40):
        check_parity(FP8_E4M3, [1, 3], [34, 67], heads, dtype, widths)


@runs
@dtypes
@formats
def test_large_queries(cache_format, widths, dtype):
    """A decode is within the budget for queries up to 1e5 (6e4 in float16), whose scores differ very much."""
    (ql, q_pe, cache, plan), kv_scale = make_stored_inputs(cache_format, [1, 2], [70, 130], 40, dtype, widths)
    size = 6e4 if dtype == torch.float16 else 1e5
    ql, q_pe = ((x.float() * (size / x.float().abs().max())).to(dtype) for x in (ql, q_pe))
    assert ql.isfinite().all() and ql.float().abs().max() > 0.99 * size
    inputs = (ql, q_pe, cache, plan)
    verdict(launch(inputs, cache_format, kv_scale), *inputs, cache_format, kv_scale)


@runs
@dtypes
@pytest.mark.parametrize("form", ["whole", "batch-invariant"])
def test_scales_of_very_different_sizes(form, dtype):
    """A decode is within the budget even if scales differ by many powers of two, within a tile and from tile to tile.

    In float16, the kernel divides products of probabilities and scales by a power of two. If a later tile has a larger
    scale, the kernel must divide by a larger power of two, and must rescale its sums.
    """
    lens = ([1, 2], [230, 70])
    (ql, q_pe, _, plan), _ = make_stored_inputs(FP8_DS_MLA, *lens, 4, dtype)
    batch = make_batch(*lens, 64)
    plan = replace(plan, block_table=batch.common.block_table)
    exponents = torch.randint(-14, 6, (300, 4))
    exponents[::7] = -126 if dtype == torch.float32 else -20
    exponents[150] = 60 if dtype == torch.float32 else 11  # largest scale, after smaller scales
    entries = torch.randn(300, 576).clamp(-8, 8)
    entries[:, :512] *= torch.exp2(exponents.double()).float().repeat_interleave(128, -1)
    inputs = (ql * 2.0**-8, q_pe, stored_cache(batch, entries, (512, 64), FP8_DS_MLA), plan)
    verdict(launch(inputs, FP8_DS_MLA, None, schedule=schedule_for(form, plan, 4)), *inputs, FP8_DS_MLA)


@runs
@formats
def test_batch_invariance(cache_format, widths):
    """In a batch-invariant decode, a request has the same bits alone and in a batch, with and without a schedule."""
    heads = 20
    inputs, kv_scale = make_stored_inputs(cache_format, [1, 2, 1], [700, 130, 64], heads, DTYPES[-1], widths)
    ql, q_pe, cache, plan = inputs
    together = launch(inputs, cache_format, kv_scale, schedule=schedule_of(plan, heads, 0, True))
    planned = launch(inputs, cache_format, kv_scale, schedule=schedule_of(plan, heads, 5, True))
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
        own = launch((ql[tokens], q_pe[tokens], cache, alone), cache_format, kv_scale, schedule=schedule)
        assert_same_bits(own.out, together.out[tokens])
        assert_same_bits(own.lse, together.lse[:, tokens])


@runs
@formats
def test_nan_stays_with_its_owner(cache_format, widths):
    """A cache entry of NaN bytes gives NaN in the output of its own request, and changes no other request."""
    (ql, q_pe, cache, plan), kv_scale = make_stored_inputs(cache_format, [2, 1, 1], [70, 130, 17], 3, widths=widths)
    clean = launch((ql, q_pe, cache, plan), cache_format, kv_scale)
    codes = cache.view(torch.uint8).clone()
    codes[plan.block_table[1, 0], 3] = cache_format.poison
    state = launch((ql, q_pe, codes.view(cache.dtype), plan), cache_format, kv_scale)
    assert state.out[2].isnan().any()
    assert_same_bits(state.out[[0, 1, 3]], clean.out[[0, 1, 3]])


@runs
@formats
def test_values_outside_the_tensors(cache_format, widths):
    """The kernel skips the tokens of blocks outside the cache, and clamps lengths to the block table."""
    (ql, q_pe, cache, plan), kv_scale = make_stored_inputs(cache_format, [1, 1], [130, 60], 4, widths=widths)
    table = plan.block_table[:, :3].clone()
    table[0, 1], table[1, 1:] = GARBAGE, -1
    far = replace(plan, block_table=table, seq_lens=integers(2**31 - 1, 60), visible_lens=integers(130, 60))
    state = launch((ql, q_pe, cache, far), cache_format, kv_scale)
    assert state.out.isfinite().all() and state.lse.isfinite().all()
    own = replace(plan, block_table=table[:, [0, 2, 1]], seq_lens=integers(66, 60), visible_lens=integers(66, 60))
    verdict(state, ql, q_pe, cache, own, cache_format, kv_scale)


@runs
@formats
def test_strides(cache_format, widths):
    """A cache that is one layer of a larger tensor gives the same bits as a contiguous cache.

    If the format needs no alignment, a cache with gaps between its columns gives the same bits too.
    """
    (ql, q_pe, cache, plan), kv_scale = make_stored_inputs(cache_format, [1, 2], [130, 64], 40, widths=widths)
    dense = launch((ql, q_pe, cache, plan), cache_format, kv_scale)
    codes = cache.view(torch.uint8)
    layers = torch.full((cache.shape[0], 3, *cache.shape[1:]), cache_format.poison, dtype=torch.uint8)
    layers[:, 1] = codes
    views = [layers[:, 1]]
    if cache_format.alignment == 1:
        views.append(torch.stack((codes, codes), -1)[..., 0])
    for view in views:
        state = launch((ql, q_pe, view.view(cache.dtype), plan), cache_format, kv_scale)
        assert_same_bits(state.out, dense.out)
        assert_same_bits(state.lse, dense.lse)


@gpu_only
@formats
@pytest.mark.parametrize("heads", [16, 128])
def test_graph_replays_with_another_scale(heads, cache_format, widths):
    """A replay of a captured decode reads the lengths and the scale that were written after the capture."""
    inputs, kv_scale = make_stored_inputs(cache_format, [2, 1], [300, 150], heads, torch.bfloat16, widths)
    ql, q_pe, cache, plan = inputs
    buffers, scale = on_device(plan), None if kv_scale is None else kv_scale.to(DEVICE)
    given = decode_inputs.arguments(ql, q_pe, cache, buffers, cache_format=cache_format, kv_scale=scale)
    decode.mla_decode(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = decode.mla_decode(*given)
    other = replace(plan, seq_lens=integers(65, 0), visible_lens=integers(64, 65, 0))
    buffers.seq_lens.copy_(other.seq_lens)
    buffers.visible_lens.copy_(other.visible_lens)
    if scale is not None:
        scale.mul_(2)
        kv_scale = kv_scale * 2
    graph.replay()
    verdict(AttentionState(out.cpu(), lse.cpu()), ql, q_pe, cache, other, cache_format, kv_scale)
