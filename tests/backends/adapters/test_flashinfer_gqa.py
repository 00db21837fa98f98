"""Tests of the adapter of grouped-query attention to FlashInfer, against the reference.

Without a GPU, a stand-in takes the place of FlashInfer's wrapper. The stand-in has the parameters of the wrapper that
the adapter uses, and computes attention from these arguments alone. On a GPU the same tests run the library, and skip a
config whose kernel is not compiled.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import re
import sys
import types
from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast import backends
from fast.backends.adapters import flashinfer as adapter
from fast.backends.adapters import flashinfer_gqa
from fast.backends.adapters.flashinfer import FLASHINFER
from fast.backends.adapters.flashinfer_workspace import WORKSPACE_VARIABLE
from fast.parity import compare
from reference.interfaces import CAUSAL, FP8_E4M3, GraphSupport, UnsupportedConfiguration
from reference.interfaces.gqa import GQAConfig

from ...gqa.test_fast_attention import attend, check_parity, in_float64
from ...support.backends import registered
from ...support.factories import assert_same_bits, integers
from ...support.gqa import LENS, SLOPES, gqa_batch
from .test_gqa_adapters import LONG, library_attention

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
OP = "gqa_paged_attention"
PLAIN = GQAConfig(6, 2, 128)
CONFIGS = {
    "plain": PLAIN,
    "multi-query": GQAConfig(4, 1, 128, scale=0.1),
    "sinks": replace(PLAIN, attention_sinks=True),
    "window 1": replace(PLAIN, sliding_window=1),
    "window of a page + 1": replace(PLAIN, sliding_window=17),
    "window beyond the context": replace(PLAIN, sliding_window=1000),
    "soft cap": replace(PLAIN, logits_soft_cap=0.8),
    "all": replace(PLAIN, scale=0.2, sliding_window=19, logits_soft_cap=1.1, attention_sinks=True),
}
BLOCK_SIZES = (64,) if ON_GPU else (16, 64)
AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)


@pytest.fixture(autouse=True)
def on_device():
    """Create tensors on the GPU if there is one."""
    with torch.device(DEVICE):
        yield


class Event:
    """A CUDA event on a machine without a GPU, which notes its calls."""

    def __init__(self):
        self.calls = []

    def record(self, stream):
        self.calls.append("record")

    def synchronize(self):
        self.calls.append("wait")


class Library:
    """In place of FlashInfer's module: its wrapper class, and the arguments of all calls of the wrapper."""

    def __init__(self):
        self.made, self.plans, self.runs = [], [], []
        library = self

        class Wrapper:
            def __init__(self, *given, **options):
                library.made.append((given, options))

            def plan(self, **given):
                library.plans.append(given)

            def run(self, **given):
                library.runs.append(given)
                return attended(library.plans[-1], **given)

        self.BatchPrefillWithPagedKVCacheWrapper = Wrapper


def attended(plan, q, paged_kv_cache, return_lse):
    """Return out [rows, N, Dh] and the LSE in base 2 [rows, N], computed from the arguments of FlashInfer's calls."""
    starts, page_starts, pages, last = (
        plan[name] for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    )
    assert all(each.dtype == torch.int32 and each.device.type == "cpu" for each in (starts, page_starts, pages, last))
    assert return_lse and plan["causal"] and plan["q_data_type"] == plan["kv_data_type"] == q.dtype
    keys, values = paged_kv_cache
    assert keys.shape == values.shape and keys.stride() == values.stride()  # the kernel "fa3" needs equal strides
    assert (plan["num_qo_heads"], plan["head_dim_qk"]) == q.shape[1:]
    assert (plan["page_size"], plan["num_kv_heads"]) == keys.shape[1:3]
    assert starts[0] == page_starts[0] == 0 and starts[-1] == q.shape[0] and page_starts[-1] == len(pages)
    query_lens, counts = starts.diff(), page_starts.diff()
    lens = (counts - 1) * plan["page_size"] + last
    assert (query_lens > 0).all() and (query_lens <= lens).all() and (counts > 0).all()
    assert (last > 0).all() and (last <= plan["page_size"]).all()
    table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
    table[torch.arange(table.shape[1]) < counts[:, None]] = pages
    out, lse = library_attention(
        q, keys, values, (starts.tolist(), None), lens.tolist(), table, plan["sm_scale"], True,
        (plan["window_left"], 0), plan["logits_soft_cap"], None, math.nan, int(query_lens.max()), int(lens.max()),
    )  # fmt: skip
    return out, lse.T.contiguous() / math.log(2)


