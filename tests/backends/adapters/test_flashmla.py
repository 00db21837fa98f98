"""Tests of the adapter to FlashMLA: with the library on a GPU, and with its unmodified Python without a GPU."""

from __future__ import annotations

import contextlib
from dataclasses import fields, replace

import pytest
import torch

import fast
import reference
from fast import backends
from fast.backends import Backend
from fast.backends.adapters import flashmla, sources
from fast.backends.adapters.flash_attn import FLASH_ATTN_3
from fast.backends.adapters.flashinfer_mla import FLASHINFER_MLA
from fast.backends.adapters.flashmla import FLASHMLA
from fast.parity import compare_states
from reference.interfaces import (
    COMPUTE_FORMAT,
    FP8_DS_MLA,
    FP8_E4M3,
    NEUTRAL_COSTS,
    AttentionState,
    DecodeMetadata,
    GraphSupport,
    MLAConfig,
    QueryLenSupport,
    UnsupportedConfiguration,
    to_e4m3,
)

from ...support.backends import with_backends
from ...support.decode_inputs import SCALE, arguments, make_inputs, make_stored_inputs, on_device, verdict
from ...support.fp8_modes import products
from ...support.libraries import (
    FLASHMLA_DENSE,
    FLASHMLA_E4M3,
    FLASHMLA_E4M3_SCHEDULE,
    entries_in_pages,
    imported_python,
    paged_attention,
    recorded_operators,
)
from ...support.triton_mode import DEVICE, ON_GPU

DTYPES = (torch.bfloat16, torch.float16)
LENS = {  # query length, sequence lengths
    "one token": (1, [0, 1, 63, 64, 65, 129, 521]),
    "two tokens": (2, [0, 2, 63, 64, 65, 131, 0]),
    "empty": (1, [0, 0]),
    "long": (1, [3001, 0, 7, 1024]),
    "no requests": (1, []),
}
PACKAGES = {source.package: source for source in flashmla.SOURCES}


def compiled_state(q, pages, seq_lens, table, scale, causal):
    """Return out [B, Sq, N, 512] and lse [B, N, Sq] in float64; LSE +inf for rows without keys."""
    requests, query_len, heads, width = q.shape
    entries = entries_in_pages(pages.squeeze(2), table)
    rows = q.reshape(-1, heads, width)
    out, lse = paged_attention(rows, entries, seq_lens.tolist(), [query_len] * requests, scale, 512, causal)
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
    return out.view(requests, query_len, heads, 512), lse.view(heads, requests, query_len).transpose(0, 1).contiguous()


def dense_decode(given):
    """Compute what the compiled decode of FlashMLA computes."""
    names = ("q", "kcache", "seqlens_k", "block_table", "softmax_scale", "is_causal")
    out, lse = compiled_state(*[given[name] for name in names])
    assert given["kcache"].shape[1:] == (64, 1, 576) and given["head_size_v"] == 512
    schedule = given.get("tile_scheduler_metadata"), given.get("num_splits")
    if schedule[0] is None:
        schedule = torch.arange(16, dtype=torch.int32).view(2, 8), given["seqlens_k"].cumsum(0).int()
    return out.to(given["q"].dtype), lse.float(), *schedule


def e4m3_decode(given):
    """Compute what the decode in e4m3 computes; rows of requests without keys get other numbers, as in the kernel."""
    table, pages = given["block_table"], given["kcache"]
    assert table.storage_offset() >= 1 and table.stride(1) == 1
    before = table.as_strided((table.shape[0],), (table.stride(0),), table.storage_offset() - 1)
    assert bool(((before >= 0) & (before < pages.shape[0])).all())  # the kernel loads the block with this number
    q = given["q"].double() * given["descale_q"].double()
    keys = pages.double() * given["descale_k"].double()
    out, lse = compiled_state(q, keys, given["seqlens_k"], table, given["softmax_scale"], given["is_causal"])
    empty = given["seqlens_k"] == 0
    out[empty], lse[empty] = torch.nan, 3.5
    return [out.to(torch.bfloat16), lse.float()]


