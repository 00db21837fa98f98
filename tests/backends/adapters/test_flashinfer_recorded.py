"""Tests of the adapters to FlashInfer with FlashInfer's own Python on the CPU; a recorder replaces the compiled part.

Each recorder checks what FlashInfer's Python passes to the compiled part, computes attention from these arguments, and
returns the result in the convention of the compiled part: LSE in base 2 [T, N], or cuDNN's natural LSE. Where the
convention leaves the result of a row without keys open, the recorder writes NaN.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast import backends
from fast.attention.varlen import flash_attn_varlen_shared_rope
from fast.backends.adapters import flashinfer as adapter
from fast.backends.adapters import flashinfer_cudnn
from fast.backends.adapters.flashinfer import FLASHINFER
from fast.backends.adapters.flashinfer_cudnn import FLASHINFER_CUDNN
from fast.backends.adapters.flashinfer_workspace import WORKSPACE_VARIABLE
from fast.backends.adapters.trtllm_ragged import TRTLLM_RAGGED, missing_entry
from fast.mla.backend_hooks import hooks_of

from ...support.backends import registered
from ...support.commands import ROOT
from ...support.factories import assert_same_bits
from .test_flashinfer import CONFIG, LENGTHS, STEPS, Step, builder_for, check_steps, inputs, joined, judge

REASONS = adapter.missing_library()
pytestmark = pytest.mark.skipif(bool(REASONS), reason="; ".join(REASONS))
BF16 = torch.bfloat16
SCALE = 192**-0.5


def attended(q, k, v, q_offsets, k_offsets, scale, causal, empty=math.nan):
    """Return out [T, N, V] and the natural LSE [T, N] in float32; rows without keys are `empty`."""
    q_offsets, k_offsets = (each.int() for each in (q_offsets, k_offsets))
    longest = [int(each.diff().max()) for each in (q_offsets, k_offsets)]
    wide = [x.double() for x in (q, k, v)]
    state = reference.flash_attn_varlen(*wide, q_offsets, k_offsets, *longest, scale, causal)
    out, lse = state.out.clone(), state.lse.T.clone()
    rows = lse == -torch.inf
    out[rows], lse[rows] = empty, empty
    return out.to(q.dtype), lse.float()


class Event:
    """A CUDA event on a machine without a GPU: notes whether a plan waits for the copy of the plan before it."""

    def __init__(self):
        self.calls = []

    def record(self, stream):
        self.calls.append("record")

    def synchronize(self):
        self.calls.append("wait")


class RaggedModule:
    """In place of the compiled module "fa3" of FlashInfer: `plan` notes the lengths, and `ragged_run` attends.

    Like the compiled kernel, `ragged_run` takes the lengths from the plan, and not from its own arguments.
    """

    def __init__(self):
        self.plans, self.runs = [], []

    def plan(self, *given):
        _, int_workspace, pinned, q_offsets, k_offsets, k_lens, rows, requests, heads, kv_heads, page, graph, *rest = (
            given
        )
        assert all(each.device.type == "cpu" and each.dtype == torch.int32 for each in (q_offsets, k_offsets, k_lens))
        assert rows == q_offsets[-1] and requests == len(k_lens) and heads == kv_heads and page == 1 and not graph
        assert rest[:2] == [192, 128] and rest[3] == -1 and int_workspace.shape == pinned.shape
        self.plans.append((q_offsets.clone(), k_offsets.clone(), rest[2]))
        int_workspace[:8].view(torch.int64)[0] = len(self.plans) - 1  # the plan is in the memory of the wrapper
        return [0]

    def ragged_run(self, *given):
        _, int_workspace, _, q, k, v, _, _, out, lse, mask, layout, window, _, *rest = given
        q_offsets, k_offsets, causal = self.plans[int(int_workspace[:8].view(torch.int64)[0])]
        assert (mask, layout, window) == (int(causal), 0, -1)
        assert k.shape[0] == v.shape[0] == k_offsets[-1] and q.shape[0] == q_offsets[-1]
        assert all(x.stride(2) == 1 for x in (q, k, v)) and out.is_contiguous()
        scale = rest[7]
        made, natural = attended(q, k, v, q_offsets, k_offsets, scale, causal)
        out.copy_(made)
        if lse is not None:
            lse.copy_(natural / math.log(2))
        self.runs.append(lse is not None)


@contextlib.contextmanager
def recorded_ragged(monkeypatch):
    """Put `RaggedModule` in place of the compiled module; return the module and the name of a backend for the CPU."""
    prefill, module, empty = importlib.import_module("flashinfer.prefill"), RaggedModule(), torch.empty
    monkeypatch.setenv(WORKSPACE_VARIABLE, "4096")
    monkeypatch.setattr(adapter, "kernel_of", lambda device: "fa3")
    monkeypatch.setattr(adapter, "is_compiled", lambda *key: True)
    monkeypatch.setattr(prefill, "get_batch_prefill_module", lambda kernel, *key: module)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    # a machine without a GPU has no pinned memory
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **given: empty(*size, **given))
    adapter._direct_wrapper.cache_clear()
    with registered(replace(FLASHINFER, name="recorded", device_type="cpu", capability=None)):
        yield module, "recorded"
    adapter._direct_wrapper.cache_clear()


@pytest.fixture
def ragged(monkeypatch):
    with recorded_ragged(monkeypatch) as made:
        yield made


def check_calls(name, lengths, causal, spare_keys=0):
    """Run direct calls with and without an LSE, and judge their results."""
    query_lens, key_lens = LENGTHS[lengths]
    tensors, rest = inputs(query_lens, key_lens, BF16, heads=2, spare_keys=spare_keys)
    whole, bounded = joined(tensors, sum(key_lens)), bool(spare_keys)
    state = flash_attn_varlen_shared_rope(*tensors, *rest, causal, torch.float32, bounded=bounded, backend=name)
    judge(state.out, state.lse, whole, rest, causal, BF16)
    made = torch.full((2, sum(query_lens), 128), torch.nan, dtype=BF16).transpose(0, 1)
    out = flash_attn_varlen_shared_rope(
        *tensors, *rest, causal, bounded=bounded, return_lse=False, out=made, backend=name
    )
    assert out is made
    assert_same_bits(out.float(), state.out)
    state = flash_attn_varlen_shared_rope(*tensors, *rest, causal, out=made, bounded=bounded, backend=name)
    assert state.out is made
    judge(state.out, state.lse, whole, rest, causal, BF16)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_ragged_calls(ragged, lengths, causal):
    """Attend in direct calls -> every call plans anew; the keys after the last request, which are NaN, are not read."""
    module, name = ragged
    check_calls(name, lengths, causal, spare_keys=3)
    runs = 3 if all(sum(lens) for lens in LENGTHS[lengths]) else 0
    assert len(module.plans) == len(module.runs) == runs and module.runs == [True, False, True][:runs]


def test_whole_keys_and_layouts(ragged):
    """Pass whole keys, and tensors whose columns have gaps -> the same bits."""
    _, name = ragged
    tensors, rest = inputs([7, 3], [9, 3], BF16, heads=2)
    plain = fast.flash_attn_varlen(*joined(tensors), *rest, True, backend=name)
    strided = [x.mT.contiguous().mT for x in joined(tensors)]
    found = fast.flash_attn_varlen(*strided, *rest, True, backend=name)
    assert_same_bits(found.out, plain.out)
    assert_same_bits(found.lse, plain.lse)


def test_steps_of_a_layer(ragged):
    """Run steps with context -> one plan for each call of a step and not for each layer; wrappers are reused."""
    module, name = ragged
    check_steps(name, "cpu")
    calls = [2 + 1 + 2, 1 + 3, 1 + 2]  # new tokens of each part, and the chunks of each part with context
    builder = builder_for({"flash_attn_varlen": name})
    for place, (query_lens, context_lens) in enumerate(STEPS.values()):
        step = Step(fast, BF16, "cpu", query_lens, context_lens)
        plan, layer = builder.build(0, step.common), step.layer(backend={"flash_attn_varlen": name})
        parts = [part.plan for part in plan.prefill.parts] or [plan.prefill]
        expected = sum(1 + len(each.context_chunks) for each in parts)
        assert len(plan.prefill.parts) == (3 if place == 0 else 0)
        module.plans.clear()
        for _ in range(3):
            step.run(layer, plan)
        assert len(module.plans) == expected >= calls[2]
        (state,) = (each for each in builder._backend_states.made.values() if isinstance(each, adapter.RaggedWrappers))
        events = [each._used.calls for each in state._wrappers]
        assert len(state._wrappers) >= expected and all(each[:2] == ["wait", "record"] for each in events)


def test_a_layer_with_other_properties_plans_again(ragged):
    """Run a plan with another softmax scale, and with other heads -> the results of these, by another plan."""
    module, name = ragged
    step = Step(fast, BF16, "cpu", [5, 4], [20, 0])
    builder = builder_for({"flash_attn_varlen": name})
    plan = builder.build(0, step.common).prefill
    part = plan.parts[0].plan if plan.parts else plan
    tokens = int(part.query_start_loc[-1])
    found = []
    for heads, scale in ((2, SCALE), (2, 2 * SCALE), (3, SCALE), (2, SCALE)):
        torch.manual_seed(1)
        q, k, v = (torch.randn(tokens, heads, width).to(BF16) for width in (192, 128, 128))
        pe = torch.randn(tokens, 64).to(BF16)
        state = fast.run_prefill_new_tokens(q, k, pe, v, part, scale)
        whole = joined((q, k, pe, v))
        judge(*state, whole, (part.query_start_loc, part.query_start_loc, tokens, tokens, scale), True, BF16)
        found.append(state.out)
    assert len(module.plans) == 4
    assert_same_bits(found[0], found[3])


def test_plans_without_a_builder_take_the_launcher(ragged):
    """Run a plan that no builder made -> a direct call, which plans itself."""
    module, name = ragged
    step = Step(fast, BF16, "cpu", [5, 4], [0, 0])
    plan = fast.build_mla_metadata(step.common, 16, 64, 1)
    step.run(step.layer(backend={"flash_attn_varlen": name}), plan)
    assert len(module.plans) == 1 and plan.prefill.backend is None


# a process of its own, without the run-time checks of shapes, which `torch.compile` cannot trace
COMPILED = """
import pytest, torch
from tests.backends.adapters.test_flashinfer_recorded import *