@contextlib.contextmanager
def stand_in(monkeypatch, capability=HOPPER):
    """Put `Library` in place of FlashInfer; return it, and the name of a backend that serves the CPU."""
    library = Library()
    monkeypatch.setenv(WORKSPACE_VARIABLE, "4096")
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(adapter, "is_compiled", lambda *key: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    flashinfer_gqa.wrapper_of.cache_clear()
    on_cpu = dict(name="flashinfer_on_cpu", device_type="cpu", capability=None, missing_package=None, hooks=None)
    ops = {OP: FLASHINFER.ops[OP]}
    with registered(replace(FLASHINFER, **on_cpu, missing_artifacts=None, ops=ops)), torch.device("cpu"):
        yield library, "flashinfer_on_cpu"
    flashinfer_gqa.wrapper_of.cache_clear()


@pytest.fixture
def name(monkeypatch):
    """Return the name of a backend with the adapter that serves the device of the run."""
    if ON_GPU:
        yield "flashinfer"
        return
    with stand_in(monkeypatch) as (_, made):
        yield made


@pytest.fixture
def library(monkeypatch):
    with stand_in(monkeypatch) as made:
        yield made


def request_of(config, dtype=torch.bfloat16, block_size=64, device="cuda", mask=CAUSAL, **options):
    return backends.paged_attention_request(config, torch.device(device), dtype, block_size, mask=mask, **options)


def batch_of(config, lens=LENS, dtype=torch.bfloat16, block_size=64, layout="NHD", **options):
    """Return a batch whose plan promises a causal mask; skip if the library on the GPU lacks the kernel."""
    on_gpu = torch.get_default_device().type == "cuda"
    if on_gpu and (reasons := FLASHINFER.validate_configuration(request_of(config, dtype, block_size))):
        pytest.skip("; ".join(reasons))
    batch = gqa_batch(config, lens, block_size, dtype, layout, **options)
    return replace(batch, metadata=replace(batch.metadata, mask=CAUSAL))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_parity(config, block_size, name):
    """Attend decodes, prefills, a padding row and a request without query tokens -> within the budgets."""
    dtype = torch.bfloat16 if block_size == 64 else torch.float16
    check_parity(batch_of(config, LENS, dtype, block_size), backend=name)


@pytest.mark.parametrize("lens", [((1, 70), (1, 1), (1, 300)), ((0, 20), (1, 5), (0, 0), (1, 129)), LONG],
                         ids=["decodes", "idle requests", "long"])  # fmt: skip
@pytest.mark.parametrize("config", [CONFIGS[each] for each in ("plain", "sinks", "all")], ids=["plain", "sinks", "all"])
def test_lengths(config, lens, name):
    check_parity(batch_of(config, lens), backend=name)


def test_layout_hnd(name):
    check_parity(batch_of(PLAIN, layout="HND"), backend=name)


@pytest.mark.parametrize("window", [None, 9])
def test_without_keys(window, name):
    """Attend no token, keys of no request, and tables without a column -> empty states, or output 0 and the sinks."""
    config = replace(PLAIN, attention_sinks=True, sliding_window=window)
    for lens in ((), ((0, 5),), ((2, 0), (1, 0)), ((0, 5), (2, 0))):
        check_parity(batch_of(config, lens), backend=name)
    batch = batch_of(config, ((2, 0), (1, 0)))
    plan = replace(batch.metadata, block_table=batch.metadata.block_table[:, :0])
    check_parity(replace(batch, metadata=plan), backend=name)


def test_given_outputs(name):
    """Write into strided memory, and into float32 -> the same numbers; the memory beside the output stays."""
    batch = batch_of(CONFIGS["sinks"])
    plain = attend(fast, batch, backend=name)
    wide = torch.full((*batch.q.shape[:2], batch.q.shape[2] + 8), 7.0, dtype=torch.bfloat16)
    made = attend(fast, batch, out=wide[..., 8:], backend=name)
    assert torch.equal(wide[..., 8:], plain.out) and torch.equal(made.lse, plain.lse) and wide[..., :8].eq(7).all()
    state = attend(fast, batch, out_dtype=torch.float32, backend=name)
    assert state.out.dtype == torch.float32 and torch.equal(state.out.bfloat16(), plain.out)


def test_nan_stays_in_its_request(name):
    """Plant NaN in one request -> NaN in its rows, and the other requests keep their bits."""
    batch = batch_of(PLAIN, ((1, 70), (3, 40), (1, 150)))
    plain = attend(fast, batch, backend=name)
    assert plain.out.isfinite().all()  # the slots behind the last tokens are NaN
    cache = batch.kv_cache.clone()
    cache[:, batch.metadata.block_table[1, :1].long()] = torch.nan
    found = attend(fast, replace(batch, kv_cache=cache), backend=name)
    others = [0, 4]
    assert_same_bits(found.out[others], plain.out[others])
    assert_same_bits(found.lse[:, others], plain.lse[:, others])
    assert found.out[1:4].isnan().all() and found.lse[:, 1:4].isnan().all()


def test_freed_blocks_of_other_requests(name):
    """Let entries before the windows name a block with NaN, which another request may own -> within the budgets."""
    batch = batch_of(replace(PLAIN, sliding_window=19), LONG)
    table, num_blocks = batch.metadata.block_table.clone(), batch.kv_cache.shape[1]
    used = (table >= 0) & (table < num_blocks)
    spare = next(block for block in range(num_blocks) if block not in table[used].tolist())
    assert batch.kv_cache[:, spare].isnan().all() and not used[0, 0]
    plan = replace(batch.metadata, block_table=torch.where(used, table, spare))
    check_parity(replace(batch, metadata=plan), backend=name)


def test_a_layer(name):
    """Run a step of decodes and prefills with the adapter for both parts -> the output is within the budget."""
    names = {"gqa_prefill": name, "gqa_decode": name}
    lens = [(query_len, length) for query_len, length in LENS if length]
    batch = batch_of(PLAIN, lens, new_tokens=False)
    common = fast.CommonAttentionMetadata.from_lens(*zip(*lens, strict=True), batch.metadata.block_table, 64)

    def step(module, batch, **options):
        plan = module.GQAMetadataBuilder(PLAIN, 64, 64, len(lens), **options).build(0, common)
        assert plan.num_decodes > 0 and plan.num_prefills > 0
        return module.GQAAttention(PLAIN, **options)(batch.q, batch.new_k, batch.new_v, batch.kv_cache.clone(), plan)

    wide = replace(in_float64(batch), k=tuple(k.double() for k in batch.k), v=tuple(v.double() for v in batch.v))
    parity = compare("forward", step(fast, batch, backend=names), step(reference, batch), step(reference, wide))
    assert parity.passed, parity


# Declarations and arguments, on any machine


def test_only_named():
    assert FLASHINFER.is_only_named(OP) and not FLASHINFER.is_only_named("flash_attn_varlen")


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"alibi_slopes": SLOPES}, {}, "has no alibi$"),
        ({}, {"first_visible": True}, "has no attention_chunk$"),
        ({}, {"mask": "visible_lens"}, "applies the masks causal, got visible_lens$"),
        ({}, {"cache_format": FP8_E4M3}, "reads caches in compute_dtype, got fp8_e4m3$"),
        ({}, {"batch_invariant": True}, "is not batch-invariant$"),
        ({}, {"graph": GraphSupport.ANY}, "has graph support 'none', got a call that needs 'any'$"),
        ({}, {"dtype": torch.float32}, "serves torch.bfloat16, torch.float16, got torch.float32$"),
        ({}, {"block_size": 8}, r"serves block sizes \(16, .*got 8$"),
        ({"head_dim": 80}, {}, r"serves head_dim in \(64, 128, 256\), got 80$"),
    ],
)
def test_refusals(monkeypatch, changes, options, reason):
    """Ask for what the adapter cannot do -> the reason, by name."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: HOPPER)
    available = replace(FLASHINFER, missing_package=None, missing_artifacts=None)
    found = available.validate_configuration(request_of(replace(PLAIN, **changes), **options))
    assert any(re.search(f"^flashinfer: {reason}", each) for each in found), found


@pytest.mark.parametrize("capability", [AMPERE, HOPPER])
def test_each_combination_has_its_kernel(monkeypatch, capability):
    """Compile one kernel of four -> its configs are served, and the reason of the others names window and soft cap."""
    compiled, asked = (False, False), []

    def module(dtype, qk_head_dim, v_head_dim, kernel, window, soft_cap):
        asked.append((dtype, qk_head_dim, v_head_dim, kernel, window, soft_cap))
        return types.SimpleNamespace(is_compiled=(window, soft_cap) == compiled)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(adapter, "_module", module)
    monkeypatch.setattr(adapter, "_COMPILED", set())
    available = replace(FLASHINFER, missing_package=None, missing_artifacts=None)
    for compiled in ((False, False), (True, True), (True, False)):
        adapter._COMPILED.clear()
        for window, soft_cap in ((False, False), (True, False), (False, True), (True, True)):
            config = replace(
                CONFIGS["sinks"], sliding_window=5 if window else None, logits_soft_cap=2.0 if soft_cap else None
            )
            found = available.validate_configuration(request_of(config))
            kernel = "fa3" if capability == HOPPER else "fa2"
            assert asked[-1] == (torch.bfloat16, 128, 128, kernel, window, soft_cap)
            if (window, soft_cap) == compiled:
                assert found == []
                continue
            with_features = ", with a window" * window + ", with a soft cap" * soft_cap
            (reason,) = found
            assert reason.startswith(
                "flashinfer: has no compiled kernel for torch.bfloat16 with 128 and 128 columns"
                f"{with_features} (install flashinfer-jit-cache"
            )


def test_the_module_is_described_with_its_features(monkeypatch):
    """Describe a module -> FlashInfer's generator gets the flags of window and soft cap."""
    given = []
    modules = types.SimpleNamespace(gen_batch_prefill_module=lambda *arguments: given.append(arguments))
    attention = types.SimpleNamespace(modules=modules)
    for path, module in {"flashinfer": None, "flashinfer.jit": None, "flashinfer.jit.attention": attention}.items():
        monkeypatch.setitem(sys.modules, path, module or types.SimpleNamespace())
    for flags in ((), (True, False), (False, True)):
        adapter._module(torch.float16, 128, 128, "fa3", *flags)
    half = torch.float16
    assert [each[:8] for each in given] == [("fa3", half, half, half, torch.int32, 128, 128, 0)] * 3
    assert [each[8:] for each in given] == [(False, False, False), (True, False, False), (False, True, False)]


