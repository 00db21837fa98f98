"""Tests of cache formats whose dtype differs from the dtype of the queries.

`STORED` is a format that only these tests define. The cache stores float16, and a gather converts the values to the
dtype of the queries, float32 or float64. An op fails these tests if it assumes that cache and queries have one dtype.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast.backends.own import CPU as CPU_BACKEND
from reference.interfaces import COMPUTE_FORMAT, CacheFormat, element_bytes

from ..support.backends import with_backends
from ..support.factories import (
    DIRECT,
    assert_same_bits,
    assert_states64,
    integers,
    make_batch,
    make_cache,
    make_entries,
    make_up_projections,
    new_cache,
    offsets,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
STORED = CacheFormat("stored", torch.float16, (torch.float32, torch.float64))
PACKED = replace(STORED, dims=(DIRECT.kv_lora_rank, DIRECT.qk_rope_head_dim))


@pytest.fixture(params=[STORED, PACKED], ids=["any dims", "dims of its own"])
def stored(request, monkeypatch):
    """Register the format STORED or PACKED, and a backend that gathers and converts its entries; return the format."""
    formats = sys.modules["reference.interfaces.cache_format"]
    monkeypatch.setattr(formats, "CACHE_FORMATS", {**formats.CACHE_FORMATS, "stored": request.param})
    declared = {"cache_formats": ("stored",), "out_dtypes": (*request.param.query_dtypes, torch.float16)}
    ops = {
        op: replace(CPU_BACKEND.ops[op], **declared) for op in ("gather_and_maybe_dequant_cache", "dequantize_entries")
    }
    with_backends(monkeypatch, CPU_BACKEND, replace(CPU_BACKEND, name="stored", priority=-1, ops=ops))
    return request.param


def written_inputs(dtype, block_size=4):
    """Return a paged cache, arguments that gather token ranges of three requests, and the gathered rows."""
    batch = make_batch([0, 0, 0], [33, 5, 16], block_size)
    entries = make_entries(batch, DIRECT.head_size, dtype)
    cache = make_cache(batch, entries, DIRECT.head_size, dtype)
    rows = torch.cat([entries[0][16:], entries[1], entries[2][3:3]])
    return cache, (batch.common.block_table, offsets([17, 5, 0]), integers(16, 0, 3), 22), rows


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_converts(ops, dtype, out_dtype):
    """A gather into another dtype rounds each element once, as `Tensor.to` does; the cache can be strided."""
    cache, arguments, rows = written_inputs(dtype)
    wanted = rows.to(out_dtype)
    strided = torch.stack((cache, cache), -1)[..., 0]
    for given in (cache, strided):
        assert_same_bits(ops.gather_and_maybe_dequant_cache(given, *arguments, out_dtype=out_dtype), wanted)
    if ops is fast:
        out = torch.full((23, DIRECT.head_size), 7.0, dtype=out_dtype)
        fast.gather_and_maybe_dequant_cache(cache, *arguments, out_dtype=out_dtype, out=out[:-1])
        assert_same_bits(out[:-1], wanted)
        assert out[-1].eq(7).all()


def test_gather_keeps_the_dtype_of_the_cache(ops):
    """Without `out_dtype`, a gather returns the dtype of the cache; `out` must have the dtype of the result."""
    cache, arguments, rows = written_inputs(torch.bfloat16)
    assert_same_bits(ops.gather_and_maybe_dequant_cache(cache, *arguments), rows)
    if ops is fast:
        for out_dtype, dtype in ((None, torch.float32), (torch.float32, torch.bfloat16)):
            out = torch.empty(22, DIRECT.head_size, dtype=dtype)
            with pytest.raises(ValueError, match=f"^out: expected dtype .*, got {dtype}$"):
                fast.gather_and_maybe_dequant_cache(cache, *arguments, out_dtype=out_dtype, out=out)


@pytest.mark.parametrize("wrong", [torch.int32, torch.uint8, "float32", 4])
def test_gather_refuses_other_dtypes(ops, wrong, plain_errors):
    """If a gather cannot return `out_dtype`, both packages raise an error of one line."""
    cache, arguments, _ = written_inputs(torch.float32)
    with pytest.raises(ValueError, match=rf"^out_dtype: expected one of torch.float32, .*, got {wrong}$"):
        ops.gather_and_maybe_dequant_cache(cache, *arguments, out_dtype=wrong)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float64])
def test_gather_of_a_stored_format(ops, stored, out_dtype):
    """A gather from a float16 cache of the format `stored` returns the dtype that the caller requests.

    The test fails if the result is allocated in the dtype of the cache.
    """
    cache, arguments, rows = written_inputs(torch.float16)
    got = ops.gather_and_maybe_dequant_cache(cache, *arguments, stored, out_dtype)
    assert_same_bits(got, rows.to(out_dtype))


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_a_stored_format_needs_a_dtype_of_its_queries(ops, stored, out_dtype):
    """A gather from the format `stored` raises an error if `out_dtype` is neither float32 nor float64.

    `out_dtype=None` raises too: it means the dtype of the cache, float16, which the format does not allow for results.
    """
    cache, arguments, _ = written_inputs(torch.float16)
    message = f"^out_dtype: expected one of torch.float32, torch.float64, got {out_dtype}$"
    with pytest.raises(ValueError, match=message):
        ops.gather_and_maybe_dequant_cache(cache, *arguments, stored, out_dtype)
    with pytest.raises(ValueError, match="^kv_cache: expected dtype torch.float16, got torch.float32$"):
        ops.gather_and_maybe_dequant_cache(cache.float(), *arguments, stored, torch.float32)


def test_a_stored_format_of_other_dims(ops, stored):
    """If a format is defined for one pair (Lkv, R), a gather from a cache of another width raises an error.

    `stored.dims` is this pair, or None if the format allows any width.
    """
    cache, arguments, _ = written_inputs(torch.float16)
    wider = torch.cat((cache, cache[..., :1]), -1)
    if stored.dims is None:
        assert ops.gather_and_maybe_dequant_cache(wider, *arguments, stored, torch.float32).shape == (22, 33)
        return
    with pytest.raises(ValueError, match="^kv_cache: expected 32 columns for format stored, got 33$"):
        ops.gather_and_maybe_dequant_cache(wider, *arguments, stored, torch.float32)


def prefill_inputs(ops, dtype):
    """Return inputs of two requests with context in several chunks: a float16 cache, queries and weights in `dtype`."""
    torch.manual_seed(0)
    batch = make_batch([2, 3], [40, 50], 4)
    plan = ops.build_mla_metadata(batch.common, 4, 32).prefill
    assert len(plan.context_chunks) > 2
    cache = new_cache(batch, DIRECT.head_size, torch.float16)
    q = torch.randn(5, DIRECT.num_heads, DIRECT.qk_head_dim, dtype=dtype)
    new = torch.randn(5, DIRECT.head_size, dtype=dtype)
    return (q, *new.split([24, 8], -1)), cache, plan, make_up_projections(DIRECT, dtype)


def test_prefill_over_a_stored_format(ops, stored):
    """A float64 prefill gives the same state over a float16 cache of the format `stored` and over a float64 cache.

    Both caches have the same values.
    """
    queries, cache, plan, weights = prefill_inputs(ops, torch.float64)
    wanted = reference.forward_prefill(*queries, cache.double(), plan, *weights, 0.3)
    state = ops.forward_prefill(*queries, cache, plan, *weights, 0.3, cache_format=stored)
    assert_states64(state, wanted)
    context = ops.gather_context(cache, plan, plan.context_chunks[0], stored, torch.float32)
    assert context.dtype == torch.float32 and context.shape[1] == DIRECT.head_size


@pytest.mark.parametrize("size", [1, 3])
def test_context_of_all_ranks_in_a_stored_format(ops, stored, size):
    """If ranks share a sequence, the gathered context and the workspace have the dtype of the queries."""
    entries = torch.randn(24, DIRECT.head_size).half()
    chunk = ops.plan_context_chunks(integers(24), 96, 4, size, 1)[0]
    plan = reference.interfaces.PrefillMetadata(integers(0, 1, 2, 3, 4, 5).view(1, 6), offsets([1]), 1, (), 4)

    def program(ranks):
        cache = torch.full((7, 4, DIRECT.head_size), torch.nan, dtype=torch.float16)
        own = entries[ranks.rank :: size]
        cache.view(-1, DIRECT.head_size)[: len(own)] = own
        part = ops.rank_local_chunk(chunk, ranks.ownership)
        found = [ops.dcp_gather_context(cache, plan, part, ranks, stored, torch.float64)]
        if ops is fast:
            rows = (size + 1) * part.padded_tokens
            workspace = torch.empty(rows, DIRECT.head_size, dtype=torch.float64)
            found.append(fast.dcp_gather_context(cache, plan, part, ranks, stored, torch.float64, workspace=workspace))
            with pytest.raises(ValueError, match="^workspace: expected dtype torch.float64, got torch.float16$"):
                fast.dcp_gather_context(cache, plan, part, ranks, stored, torch.float64, workspace=workspace.half())
        return found

    for found in ops.simulate(size, 1, program):
        for context in found:
            assert_same_bits(context, entries.double())


def test_bytes_of_an_entry():
    """A cache entry has the bytes of the format's storage dtype, or of the queries' dtype if the format has none."""
    for dtype, size in ((torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)):
        assert element_bytes(dtype) == size
        assert COMPUTE_FORMAT.entry_bytes(512, 64, dtype) == 576 * size
    assert STORED.entry_bytes(512, 64, torch.float64) == 576 * 2
    one_byte = replace(STORED, storage_dtype=torch.float8_e4m3fn)
    assert one_byte.entry_bytes(512, 0, torch.float32) == 512
    with pytest.raises(ValueError, match="^dtype: expected one of torch.float32, torch.float64, got torch.bfloat16$"):
        STORED.entry_bytes(512, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="^cache_format: expected "):
        PACKED.entry_bytes(512, 64, torch.float32)