@contextlib.contextmanager
def recorded(package="vllm", schema=FLASHMLA_DENSE):
    """Import a package's own Python of FlashMLA with recorders in the place of its compiled part."""
    functions = {
        FLASHMLA_DENSE: dense_decode,
        FLASHMLA_E4M3: e4m3_decode,
        FLASHMLA_E4M3_SCHEDULE: lambda given: [torch.full((4, 8), 7, dtype=torch.int32), given["seqlens_k"].cumsum(0)],
    }
    e4m3 = {key: functions[key] for key in (FLASHMLA_E4M3, FLASHMLA_E4M3_SCHEDULE)}
    with contextlib.ExitStack() as stack:
        dense = stack.enter_context(recorded_operators("_flashmla_C", {FLASHMLA_DENSE: dense_decode}))
        found = dense | stack.enter_context(recorded_operators("_flashmla_extension_C", e4m3))
        if package == "vllm":
            compiled = "vllm._flashmla_C", "vllm._flashmla_extension_C"
            python = imported_python(PACKAGES["vllm"].module, *compiled, bare="vllm")
        else:
            recorder = {"dense_decode_fwd": dense["dense_decode_fwd"]}
            python = imported_python(PACKAGES[package].module, "flash_mla.cuda", **recorder)
        stack.enter_context(python)
        yield found


@pytest.fixture(params=PACKAGES)
def library(request, monkeypatch):
    """Provide FlashMLA: on a GPU the library, and else one package's own Python; return the recorders or None."""
    if not sources.is_installed(PACKAGES[request.param].module):
        pytest.skip(f"{request.param} is not installed")
    monkeypatch.setattr(flashmla, "SOURCES", (PACKAGES[request.param],))
    if not ON_GPU:
        with recorded(request.param) as recorders:
            yield recorders
        return
    if not FLASHMLA.supports_compute_capability(torch.cuda.get_device_capability()):
        pytest.skip("FlashMLA does not serve this GPU")
    if reasons := sources.missing_artifacts(flashmla.SOURCES):
        pytest.skip("; ".join(reasons))
    yield None


def batch(name, heads, dtype):
    query_len, seq_lens = LENS[name]
    return make_inputs([query_len] * len(seq_lens), seq_lens, heads, dtype)


def decode(inputs, prepared=(), out=None, **options):
    """Launch the decode on DEVICE; return the state on the CPU."""
    out, lse = flashmla.mla_decode(*arguments(*inputs, **options), out, prepared=prepared)
    assert out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
    return AttentionState(out.cpu(), lse.cpu())