@pytest.mark.parametrize("capability, kernel", [(AMPERE, "fa2"), (HOPPER, "fa3"), (BLACKWELL, "fa2")])
def test_one_wrapper_for_all_calls(monkeypatch, capability, kernel):
    """Attend twice -> one wrapper with the kernel of the GPU; each call plans anew, after the call before it."""
    with stand_in(monkeypatch, capability) as (library, name):
        batch = batch_of(CONFIGS["all"])
        first, second = (attend(fast, batch, backend=name) for _ in range(2))
        ((workspace, layout), options), *others = library.made
        assert not others and layout == "NHD" and options == {"backend": kernel}
        assert workspace.dtype == torch.uint8 and workspace.numel() == 4096
        assert len(library.plans) == len(library.runs) == 2
        assert flashinfer_gqa.wrapper_of(torch.device("cpu"))._used.calls == ["wait", "record"] * 2
        assert_same_bits(first.out, second.out)


def test_all_queries_are_taken_without_a_copy(library):
    """Attend requests that all see keys, and queries with gaps -> the library gets the queries, or aligned words."""
    library, name = library
    batch = batch_of(PLAIN, ((1, 5), (3, 70)))
    attend(fast, batch, backend=name)
    assert library.runs[-1]["q"].data_ptr() == batch.q.data_ptr()
    check_parity(replace(batch, q=batch.q.mT.contiguous().mT), backend=name)
    assert library.runs[-1]["q"].is_contiguous()


