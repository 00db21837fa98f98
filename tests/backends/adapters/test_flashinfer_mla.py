"""Tests of the adapter to FlashInfer's decode for MLA: with the library on a GPU, else with its unmodified Python.

Without a GPU, a recorder replaces the compiled module "fa3". It checks what FlashInfer's Python passes to the compiled
part, and decodes from these arguments one row after the other. Like the compiled kernel, it takes the lengths from the
plan.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast import backends
from fast.backends.adapters import flashinfer_mla as adapter
from fast.backends.adapters.flashinfer_mla import FLASHINFER_MLA
from fast.backends.adapters.flashinfer_workspace import WORKSPACE_VARIABLE
from reference.interfaces import (
    COMPUTE_FORMAT,
    FP8_E4M3,
    AttentionState,
    GraphSupport,
    QueryLenSupport,
    UnsupportedConfiguration,
)

from ...support.backends import registered
from ...support.decode_inputs import SCALE, arguments, make_inputs, verdict
from ...support.factories import make_batch, make_layer, make_weights, new_cache, positions_of
from ...support.libraries import entries_in_pages, paged_attention
from ...support.triton_mode import DEVICE, ON_GPU

REASONS = adapter.missing_decode()
needs_library = pytest.mark.skipif(bool(REASONS), reason="; ".join(REASONS))
DTYPES = (torch.bfloat16, torch.float16)
LENS = {"edges": [0, 1, 63, 64, 65, 129, 521], "long": [3001, 0, 7, 1024], "one": [70], "empty": [0, 0]}
CONFIG = replace(reference.MLAConfig.from_preset("deepseek-v2-lite"), hidden_size=64, num_heads=3)


class Event:
    """A CUDA event on a machine without a GPU: notes whether a plan waits for the copy of the plan before it."""

    calls: list[str] = []  # noqa: RUF012

    def record(self, stream):
        Event.calls.append("record")

    def synchronize(self):
        Event.calls.append("wait")


class Module:
    """In place of the compiled module: `plan` notes the lengths, and `run` decodes."""

    def __init__(self):
        self.plans, self.runs = [], []

    def plan(self, workspace, integers, pinned, q_offsets, page_offsets, lens, heads, latent, causal):
        given = q_offsets, page_offsets, lens
        assert all(each.device.type == "cpu" and each.dtype == torch.int32 for each in given)
        assert q_offsets.tolist() == list(range(len(lens) + 1)) and latent == 512 and causal is False
        assert workspace.dtype == integers.dtype == torch.uint8 and pinned.device.type == "cpu"
        self.plans.append((page_offsets.clone(), lens.clone(), heads))
        return [len(self.plans) - 1]

    def run(
        self, workspace, integers, plan, ql, q_pe, latents, rope, pages, out, lse, mask, heads, page, scale,
        natural, latent_scale, rope_scale, scales,
    ):  # fmt: skip
        offsets, lens, planned = self.plans[plan[0]]
        assert (mask, natural, latent_scale, rope_scale, scales) == (0, True, 1.0, 1.0, None) and planned == heads
        assert pages.dtype == torch.int32 and pages.shape[0] == offsets[-1] and page == latents.shape[1]
        assert latents.shape[2] == 512 and rope.shape[2] == 64 and all(x.stride(2) == 1 for x in (ql, q_pe, latents))
        assert out.is_contiguous() and lse.shape == ql.shape[:2]
        entries, query = torch.cat((latents, rope), -1), torch.cat((ql, q_pe), -1)
        columns = int((lens.amax() + page - 1) // page)
        table = torch.zeros(len(lens), columns, dtype=torch.int32)
        for request, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
            assert end - first == -(-int(lens[request]) // page)
            table[request, : end - first] = pages[first:end]
        made, made_lse = paged_attention(
            query, entries_in_pages(entries, table), lens.tolist(), [1] * len(lens), scale, 512, False
        )
        out.copy_(made)
        lse.copy_(made_lse.T)
        self.runs.append(plan[0])


@contextlib.contextmanager
def recorded(patch):
    """Put `Module` in place of the compiled module; return the module."""
    fa3 = importlib.import_module("flashinfer.mla._batch_mla._backends.fa3_backend")
    common = importlib.import_module("flashinfer.mla._batch_mla._backends._fa_common")
    module, empty, Event.calls = Module(), torch.empty, []
    patch.setenv(WORKSPACE_VARIABLE, "4096")
    patch.setattr(adapter, "kernel_of", lambda device: "fa3")
    patch.setattr(adapter, "is_compiled", lambda *key: True)
    patch.setattr(fa3, "get_batch_mla_module", lambda *key: module)
    patch.setattr(common, "get_device_sm_count", lambda device: 132)
    patch.setattr(common, "get_compute_capability", lambda device: (9, 0))
    patch.setattr(common, "is_sm90a_supported", lambda device: True)
    patch.setattr(common, "_get_fa_shared_memory_limits", lambda device: (228 * 1024, 227 * 1024))  # as on an H100
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    # a machine without a GPU has no pinned memory
    patch.setattr(torch, "empty", lambda *size, pin_memory=False, **given: empty(*size, **given))
    adapter._direct_wrapper.cache_clear()
    with registered(replace(FLASHINFER_MLA, name="recorded", device_type="cpu", capability=None)):
        yield module
    adapter._direct_wrapper.cache_clear()


@pytest.fixture
def library(monkeypatch):
    """Provide FlashInfer: on a GPU the library, and else its Python with a recorder; return the recorder or None."""
    if REASONS:
        pytest.skip("; ".join(REASONS))
    if not ON_GPU:
        with recorded(monkeypatch) as module:
            yield module
        return
    request = request_of()
    if reasons := FLASHINFER_MLA.validate_configuration(request):
        pytest.skip("; ".join(reasons))
    yield None


def request_of(device=DEVICE, **changes):
    options = dict(
        dtype=torch.bfloat16, head_dims=(("kv_lora_rank", 512), ("qk_rope_head_dim", 64)), block_size=64,
        out_dtype=torch.bfloat16, cache_format=COMPUTE_FORMAT, mask="causal", lse=True,
        query_lens=QueryLenSupport.SINGLE_ONLY,
    )  # fmt: skip
    return backends.KernelRequest("mla_decode", torch.device(device), **(options | changes))


def name_of(library):
    return "flashinfer_mla" if library is None else "recorded"


def skip_unless_compiled(dtype):
    if ON_GPU and not adapter.is_compiled(dtype, torch.device(DEVICE)):
        pytest.skip(f"has no compiled kernel for {dtype}")


@pytest.mark.parametrize("heads", [16, 100, 128] if ON_GPU else [16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", LENS)
def test_direct_calls(lens, dtype, heads, library):
    """Decode over a cache with NaN in free entries, and numbers out of range in the block table -> within the budget.

    Every call plans anew. The output goes to new or to given memory, and in the dtype of the queries or in float32.
    """
    skip_unless_compiled(dtype)
    inputs = make_inputs([1] * len(LENS[lens]), LENS[lens], heads, dtype)
    given = arguments(*inputs)
    out, lse = adapter.mla_decode(*given)
    assert out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
    state = AttentionState(out.cpu(), lse.cpu())
    verdict(state, *inputs)
    wide, _ = adapter.mla_decode(*given[:10], torch.float32, *given[11:])
    assert torch.equal(wide.cpu(), state.out.float())
    held = torch.full(inputs[0].shape, torch.nan, dtype=dtype, device=DEVICE)
    made, lse = adapter.mla_decode(*given, held)
    assert made is held
    verdict(AttentionState(held.cpu(), lse.cpu()), *inputs)
    if library is not None:
        assert len(library.plans) == len(library.runs) == 3


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_block_sizes(block_size, library):
    inputs = make_inputs([1] * 4, [131, 20, 0, 700], 16, torch.bfloat16, block_size=block_size)
    verdict(AttentionState(*(x.cpu() for x in adapter.mla_decode(*arguments(*inputs)))), *inputs)


def test_nan_stays_in_its_request(library):
    """Put NaN into a key of one request -> NaN in its rows; the other requests get the same bits as before."""
    inputs = make_inputs([1] * 3, [70, 130, 9], 16, torch.bfloat16)
    out, lse = (x.cpu() for x in adapter.mla_decode(*arguments(*inputs)))
    inputs[2][inputs[3].block_table[1, 0], 3] = torch.nan
    found, found_lse = (x.cpu() for x in adapter.mla_decode(*arguments(*inputs)))
    assert torch.equal(found[::2], out[::2]) and torch.equal(found_lse[:, ::2], lse[:, ::2])
    assert found[1].isnan().any() and found_lse[:, 1].isnan().all()


def test_no_request(library):
    """Decode no request, and over a cache without blocks -> empty results, and rows without keys."""
    inputs = make_inputs([], [], 16, torch.bfloat16)
    out, lse = adapter.mla_decode(*arguments(*inputs))
    assert out.shape == (0, 16, 512) and lse.shape == (16, 0)


def step_of(builder, layers, seq_lens):
    batch = make_batch([1] * len(seq_lens), seq_lens, 64)
    torch.manual_seed(1)
    cache = new_cache(batch, CONFIG.head_size, torch.bfloat16)
    hidden = torch.randn(len(seq_lens), CONFIG.hidden_size).to(torch.bfloat16)
    plan = builder.build(0, batch.common)
    return plan, [layer(hidden, positions_of([1] * len(seq_lens), seq_lens), cache.clone(), plan) for layer in layers]


def builder_for(name, **options):
    return fast.MLAMetadataBuilder(CONFIG, 64, 1024, 8, backend={"mla_decode": name}, **options)


@pytest.mark.skipif(ON_GPU, reason="counts the calls of a recorder")
@needs_library
def test_steps_of_a_layer(library):
    """Run two steps of three layers -> one plan for each step, and the outputs of direct calls, which plan anew.

    A plan waits for the copy of the plan before it.
    """
    weights = make_weights(CONFIG, torch.bfloat16)
    builder = builder_for("recorded")
    assert builder.query_len_support is QueryLenSupport.SINGLE_ONLY and builder.graph_support is GraphSupport.NONE
    layers = [make_layer(fast, CONFIG, weights, torch.bfloat16) for _ in range(3)]
    direct = make_layer(fast, CONFIG, weights, torch.bfloat16, backend={"mla_decode": "recorded"})
    own = fast.MLAMetadataBuilder(CONFIG, 64, 1024, 8)
    for number, lens in enumerate(([70, 200, 1], [71, 201, 2])):
        plan, outputs = step_of(builder, layers, lens)
        assert plan.decode.backend == "recorded" and len(plan.decode.prepared) == 1
        assert len(library.plans) == 2 * number + 1 and library.runs[-3:] == [2 * number] * 3
        assert Event.calls == ["wait", "record"]
        _, (wanted,) = step_of(own, [direct], lens)
        assert len(library.plans) == 2 * number + 2 and outputs[0].isfinite().all()
        assert all(torch.equal(output, wanted) for output in outputs)
        Event.calls.clear()


@pytest.mark.skipif(ON_GPU, reason="counts the calls of a recorder")
@needs_library
def test_another_scale_plans_again(library):
    """Decode one step with two scales -> two plans, and results of these scales."""
    inputs = make_inputs([1] * 3, [70, 130, 9], 3, torch.bfloat16)
    given = arguments(*inputs)
    prepared = adapter.prepare(replace(inputs[3], block_size=64), adapter.DecodeWrapper(torch.empty(64).byte()))
    for scale, plans in ((SCALE, 1), (SCALE, 1), (2 * SCALE, 2)):
        out, lse = adapter.mla_decode(*given[:9], scale, *given[10:], prepared=prepared)
        assert len(library.plans) == plans
        direct, direct_lse = adapter.mla_decode(*given[:9], scale, *given[10:])
        library.plans.pop()
        assert torch.equal(out, direct) and torch.equal(lse, direct_lse)


@pytest.mark.skipif(ON_GPU, reason="replaces FlashInfer's plan")
@needs_library
def test_too_small_workspace(library, monkeypatch):
    """Let FlashInfer's allocator run out of memory -> an error with the size; another error of FlashInfer stays."""
    given = arguments(*make_inputs([1], [70], 3, torch.bfloat16))
    overflow = "Error: Buffer overflow when allocating memory for mla_partial_o, but only 7\n bytes available in"

    def fail(text):
        def plan(*arguments):
            raise RuntimeError(text)

        return plan

    monkeypatch.setattr(library, "plan", fail(f"{overflow} AlignedAllocator. Increase the workspace buffer size."))
    with pytest.raises(ValueError, match=r"^workspace: expected more memory for this step, got 4096 bytes \(FlashInf"):
        adapter.mla_decode(*given)
    monkeypatch.setattr(library, "plan", fail("another error"))
    with pytest.raises(RuntimeError, match="^another error$"):
        adapter.mla_decode(*given)


