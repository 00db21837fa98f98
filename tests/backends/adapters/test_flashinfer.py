"""Tests of the adapters to FlashInfer, with FlashInfer's kernels on a GPU, and of their declarations on any machine."""

from __future__ import annotations

import contextlib
import functools
import re
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
from fast.backends.adapters.flashinfer import FLASHINFER
from fast.backends.adapters.flashinfer_cudnn import FLASHINFER_CUDNN, sees_no_key
from fast.backends.adapters.flashinfer_workspace import WORKSPACE_VARIABLE, workspace_bytes
from fast.backends.adapters.ragged_calls import rows_without_keys
from fast.backends.adapters.trtllm_ragged import TRTLLM_RAGGED
from fast.parity import LSE_RELATIVE, compare
from reference.interfaces import MLAConfig, QueryLenSupport, RopeConfig, UnsupportedConfiguration

from ...support.backends import registered
from ...support.factories import (
    assert_same_bits,
    integers,
    make_batch,
    make_cache,
    make_entries,
    make_layer,
    make_weights,
    moved,
    offsets,
)
from ...support.synchronisation import no_synchronisation

OP = "flash_attn_varlen"
ADAPTERS = {each.name: each for each in (FLASHINFER, FLASHINFER_CUDNN, TRTLLM_RAGGED)}
CONFIG = MLAConfig(32, 2, None, 64, 128, 64, 128, 1e-5, RopeConfig(interleaved=False))  # head dims 192 and 128
LENGTHS = {
    "one": ([1], [1]),
    "equal": ([5, 5], [5, 5]),
    "mixed": ([1, 17, 0, 5, 7], [1, 17, 4, 0, 31]),
    "pages": ([63, 64, 65], [127, 128, 129]),
    "tiles": ([127, 128, 129, 1], [255, 257, 128, 97]),
    "more queries than keys": ([9, 4, 200], [4, 0, 71]),
    "long": ([300, 3, 1], [2503, 4099, 700]),
    "no keys": ([3, 2], [0, 0]),
    "none": ([0], [0]),
}
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def all_registered():
    """Register the adapters that are not registered yet."""
    known = {each.name for each in backends.registered()}
    with contextlib.ExitStack() as stack:
        for each in ADAPTERS.values():
            if each.name not in known:
                stack.enter_context(registered(each))
        yield


def inputs(query_lens, key_lens, dtype, heads=16, device="cpu", spare_keys=0):
    """Return q, k_nope, k_pe and v, and the other arguments up to the scale; spare keys after the requests are NaN."""
    tokens, keys = sum(query_lens), sum(key_lens)
    shapes = (
        (tokens, heads, 192),
        (keys + spare_keys, heads, 128),
        (keys + spare_keys, 64),
        (keys + spare_keys, heads, 128),
    )
    tensors = [torch.randn(*shape, dtype=torch.float64).to(device, dtype) for shape in shapes]
    for each in tensors[1:]:
        each[keys:] = torch.nan
    starts = [offsets(lens).to(device) for lens in (query_lens, key_lens)]
    return tensors, (*starts, max(query_lens), max(key_lens), 192**-0.5)


def joined(tensors, keys=None):
    """Return queries, whole keys and values; with `keys`, only this number of keys and values."""
    q, k_nope, k_pe, v = tensors
    whole = torch.cat((k_nope, k_pe[:, None].expand(-1, k_nope.shape[1], -1)), dim=-1)
    return q, whole[:keys], v[:keys]


def judge(out, lse, whole, rest, causal, dtype):
    """Compare a state with the reference; the library rounds an output in float32 to the dtype of the queries too."""
    low = reference.flash_attn_varlen(*whole, *rest, causal)
    gold = reference.flash_attn_varlen(*[x.double() for x in whole], *rest, causal)
    assert out.shape == gold.out.shape and torch.equal(out.to(dtype).to(out.dtype), out)
    for name, value, coarse, fine, relative in (
        ("out", out.to(dtype), low.out, gold.out, 0.0),
        ("lse", lse, low.lse, gold.lse, LSE_RELATIVE),
    ):
        if value is not None:
            parity = compare(name, value, coarse, fine, relative)
            assert parity.passed, parity
    assert out[(gold.lse == -torch.inf).T].eq(0).all()