OP = "flash_attn_varlen"
with pytest.MonkeyPatch.context() as patch, recorded_ragged(patch) as (module, name):
    step = Step(fast, BF16, "cpu", *STEPS["parts"])
    plan = builder_for({OP: name}).build(0, step.common)
    layer = step.layer(backend={OP: name})
    plain = step.run(layer, plan)
    module.plans.clear()
    output = torch.zeros_like(plain)
    torch.compile(layer.forward_attention, fullgraph=True, backend="eager")(
        *step.inputs, step.cache.clone(), plan, output
    )
    assert_same_bits(output, plain)
    assert len(module.plans) == sum(1 + len(part.plan.context_chunks) for part in plan.prefill.parts)
"""


def test_compiled_layers_take_the_launcher():
    """Trace a planned step in one graph -> the same bits, by direct calls inside the graph."""
    subprocess.run([sys.executable, "-c", COMPILED], check=True, cwd=ROOT)


def test_wrong_offsets(ragged, plain_errors):
    """Change a plan's number of keys -> an error in place of a read behind the keys."""
    _, name = ragged
    tensors, rest = inputs([4], [4], BF16, heads=2)
    hooks = hooks_of(name)
    state = hooks.create_builder_state(CONFIG, None, (), torch.device("cpu"))
    starts, keys = rest[0], rest[0] + torch.tensor([0, 1], dtype=torch.int32)
    call = adapter.RaggedCall(starts, keys, starts, keys, False, state.wrapper(0))
    q, k, v = joined(tensors)
    with pytest.raises(ValueError, match="^k: expected at least 5 keys, got 4$"):
        adapter.attend(call, q, k, v, SCALE, BF16, True)