@pytest.mark.parametrize("heads", [16, 64, 128] if ON_GPU else [16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", LENS)
def test_within_the_budget(lens, dtype, heads, library):
    """Decode over a cache with NaN in free entries, and numbers out of range in the block table -> within the budget.

    The schedule of the library is made in the call or ahead, and the output goes to new or to given memory.
    """
    inputs = batch(lens, heads, dtype)
    state = decode(inputs)
    verdict(state, *inputs)
    wide = decode(inputs, out_dtype=torch.float32)
    assert torch.equal(wide.out, state.out.float()) and torch.equal(wide.lse, state.lse)
    if not inputs[3].seq_lens.shape[0]:
        return
    prepared = flashmla.prepare(on_device(inputs[3]), heads)
    out = torch.full(inputs[0].shape, torch.nan, dtype=dtype, device=DEVICE)
    ahead = decode(inputs, prepared, out)
    assert torch.equal(ahead.out, state.out) and torch.equal(ahead.lse, state.lse) and torch.equal(out.cpu(), state.out)
    if library is not None:
        calls = library["dense_decode_fwd"].calls
        assert torch.equal(calls[-1]["tile_scheduler_metadata"], prepared[0])
        assert calls[0]["tile_scheduler_metadata"] is None and calls[-2]["kcache"].shape[0] == 1
        assert all(call["is_causal"] and call["q"].shape[2:] == (heads, 576) for call in calls)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_schedule_is_made_for_the_real_lengths(package, monkeypatch):
    """Prepare a step -> the library gets the lengths, the shape of the queries and a table as wide as the real one."""
    if ON_GPU or not sources.is_installed(PACKAGES[package].module):
        pytest.skip("needs the library's Python and no GPU")
    monkeypatch.setattr(flashmla, "SOURCES", (PACKAGES[package],))
    plan = batch("two tokens", 16, torch.bfloat16)[3]
    with recorded(package) as recorders:
        schedule = flashmla.prepare(plan, 128)
        call = recorders["dense_decode_fwd"].calls[0]
        assert torch.equal(schedule[1], plan.seq_lens.cumsum(0).int())
    assert call["q"].shape == (7, 2, 128, 576) and torch.equal(call["seqlens_k"], plan.seq_lens)
    assert call["block_table"].shape == plan.block_table.shape and call["block_table"].eq(0).all()


def test_nan_stays_in_its_request(library):
    """Put NaN into a key and into a query -> NaN in these requests, and the same bits as before in the others."""
    inputs = batch("one token", 16, torch.bfloat16)
    plain = decode(inputs)
    ql, _, cache, plan = inputs
    cache[plan.block_table[5, 1], 3] = torch.nan
    ql[6] = torch.nan
    state = decode(inputs)
    assert torch.equal(state.out[:5], plain.out[:5]) and torch.equal(state.lse[:, :5], plain.lse[:, :5])
    assert state.out[5:].isnan().any(-1).all() and state.lse[:, 6].isnan().all()


def test_later_calls(library):
    """Keep the function of a first call -> later calls with other values and memory get the results of a new call."""
    first, *later = (arguments(*batch("two tokens", 16, torch.bfloat16)) for _ in range(3))
    kept, kept_into = flashmla.kept_decode(*first), flashmla.kept_decode(*first, torch.empty_like(first[0]))
    for given in (first, *later):
        found, wanted = kept(*given), flashmla.mla_decode(*given)
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
        out = torch.full(given[0].shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)
        assert kept_into(*given, out)[0] is out and torch.equal(out, wanted[0])


def test_padding_requests(library):
    """Decode with requests without query tokens at the end of the batch, NaN in their rows -> no other row changes."""
    inputs = batch("two tokens", 16, torch.bfloat16)
    ql, q_pe, cache, plan = inputs
    plan = replace(plan, seq_lens=torch.cat((plan.seq_lens[:5], torch.zeros(2, dtype=torch.int32))))
    plain = decode((ql, q_pe, cache, plan))
    ends = plan.query_start_loc.clamp(max=10)
    ql, q_pe = ql.clone(), q_pe.clone()
    ql[10:], q_pe[10:] = torch.nan, torch.nan
    state = decode((ql, q_pe, cache, replace(plan, query_start_loc=ends)))
    assert torch.equal(state.out[:10], plain.out[:10]) and torch.equal(state.lse[:, :10], plain.lse[:, :10])


def rounded_to_e4m3(queries, q_scale, cache, kv_scale, plan, out_dtype):
    """Decode in float64, but round where the kernel rounds.

    The kernel rounds probabilities to e4m3 and the output to `out_dtype`. It adds the products of all 576 columns of a
    score in one sum of the Tensor Cores.
    """
    q = torch.cat([x.double() for x in queries], -1) * q_scale.double()
    keys = cache.double() * kv_scale.double()
    entries = entries_in_pages(keys, plan.block_table)
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, 512, dtype=torch.float64)
    lse = torch.full((heads, tokens), -torch.inf)
    for request, length in enumerate(plan.seq_lens.tolist()):
        own = entries(request, length)
        for token in range(*plan.query_start_loc[request : request + 2].tolist()):
            seen = int(plan.visible_lens[token])
            if seen:
                scores = products(q[token], own[:seen], True, columns=576).float() * SCALE
                weights = torch.exp(scores - scores.amax(-1, keepdim=True))
                rounded = to_e4m3(weights, torch.tensor(1.0)).double()
                out[token] = rounded @ own[:seen, :512] / weights.sum(-1, dtype=torch.float64)[:, None]
                lse[:, token] = scores.logsumexp(-1)
    return AttentionState(out.to(out_dtype), lse)


@pytest.mark.parametrize("heads", [16, 64, 128] if ON_GPU else [16])
@pytest.mark.parametrize("lens", LENS)
def test_decode_in_e4m3(lens, heads):
    """Decode queries in e4m3 over a cache in e4m3 -> within the budget that follows from rounded probabilities."""
    query_len, seq_lens = LENS[lens]
    (ql, q_pe, cache, plan), kv_scale = make_stored_inputs(
        FP8_E4M3, [query_len] * len(seq_lens), seq_lens, heads, torch.bfloat16
    )
    q_scale = torch.tensor(0.021)
    queries = [to_e4m3(x.float(), q_scale) for x in (ql, q_pe)]
    options = {"cache_format": FP8_E4M3, "kv_scale": kv_scale, "out_dtype": torch.bfloat16}
    with contextlib.ExitStack() as stack:
        _need_e4m3(stack)
        given = arguments(*queries, cache, plan, **options)
        modes = {"fp8_mode": "fp8_product", "q_scale": q_scale.to(DEVICE)}
        out, lse = flashmla.mla_decode(*given, **modes)
        wide, _ = flashmla.mla_decode(*given[:10], torch.float32, *given[11:], **modes)
        assert torch.equal(wide, out.float())
        if plan.seq_lens.shape[0]:
            prepared = flashmla.prepare(on_device(plan), heads, "fp8_product")
            ahead, ahead_lse = flashmla.mla_decode(*given, **modes, prepared=prepared)
            assert torch.equal(ahead, out) and torch.equal(ahead_lse, lse)
    value = AttentionState(out.cpu(), lse.cpu())
    low = rounded_to_e4m3(queries, q_scale, cache, kv_scale, plan, torch.bfloat16)
    gold = reference.mla_decode(
        *queries, cache, plan, SCALE, None, torch.float64, FP8_E4M3, kv_scale, "fp8_product", q_scale
    )
    for parity in compare_states("mla_decode", value, low, gold):
        assert parity.passed, parity
    unseen = plan.visible_lens == 0
    assert value.out[unseen].eq(0).all() and value.lse[:, unseen].eq(-torch.inf).all()


def _need_e4m3(stack):
    """Provide the kernel for e4m3: on a GPU the library, and else recorders; skip the test if it is missing."""
    if not sources.is_installed(PACKAGES["vllm"].module):
        pytest.skip("vllm is not installed")
    if not ON_GPU:
        stack.enter_context(recorded())
    elif reasons := sources.missing_artifacts(flashmla.SOURCES_E4M3):
        pytest.skip("; ".join(reasons))
    elif not FLASHMLA.supports_compute_capability(torch.cuda.get_device_capability()):
        pytest.skip("FlashMLA does not serve this GPU")


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_replay_with_new_lengths(library):
    """Capture a decode, write new lengths and a new schedule in place, and replay -> the state for the new lengths."""
    ql, q_pe, cache, plan = make_inputs([2] * 4, [700, 130, 64, 300], 16, torch.bfloat16)
    given = arguments(ql, q_pe, cache, plan)
    prepared = tuple(x.clone() for x in flashmla.prepare(on_device(plan), 16))
    flashmla.mla_decode(*given, prepared=prepared)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashmla.mla_decode(*given, prepared=prepared)
    for lens in ([699, 2, 0, 299], [5, 130, 64, 2]):
        visible = torch.tensor([max(length - 1 + i, 0) if length else 0 for length in lens for i in (0, 1)])
        now = replace(plan, seq_lens=torch.tensor(lens, dtype=torch.int32), visible_lens=visible.int())
        given[4].copy_(now.seq_lens)
        given[6].copy_(now.visible_lens)
        for mine, new in zip(prepared, flashmla.prepare(on_device(now), 16), strict=True):
            mine.copy_(new)
        graph.replay()
        verdict(AttentionState(out.cpu(), lse.cpu()), ql, q_pe, cache, now)


def request_for(**change):
    """Return the request for a decode that FlashMLA can serve, with changes."""
    options = dict(
        dtype=torch.bfloat16, head_dims=(("kv_lora_rank", 512), ("qk_rope_head_dim", 64)), block_size=64,
        query_lens=QueryLenSupport.UNIFORM, out_dtype=torch.bfloat16, cache_format=COMPUTE_FORMAT, mask="causal",
        lse=True, graph=GraphSupport.ONE_QUERY_LEN,
    )  # fmt: skip
    return backends.KernelRequest("mla_decode", torch.device("cpu"), **(options | change))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(), None),
        (dict(cache_format=FP8_E4M3, fp8_mode="fp8_product", dtype=None), None),
        (dict(dtype=torch.float32), "serves torch.bfloat16, torch.float16, got torch.float32"),
        (dict(block_size=16), "serves block sizes (64,), got 16"),
        (dict(head_dims=(("kv_lora_rank", 256),)), "serves kv_lora_rank in (512,), got 256"),
        (dict(head_dims=(("qk_rope_head_dim", 0),)), "serves qk_rope_head_dim in (64,), got 0"),
        (dict(query_lens=QueryLenSupport.VARLEN), "serves uniform query lengths, got varlen"),
        (dict(mask="visible_lens"), "applies the masks causal, got visible_lens"),
        (dict(batch_invariant=True), "is not batch-invariant"),
        (dict(cache_format=FP8_DS_MLA), "reads caches in compute_dtype, fp8_e4m3, got fp8_ds_mla"),
        (dict(fp8_mode="fp8_query"), "decodes in the fp8 modes converted, fp8_product, got fp8_query"),
        (dict(cache_format=FP8_E4M3), "decodes caches in fp8_e4m3 in the fp8 modes fp8_product, got converted"),
        (
            dict(fp8_mode="fp8_product", dtype=None),
            "decodes caches in compute_dtype in the fp8 modes converted, got fp8_product",
        ),
        (
            dict(cache_format=FP8_E4M3, fp8_mode="fp8_product", dtype=None, head_scales=True),
            "serves one scale for all queries, got one scale for each head",
        ),
        (dict(graph=GraphSupport.ANY), "has graph support 'one', got a call that needs 'any'"),
        (dict(cache_in_words=False), "needs a cache of whole, aligned 16-byte words, with at least one block"),
    ],
)
def test_refusals(change, reason):
    """Ask for a decode that FlashMLA cannot serve -> the declaration gives the one reason."""
    assert FLASHMLA.ops["mla_decode"].reasons(request_for(**change)) == ([] if reason is None else [reason])
    assert "flashmla: serves device cuda, got cpu" in FLASHMLA.validate_configuration(request_for(**change))