def test_plan_of_a_call():
    """Plan requests without keys, without tokens and with too many keys -> the requests that attend a key alone."""
    with torch.device("cpu"):
        table = integers(*range(10, 25)).view(5, 3)
        lens, starts = integers(17, 0, 99, 2, -4), integers(0, 1, 3, 3, 7, 8)
        call = flashinfer_gqa.PagedCall.of(table, lens, starts, 9, 16, 40)
        # request 2 has no token; requests 1 and 4 have no key; the first two tokens of request 3 see no key
        assert call.q_offsets.tolist() == [0, 1, 3] and call.page_offsets.tolist() == [0, 2, 3]
        assert call.pages.tolist() == [10, 11, 19] and call.last_page_lens.tolist() == [1, 2]
        assert call.rows.tolist() == [0, 5, 6]
        clamped = flashinfer_gqa.PagedCall.of(table[:1], integers(99), integers(0, 1), 1, 16, 40)
        assert clamped.pages.tolist() == [10, 11, 12] and clamped.last_page_lens.tolist() == [8]
        assert clamped.rows is None
        for wrong in ((0, 2, 1), (1, 1, 2), (0, 1, 3)):
            with pytest.raises(ValueError, match="query_start_loc: expected"):
                flashinfer_gqa.PagedCall.of(table[:2], integers(5, 5), integers(*wrong), 2, 16, 40)