@pytest.mark.skipif(ON_GPU, reason="counts the calls of a recorder")
@needs_library
def test_workspace_of_a_builder(library, monkeypatch):
    """Give a builder the size of the workspace, or the workspace -> FlashInfer plans with it."""
    own, seen = torch.zeros(512, dtype=torch.uint8), []
    plain = Module.plan

    def plan(self, workspace, *rest):
        seen.append(workspace)
        return plain(self, workspace, *rest)

    monkeypatch.setattr(Module, "plan", plan)
    layer = make_layer(fast, CONFIG, make_weights(CONFIG, torch.bfloat16), torch.bfloat16)
    for given in (own, 2048, None):
        options = None if given is None else {"recorded": {"workspace": given}}
        step_of(builder_for("recorded", backend_options=options), [layer], [70, 3])
    assert seen[0].data_ptr() == own.data_ptr() and [each.numel() for each in seen] == [512, 2048, 4096]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(), None),
        (dict(dtype=torch.float32), "serves torch.bfloat16, torch.float16, got torch.float32"),
        (dict(block_size=48), "serves block sizes (16, 32, 64, 128), got 48"),
        (dict(head_dims=(("kv_lora_rank", 256),)), "serves kv_lora_rank in (512,), got 256"),
        (dict(mask="visible_lens"), "applies the masks causal, got visible_lens"),
        (dict(query_lens=QueryLenSupport.UNIFORM), "serves single_only query lengths, got uniform"),
        (dict(batch_invariant=True), "is not batch-invariant"),
        (dict(graph=GraphSupport.ONE_QUERY_LEN), "has graph support 'none', got a call that needs 'one'"),
        (dict(cache_format=FP8_E4M3), "reads caches in compute_dtype, got fp8_e4m3"),
    ],
)
def test_refusals(change, reason):
    """Ask for a decode that FlashInfer cannot serve -> the declaration gives the one reason."""
    support = FLASHINFER_MLA.ops["mla_decode"]
    assert support.reasons(request_of("cpu", **change)) == ([] if reason is None else [reason])
    assert support.plans_steps and support.lse