def test_refused_by_name():
    """Ask a builder, a table of choices and a call for a cache in e4m3 with converted queries -> the same reason."""
    config = MLAConfig.from_preset("deepseek-v3", num_heads=2)
    reason = "flashmla: decodes caches in fp8_e4m3 in the fp8 modes fp8_product, got converted"
    with pytest.raises(UnsupportedConfiguration) as error:
        fast.MLAMetadataBuilder(
            config, 64, 128, 4, cache_format=FP8_E4M3, dtype=torch.bfloat16, backend={"mla_decode": "flashmla"}
        )
    assert list(error.value.reasons) == [reason]
    lines = backends.explain(
        config, device="cpu", dtype=torch.bfloat16, cache_format=FP8_E4M3, backend={"mla_decode": "flashmla"}
    ).splitlines()
    assert [reason in line for line in lines if line.startswith("mla_decode:")] == [True]
    (*queries, cache, plan), kv_scale = make_stored_inputs(FP8_E4M3, [1], [70], 2, torch.bfloat16)
    with pytest.raises(UnsupportedConfiguration, match=reason):
        fast.mla_decode(*queries, cache, plan, SCALE, cache_format=FP8_E4M3, kv_scale=kv_scale, backend="flashmla")


@pytest.mark.parametrize("adapter", [FLASHMLA, FLASH_ATTN_3, FLASHINFER_MLA], ids=lambda each: each.name)
def test_never_chosen_without_its_name(adapter, monkeypatch):
    """Ask for a decode that no other backend can serve -> the adapter with its name, and an error without a name."""
    if "mla_decode" not in adapter.ops:
        pytest.skip("fa3-fwd alone has no decode")
    present = replace(adapter, missing_package=None, missing_artifacts=None)
    with_backends(monkeypatch, present)
    monkeypatch.setattr(type(present), "validate_configuration", Backend.validate_configuration)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for op in backends.DECODES:
        request = backends.decode_request(
            torch.device("cuda"), torch.bfloat16, 512, 64, 64, QueryLenSupport.SINGLE_ONLY, op=op, mask="causal"
        )
        assert backends.select(request, adapter.name) is present
        with pytest.raises(UnsupportedConfiguration):
            backends.select(request)