def test_rubbish_in_the_variable(ragged, monkeypatch, plain_errors):
    """Create the state of a builder with rubbish in the variable -> one line that names the variable."""
    _, name = ragged
    monkeypatch.setenv(WORKSPACE_VARIABLE, "many")
    with pytest.raises(ValueError, match=f"^{WORKSPACE_VARIABLE}: .*, got 'many'$"):
        hooks_of(name).create_builder_state(CONFIG, None, (), torch.device("cpu"))


# cuDNN


class CudnnGraph:
    """In place of a graph of cuDNN: attends with the tensors that FlashInfer binds to it."""

    def __init__(self, uids, given):
        self.uids, self.given, self.workspaces = uids, given, []

    def get_workspace_size(self):
        return 2**20

    def execute(self, tensors, workspace, handle, **real_shapes):
        uids = self.uids
        q, k, v, out = (tensors[uids[f"{name}_UID"].value] for name in "QKVO")
        lens = [tensors[uids[f"ACTUAL_SEQ_LENS_{name}_UID"].value] for name in ("Q", "KV")]
        starts = [tensors[uids[f"RAGGED_{name}_UID"].value].long() for name in "QKVO"]
        direct = self.given["cu_seq_lens_q"] is not None
        if not direct:  # offsets count elements, and lengths are [B, 1, 1, 1]
            assert all(each.shape[1:] == (1, 1, 1) for each in lens)
            widths = [x.shape[1] * x.shape[2] for x in (q, k, v, out)]
            assert all((each % width == 0).all() for each, width in zip(starts, widths, strict=True))
            starts = [each // width for each, width in zip(starts, widths, strict=True)]
            lens = [torch.nn.functional.pad(each.flatten().cumsum(0), (1, 0)) for each in lens]
        assert torch.equal(starts[0], lens[0].long()) and torch.equal(starts[1], lens[1].long())
        assert torch.equal(starts[0], starts[3]) and torch.equal(starts[1], starts[2])
        assert all(x.is_contiguous() for x in (q, k, v, out))
        assert self.given["max_token_seq_q"] >= lens[0].diff().max()
        assert self.given["max_sequence_kv"] >= lens[1].diff().max()
        requests = len(starts[0]) - 1
        assert workspace.dtype == torch.uint8 and workspace.numel() >= 12_800 * requests
        causal = self.given["bottom_right_causal_mask"]
        made, natural = attended(q, k, v, starts[0], starts[1], self.given["scale"], causal)
        out.copy_(made)
        if self.given["return_lse"]:
            lse = tensors[uids["STATS_UID"].value]
            offsets = tensors[uids["RAGGED_STATS_UID"].value].long() // (1 if direct else q.shape[1])
            assert torch.equal(offsets, starts[0]) and lse.shape == natural.shape
            lse.copy_(natural)


@pytest.fixture(params=["lengths", "offsets"])
def cudnn(monkeypatch, request):
    """Put `CudnnGraph` in place of cuDNN, for versions that take lengths, and for versions that take offsets."""
    prefill = importlib.import_module("flashinfer.cudnn.prefill")
    uids, direct = prefill.UIDs.__members__, request.param == "offsets"

    def build(*, q, k_cache, v_cache, **given):
        return CudnnGraph(uids, given), []

    monkeypatch.setattr(prefill, "CUDNN_AVAILABLE", True)
    monkeypatch.setattr(prefill, "_build_prefill_graph", build, raising=False)
    monkeypatch.setattr(prefill, "_create_cudnn_handle", lambda stream: None)
    monkeypatch.setattr(prefill, "_cudnn_supports_direct_seqlens", lambda dtype, mixed=False: direct)
    monkeypatch.setattr(prefill, "_cudnn_supports_shape_override", lambda: direct)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    available = dict(missing_package=None, missing_artifacts=None)
    with registered(replace(FLASHINFER_CUDNN, name="recorded", device_type="cpu", capability=None, **available)):
        yield "recorded"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_cudnn_calls(cudnn, lengths, causal):
    check_calls(cudnn, lengths, causal)


def test_cudnn_steps(cudnn):
    check_steps(cudnn, "cpu")


def test_cudnn_is_refused_without_its_library(monkeypatch):
    """Take cuDNN's library away -> the reason; an older FlashInfer is refused too."""
    cudnn = pytest.importorskip("cudnn")
    monkeypatch.setattr(cudnn, "backend_version", lambda: 1 / 0, raising=False)
    assert flashinfer_cudnn.missing_parts() == ["cannot load cuDNN: ZeroDivisionError: division by zero"]

    def raises():
        raise RuntimeError("Unable to find symbol\n cudnnGetVersion")

    monkeypatch.setattr(cudnn, "backend_version", raises, raising=False)
    assert flashinfer_cudnn.missing_parts() == [
        "cannot load cuDNN: RuntimeError: Unable to find symbol cudnnGetVersion"
    ]
    monkeypatch.setattr(cudnn, "backend_version", lambda: 92400, raising=False)
    assert flashinfer_cudnn.missing_parts() == []
    entry = importlib.import_module("flashinfer.cudnn")
    monkeypatch.setattr(entry, "cudnn_batch_prefill_with_kv_cache", lambda q, batch_offsets_units: None)
    assert flashinfer_cudnn.missing_parts() == ["needs a version of flashinfer whose cuDNN call has lse_base"]


def test_cudnn_refuses_offsets_above_32_bit(cudnn, plain_errors):
    q = torch.empty(1, 1, 192, dtype=BF16).expand(2**24, 1, 192)
    k, v = torch.zeros(1, 1, 192, dtype=BF16), torch.zeros(1, 1, 128, dtype=BF16)
    starts = [torch.tensor([0, end], dtype=torch.int32) for end in (2**24, 1)]
    with pytest.raises(ValueError, match="^q: expected fewer than 2\\^31 elements for cuDNN, got 3221225472$"):
        flashinfer_cudnn.flash_attn_varlen(q, k, None, v, *starts, 2**24, 1, 1.0, False, BF16)


# TRT-LLM


class TrtllmModule:
    """In place of TRT-LLM's compiled kernels."""

    def __init__(self):
        self.calls = 0

    def trtllm_ragged_attention(
        self, out, query, key, value, workspace, seq_lens, max_q, max_kv, scale, value_scale, o_sf_scale, requests,
        window, cu_q, cu_k, sm_count, pdl, causal, workspace_size, sinks, threshold, lse, *rest,
    ):  # fmt: skip
        assert not workspace.any() and workspace_size == workspace.numel() == 4096
        assert (value_scale, o_sf_scale, window, pdl, sinks, threshold) == (1.0, 1.0, -1, False, None, None)
        assert torch.equal(seq_lens, cu_k.diff()) and requests == len(seq_lens)
        assert (cu_q.diff() > 0).all() and (seq_lens > 0).all()  # the kernel must get no empty request
        assert (max_q, max_kv) == (cu_q.diff().max(), seq_lens.max())
        assert all(x.is_contiguous() for x in (query, key, value, out))
        made, natural = attended(query, key, value, cu_q, cu_k, scale, causal)
        out.copy_(made)
        if lse is not None:
            lse.copy_(natural / math.log(2))
        workspace.fill_(7)  # the next call must get zeros again
        self.calls += 1


@pytest.fixture
def trtllm(monkeypatch):
    """Put `TrtllmModule` in place of the compiled kernels; return the module and the name of a backend for the CPU."""
    prefill, module = importlib.import_module("flashinfer.prefill"), TrtllmModule()
    monkeypatch.setenv(WORKSPACE_VARIABLE, "4096")
    monkeypatch.setattr(prefill, "get_trtllm_gen_fmha_module", lambda: module)
    monkeypatch.setattr(prefill, "get_device_sm_count", lambda device: 1)
    with registered(replace(TRTLLM_RAGGED, name="recorded", device_type="cpu", capability=None, capability_end=None)):
        yield module, "recorded"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_trtllm_calls(trtllm, lengths, causal):
    module, name = trtllm
    check_calls(name, lengths, causal, spare_keys=3)
    requests = zip(*LENGTHS[lengths], strict=True)
    assert module.calls == (3 if any(queries and keys for queries, keys in requests) else 0)


def test_trtllm_steps(trtllm):
    """Run steps with context -> within the budget; every call gets an output and a workspace of zeros."""
    module, name = trtllm
    check_steps(name, "cpu")
    assert module.calls > 0


def test_trtllm_output_is_zeroed(trtllm, monkeypatch):
    """Let the kernel write nothing -> output 0 and LSE -inf, although the given tensors were NaN."""
    module, name = trtllm
    monkeypatch.setattr(module, "trtllm_ragged_attention", lambda *given: None, raising=False)
    tensors, rest = inputs([4], [4], BF16, heads=2)
    made = torch.full((4, 2, 128), torch.nan, dtype=BF16)
    state = flash_attn_varlen_shared_rope(*tensors, *rest, True, out=made, backend=name)
    assert not state.out.any() and (state.lse == -torch.inf).all()
    state = flash_attn_varlen_shared_rope(*tensors, *rest, True, torch.float32, backend=name)
    assert not state.out.any() and (state.lse == -torch.inf).all()


def test_trtllm_entry(monkeypatch):
    """Look for the entry in FlashInfer's module -> nothing is missing; without the entry, the reason."""
    assert missing_entry() == []
    monkeypatch.delattr(importlib.import_module("flashinfer.prefill"), "trtllm_ragged_attention_deepseek")
    assert missing_entry() == ["needs a version of flashinfer with trtllm_ragged_attention_deepseek"]


def test_trtllm_widths():
    """Ask for keys and values of widths that the kernels do not have -> the reasons."""
    dims = ("qk_head_dim", 192), ("v_head_dim", 256)
    request = backends.KernelRequest("flash_attn_varlen", torch.device("cpu"), BF16, dims)
    anywhere = replace(TRTLLM_RAGGED, device_type="cpu", capability=None, capability_end=None)
    assert anywhere.validate_configuration(request) == [
        "trtllm_ragged: not run: needs Blackwell",
        "trtllm_ragged: serves the columns ((192, 128), (128, 128), (256, 256)) of keys and values, got (192, 256)",
    ]