def test_missing_and_old_libraries(monkeypatch):
    """Look for a library that is missing, too old, or without the compiled kernel -> the reason."""
    stand_in = replace(FLASHINFER_MLA, name="other", device_type="cpu", capability=None, missing_package=None,
                       missing_artifacts=None)  # fmt: skip
    monkeypatch.setattr(adapter, "is_compiled", lambda *key: False)
    (reason,) = stand_in.validate_configuration(request_of("cpu"))
    assert reason.startswith("other: has no compiled kernel for torch.bfloat16 (install flashinfer-jit-cache")

    def broken(*key):
        raise AttributeError("no\ngen_batch_mla_module")

    monkeypatch.setattr(adapter, "is_compiled", broken)
    with (
        registered(stand_in),
        pytest.raises(UnsupportedConfiguration, match="its compiled kernel: AttributeError: no gen_b"),
    ):
        backends.select(request_of("cpu"), "other")
    monkeypatch.setattr(adapter, "missing_library", lambda: ["cannot import flashinfer"])
    assert adapter.missing_decode() == ["cannot import flashinfer"]


@needs_library
def test_a_version_without_an_lse(monkeypatch):
    """Take a version whose `plan` has no `lse_mode` -> refused, because the layer needs the LSE."""
    import flashinfer.mla

    class Old:
        def plan(self, qo_indptr, kv_indptr):
            pass

    monkeypatch.setattr(flashinfer.mla, "BatchMLAPagedAttentionWrapper", Old)
    assert adapter.missing_decode() == [
        "FlashInfer is too old: BatchMLAPagedAttentionWrapper.plan has no parameter lse_mode"
    ]