def test_declaration():
    """FlashMLA needs no schedule of this package, and runs on CC 9.x alone."""
    shape = torch.device("cpu"), torch.bfloat16, 16, 512, 64, 64
    assert backends.imported(FLASHMLA.ops["decode_programs"].launcher)(*shape, 1, COMPUTE_FORMAT) == 0
    assert backends.imported(FLASHMLA.ops["schedule_costs"].launcher)(*shape, COMPUTE_FORMAT) == NEUTRAL_COSTS
    assert [major for major in range(7, 13) if FLASHMLA.supports_compute_capability((major, 0))] == [9]


@pytest.mark.skipif(
    "prepared" not in {each.name for each in fields(DecodeMetadata)}, reason="plans of decodes have no prepared tensors"
)
def test_hooks(library):
    """Finish the plan of a step -> prepared tensors if FlashMLA decodes, and else the same plan."""
    from fast.mla.decode_hooks import FlashMLAHooks

    from ...support.factories import make_batch

    step = make_batch([1, 1], [70, 200], 64)
    metadata = reference.build_mla_metadata(step.common, 64, 4096, 1)
    metadata = replace(metadata, decode=on_device(replace(metadata.decode, backend="flashmla")))
    hooks = FlashMLAHooks("flashmla")
    found = hooks.finalize_metadata(metadata, 16)
    expected = flashmla.prepare(metadata.decode, 16)
    assert all(torch.equal(x, y) for x, y in zip(found.decode.prepared, expected, strict=True))
    other = replace(metadata, decode=replace(metadata.decode, backend="triton"))
    assert hooks.finalize_metadata(other, 16) is other