class Step:
    """A step of prefills of one layer: requests with and without context, whose context has two chunks.

    Args:
        ops: package of the layer and the plan, `fast` or `reference`.
        dtype: dtype of the layer.
        device: device of all tensors.
        query_lens: new tokens of each request.
        context_lens: tokens of each request that are in the cache before the step.
        config: config of the layer.
    """

    def __init__(self, ops, dtype, device, query_lens, context_lens, config=CONFIG):
        torch.manual_seed(5)
        self.device, self.config, rounded = device, config, torch.bfloat16
        weights = {name: x.to(rounded) for name, x in make_weights(config, torch.float64).items()}
        seq_lens = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
        self.batch = make_batch(query_lens, seq_lens)
        entries = [x.to(rounded) for x in make_entries(self.batch, config.head_size, torch.float64)]
        self.cache = make_cache(self.batch, entries, config.head_size, dtype, new_tokens=False).to(device)
        self.common = moved(self.batch.common, device)
        shapes = (config.num_heads, config.qk_head_dim), (config.kv_lora_rank,), (config.qk_rope_head_dim,)
        given = [torch.randn(sum(query_lens), *shape, dtype=torch.float64) for shape in shapes]
        self.inputs = [x.to(rounded).to(device, dtype) for x in given]
        self.make = functools.partial(make_layer, ops, config, weights, dtype)

    def layer(self, **options):
        """Return the layer on the device."""
        return self.make(**options).to(self.device)

    def run(self, layer, plan):
        """Return the attention output [T, N, V] of the step."""
        shape = self.inputs[0].shape[0], self.config.num_heads, self.config.v_head_dim
        output = torch.full(shape, torch.nan, dtype=self.inputs[0].dtype, device=self.device)
        layer.forward_attention(*self.inputs, self.cache.clone(), plan, output)
        return output


STEPS = {  # new tokens and context of each request; chunks have at most 64 tokens
    "parts": ([5, 7, 3, 9], [0, 53, 38, 0]),
    "one part": ([70, 2, 33], [3, 64, 40]),
    "an empty chunk": ([4, 6, 2], [1, 100, 7]),
}
CHUNK_TOKENS = 64


def builder_for(backend, config=CONFIG):
    """Return a builder whose plans have chunks of `CHUNK_TOKENS` tokens and no decodes of several tokens."""
    options = dict(workspace_tokens=CHUNK_TOKENS, dtype=torch.bfloat16, backend=backend)
    return fast.MLAMetadataBuilder(config, 16, 512, 8, QueryLenSupport.SINGLE_ONLY, **options)


def check_steps(backend, device, config=CONFIG):
    """Run every step twice with a backend and once with kernels of this package, and compare them with the reference.

    The builder is the same for all steps, so that later steps use the wrappers of earlier steps. A plan is also run
    after the builder has planned another step.

    Returns:
        The last step, and its layer and plan.
    """
    own = {OP: "triton" if device == "cuda" else "cpu"}
    builder, own_builder = (builder_for(each, config) for each in ({OP: backend}, own))
    last = None
    for query_lens, context_lens in STEPS.values():
        step = Step(fast, torch.bfloat16, device, query_lens, context_lens, config)
        layer, plan = step.layer(backend={OP: backend}), builder.build(0, step.common)
        assert plan.prefill.backend == backend and len(plan.prefill.context_chunks) >= 2 and plan.num_decodes == 0
        found = step.run(layer, plan)
        assert_same_bits(step.run(layer, plan), found)
        ours = step.run(step.layer(backend=own), own_builder.build(0, step.common))
        gold, low = (
            (other := Step(reference, dtype, "cpu", query_lens, context_lens, config)).run(
                other.layer(), reference.build_mla_metadata(other.common, 16, CHUNK_TOKENS, 1)
            )
            for dtype in (torch.float64, torch.bfloat16)
        )
        for name, value in (("adapter", found), ("own", ours)):
            parity = compare(name, value.cpu(), low, gold)
            assert parity.passed, parity
        if last is not None:  # a plan of an earlier step, whose wrappers now serve this step
            assert_same_bits(last[0].run(*last[1:3]), last[3])
        last = step, layer, plan, found
    return step, layer, plan


