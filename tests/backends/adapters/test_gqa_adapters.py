"""Tests of the adapters that serve grouped-query attention, against the reference.

Without a GPU, flex_attention runs operation by operation, and a stand-in computes what flash-attn computes. The
stand-in has the parameters of the library's function. Like the library it reads whole tiles of keys, also the keys that
no query of the tile attends, and gives its own LSE to rows without keys. On a GPU the same tests run the libraries.

The letters of shapes: T query tokens, N heads, Nkv KV heads, Dh head dim.
"""

from __future__ import annotations

import functools
import math
import sys
import types
from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast import backends
from fast.backends import Backend
from fast.backends.adapters import flash_attn_gqa, flex_gqa, sources, torch_varlen
from fast.backends.adapters.flash_attn import FLASH_ATTN_2, FLASH_ATTN_3
from fast.backends.adapters.flex import FLEX
from fast.backends.adapters.torch_varlen import TORCH_VARLEN
from fast.parity import LSE_RELATIVE, compare
from reference.interfaces import CAUSAL, VISIBLE_LENS, GraphSupport, QueryLenSupport, UnsupportedConfiguration
from reference.interfaces.gqa import AttentionType

from ...gqa import test_fast_attention
from ...gqa.test_fast_attention import PACKED, attend, doubled, in_float64, packed_inputs
from ...support.backends import registered
from ...support.factories import assert_same_bits
from ...support.gqa import CONFIGS, GROUPED, LENS, MHA, gqa_batch, gqa_step

ON_GPU = torch.cuda.is_available()
ADAPTERS = {each.name: each for each in (FLASH_ATTN_2, FLASH_ATTN_3, FLEX, TORCH_VARLEN)}
PAGED, PACKED_OP = "gqa_paged_attention", "gqa_varlen_attention"
LONG = ((1, 300), (2, 67), (1, 0), (0, 9), (150, 150), (40, 333))
ALL = CONFIGS["all of them"]
# on a GPU a library computes with exp2 and log2, and may approximate the tanh of a soft cap
BUDGET = {"lse_relative": LSE_RELATIVE} if ON_GPU else {}
verdict, check_parity = (
    functools.partial(function, **BUDGET)
    for function in (test_fast_attention.verdict, test_fast_attention.check_parity)
)
TILE = 64  # keys that the stand-in reads at once
ROW_BLOCK = 64  # query tokens of a row block of flash-attn 2
VLLM = "vllm.vllm_flash_attn.flash_attn_interface"


@pytest.fixture(autouse=True)
def on_device():
    """Create tensors on the GPU if there is one."""
    with torch.device("cuda" if ON_GPU else "cpu"):
        yield


