"""Tests of FlashMLA's calls over the kernels of `fast`.

The shapes and tolerances of `test_shapes_of_flashmla` are those of FlashMLA's own test of its dense kernel:
tests/test_flash_mla_dense_decoding.py at commit 9241ae3 of https://github.com/deepseek-ai/FlashMLA. On a CPU the test
has contexts of 20 and 140 tokens, in batches of 2 requests and in one batch of 6 requests.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

import fast
from fast.backends import Backend
from fast.integrations.flash_mla import flash_mla_with_kvcache, get_mla_metadata, interface
from reference.interfaces import (
    E4M3,
    FP8_DS_MLA,
    FP8_E4M3,
    DecodeMetadata,
    GraphSupport,
    UnsupportedConfiguration,
    to_e4m3,
)

from ...support.backends import registered
from ...support.factories import GARBAGE, assert_same_bits

V, D, BLOCK = 512, 576, 64


def make_case(lengths, query_len=1, heads=4, dtype=torch.float32, width=D, block=BLOCK):
    """Return q, cache, block table and lengths; NaN in every cache entry that belongs to no token."""
    device = torch.get_default_device()
    lengths = torch.tensor(lengths, dtype=torch.int32, device="cpu")
    columns = max(1, -(-int(lengths.max()) // block))
    table = torch.randperm(len(lengths) * columns, device="cpu").view(-1, columns).int()
    cache = torch.randn(table.numel(), block, 1, width) / 10
    q = (torch.randn(len(lengths), query_len, heads, width) / 10).to(dtype)
    for row, length in zip(table, lengths.tolist(), strict=True):
        used = -(-length // block)
        cache[row[used:].to(device)] = math.nan
        if length % block:
            cache[row[used - 1], length % block :] = math.nan
        row[used:] = GARBAGE
    return q, cache.to(dtype), table.to(device), lengths.to(device)


def masked_softmax(q, cache, table, lengths, latent, causal):
    """Return output and LSE in float64, each request on its own."""
    outputs, lses = [], []
    for own, row, length in zip(q.double(), table, lengths.tolist(), strict=True):
        keys = cache.double()[row[: -(-length // cache.shape[1])].long()].flatten(0, 2)[:length]
        scores = torch.einsum("tnd,sd->nts", own, keys) * q.shape[3] ** -0.5
        if causal:
            last = torch.arange(q.shape[1])[:, None] + length - q.shape[1]
            scores = scores.masked_fill(torch.arange(length) > last, -math.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
        outputs.append(torch.einsum("nts,sv->tnv", weights, keys[:, :latent]))
        lses.append(torch.where(lse == -math.inf, math.inf, lse))
    return torch.stack(outputs), torch.stack(lses)


def assert_close(name, found, exact, absolute, relative):
    """Compare as FlashMLA's test does: one of the two tolerances must hold, and infinities must be the same."""
    found, exact = found.double(), exact.double()
    same = found == exact
    error = torch.where(same, 0.0, (found - exact).abs())
    assert bool((same | (error <= absolute) | (error <= relative * exact.abs())).all()), f"{name}: {error.max()}"


@pytest.mark.parametrize("heads", [1, 3, 9, 63, 64, 126, 128])
def test_shapes_of_flashmla(heads):
    """Call with the shapes of FlashMLA's test, in bfloat16 -> results within the tolerances of this test."""
    large = torch.get_default_device().type == "cuda"
    sizes, contexts = ((1, 2, 6, 64), (20, 140, 4096)) if large else ((2,), (20, 140))
    cases = [(*case, False) for case in itertools.product(sizes, (1, 2, 4), contexts, (False, True))]
    cases.append((128 if large else 6, 2, 4096 if large else 140, True, True))
    for (size, query_len, context, varied, empty), causal in itertools.product(cases, (False, True)):
        torch.manual_seed(0)
        lengths = torch.full((size,), context)
        if varied:
            lengths = (torch.randn(size) * context / 2 + context).clamp(min=query_len).int()
        if empty:
            lengths[torch.randn(size) > 0] = 0
        q, cache, table, lengths = make_case(lengths.tolist(), query_len, heads, torch.bfloat16)
        meta, splits = get_mla_metadata()
        out, lse = flash_mla_with_kvcache(q, cache, table, lengths, V, meta, splits, causal=causal)
        assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32 and lse.is_contiguous()
        exact, exact_lse = masked_softmax(q, cache, table, lengths, V, causal)
        assert_close("out", out, exact.to(torch.bfloat16), 8e-4, 2.01 / 128)
        assert_close("lse", lse, exact_lse, 1e-6, 8.01 / 65536)
        product, norms = (out.double() * exact).sum(), (out.double().square().sum() + exact.square().sum()) / 2
        assert 1 - product / norms.clamp(min=1e-300) < 5e-6 or not exact.any()