@pytest.mark.parametrize("window", [None, 19])
def test_lengths_beyond_their_bound(library, window):
    """Call the launcher with a length above its bound, and with tokens behind the last request -> no invalid read."""
    batch = batch_of(replace(PLAIN, sliding_window=window), ((1, 40), (2, 100)), block_size=16)
    plan = batch.metadata
    lens = torch.where(plan.seq_lens == 100, 10**6, plan.seq_lens)
    q = torch.cat((batch.q, batch.q[:1]))
    first = None if window is None else torch.cat((plan.first_visible, integers(0)))
    out, lse = flashinfer_gqa.gqa_paged_attention(
        q, batch.kv_cache, plan.block_table, lens, plan.query_start_loc, plan.visible_lens, first, 2, 100,
        window or 100, PLAIN.softmax_scale, None, None, None, torch.bfloat16,
    )  # fmt: skip
    state = attend(fast, batch, backend=library[1])
    assert torch.equal(out[:3], state.out) and torch.equal(lse[:, :3], state.lse)
    assert out[3].eq(0).all() and lse[:, 3].eq(-torch.inf).all()


def test_a_cache_without_words(library):
    """Give a cache whose heads do not begin at words of 16 bytes -> an error that names the strides."""
    batch = batch_of(PLAIN)
    wide = torch.zeros(*batch.kv_cache.shape[:-1], 129, dtype=torch.bfloat16)
    odd = wide[..., :128].copy_(batch.kv_cache)
    with pytest.raises(UnsupportedConfiguration, match="flashinfer: needs a cache of aligned 16-byte words, got strid"):
        attend(fast, replace(batch, kv_cache=odd), backend=library[1])
    assert flashinfer_gqa.cache_reasons(batch.kv_cache) == []


def test_signatures(monkeypatch):
    """Bind the arguments of the adapter's calls to FlashInfer's own signatures -> every name exists."""
    if reasons := adapter.missing_library():
        pytest.skip("; ".join(reasons))
    real = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    with stand_in(monkeypatch) as (library, name):
        attend(fast, batch_of(CONFIGS["all"]), backend=name)
    (given, options), plan, run = library.made[0], library.plans[0], library.runs[0]
    inspect.signature(real.__init__).bind(None, *given, **options)
    inspect.signature(real.plan).bind(None, **plan)
    inspect.signature(real.run).bind(None, **run)
    defaults = {each.name: each.default for each in inspect.signature(real.plan).parameters.values()}
    assert defaults["pos_encoding_mode"] == "NONE" and defaults["window_left"] == -1
    assert inspect.signature(real.run).parameters["lse_base"].default == "log2"