def library_attention(
    q, k, v, starts, lens, table, scale, causal, window, soft_cap, slopes, empty_lse, max_query_len, max_key_len
):
    """Compute attention as flash-attn does: whole tiles of keys, probabilities in the dtype of the queries.

    Args:
        q: [T, N, Dh].
        k: [S, Nkv, Dh], packed keys; or pages [num_pages, page size, Nkv, Dh].
        v: values like `k`.
        starts: first query token of each request, and first key of each request without pages.
        lens: keys of each request.
        table: [B, W] pages of each request; None for packed keys.
        scale: factor of the scores.
        causal: whether the mask is causal, bottom-right.
        window: keys before and after a query's own key; -1 for no limit.
        soft_cap: 0 for none.
        slopes: [N], or None.
        empty_lse: LSE of a row without keys.
        max_query_len: upper bound of the query lengths. flash-attn 2 takes q as one token of each request if it is 1.
        max_key_len: upper bound of the key lengths; a window of as many keys is no window.
    """
    if max_query_len == 1 and window == (-1, -1) and slopes is None and empty_lse > 0:
        assert q.shape[0] == len(lens), "the library takes q as one token of each request"
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), empty_lse, dtype=torch.float32)
    query_starts, key_starts = starts
    for request, keys in enumerate(lens):
        rows = slice(query_starts[request], query_starts[request + 1])
        position = torch.arange(rows.stop - rows.start)[:, None] + keys - (rows.stop - rows.start)
        # the library leaves out tiles before the window of the first query and behind the last visible key
        begin = 0 if window[0] < 0 or not len(position) else max(int(position[0]) - window[0], 0) // TILE * TILE
        key = torch.arange(begin, keys)
        if table is not None and empty_lse > 0:
            for first in range(0, len(position), ROW_BLOCK):
                sees = position[min(first + ROW_BLOCK, len(position)) - 1] >= 0 and keys > 0
                assert sees, "the library writes the LSE of a row block without keys to a wrong place"
        if not len(key) or not len(position):
            continue
        if table is None:
            own_k, own_v = (x[key + key_starts[request]] for x in (k, v))
        else:
            pages = table[request, (key // k.shape[1]).long()].long()
            assert ((pages >= 0) & (pages < k.shape[0])).all(), "the library reads a page that does not exist"
            own_k, own_v = (x[pages, key % k.shape[1]] for x in (k, v))
        visible = torch.ones(len(position), len(key), dtype=torch.bool)
        if causal:
            visible &= key <= position
        if window[0] >= 0:
            visible &= key >= position - window[0]
        if window[1] >= 0:
            visible &= key <= position + window[1]
        group = q.shape[1] // k.shape[2 if table is not None else 1]
        own_k, own_v = (x.float().repeat_interleave(group, 1) for x in (own_k, own_v))
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), own_k) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if slopes is not None and causal and not 0 <= window[0] < max_key_len:  # flash-attn 2 leaves out the position
            scores = scores + slopes.float()[:, None, None] * key
        elif slopes is not None:
            scores = scores - slopes.float()[:, None, None] * (position - key).abs()
        scores = scores.masked_fill(~visible, -torch.inf)
        found = scores.logsumexp(-1)
        weights = torch.where(found[..., None] == -torch.inf, 0, torch.exp(scores - found[..., None]))
        out[rows] = torch.einsum("hqk,khd->qhd", weights.to(q.dtype).float(), own_v).to(q.dtype)  # 0 * NaN is NaN
        if empty_lse == -torch.inf:  # flash-attn 3 also gives this LSE to rows whose sum is NaN
            found = torch.where(found.isnan(), empty_lse, found)
        lse[:, rows] = torch.where(found == -torch.inf, empty_lse, found)
    return out, lse


def vllm_function(empty_lse):
    """Return a stand-in for vLLM's `flash_attn_varlen_func`."""

    def flash_attn_varlen_func(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, softmax_scale=None,
        causal=False, window_size=None, softcap=0.0, alibi_slopes=None, block_table=None, return_softmax_lse=False,
        out=None, num_splits=0, fa_version=2,
    ):  # fmt: skip
        assert return_softmax_lse and out is None and (cu_seqlens_k is None) != (seqused_k is None)
        assert block_table is None or block_table.stride(-1) == 1
        assert block_table is None or k.shape[1] % 16 == 0
        assert fa_version == 2 or alibi_slopes is None
        assert num_splits == (1 if block_table is None else 0)
        lens = seqused_k.tolist() if cu_seqlens_k is None else cu_seqlens_k.diff().tolist()
        query_starts = cu_seqlens_q.tolist()
        assert max_seqlen_k >= max(lens, default=0) and max_seqlen_q >= max(cu_seqlens_q.diff().tolist(), default=0)
        if block_table is not None and fa_version == 3:  # larger pages may be read as a whole
            assert k.shape[1] <= 32
        starts = query_starts, None if cu_seqlens_k is None else cu_seqlens_k.tolist()
        return library_attention(
            q, k, v, starts, lens, block_table, softmax_scale, causal, window_size, softcap, alibi_slopes, empty_lse,
            max_seqlen_q, max_seqlen_k,
        )  # fmt: skip

    return flash_attn_varlen_func


