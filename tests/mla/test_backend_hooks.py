"""Tests of the hooks that a builder and the layers call on the backend of a step's prefills."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

import fast
from fast.backends import Backend
from fast.backends.adapters.flashinfer_workspace import new_workspace
from fast.backends.own import CPU
from fast.mla.backend_hooks import BackendHooks
from reference.interfaces import PrefillMetadata, QueryLenSupport, UnsupportedConfiguration, check_int

from ..support.backends import registered
from ..support.factories import (
    DIRECT,
    assert_same_bits,
    make_batch,
    make_layer,
    make_weights,
    new_cache,
    positions_of,
)

CALLS: list[tuple] = []
OP = "flash_attn_varlen"
ONE_TOKEN = QueryLenSupport.SINGLE_ONLY  # with this support, a query of several tokens takes the expanded path


@dataclass(frozen=True, eq=False)
class ScheduledPrefill(PrefillMetadata):
    """The prefill part of a plan, with what a library would plan once for all layers."""

    made_for: str = ""


class Recorder(BackendHooks):
    """Hooks that note each call, and that otherwise do what the hooks of the own backends do."""

    def create_builder_state(self, config, cache_format, layer_names, device):
        CALLS.append(("state", config, cache_format.name, layer_names, device.type))
        return {"steps": 0}

    def post_process_prefill_metadata(self, prefill, state, query_start_loc):
        state["steps"] += 1
        CALLS.append(("prefill", query_start_loc.tolist(), len(prefill.context_chunks), state["steps"]))
        fields = {name: getattr(prefill, name) for name in PrefillMetadata.__dataclass_fields__}
        return ScheduledPrefill(**fields, made_for="step")

    def finalize_metadata(self, metadata, state):
        CALLS.append(("plan", metadata.prefill.made_for, metadata.num_decodes, metadata.schedule is not None))
        return metadata

    def run_prefill_new_tokens(self, inputs, metadata, *rest):
        CALLS.append(("new tokens", inputs.q.shape[0], metadata.backend))
        return super().run_prefill_new_tokens(inputs, metadata, *rest)

    def run_prefill_context_chunk(self, inputs, metadata, chunk, softmax_scale):
        CALLS.append(("chunk", inputs.k.shape[0], metadata.backend))
        return super().run_prefill_context_chunk(inputs, metadata, chunk, softmax_scale)


def hooked(name: str = "hooked", **changes) -> Backend:
    return Backend(name, 50, "cpu", {OP: replace(CPU.ops[OP], **changes)}, hooks=f"{__name__}:Recorder")


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()


def step(query_lens, seq_lens, builder, layer):
    """Run one step of a layer; return its plan, its output and its cache."""
    batch = make_batch(query_lens, seq_lens)
    cache = new_cache(batch, DIRECT.head_size, torch.float32)
    torch.manual_seed(len(query_lens))
    hidden = torch.randn(sum(query_lens), DIRECT.hidden_size)
    plan = builder.build(0, batch.common)
    return plan, layer(hidden, positions_of(query_lens, seq_lens), cache, plan), cache


def make(backend=None, **given):
    layer = make_layer(fast, DIRECT, make_weights(DIRECT, torch.float32), torch.float32, backend=backend)
    names = ("layers.0", "layers.1")
    options = dict(
        workspace_tokens=16, query_len_support=ONE_TOKEN, dtype=torch.float32, layer_names=names, backend=backend
    )
    options |= given
    return fast.MLAMetadataBuilder(DIRECT, 16, 128, 8, **options), layer


def test_order_of_the_hooks():
    """Plan and run steps -> the state once, then for each step the prefill, the plan, the new tokens and the chunks.

    The whole plan already has the schedule of its decodes.
    """
    torch.manual_seed(0)
    weights = make_weights(DIRECT, torch.float32)
    plain = make_layer(fast, DIRECT, weights, torch.float32)
    own, _ = make(batch_invariant=True)
    with registered(hooked()):
        torch.manual_seed(0)
        layer = make_layer(fast, DIRECT, weights, torch.float32, backend={OP: "hooked"})
        builder, _ = make({OP: "hooked"}, batch_invariant=True)
        lens = [1, 6, 4], [20, 6, 24]
        state = torch.get_rng_state()
        plan, found, cache = step(*lens, builder, layer)
        assert type(plan.prefill) is ScheduledPrefill and plan.prefill.backend == "hooked"
        assert [part.plan.backend for part in plan.prefill.parts] == ["hooked", "hooked"]
        chunks = plan.prefill.context_chunks
        assert CALLS[0] == ("state", DIRECT, "compute_dtype", ("layers.0", "layers.1"), "cpu")
        assert CALLS[1:3] == [("prefill", [0, 6, 10], len(chunks), 1), ("plan", "step", 1, True)]
        assert CALLS[3:5] == [("new tokens", 6, "hooked"), ("new tokens", 4, "hooked")]
        assert CALLS[5:] == [("chunk", chunk.num_tokens, "hooked") for chunk in chunks] and len(chunks) == 2
        CALLS.clear()
        builder.build(0, make_batch([3], [3]).common)
        assert [call[0] for call in CALLS] == ["prefill", "plan"] and CALLS[0][-1] == 2
        CALLS.clear()
        assert builder.build(0, make_batch([1, 1], [9, 4]).common).prefill.backend is None and not CALLS
    torch.set_rng_state(state)
    _, wanted, other = step(*lens, own, plain)
    assert_same_bits(found, wanted)
    assert_same_bits(cache, other)


def test_own_backends_are_named_too():
    builder, layer = make()
    plan, _, _ = step([5], [30], builder, layer)
    assert plan.prefill.backend == "cpu" and type(plan.prefill) is PrefillMetadata


def test_the_backend_of_a_step_depends_on_the_step():
    """Register a backend without an LSE -> it serves steps without context, and `cpu` serves steps with context."""
    with registered(hooked("no_lse", lse=False)):
        builder, layer = make()
        assert step([5, 3], [5, 3], builder, layer)[0].prefill.backend == "no_lse"
        assert step([5, 3], [5, 30], builder, layer)[0].prefill.backend == "cpu"


def test_a_layer_bound_to_another_backend_refuses_the_plan():
    with registered(hooked()):
        builder, _ = make({OP: "hooked"})
        _, layer = make({OP: "cpu"})
        batch = make_batch([4], [4])
        cache = new_cache(batch, DIRECT.head_size, torch.float32)
        before = cache.clone()
        plan = builder.build(0, batch.common)
        with pytest.raises(ValueError, match="^metadata.prefill.backend: expected cpu, .* of the layer, got hooked$"):
            layer(torch.randn(4, DIRECT.hidden_size), positions_of([4], [4]), cache, plan)
        assert_same_bits(cache, before)


def test_wrong_hooks():
    """Name hooks of another type, or return another type from a hook -> an error with the name of the backend."""
    with registered(replace(hooked(), hooks=f"{__name__}:ScheduledPrefill")):
        builder, _ = make({OP: "hooked"})
        with pytest.raises(TypeError):
            builder.build(0, make_batch([4], [4]).common)
    with registered(replace(hooked(), hooks=f"{__name__}:NothingBack")):
        builder, _ = make({OP: "hooked"})
        with pytest.raises(TypeError, match="^the prefill of the backend hooked: expected a PrefillMetadata, got None"):
            builder.build(0, make_batch([4], [4]).common)


class NothingBack(BackendHooks):
    """Hooks that lose the prefill part of a plan."""

    def post_process_prefill_metadata(self, prefill, state, query_start_loc):
        return None


class NoPlanBack(BackendHooks):
    """Hooks that lose the plan."""

    def finalize_metadata(self, metadata, state):
        return None


class NoNameBack(BackendHooks):
    """Hooks that lose the name of the backend."""

    def post_process_prefill_metadata(self, prefill, state, query_start_loc):
        return replace(prefill, backend=None)


class WrongState(BackendHooks):
    """Hooks whose results have another dtype, from the third call on."""

    calls = 0

    def run_prefill_context_chunk(self, inputs, metadata, chunk, softmax_scale):
        state = super().run_prefill_context_chunk(inputs, metadata, chunk, softmax_scale)
        WrongState.calls += 1
        return state if WrongState.calls < 3 else replace(state, out=state.out.double())


class IgnoresOut(BackendHooks):
    """Hooks that do not write into `out`."""

    def run_prefill_new_tokens(self, inputs, metadata, softmax_scale, out_dtype, return_lse, out, out_is_checked):
        return super().run_prefill_new_tokens(
            inputs, metadata, softmax_scale, out_dtype, return_lse, None, out_is_checked
        )


@pytest.mark.parametrize(
    ("hooks", "error", "message"),
    [
        (NoPlanBack, TypeError, "^the plan of the backend hooked: expected an MLAMetadata, got None"),
        (NoNameBack, ValueError, "^the prefill of the backend hooked: backend: expected hooked, got None$"),
    ],
)
def test_lost_plans(hooks, error, message, plain_errors):
    with registered(replace(hooked(), hooks=hooks)):
        builder, _ = make({OP: "hooked"})
        with pytest.raises(error, match=message):
            builder.build(0, make_batch([4], [4]).common)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nosuch.module:Hooks", "ModuleNotFoundError: No module named 'nosuch'"),
        (f"{__name__}:Nosuch", f"AttributeError: module '{__name__}' has no attribute 'Nosuch'"),
    ],
)
def test_hooks_that_cannot_be_imported(path, why):
    with registered(replace(hooked(), hooks=path)):
        builder, _ = make({OP: "hooked"})
        with pytest.raises(UnsupportedConfiguration) as error:
            builder.build(0, make_batch([4], [4]).common)
        assert list(error.value.reasons) == [f"hooked: cannot import its hooks {path}: {why}"]


def test_names_of_layers(plain_errors):
    for names, message in (
        (["a"], "^layer_names: expected a tuple of names, got list$"),
        (("a", 2), r"^layer_names\[1\]: expected a?n? ?str, got int$"),
    ):
        with pytest.raises(TypeError, match=message):
            make(layer_names=names)


def test_wrong_states_of_hooks(plain_errors):
    """Return a wrong dtype in a later step, or ignore `out` -> an error that names the backend and the method."""
    WrongState.calls = 0
    name = "the result of the backend hooked for"
    with registered(replace(hooked(), hooks=WrongState)):
        builder, layer = make({OP: "hooked"})
        for _ in range(2):
            step([5], [21], builder, layer)
        with pytest.raises(ValueError, match=f"^{name} run_prefill_context_chunk: out: expected dtype torch.float32"):
            step([5], [21], builder, layer)
    with registered(replace(hooked(), hooks=IgnoresOut)):
        builder, layer = make({OP: "hooked"})
        with pytest.raises(ValueError, match=f"^{name} run_prefill_new_tokens: out: expected the tensor into which"):
            step([5], [5], builder, layer)


def test_wrong_states_of_launchers(plain_errors):
    """Ignore `out` in a launcher, or return a wrong shape -> an error that names the backend and the op."""
    right = fast.backends.kernel("cpu", OP)

    def elsewhere(*arguments):
        return right(*arguments[:11])[0], None

    def cut(*arguments):
        out, lse = right(*arguments)
        return out[:-1], lse

    for launcher, message in (
        (elsewhere, "out: expected the tensor into which the backend had to write, got another tensor"),
        (cut, r"out: expected shape \[5, 3, 10\], got \[4, 3, 10\]"),
    ):
        with registered(replace(hooked(launcher=launcher), hooks=None)):
            builder, layer = make({OP: "hooked"})
            with pytest.raises(ValueError, match=f"^the result of the backend hooked for {OP}: {message}$"):
                step([5], [5], builder, layer)


def test_one_backend_serves_all_parts():
    """Register a backend that writes float32 only, for a bfloat16 layer -> not chosen for a step with both kinds."""
    config, dtype = DIRECT, torch.bfloat16
    wide = hooked("wide", out_dtypes=(torch.float32,))
    with registered(wide):
        builder = fast.MLAMetadataBuilder(
            config, 16, 128, 8, workspace_tokens=16, query_len_support=ONE_TOKEN, dtype=dtype
        )
        assert builder.build(0, make_batch([5, 3], [40, 30]).common).prefill.backend == "wide"
        both = builder.build(0, make_batch([5, 3], [5, 30]).common)
        assert len(both.prefill.parts) == 2 and both.prefill.backend == "cpu"
        assert builder.build(0, make_batch([5, 3], [5, 3]).common).prefill.backend == "cpu"


def test_a_layer_of_another_dtype_refuses_before_it_writes():
    with registered(hooked("narrow", dtypes=(torch.bfloat16,))):
        builder = fast.MLAMetadataBuilder(DIRECT, 16, 128, 8, query_len_support=ONE_TOKEN)  # plans for bfloat16
        batch = make_batch([4], [4])
        plan = builder.build(0, batch.common)
        assert plan.prefill.backend == "narrow"
        _, layer = make()
        cache = new_cache(batch, DIRECT.head_size, torch.float32)
        before = cache.clone()
        message = "metadata.prefill.backend: narrow: serves torch.bfloat16, got torch.float32"
        with pytest.raises(UnsupportedConfiguration, match=f"^{message}"):
            layer(torch.randn(4, DIRECT.hidden_size), positions_of([4], [4]), cache, plan)
        assert_same_bits(cache, before)
    with pytest.raises(ValueError, match="^metadata.prefill.backend: expected one of cpu, .*, got narrow$"):
        layer(torch.randn(4, DIRECT.hidden_size), positions_of([4], [4]), cache, plan)


@pytest.mark.parametrize("scaled", [False, True])
def test_an_output_in_e4m3_needs_no_lse(scaled):
    """Prefill without context through a backend without an LSE, with and without `output_scale` -> the usual output."""
    scale = torch.tensor(0.02) if scaled else None
    found = {}
    for lse in (False, True):
        with registered(hooked(lse=lse)):
            torch.manual_seed(3)
            builder, layer = make({OP: "hooked"})
            batch = make_batch([5, 4], [5, 4])
            q, kv_c, k_pe = (torch.randn(9, *shape) for shape in ((3, 20), (24,), (8,)))
            out = torch.empty(9, 3, 10, dtype=torch.float8_e4m3fn if scaled else torch.float32)
            cache = new_cache(batch, DIRECT.head_size, torch.float32)
            layer.forward_attention(q, kv_c, k_pe, cache, builder.build(0, batch.common), out, scale)
            found[lse] = out.float()
    assert_same_bits(found[False], found[True])


def test_no_backend_for_a_step():
    with registered(hooked(lse=False)):
        builder, _ = make({OP: "hooked"})
        with pytest.raises(UnsupportedConfiguration, match="^hooked: .*returns no LSE$"):
            builder.build(0, make_batch([4], [30]).common)


def test_an_output_in_e4m3_that_the_backend_cannot_serve_is_refused_before_the_write():
    """Quantise the output of a backend that writes the dtype of the queries only -> an error, the cache unchanged."""
    with registered(hooked(same_out_dtype=True, lse=False)):
        builder = fast.MLAMetadataBuilder(DIRECT, 16, 128, 8, query_len_support=ONE_TOKEN, backend={OP: "hooked"})
        weights, dtype = make_weights(DIRECT, torch.bfloat16), torch.bfloat16
        layer = make_layer(fast, DIRECT, weights, dtype, backend={OP: "hooked"})
        batch = make_batch([5], [5])
        q, kv_c, k_pe = (torch.randn(5, *shape, dtype=dtype) for shape in ((3, 20), (24,), (8,)))
        cache = new_cache(batch, DIRECT.head_size, dtype)
        before, plan = cache.clone(), builder.build(0, batch.common)
        layer.forward_attention(q, kv_c, k_pe, cache.clone(), plan, torch.empty(5, 3, 10, dtype=dtype))
        out = torch.empty(5, 3, 10, dtype=torch.float8_e4m3fn)
        message = "^metadata.prefill.backend: hooked: writes torch.bfloat16, got torch.float32$"
        with pytest.raises(UnsupportedConfiguration, match=message):
            layer.forward_attention(q, kv_c, k_pe, cache, plan, out, torch.tensor(0.02))
        assert_same_bits(cache, before)


class WithOptions(BackendHooks):
    """Hooks of a backend with one option, which notes its value."""

    options = {"depth": lambda name, value: check_int(name, value, 1)}  # noqa: RUF012

    def create_builder_state(self, config, cache_format, layer_names, device, depth=7):
        CALLS.append(("depth", depth))


def test_options_of_a_builder():
    """Give a builder options of a backend -> its hooks get them once; without options, they get the defaults."""
    CALLS.clear()
    with registered(replace(CPU, name="other", hooks=WithOptions)):
        for options in ({"other": {"depth": 3}}, {"other": {}}, {}, None):
            builder = fast.MLAMetadataBuilder(DIRECT, 16, 128, 8, backend_options=options, backend={OP: "other"})
            for _ in range(2):
                builder.build(0, make_batch([7], [7]).common)
    assert [("depth", depth) for depth in (3, 7, 7, 7)] == CALLS


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ([], TypeError, "backend_options: expected a mapping from backend to its options, or None, got list"),
        ({"oter": {}}, ValueError, r"backend_options: expected one of .* \(the most similar name: other\), got oter"),
        ({"other": 3}, TypeError, r"backend_options\['other'\]: expected a mapping from option to value, got int"),
        ({"other": {"width": 3}}, ValueError, r"backend_options\['other'\]: expected options among depth, got width"),
        ({"cpu": {"depth": 3}}, ValueError, r"backend_options\['cpu'\]: expected options among none, got depth"),
        ({"other": {"depth": 0}}, ValueError, r"backend_options\['other'\]\['depth'\]: expected .*, got 0"),
        ({"other": {"depth": "3"}}, ValueError, r"backend_options\['other'\]\['depth'\]: expected .*, got 3"),
    ],
)
def test_wrong_options(options, error, message, plain_errors):
    """Give a builder rubbish as options -> one line that names the option, from the constructor."""
    with registered(replace(CPU, name="other", hooks=WithOptions)), pytest.raises(error, match=f"^{message}$"):
        fast.MLAMetadataBuilder(DIRECT, 16, 128, 8, backend_options=options)


@pytest.mark.parametrize("backend", ["flashinfer", "flashinfer_mla", "trtllm_ragged"])
@pytest.mark.parametrize(
    ("workspace", "error", "message"),
    [
        ("64", TypeError, "a size in bytes or a uint8 tensor, got str"),
        (2.0, TypeError, "a size in bytes or a uint8 tensor, got float"),
        (True, ValueError, "a size in bytes of at least 1, or a uint8 tensor, got True"),
        (0, ValueError, "a size in bytes of at least 1, or a uint8 tensor, got 0"),
        (torch.zeros(64), ValueError, r"a contiguous uint8 vector, got torch.float32 of shape \[64\]"),
        (torch.zeros(8, 8).byte(), ValueError, r"a contiguous uint8 vector, got torch.uint8 of shape \[8, 8\]"),
        (torch.zeros(64).byte()[::2], ValueError, r"a contiguous uint8 vector, got torch.uint8 of shape \[32\]"),
        (torch.zeros(0).byte(), ValueError, "at least 1 byte, got 0"),
        (torch.zeros(64).byte()[1:], ValueError, r"an address that is a multiple of 16, got \d+"),
    ],
)
def test_wrong_workspaces(backend, workspace, error, message, plain_errors):
    """Give a builder rubbish as FlashInfer's workspace -> one line that names the option."""
    options = {backend: {"workspace": workspace}}
    with pytest.raises(error, match=rf"^backend_options\['{backend}'\]\['workspace'\]: expected {message}$"):
        fast.MLAMetadataBuilder(DIRECT, 16, 128, 8, backend_options=options)


def test_workspace_on_another_device(plain_errors):
    """Plan on a GPU with a workspace on the CPU -> an error; a workspace on the device of the plans is used itself."""
    own = torch.zeros(64, dtype=torch.uint8)
    assert new_workspace(torch.device("cpu"), own) is own
    assert new_workspace(torch.device("cpu"), 32).shape == (32,)
    with pytest.raises(ValueError, match="^workspace: expected a tensor on cuda:0, the device of the plans, got cpu$"):
        new_workspace(torch.device("cuda", 0), own)