# Declarations and conversions, on any machine


def test_declarations():
    """Import the adapters -> neither FlashInfer nor a kernel is imported; only `flashinfer` may be chosen unnamed."""
    program = (
        "import sys; import fast.backends.adapters.flashinfer, fast.backends.adapters.flashinfer_cudnn; "
        "import fast.backends.adapters.trtllm_ragged, fast.mla.flashinfer_hooks; "
        "assert not {'flashinfer', 'cudnn', 'tvm_ffi'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert [each.only_named for each in ADAPTERS.values()] == [False, True, True]
    assert FLASHINFER.priority_of(OP, "9.x") == 12 and FLASHINFER.priority_of(OP, "8.x") == 0
    assert FLASHINFER.supports_compute_capability((8, 0)) and not FLASHINFER.supports_compute_capability((7, 5))
    assert TRTLLM_RAGGED.supports_compute_capability((10, 3)) and not TRTLLM_RAGGED.supports_compute_capability((9, 0))


@pytest.mark.parametrize("name", ADAPTERS)
def test_cpu_tensors_are_refused(name):
    tensors, rest = inputs([4], [4], torch.bfloat16)
    with pytest.raises(UnsupportedConfiguration, match=f"{name}: serves device cuda, got cpu") as error:
        flash_attn_varlen_shared_rope(*tensors, *rest, True, backend=name)
    assert ("not run: needs Blackwell" in str(error.value)) == (name == "trtllm_ragged")


@pytest.mark.parametrize(
    ("widths", "dtype", "changes", "reason"),
    [
        ((192, 128), torch.float32, {}, "serves torch.bfloat16, torch.float16, got torch.float32"),
        ((192, 256), torch.bfloat16, {}, "serves keys as wide as values, or 192 and 128 columns, got 192 and 256"),
        ((20, 20), torch.bfloat16, {}, r"serves qk_head_dim in \(64, 128, 256, 192\), got 20"),
        ((128, 128), torch.bfloat16, {"mask": "visible_lens"}, "applies the masks causal, got visible_lens"),
        ((128, 128), torch.bfloat16, {"batch_invariant": True}, "is not batch-invariant on this GPU"),
        ((128, 128), torch.float16, {}, "has no compiled kernel for torch.float16 with 128 and 128 columns"),
    ],
)
def test_refusals(monkeypatch, widths, dtype, changes, reason):
    """Ask for what FlashInfer cannot do on an Ampere GPU without compiled kernels -> the reason."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(adapter, "is_compiled", lambda *key: False)
    available = replace(FLASHINFER, missing_package=None, missing_artifacts=None)
    dims = tuple(zip(("qk_head_dim", "v_head_dim"), widths, strict=True))
    request = backends.KernelRequest(OP, torch.device("cuda"), dtype, dims, **changes)
    found = available.validate_configuration(request)
    assert any(re.search(f"^flashinfer: .*{reason}", each) for each in found), found


def test_a_broken_library_is_a_reason(monkeypatch):
    """Let FlashInfer fail while it describes a kernel -> a reason, and not an error of every choice of a backend."""

    def fail(*key):
        raise RuntimeError("no source\nfiles")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(adapter, "_module", fail)
    available = replace(FLASHINFER, missing_package=None, missing_artifacts=None)
    dims = ("qk_head_dim", 256), ("v_head_dim", 256)
    found = available.validate_configuration(backends.KernelRequest(OP, torch.device("cuda"), torch.bfloat16, dims))
    assert found == ["flashinfer: cannot look for its compiled kernel: RuntimeError: no source files"]


@pytest.mark.parametrize("text", ["rubbish", "-1", "0", "1e6", "٣x", "9" * 30])
def test_workspace_variable(monkeypatch, plain_errors, text):
    """Put rubbish into the variable -> one line that names the variable; an argument is taken before the variable."""
    monkeypatch.setenv(WORKSPACE_VARIABLE, text)
    with pytest.raises(ValueError, match=f"^{WORKSPACE_VARIABLE}: expected a number of bytes, at least 1, got"):
        workspace_bytes()
    assert workspace_bytes(64) == 64
    monkeypatch.setenv(WORKSPACE_VARIABLE, "4096")
    assert workspace_bytes() == 4096
    monkeypatch.setenv(WORKSPACE_VARIABLE, "")
    assert workspace_bytes() == 394 * 2**20
    with pytest.raises(ValueError, match="^workspace_bytes: "):
        workspace_bytes(0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_rows_without_keys(lengths, causal):
    """Find the rows without keys on the CPU and on the device -> the rows where the reference's LSE is -inf."""
    query_lens, key_lens = LENGTHS[lengths]
    tensors = [torch.randn(sum(lens), 1, 2) for lens in (query_lens, key_lens, key_lens)]
    starts = offsets(query_lens), offsets(key_lens)
    lse = reference.flash_attn_varlen(*tensors, *starts, max(query_lens), max(key_lens), 1.0, causal).lse
    wanted = (lse[0] == -torch.inf).nonzero().flatten()
    assert torch.equal(rows_without_keys(*[each.cpu() for each in starts], causal).to(wanted.device), wanted)
    assert torch.equal(sees_no_key(*starts, sum(query_lens), causal).nonzero().flatten(), wanted)


# The kernels, on a GPU


def skip_unless_served(name, dtype, heads_dims=(192, 128)):
    """Skip the test with the backend's reasons if this machine lacks the library, the GPU or the compiled kernel."""
    dims = tuple(zip(("qk_head_dim", "v_head_dim"), heads_dims, strict=True))
    request = backends.KernelRequest(OP, torch.device("cuda", 0), dtype, dims, out_dtype=dtype, lse=True)
    reasons = ADAPTERS[name].validate_configuration(request)
    if reasons:
        pytest.skip("; ".join(reasons))


@NEEDS_GPU
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", ADAPTERS)
def test_within_the_budget(name, lengths, dtype, causal, heads):
    """Attend packed requests, with an LSE in float32 and without -> output and LSE are within the budget."""
    skip_unless_served(name, dtype)
    query_lens, key_lens = LENGTHS[lengths]
    tensors, rest = inputs(query_lens, key_lens, dtype, heads, "cuda")
    whole = joined(tensors)
    state = fast.flash_attn_varlen(*whole, *rest, causal, torch.float32, backend=name)
    assert state.out.dtype == state.lse.dtype == torch.float32
    judge(state.out, state.lse, whole, rest, causal, dtype)
    out = flash_attn_varlen_shared_rope(*tensors, *rest, causal, return_lse=False, backend=name)
    assert out.dtype == dtype
    judge(out, None, whole, rest, causal, dtype)
    if name == "flashinfer":  # cuDNN may take another kernel for a call without an LSE
        assert_same_bits(out.float(), state.out)


@NEEDS_GPU
@pytest.mark.parametrize("name", ADAPTERS)
def test_out_with_any_strides(name):
    """Write to tensors with other strides -> the same bits, in the given tensor."""
    skip_unless_served(name, torch.bfloat16)
    tensors, rest = inputs([70, 3], [70, 31], torch.bfloat16, device="cuda")
    plain = flash_attn_varlen_shared_rope(*tensors, *rest, True, backend=name)
    made = torch.full((16, 73, 128), torch.nan, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
    strided = [x.mT.contiguous().mT for x in tensors]
    state = flash_attn_varlen_shared_rope(*strided, *rest, True, out=made, backend=name)
    assert state.out is made and torch.equal(made, plain.out) and torch.equal(state.lse, plain.lse)


@NEEDS_GPU
def test_nan():
    """Put NaN into spare keys, into a key and into a value -> only the rows that the module's docstring names."""
    skip_unless_served("flashinfer", torch.bfloat16)
    lens = [130, 70, 40]
    tensors, rest = inputs(lens, lens, torch.bfloat16, device="cuda", spare_keys=50)

    def attend():
        return flash_attn_varlen_shared_rope(*tensors, *rest, True, bounded=True, backend="flashinfer")

    plain = attend()
    judge(*plain, joined(tensors, sum(lens)), rest, True, torch.bfloat16)
    tensors[1][200] = torch.nan  # first key of the last request
    state = attend()
    assert_same_bits(state.out[:200], plain.out[:200])
    assert_same_bits(state.lse[:, :200].contiguous(), plain.lse[:, :200].contiguous())
    assert state.out[200:].isnan().all() and state.lse[:, 200:].isnan().all()
    tensors[1][200] = 1.0
    tensors[3][200] = torch.nan
    state = attend()  # may also reach rows of earlier requests, whose last tile of values holds this value
    assert_same_bits(state.out[:128], plain.out[:128])
    assert state.out[200:].isnan().all() and state.lse.isfinite().all()


@NEEDS_GPU
def test_batch_invariance():
    """Attend each request alone and in a batch, with the kernel "fa3" -> the same bits."""
    skip_unless_served("flashinfer", torch.bfloat16)
    if adapter.kernel_of(torch.device("cuda")) != "fa3":
        pytest.skip("only the kernel fa3 is batch-invariant")
    query_lens, key_lens = [130, 1, 7, 300], [130, 77, 4000, 811]
    (q, k, k_pe, v), rest = inputs(query_lens, key_lens, torch.bfloat16, device="cuda")
    for causal in (True, False):
        whole = flash_attn_varlen_shared_rope(q, k, k_pe, v, *rest, causal, backend="flashinfer")
        for request in range(4):
            rows = slice(sum(query_lens[:request]), sum(query_lens[: request + 1]))
            keys = slice(sum(key_lens[:request]), sum(key_lens[: request + 1]))
            lens = query_lens[request], key_lens[request]
            alone = flash_attn_varlen_shared_rope(
                q[rows], k[keys], k_pe[keys], v[keys], *[offsets([each]).cuda() for each in lens], *lens, rest[4],
                causal, backend="flashinfer",
            )  # fmt: skip
            assert_same_bits(alone.out, whole.out[rows].contiguous())
            assert_same_bits(alone.lse, whole.lse[:, rows].contiguous())


@NEEDS_GPU
@pytest.mark.parametrize("name", ADAPTERS)
def test_steps_of_a_layer(name):
    """Plan and run steps with two chunks of context -> within the budget; a layer of a planned step does not wait."""
    skip_unless_served(name, torch.bfloat16)
    step, layer, plan = check_steps(name, "cuda", replace(CONFIG, num_heads=16))
    if name == "flashinfer":
        with no_synchronisation():
            step.run(layer, plan)


@NEEDS_GPU
def test_wrong_offsets(plain_errors):
    """Pass offsets that exceed the keys or that decrease -> an error, and the kernel reads nothing."""
    skip_unless_served("flashinfer", torch.bfloat16)
    tensors, (starts, _, *rest) = inputs([4, 4], [5, 5], torch.bfloat16, device="cuda")
    for wrong in ((0, 5, 11), (0, 7, 3), (-1, 5, 10)):
        with pytest.raises(ValueError, match="^cu_seqlens_k: expected"):
            flash_attn_varlen_shared_rope(
                *tensors, starts, integers(*wrong).cuda(), *rest, True, bounded=True, backend="flashinfer"
            )