def package_functions(version, empty_lse):
    """Return stand-ins for the functions of the package `flash_attn`, or of flash-attn 3's own package."""

    def varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, return_attn_probs=False, block_table=None, num_splits=1,
    ):  # fmt: skip
        assert return_attn_probs and (block_table is None or (version == 2 and k.shape[1] % 256 == 0))
        assert version == 2 or alibi_slopes is None
        starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        lens = cu_seqlens_k.diff().tolist()
        return (*library_attention(
            q, k, v, starts, lens, block_table, softmax_scale, causal, window_size, softcap, alibi_slopes, empty_lse,
            max_seqlen_q, max_seqlen_k,
        ), None)  # fmt: skip

    def with_cache(
        q, k_cache, v_cache, cache_seqlens=None, page_table=None, cu_seqlens_q=None, max_seqlen_q=None,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, num_splits=0, return_softmax_lse=False,
    ):  # fmt: skip
        assert return_softmax_lse and num_splits == 0 and k_cache.shape[1] <= 32
        return (*library_attention(
            q, k_cache, v_cache, (cu_seqlens_q.tolist(), None), cache_seqlens.tolist(), page_table, softmax_scale,
            causal, window_size, softcap, None, empty_lse, max_seqlen_q, page_table.shape[1] * k_cache.shape[1],
        ), None, None)  # fmt: skip

    return {"flash_attn_varlen_func": varlen} | ({} if version == 2 else {"flash_attn_with_kvcache": with_cache})