PROGRAM = """
import torch
from flash_mla import flash_mla_with_kvcache, get_mla_metadata

def serve(q, layers, block_table, cache_seqlens, *arguments):
    tile_scheduler_metadata, num_splits = get_mla_metadata(*arguments)
    return [
        flash_mla_with_kvcache(
            q, k_cache, block_table, cache_seqlens, 512, tile_scheduler_metadata, num_splits, causal=True,
        )[0]
        for k_cache in layers
    ]
"""


@pytest.mark.parametrize("planned", [False, True], ids=["no arguments", "the arguments of 2025"])
def test_program_for_flashmla(planned):
    """A program for FlashMLA changes one import; one schedule object serves all layers of a step."""
    q, cache, table, lengths = make_case([130, 70], 2, 8)
    layers = [cache, cache.flip(3)]
    space = {}
    exec(PROGRAM.replace("from flash_mla import", "from fast.integrations.flash_mla import"), space)
    arguments = (lengths, 2 * 8 // 1, 1) if planned else ()
    for found, layer in zip(space["serve"](q, layers, table, lengths, *arguments), layers, strict=True):
        exact, _ = masked_softmax(q, layer, table, lengths, V, True)
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


def plan_of(q, table, lengths, block=BLOCK):
    """Return the plan of a causal decode in which every request has the query tokens of `q`."""
    size, query_len = q.shape[:2]
    starts = torch.arange(size + 1, dtype=torch.int32) * query_len
    later = torch.arange(query_len - 1, -1, -1, dtype=torch.int32)
    visible = (lengths[:, None] - later).clamp(min=0).flatten()
    return DecodeMetadata(table, lengths, starts, query_len, visible, table.shape[1] * block, block)


@pytest.mark.parametrize("query_len", [1, 3])
def test_bits_of_mla_decode(query_len):
    """The results have the bits of `fast.mla_decode` over the same cache, also for other widths and block sizes."""
    for width, latent, block in ((D, V, BLOCK), (40, 32, 16)):
        q, cache, table, lengths = make_case([100, 0, 37], query_len, 4, width=width, block=block)
        meta, _ = get_mla_metadata()
        out, lse = flash_mla_with_kvcache(q, cache, table, lengths, latent, meta, softmax_scale=0.2, causal=True)
        rows, plan = q.flatten(0, 1), plan_of(q, table, lengths, block)
        wanted = fast.mla_decode(
            rows[..., :latent], rows[..., latent:], cache.squeeze(2), plan, 0.2, meta._plan.schedule
        )  # fmt: skip
        assert_same_bits(out.flatten(0, 1), wanted.out)
        full = lengths > 0
        assert_same_bits(lse[full].transpose(0, 1).flatten(1), wanted.lse.view(4, 3, -1)[:, full].flatten(1))
        assert not out[1].any() and bool((lse[1] == math.inf).all())


def test_fewer_keys_than_query_tokens():
    """With causal masks and fewer keys than query tokens, the first query tokens have no keys."""
    q, cache, table, lengths = make_case([2], 4)
    out, lse = flash_mla_with_kvcache(q, cache, table, lengths, V, get_mla_metadata()[0], causal=True)
    exact, exact_lse = masked_softmax(q, cache, table, lengths, V, True)
    assert bool((exact_lse[0, :, :2] == math.inf).all())
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e4m3 without scale", "fp8_ds_mla", "e4m3 queries"])
def test_fp8(kind):
    """Serve caches in e4m3 -> the bits of `fast.mla_decode` over this format."""
    q, cache, table, lengths = make_case([100, 37], 1, 4)
    cache_format = FP8_DS_MLA if kind == "fp8_ds_mla" else FP8_E4M3
    scale = {"fp8_e4m3": torch.tensor([0.004]), "e4m3 queries": torch.tensor([0.004])}.get(kind)
    kv_scale = None
    if cache_format.layer_scale:
        kv_scale = torch.ones(()) if scale is None else scale.view(())
    entries = cache.view(-1, D).nan_to_num(0.0)
    stored = fast.quantize_entries(entries[:, :V], entries[:, V:], cache_format, kv_scale)
    stored = stored.view(len(cache), BLOCK, 1, -1)
    options, descale_q = {}, None
    if kind == "e4m3 queries":
        descale_q = torch.tensor(0.002)
        q = to_e4m3(q, descale_q)
        options = {"fp8_mode": "fp8_product", "q_scale": descale_q, "out_dtype": torch.bfloat16}
    given = stored.view(torch.uint8) if kind == "fp8_ds_mla" else stored
    meta, _ = get_mla_metadata()
    out, lse = flash_mla_with_kvcache(
        q, given, table, lengths, V, meta, is_fp8_kvcache=True, descale_q=descale_q, descale_k=scale
    )
    rows, plan = q.flatten(0, 1), plan_of(q, table, lengths)
    wanted = fast.mla_decode(
        rows[..., :V], rows[..., V:], stored.squeeze(2), plan, D**-0.5, meta._plan.schedule, cache_format=cache_format,
        kv_scale=kv_scale, **options,
    )  # fmt: skip
    assert_same_bits(out.squeeze(1), wanted.out)
    assert_same_bits(lse.squeeze(2).T, wanted.lse)


def test_schedule_of_other_lengths():
    """Change the lengths in place -> the schedule object makes a new plan; the same lengths keep the plan."""
    q, cache, table, lengths = make_case([100, 40], 2)
    meta, _ = get_mla_metadata()
    calls = [q, cache, table, lengths, V, meta]
    flash_mla_with_kvcache(*calls, causal=True)
    plan = meta._plan
    flash_mla_with_kvcache(*calls, causal=True)
    assert meta._plan is plan
    lengths -= 7
    found = flash_mla_with_kvcache(*calls, causal=True)
    assert meta._plan is not plan
    assert meta._plan.seq_lens.data_ptr() == lengths.data_ptr()  # no other tensor can get this address
    wanted = flash_mla_with_kvcache(*calls[:-1], get_mla_metadata()[0], causal=True)
    for one, other in zip(found, wanted, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("change", ["strides", "memory of the tensor object"])
def test_schedule_of_other_lengths_at_one_address(change):
    """Pass other lengths with the same first element, or in the same tensor object -> a new plan, the right bits."""
    q, cache, table, _ = make_case([200, 200], 2)
    lengths, meta = torch.tensor([70, 70, 200, 5], dtype=torch.int32), get_mla_metadata()[0]
    first = lengths[:2]
    flash_mla_with_kvcache(q, cache, table, first, V, meta, causal=True)
    plan = meta._plan
    flash_mla_with_kvcache(q, cache, table, lengths[:2], V, meta, causal=True)
    assert meta._plan is plan  # another tensor object with the same elements
    if change == "strides":
        other = lengths[::2]
        assert other.data_ptr() == first.data_ptr() and other._version == first._version
    else:
        first.data, other = torch.tensor([70, 200], dtype=torch.int32), first
    found = flash_mla_with_kvcache(q, cache, table, other, V, meta, causal=True)
    wanted = flash_mla_with_kvcache(q, cache, table, other, V, get_mla_metadata()[0], causal=True)
    assert meta._plan is not plan
    for one, another in zip(found, wanted, strict=True):
        assert_same_bits(one, another)


def test_backend_with_a_causal_mask_alone():
    """A backend that applies only the causal mask serves causal calls and one query token, and no other call.

    The backend serves a CPU, so all tensors are on the CPU.
    """
    decode = replace(next(each for each in fast.backends.registered() if each.name == "cpu").ops["mla_decode"],
                     masks=("causal",))  # fmt: skip
    with torch.device("cpu"), registered(Backend("library", -100, "cpu", {"mla_decode": decode})):
        for query_len, causal in ((1, False), (1, True), (3, True)):
            given = (*make_case([100, 2, 37], query_len), V)
            found, wanted = (
                flash_mla_with_kvcache(*given, get_mla_metadata()[0], causal=causal, backend=backend)
                for backend in ("library", "cpu")
            )
            for one, other in zip(found, wanted, strict=True):
                assert_same_bits(one, other)
        with pytest.raises(UnsupportedConfiguration, match="library: applies the masks causal, got visible_lens"):
            flash_mla_with_kvcache(*given, get_mla_metadata()[0], backend="library")


def test_calls_inside_and_outside_a_graph(monkeypatch):
    """A call inside a captured graph does not use the plan of a call outside, and the reverse."""
    q, cache, table, lengths = make_case([100, 40])
    meta, _ = get_mla_metadata()
    plans = []
    for graph in (GraphSupport.NONE, GraphSupport.ONE_QUERY_LEN, GraphSupport.ONE_QUERY_LEN, GraphSupport.NONE):
        monkeypatch.setattr(interface, "_graph_of", lambda q, graph=graph: graph)
        flash_mla_with_kvcache(q, cache, table, lengths, V, meta)
        plans.append(meta._plan)
    assert plans[1] is plans[2] and len({id(plan) for plan in plans}) == 3
    assert [plan.graph for plan in plans] == [GraphSupport.NONE, *[GraphSupport.ONE_QUERY_LEN] * 2, GraphSupport.NONE]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_fp8", [False, True], ids=["16 bit", "e4m3"])
def test_captured_graph(is_fp8):
    """Capture a step of two layers after an eager call, replay it with other lengths -> the results of eager calls."""
    q, cache, table, lengths = make_case([200, 130, 60], 2, 16, torch.bfloat16)
    cache = cache.nan_to_num(0.0).to(E4M3 if is_fp8 else torch.bfloat16)
    inputs = [x.cuda() for x in (q, cache, table.clamp(max=len(cache) - 1), lengths)]

    def step(meta):
        options = {"causal": True, "is_fp8_kvcache": is_fp8}
        return [flash_mla_with_kvcache(*inputs, V, meta, **options) for _ in range(2)]

    step(get_mla_metadata()[0])
    graph, meta = torch.cuda.CUDAGraph(), get_mla_metadata()[0]
    with torch.cuda.graph(graph):
        captured = step(meta)
    for lens in ([200, 130, 60], [5, 190, 2], [64, 0, 170]):
        inputs[3].copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        for found, wanted in zip(captured, step(get_mla_metadata()[0]), strict=True):
            for one, other in zip(found, wanted, strict=True):
                assert_same_bits(one, other)


def test_gradients():
    """Queries that require a gradient are accepted; the results require none."""
    q, cache, table, lengths = make_case([100, 40])
    out, lse = flash_mla_with_kvcache(q.requires_grad_(), cache, table, lengths, V, get_mla_metadata()[0])
    assert not out.requires_grad and not lse.requires_grad


def test_refusals(plain_errors):
    """A call that FlashMLA's dense decode cannot make, or that this package cannot serve, raises one line."""
    q, cache, table, lengths = make_case([100, 40], 2)
    meta, _ = get_mla_metadata()
    good = {"q": q, "k_cache": cache, "block_table": table, "cache_seqlens": lengths, "head_dim_v": V,
            "tile_scheduler_metadata": meta}  # fmt: skip

    def refused(message, error=ValueError, **options):
        with pytest.raises(error, match=message):
            flash_mla_with_kvcache(**good | options)

    sparse = ("indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length")
    for name in sparse:
        refused(f"{name}: is not supported; pass None", UnsupportedConfiguration, **{name: torch.zeros(2)})
    refused("k_cache: only 1 key head is supported, got 2", UnsupportedConfiguration,
            k_cache=cache.expand(-1, -1, 2, -1))  # fmt: skip
    refused("^tile_scheduler_metadata: expected a result of get_mla_metadata, got Tensor$", TypeError,
            tile_scheduler_metadata=lengths)  # fmt: skip
    refused("^num_splits: expected None", num_splits=lengths)
    refused("^head_dim_v: expected at most the width 576 of q, got 577$", head_dim_v=577)
    refused(r"^cache_seqlens: expected shape \[2\]", cache_seqlens=lengths[:1])
    refused("^block_table: expected a tensor, got NoneType$", TypeError, block_table=None)
    refused(r"^k_cache: expected shape \[num_blocks, block_size, 1, 576\], got", k_cache=cache.squeeze(2))
    refused(r"^k_cache: expected shape \[num_blocks, block_size, 1, 576\], got", k_cache=cache[..., :575])
    refused("^k_cache: expected dtype torch.float32, got torch.bfloat16$", k_cache=cache.bfloat16())
    for dtype in (torch.float32, torch.float8_e5m2, torch.bool):
        refused(f"^k_cache: expected dtype {E4M3} or torch.uint8, got {dtype}$", is_fp8_kvcache=True,
                k_cache=cache.nan_to_num(0.0).to(dtype))  # fmt: skip
    refused("^backend: expected None, a name or a mapping from op to name, got int$", backend=3)
    refused("^q: expected another dtype than e4m3 without is_fp8_kvcache", q=q.to(E4M3))
    refused("^descale_k: expected None for the format compute_dtype, got a scale$", descale_k=torch.ones(1))
    refused("^descale_q: expected None for queries in torch.float32, got a scale$", is_fp8_kvcache=True,
            k_cache=cache.to(E4M3), descale_q=torch.ones(1))  # fmt: skip
    if cache.device.type == "cpu":  # on a GPU, the value would have to be waited for
        refused("^descale_k: expected a finite number above 0, got 0.0$", is_fp8_kvcache=True, k_cache=cache.to(E4M3),
                descale_k=torch.zeros(1))  # fmt: skip
        wanted = "cache_seqlens: expected lengths from 0 to 128, for 2 blocks of 64 tokens"
        refused(f"^{wanted}, got 129 at request 0$", cache_seqlens=lengths + 29)
        refused(f"^{wanted}, got -1 at request 1$", cache_seqlens=lengths - 41)
        refused(r"^block_table: expected blocks in \[0, 4\) at request 0, got", block_table=table + 4)
    for part in (q[:, :0], q[:, :, :0]):
        refused("^q: expected at least one query token, head and column, got shape", q=part)
    refused("^softmax_scale: expected", softmax_scale=math.nan)
    assert meta._plan is None  # no refused call changed the object
    flash_mla_with_kvcache(**good)
    refused("^tile_scheduler_metadata: expected calls with .*query_len=2.*, got .*query_len=1", q=q[:, :1])
    assert get_mla_metadata(lengths, num_heads_per_head_k=8, num_heads_k=1)[1] is None
    with pytest.raises(UnsupportedConfiguration, match="topk: is not supported; pass None"):
        get_mla_metadata(lengths, 8, 1, topk=64)
    with pytest.raises(UnsupportedConfiguration, match="num_heads_k: only 1 is supported, got 2"):
        get_mla_metadata(lengths, 8, 2)
    with pytest.raises(ValueError, match="^cache_seqlens: expected dtype torch.int32, got torch.int64$"):
        get_mla_metadata(lengths.long(), 8, 1)