def torch_function(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """Compute what `varlen_attn` computes, with an LSE; `enable_gqa` must be given for fewer heads of keys."""
    assert enable_gqa or k.shape[1] == q.shape[1]
    starts = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert max_q >= max(cu_seq_q.diff().tolist()) and max_k >= max(cu_seq_k.diff().tolist())
    causal = window_size[1] == 0
    return library_attention(
        q, k, v, starts, cu_seq_k.diff().tolist(), None, scale, causal, window_size, 0, None, torch.inf, max_q, max_k
    )


def on_cpu(declared):
    """Return the declaration of an adapter for CPU tensors, under another name."""
    ops = {op: replace(support, only_named=False) for op, support in declared.ops.items() if "gqa" in op}
    return Backend(f"{declared.name}_on_cpu", -1, "cpu", ops)


@pytest.fixture(params=[*ADAPTERS, "package_2", "package_3", "torch_varlen_2_11"])
def adapter(request, monkeypatch):
    """Return the name of a backend with the launchers of an adapter that serves the device of the run."""
    name = request.param
    if ON_GPU:
        if name not in ADAPTERS:
            pytest.skip("a variant for the stand-in alone")
        declared = ADAPTERS[name]
        request_of = backends.KernelRequest(PACKED_OP, torch.device("cuda"))
        reasons = declared.validate_configuration(request_of)
        if reasons:
            pytest.skip("; ".join(reasons))
        yield name
        return
    declared = FLASH_ATTN_2 if name == "package_2" else FLASH_ATTN_3 if name == "package_3" else None
    version = 3 if name in ("flash_attn_3", "package_3") else 2
    empty = -torch.inf if version == 3 else torch.inf
    if name in ("flash_attn_2", "flash_attn_3"):
        source, functions = sources.Source("vllm", VLLM), {"flash_attn_varlen_func": vllm_function(empty)}
    else:
        source, functions = sources.Source("own", "own_package"), package_functions(version, empty)
    monkeypatch.setattr(flash_attn_gqa, "loaded", lambda _: (source, types.SimpleNamespace(**functions)))
    monkeypatch.setattr(torch_varlen, "_library", lambda: torch_function)
    monkeypatch.setattr(torch_varlen, "_takes_groups", lambda: name != "torch_varlen_2_11")
    uncompiled(monkeypatch)
    made = on_cpu(declared or ADAPTERS["torch_varlen" if name == "torch_varlen_2_11" else name])
    if PAGED in made.ops and name in ("flash_attn_2", "package_2"):  # the machine's own packages must not matter
        step = 16 if name == "flash_attn_2" else 256
        made.ops[PAGED] = replace(made.ops[PAGED], block_sizes=tuple(range(step, 1025, step)))
    with registered(made):
        yield made.name


def uncompiled(monkeypatch):
    """Run flex_attention operation by operation, by the switch that PyTorch has for debugging."""
    module = "torch.nn.attention.flex_attention"
    __import__(module)
    monkeypatch.setattr(sys.modules[module], "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)

    def made(dtype, heads, kv_heads, head_dim, softmax_scale, soft_cap, has_alibi):
        def attend(*tensors):
            assert (tensors[-1] is not None) == has_alibi
            return flex_gqa.attend_rows(*tensors, softmax_scale, soft_cap or 0.0)

        return attend

    monkeypatch.setattr(flex_gqa, "_compiled", made)


def paged_batch(config, lens, adapter, dtype, layout="NHD", block_size=None):
    """Return a batch whose plan promises a causal mask; skip if the adapter does not serve it."""
    support = backends.support_of(adapter, PAGED) if PAGED in declared_ops(adapter) else None
    if support is None:
        pytest.skip("serves packed keys alone")
    block_size = block_size or next(each for each in (64, 256) if each in (support.block_sizes or (each,)))
    if support.block_sizes and block_size not in support.block_sizes:
        pytest.skip(f"does not serve blocks of {block_size} tokens")
    batch = gqa_batch(config, lens, block_size, dtype, layout)
    batch = replace(batch, metadata=replace(batch.metadata, mask=CAUSAL))
    reasons = missing_features(adapter, PAGED, config)
    if reasons:
        with pytest.raises(UnsupportedConfiguration, match=reasons):
            attend(fast, batch, backend=adapter)
        pytest.skip(reasons)
    return batch


def declared_ops(adapter):
    return next(each.ops for each in backends.registered() if each.name == adapter)


def missing_features(adapter, op, config):
    """Return the reason with which an adapter refuses the features of a config; an empty text if it serves them."""
    needed = {
        "alibi": config.alibi_slopes is not None,
        "soft_cap": config.logits_soft_cap is not None,
        "sinks": config.attention_sinks,
        "window": config.sliding_window is not None,
        "attention_chunk": config.attention_chunk_size is not None and op == PACKED_OP,
    }
    lacking = [
        name for name, is_needed in needed.items() if is_needed and name not in declared_ops(adapter)[op].features
    ]
    return f"has no {', '.join(lacking)}" if lacking else ""


@pytest.mark.parametrize("number, name", list(enumerate(CONFIGS)))
def test_paged(number, name, adapter):
    """Attend a paged cache -> within the budgets; a feature that the adapter lacks is refused by its name."""
    for dtype in (torch.bfloat16, torch.float16) if ON_GPU else ((torch.bfloat16, torch.float16)[number % 2],):
        check_parity(paged_batch(CONFIGS[name], LENS, adapter, dtype), backend=adapter)


@pytest.mark.parametrize(
    "config", [GROUPED, replace(GROUPED, sliding_window=50, attention_sinks=True)], ids=["", "all"]
)
def test_long_requests(config, adapter):
    """Attend several tiles of keys, in blocks that are divided into pages -> within the budgets."""
    for block_size in (16, 48, 64, 96, 256):
        support = declared_ops(adapter).get(PAGED)
        if support is not None and support.block_sizes is not None and block_size not in support.block_sizes:
            continue
        check_parity(paged_batch(config, LONG, adapter, torch.bfloat16, block_size=block_size), backend=adapter)


def test_other_layouts(adapter):
    """Attend a cache in the layout HND -> within the budgets, or an error that names the strides."""
    batch = paged_batch(replace(GROUPED, sliding_window=19), LENS, adapter, torch.bfloat16, "HND")
    if "3" in adapter and batch.block_size > 32:
        with pytest.raises(UnsupportedConfiguration, match="only if they follow each other in memory"):
            attend(fast, batch, backend=adapter)
        batch = paged_batch(batch.config, LENS, adapter, torch.bfloat16, "HND", 32)
    check_parity(batch, backend=adapter)


def test_given_outputs(adapter):
    """Write into strided memory, and into float32 -> the same numbers; the memory beside the output stays."""
    batch = paged_batch(replace(GROUPED, attention_sinks=True), LENS, adapter, torch.bfloat16)
    plain = attend(fast, batch, backend=adapter)
    wide = torch.full((*batch.q.shape[:2], batch.q.shape[2] + 8), 7.0, dtype=torch.bfloat16)
    made = attend(fast, batch, out=wide[..., 8:], backend=adapter)
    assert torch.equal(wide[..., 8:], plain.out) and torch.equal(made.lse, plain.lse) and wide[..., :8].eq(7).all()
    state = attend(fast, batch, out_dtype=torch.float32, backend=adapter)
    assert state.out.dtype == torch.float32 and torch.equal(state.out.bfloat16(), plain.out)


def test_a_batch_without_tokens(adapter):
    """Attend no token, keys of no request, and tables without a column -> empty states, or output 0 and the sinks."""
    config = replace(GROUPED, attention_sinks=True)
    batch = paged_batch(replace(config, sliding_window=9), ((2, 0), (1, 0)), adapter, torch.bfloat16)
    plan = replace(batch.metadata, block_table=batch.metadata.block_table[:, :0])
    check_parity(replace(batch, metadata=plan), backend=adapter)
    for lens in ((), ((0, 5),), ((2, 0), (1, 0))):
        check_parity(paged_batch(config, lens, adapter, torch.bfloat16), backend=adapter)


def test_a_plan_with_any_mask(adapter):
    """Attend with a plan that promises no causal mask -> flex serves it, and flash-attn refuses it."""
    batch = paged_batch(GROUPED, LENS, adapter, torch.bfloat16)
    batch = replace(batch, metadata=replace(batch.metadata, mask="visible_lens"))
    if "flex" in adapter:
        return check_parity(batch, backend=adapter)
    with pytest.raises(UnsupportedConfiguration, match="applies the masks causal, got visible_lens"):
        attend(fast, batch, backend=adapter)


def test_a_first_key_without_a_window(adapter):
    """Attend with first visible keys that no window explains -> flex serves it, and flash-attn refuses it."""
    windowed = paged_batch(replace(GROUPED, sliding_window=19), LENS, adapter, torch.bfloat16)
    batch = replace(windowed, config=GROUPED)
    if "flex" in adapter:
        gold, low = attend(reference, in_float64(batch)), attend(reference, batch)
        return verdict(PAGED, attend(fast, batch, backend=adapter), low, gold)
    with pytest.raises(UnsupportedConfiguration, match="has no attention_chunk"):
        attend(fast, batch, backend=adapter)


@pytest.mark.parametrize("name", PACKED)
def test_packed(name, adapter):
    """Attend packed keys with every mask -> within the budgets; a feature that the adapter lacks is refused by name."""
    config = PACKED[name]
    for dtype in (torch.bfloat16, torch.float16):
        arguments = packed_inputs(config, dtype)
        lacking = missing_features(adapter, PACKED_OP, config)
        if lacking:
            with pytest.raises(UnsupportedConfiguration, match=lacking):
                fast.gqa_varlen_attention(*arguments, backend=adapter)
            continue
        low, gold = reference.gqa_varlen_attention(*arguments), reference.gqa_varlen_attention(*doubled(arguments))
        state = fast.gqa_varlen_attention(*arguments, backend=adapter)
        verdict(PACKED_OP, state, low, gold)
        out = torch.full((*state.out.shape[:2], state.out.shape[2] + 8), 7.0, dtype=dtype)[..., :-8]
        made = fast.gqa_varlen_attention(*arguments, out=out, backend=adapter)
        assert torch.equal(out, state.out) and torch.equal(made.lse, state.lse)


@pytest.mark.parametrize("attention_type", [AttentionType.DECODER, AttentionType.ENCODER])
def test_packed_without_keys(attention_type, adapter):
    config = replace(GROUPED, attention_sinks=True, attention_type=attention_type)
    q, k, v, *_, sinks = packed_inputs(config, torch.bfloat16)
    none = torch.zeros(2, dtype=torch.int32)
    state = fast.gqa_varlen_attention(q[:0], k[:0], v[:0], none, none, 0, 0, config, sinks, backend=adapter)
    assert state.out.shape == (0, *q.shape[1:]) and state.lse.shape == (q.shape[1], 0)
    if attention_type is AttentionType.DECODER:
        three = torch.tensor([0, 3], dtype=torch.int32)
        state = fast.gqa_varlen_attention(q[:3], k[:0], v[:0], three, none, 3, 0, config, sinks, backend=adapter)
        assert state.out.eq(0).all() and torch.equal(state.lse, sinks.float()[:, None].expand(-1, 3))


def test_nan_stays_in_its_request(adapter):
    """Plant NaN in one request -> NaN in its rows, and the other requests keep their bits."""
    if "flex" in adapter and not ON_GPU:
        pytest.skip("without its kernel, flex_attention multiplies the values of all requests by probabilities")
    batch = paged_batch(GROUPED, ((1, 70), (3, 40), (1, 150)), adapter, torch.bfloat16)
    plain = attend(fast, batch, backend=adapter)
    cache = batch.kv_cache.clone()
    blocks = batch.metadata.block_table[1, : math.ceil(40 / batch.block_size)].long()
    cache[:, blocks] = torch.nan
    found = attend(fast, replace(batch, kv_cache=cache), backend=adapter)
    others = [0, 4]
    assert torch.equal(found.out[others], plain.out[others]) and torch.equal(found.lse[:, others], plain.lse[:, others])
    assert found.out[1:4].isnan().all() and found.lse[:, 1:4].isnan().all()


def test_a_layer(adapter):
    """Run a step of decodes and prefills with the adapter for both parts -> the output is within the budget."""
    if PAGED not in declared_ops(adapter):
        pytest.skip("serves packed keys alone")
    config, names = replace(MHA, sliding_window=19), {"gqa_prefill": adapter, "gqa_decode": adapter}
    lens = [(query_len, length) for query_len, length in LENS if length]
    batch = gqa_batch(config, lens, 256, torch.bfloat16, new_tokens=False)
    common = fast.CommonAttentionMetadata.from_lens(*zip(*lens, strict=True), batch.metadata.block_table, 256)

    def step(module, batch, **options):
        plan = module.GQAMetadataBuilder(config, 256, 64, len(lens), **options).build(0, common)
        assert plan.num_decodes > 0 and plan.num_prefills > 0
        return module.GQAAttention(config, **options)(batch.q, batch.new_k, batch.new_v, batch.kv_cache.clone(), plan)

    wide = replace(in_float64(batch), k=tuple(k.double() for k in batch.k), v=tuple(v.double() for v in batch.v))
    parity = compare("forward", step(fast, batch, backend=names), step(reference, batch), step(reference, wide))
    assert parity.passed, parity


def test_the_declarations(monkeypatch):
    """Ask what each adapter serves -> the features that it lacks, by name, and no automatic choice."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    request = backends.paged_attention_request(
        replace(CONFIGS["all of them"], attention_sinks=True), torch.device("cuda"), torch.bfloat16, 64,
        QueryLenSupport.VARLEN, mask=CAUSAL,
    )  # fmt: skip
    found = {name: [why for why in each.ops[PAGED].reasons(request)] for name, each in ADAPTERS.items()
             if PAGED in each.ops}  # fmt: skip
    assert found["flash_attn_3"] == ["has no alibi"] and found["flex"] == []
    assert "has no alibi" not in found["flash_attn_2"]
    for name, each in ADAPTERS.items():
        assert all(each.is_only_named(op) for op in (PAGED, PACKED_OP) if op in each.ops), name


def test_one_graph_for_all_lengths(monkeypatch):
    """Trace whole calls of flex with torch.compile -> within the budget, and one graph of each kind for all batches."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    flex_gqa._compiled.cache_clear()
    graphs = []
    try:
        with registered(on_cpu(FLEX)), torch.device("cpu"):
            for lens in (((1, 1), (17, 53)), ((3, 257), (130, 300)), ((1, 5), (1, 9)), ((150, 150), (1, 900))):
                check_parity(gqa_batch(ALL, lens, 16, torch.bfloat16), backend="flex_on_cpu")
                graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    finally:
        flex_gqa._compiled.cache_clear()
    assert graphs[1] == graphs[3] <= graphs[0] + 1


def test_blocks_before_a_window():
    """Remove the blocks before a window -> tables and lengths that begin with the first visible block."""
    table = torch.tensor([[-7, 99, 3, 4], [5, 6, -1, 8]], dtype=torch.int32)
    lens, starts = torch.tensor([60, 30], dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)
    first = torch.tensor([40, 45, 3], dtype=torch.int32)
    found, kept = flash_attn_gqa.without_hidden_blocks(table, lens, first, starts, 16)
    assert found[0, :2].tolist() == [3, 4] and found[1].tolist() == [5, 6, -1, 8] and kept.tolist() == [28, 30]


def test_a_window_in_the_last_block(adapter):
    """Attend the last keys of a request, whose last block has NaN behind the last token -> within the budgets."""
    config = replace(GROUPED, sliding_window=3)
    check_parity(paged_batch(config, ((1, 85), (2, 100)), adapter, torch.bfloat16), backend=adapter)


def test_freed_blocks_of_other_requests(adapter):
    """Let entries before the windows name a block with NaN, which another request may own -> within the budgets."""
    batch = paged_batch(replace(GROUPED, sliding_window=19), LONG, adapter, torch.bfloat16)
    table, num_blocks = batch.metadata.block_table.clone(), batch.kv_cache.shape[1]
    used = (table >= 0) & (table < num_blocks)
    spare = next(block for block in range(num_blocks) if block not in table[used].tolist())
    assert batch.kv_cache[:, spare].isnan().all() and not used[0, 0]
    plan = replace(batch.metadata, block_table=torch.where(used, table, spare))
    check_parity(replace(batch, metadata=plan), backend=adapter)


def test_one_query_token_of_some_requests(adapter):
    """Attend packed keys with requests of one query token and of none -> within the budgets."""
    config = replace(GROUPED, attention_type=AttentionType.CROSS)
    q, k, v, *_ = packed_inputs(config, torch.bfloat16)
    starts = [torch.tensor(each, dtype=torch.int32) for each in ([0, 1, 1, 2], [0, 9, 20, 27])]
    arguments = (q[:2], k[:27], v[:27], *starts, 1, 11, config)
    low, gold = reference.gqa_varlen_attention(*arguments), reference.gqa_varlen_attention(*doubled(arguments))
    verdict(PACKED_OP, fast.gqa_varlen_attention(*arguments, backend=adapter), low, gold)


@pytest.mark.parametrize("module", [fast, reference], ids=["fast", "reference"])
def test_ranks_with_a_window(module):
    """Let two ranks share sequences under a window -> the plan promises no causal mask, so flash-attn is refused.

    flash-attn counts the keys of a window, of which a rank has only a part.
    """
    config = replace(GROUPED, num_heads=4, sliding_window=17)
    groups = module.simulate(2, 1, lambda ranks: ranks)[0]
    table = torch.arange(16, dtype=torch.int32).view(2, 8)
    common = fast.CommonAttentionMetadata.from_lens([1, 1], [101, 41], table, 16)  # rank 0 owns both new tokens
    for window, mask in ((17, VISIBLE_LENS), (None, CAUSAL)):
        config = replace(config, sliding_window=window)
        builder = module.GQAMetadataBuilder(config, 16, 128, 4, context_parallel=groups)
        assert builder.build(0, common).decode.mask == mask
        assert builder.build_for_cudagraph_capture(common).decode.mask == mask


def test_a_builder_knows_its_decode_backend(adapter):
    """Build with a named decode backend -> no cascade, graph or batch invariance that the backend cannot serve."""
    if PAGED not in declared_ops(adapter):
        pytest.skip("serves packed keys alone")
    names = {"gqa_decode": adapter}
    options = dict(dtype=torch.bfloat16, num_processors=132, cascade_costs=fast.CascadeCosts())
    builder = fast.GQAMetadataBuilder(GROUPED, 256, 4096, 8, backend=names, **options)
    assert builder.graph_support is GraphSupport.NONE
    with pytest.raises(UnsupportedConfiguration, match="is not batch-invariant$"):
        fast.GQAMetadataBuilder(GROUPED, 256, 4096, 8, backend=names, batch_invariant=True)
    with pytest.raises(UnsupportedConfiguration, match="has graph support 'none', got graph_support 'any'$"):
        fast.GQAMetadataBuilder(GROUPED, 256, 4096, 8, backend=names, graph_support=GraphSupport.ANY)
    table = torch.arange(8, dtype=torch.int32).repeat(8, 1)
    table = torch.cat((table, 8 + torch.arange(8, dtype=torch.int32)[:, None]), dim=1)
    common = fast.CommonAttentionMetadata.from_lens([1] * 8, [2100] * 8, table, 256)
    assert fast.GQAMetadataBuilder(GROUPED, 256, 4096, 8, **options).build(2048, common).cascade is not None
    assert (builder.build(2048, common).cascade is not None) == ("flex" in adapter)


def test_a_cache_that_cannot_be_divided(adapter):
    """Give flash-attn 3 blocks that do not follow each other -> the layer raises before it writes."""
    if "3" not in adapter:
        pytest.skip("reads a cache with any strides")
    batch = gqa_batch(GROUPED, LENS, 64, torch.bfloat16, "HND", new_tokens=False)
    batch = replace(batch, metadata=replace(batch.metadata, mask=CAUSAL))
    cache = batch.kv_cache.clone(memory_format=torch.preserve_format)
    layer = fast.GQAAttention(GROUPED, backend={PAGED: adapter})
    with pytest.raises(UnsupportedConfiguration, match="only if they follow each other in memory"):
        layer(batch.q, batch.new_k, batch.new_v, cache, gqa_step(batch, 2))
    assert_same_bits(cache, batch.kv_cache)


def test_explain_names_the_adapter(adapter):
    """Ask which backend serves a layer -> the adapter, for both ops if it has both."""
    device = "cuda" if ON_GPU else "cpu"
    lines = backends.explain(
        GROUPED, device=device, dtype=torch.bfloat16, block_size=256, backend={PACKED_OP: adapter}
    ).splitlines()
    assert f"{PACKED_OP}: {adapter}, bound" in lines
    if PAGED in declared_ops(adapter):
        lines = backends.explain(GROUPED, device=device, dtype=torch.bfloat16, block_size=256, backend={PAGED: adapter})
        assert f"{PAGED}: {adapter}, bound" in lines.splitlines()


@pytest.mark.parametrize("window", [None, 1, 100, 300])
def test_blocks_of_the_row_mask(window):
    """List the blocks of keys of each block of queries -> exactly those with a visible key; full ones need no mask."""
    config = replace(GROUPED, sliding_window=window)
    batch = gqa_batch(config, LONG, 16, torch.float32)
    plan = batch.metadata
    first = torch.zeros_like(plan.visible_lens) if plan.first_visible is None else plan.first_visible
    ranges = flex_gqa.Ranges(torch.minimum(first, plan.visible_lens), plan.visible_lens, plan.visible_lens - 1)
    queries = flex_gqa.blocks_of(plan.query_start_loc, batch.q.shape[0])
    request = flex_gqa.request_of_tokens(plan.query_start_loc, batch.q.shape[0])
    keys = flex_gqa.keys_of_cache(batch.kv_cache, plan.block_table, request, ranges, plan.max_seq_len)
    row = flex_gqa.rows_of_tokens(request, plan.query_start_loc, queries)
    mask = flex_gqa.row_mask(queries, row, keys, request, ranges)
    places = torch.arange(keys.keys.shape[2])
    dense = (places >= mask.first[:, None]) & (places < mask.end[:, None])
    used = torch.zeros(dense.shape[0], dtype=torch.bool)
    used[row.long()] = True
    width = flex_gqa.BLOCK
    for number in range(queries.count):
        rows = slice(number * width, (number + 1) * width)
        for at in range(dense.shape[1] // width):
            part = dense[rows, at * width : (at + 1) * width]
            full = bool(part[used[rows]].all()) and bool(used[rows].any())
            lists = (mask.partial, mask.partial_blocks), (mask.full, mask.full_blocks)
            listed = [int(at in blocks[0, 0, number, : counts[0, 0, number]].tolist()) for counts, blocks in lists]
            assert listed == [int(bool(part.any()) and not full), int(full)], (number, at)
