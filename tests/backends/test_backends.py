"""Tests of the choice of a backend: the caller names it, or declared capabilities and priorities decide."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fast
from fast import backends
from fast.backends import DECODES, Backend, KernelRequest, OpSupport
from fast.backends.own import CPU as CPU_BACKEND
from fast.backends.own import OPS
from reference.interfaces import (
    COMPUTE_FORMAT,
    CacheFormat,
    DecodeSchedule,
    GraphSupport,
    MLAConfig,
    QueryLenSupport,
    UnsupportedConfiguration,
)

from ..support.backends import own_backends, with_backends
from ..support.factories import (
    CONFIGS,
    DIRECT,
    assert_same_bits,
    integers,
    make_batch,
    make_cache,
    make_entries,
    make_layer,
    make_weights,
    new_cache,
)

CPU = torch.device("cpu")
REQUEST = KernelRequest("mla_decode", CPU, torch.float32, (("kv_lora_rank", 512),), 64)
V3 = MLAConfig.from_preset("deepseek-v3")
GPU = torch.device("cuda")
ON_GPU = backends.decode_request(GPU, torch.bfloat16, 512, 64, 64, QueryLenSupport.VARLEN)


@pytest.fixture
def capability(monkeypatch):
    """Return a function that sets the compute capability that torch reports.

    The choice of a backend reads nothing else of a GPU, so the tests need no GPU.
    """
    pytest.importorskip("triton")

    def report(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))

    return report


def deviceless(name: str, priority: int, ops: tuple[str, ...] = ("mla_decode",), **declared) -> Backend:
    """Return a CPU backend whose ops all have the same declaration."""
    return Backend(name, priority, "cpu", {op: OpSupport(print, **declared) for op in ops})


@pytest.fixture
def launched(monkeypatch):
    """Register two backends and return the set of (backend, op) of every launch.

    `cpu` is the built-in backend. `decoder` has a lower priority and only the ops of a decode.
    """
    with_backends(monkeypatch, CPU_BACKEND, Backend("decoder", -1, "cpu", {op: CPU_BACKEND.ops[op] for op in DECODES}))
    found, right = set(), backends.kernel
    monkeypatch.setattr(backends, "kernel", lambda name, op: found.add((name, op)) or right(name, op))
    return found


def refusal(call) -> list[str]:
    """Return the reasons of the UnsupportedConfiguration that a call raises."""
    with pytest.raises(UnsupportedConfiguration) as error:
        call()
    return list(error.value.reasons)


def test_every_op_has_a_cpu_kernel():
    assert backends.select(REQUEST).name == "cpu"
    for op in OPS:
        assert backends.select(replace(REQUEST, op=op)).name == "cpu"
        assert callable(backends.kernel("cpu", op))


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(op="wgmma"), "narrow: has no kernel for wgmma"),
        (dict(device=torch.device("meta")), "narrow: serves device cpu, got meta"),
        (dict(dtype=torch.float64), "narrow: serves torch.float32, got torch.float64"),
        (dict(head_dims=(("kv_lora_rank", 256),)), "narrow: serves kv_lora_rank in (512,), got 256"),
        (dict(out_dtype=torch.float64), "narrow: writes torch.float32, got torch.float64"),
        (dict(block_size=7), "narrow: serves block sizes (64,), got 7"),
        (dict(query_lens=QueryLenSupport.VARLEN), "narrow: serves uniform query lengths, got varlen"),
        (dict(mask="visible_lens"), "narrow: applies the masks causal, got visible_lens"),
        (dict(batch_invariant=True), "narrow: is not batch-invariant"),
        (dict(cache_in_words=False), "narrow: needs a cache of whole, aligned 16-byte words, with at least one block"),
        (dict(graph=GraphSupport.ANY), "narrow: has graph support 'one', got a call that needs 'any'"),
        (dict(cache_format=CacheFormat("other")), "narrow: reads caches in compute_dtype, got other"),
    ],
)
def test_reasons(change, reason):
    """If exactly one value of a call is not declared by a backend, the backend refuses the call with one reason."""
    narrow = deviceless(
        "narrow", 5, dtypes=(torch.float32,), head_dims={"kv_lora_rank": (512,)}, block_sizes=(64,),
        query_lens=QueryLenSupport.UNIFORM, masks=("causal",), batch_invariant=False, graph=GraphSupport.ONE_QUERY_LEN,
        needs_words=True,
    )  # fmt: skip
    assert narrow.validate_configuration(REQUEST) == []
    assert narrow.validate_configuration(replace(REQUEST, query_lens=QueryLenSupport.UNIFORM)) == []
    assert narrow.validate_configuration(replace(REQUEST, **change)) == [reason]


def test_dtypes_of_an_op():
    """Ask about a dtype -> what the op declares, as `validate_configuration` says; False for an op that is missing."""
    narrow = deviceless("narrow", 5, dtypes=(torch.float32,))
    for dtype in (torch.float32, torch.float64):
        served = not narrow.validate_configuration(replace(REQUEST, dtype=dtype, out_dtype=None))
        assert narrow.supports_dtype("mla_decode", dtype) == served == (dtype == torch.float32)
    assert not narrow.supports_dtype("apply_rope", torch.float32)


def test_every_reason_at_once():
    narrow = Backend(
        "narrow", 5, "cuda", {"mla_decode": OpSupport(print, (torch.float16,), block_sizes=(128,))}, (9, 0)
    )
    assert len(narrow.validate_configuration(REQUEST)) == 3


def test_choice_is_by_capability_then_priority(monkeypatch):
    high = deviceless("high", 3, dtypes=(torch.bfloat16,))
    with_backends(monkeypatch, deviceless("low", 1), high, deviceless("middle", 2))
    assert backends.select(REQUEST).name == "middle"
    assert backends.select(replace(REQUEST, dtype=torch.bfloat16)).name == "high"
    assert backends.select(REQUEST, "low").name == "low"
    with pytest.raises(UnsupportedConfiguration, match="^high: serves torch.bfloat16, got torch.float32$") as error:
        backends.select(REQUEST, "high")
    assert len(error.value.reasons) == 1
    with pytest.raises(UnsupportedConfiguration) as error:
        backends.select(replace(REQUEST, op="nothing"))
    assert [reason.split(":")[0] for reason in error.value.reasons] == ["high", "middle", "low"]


def test_unknown_name():
    with pytest.raises(ValueError, match="^backend: expected one of .*cpu.*, got nosuch$"):
        backends.select(REQUEST, "nosuch")


def decode_arguments():
    batch = make_batch([1, 1], [20, 5])
    entries = make_entries(batch, DIRECT.head_size, torch.float32)
    plan = fast.build_mla_metadata(batch.common, 16, 64)
    return (
        torch.randn(2, 3, 24),
        torch.randn(2, 3, 8),
        make_cache(batch, entries, 32, torch.float32),
        plan.decode,
        0.3,
    )


def test_schedule_changes_no_value(ops):
    """If no request has more than 64 keys (one tile), a schedule does not change a bit of the result of a decode."""
    q, k_pe, cache, plan, scale = decode_arguments()
    schedule = DecodeSchedule(integers(0, 0, 0, 1, 0).view(1, 5), integers(0, 1, 2))
    with_schedule, without = (
        ops.mla_decode(q, k_pe, cache, plan, scale, schedule),
        ops.mla_decode(q, k_pe, cache, plan, scale),
    )
    assert torch.equal(with_schedule.out, without.out) and torch.equal(with_schedule.lse, without.lse)


@pytest.mark.parametrize(
    "lens, wanted",
    [((1, 1, 1), "SINGLE_ONLY"), ((0, 1), "VARLEN"), ((2, 2), "UNIFORM"), ((1, 3), "VARLEN"), ((2, 2, 0), "VARLEN")],
)
def test_query_lens_of(lens, wanted):
    """Query lengths are uniform if all requests have the query length `max_query_len`.

    So a batch is not uniform if a request has the query length 0.
    """
    assert backends.query_lens_of(sum(lens), len(lens), max(lens)).name == wanted


def test_layer_refuses_an_unknown_backend():
    with pytest.raises(ValueError, match="^backend: expected one of cpu, triton, hopper, .*trtllm_ragged, got nosuch$"):
        make_layer(fast, DIRECT, make_weights(DIRECT, torch.float32), torch.float32, backend="nosuch")


def step_of_a_layer(backend, cache_format=COMPUTE_FORMAT) -> None:
    """Run a layer on one decode and one prefill with context, over a cache of the given format."""
    batch = make_batch([1, 3], [20, 20])
    entries = make_entries(batch, DIRECT.head_size, torch.float32)
    options = {"backend": backend, "cache_format": cache_format}
    layer = make_layer(fast, DIRECT, make_weights(DIRECT, torch.float32), torch.float32, **options)
    plan = fast.build_mla_metadata(batch.common, 16, 16, cache_format=cache_format)
    assert plan.num_decodes == 1 and plan.prefill.context_chunks
    cache = make_cache(batch, entries, 32, torch.float32)
    layer(torch.randn(4, DIRECT.hidden_size), torch.tensor([19, 17, 18, 19]), cache, plan)


STEP = {"flash_attn_varlen", "gather_and_maybe_dequant_cache", "merge_attn_states", "mla_decode", "rope_norm_and_cache"}


@pytest.mark.parametrize("backend, decoder", [
    (None, set()), ("cpu", set()), ("decoder", {"mla_decode"}), ({"mla_decode": "decoder"}, {"mla_decode"}),
    ({"decode_programs": "decoder"}, {"mla_decode"}), ({"flash_attn_varlen": "cpu"}, set()),
], ids=str)  # fmt: skip
def test_a_layer_binds_what_a_backend_declares(backend, decoder, launched):
    """A backend that the caller names for a layer serves every op of the layer that this backend declares.

    For every other op of the layer, a backend is chosen by capability and priority.
    """
    step_of_a_layer(backend)
    assert launched == {("decoder" if op in decoder else "cpu", op) for op in STEP}


def test_a_compound_function_binds_what_a_backend_declares(launched):
    """A cascade and a decode over ranks use the named backend for `mla_decode`, and `cpu` for the other ops.

    The named backend is `decoder`, which does not declare the other ops. A cascade is a decode that reads a shared
    prefix only once.
    """
    q, k_pe, cache, plan, scale = decode_arguments()
    cascade = fast.split_shared_prefix(plan, 16, 16, 0)
    fast.cascade_attention(q, k_pe, cache, cascade, scale, backend="decoder")
    assert launched == {("decoder", "mla_decode"), ("cpu", "merge_attn_states")}
    exchanges = {"ag_rs": {"weight_attn_out"}, "a2a": {"pack_attn_state", "merge_packed_attn_states"}}
    for merge, exchange in exchanges.items():
        launched.clear()
        fast.simulate(
            2, 1, lambda ranks: fast.dcp_decode(q, k_pe, cache, plan, scale, ranks, backend="decoder"), merge=merge
        )
        assert launched == {("decoder", "mla_decode")} | {("cpu", op) for op in exchange}


def test_a_compound_function_refuses_a_backend_that_declares_nothing_of_it(launched):
    batch = make_batch([3], [20])
    plan = fast.build_mla_metadata(batch.common, 16, 16)
    cache = new_cache(batch, 32, torch.float32)
    up = torch.randn(24, 2, 4)
    arguments = torch.randn(3, 2, 12), torch.randn(3, 24), torch.randn(3, 8), cache, plan.prefill, up, up, 0.3
    fast.forward_prefill(*arguments, backend="cpu")
    launched.clear()
    assert refusal(lambda: fast.forward_prefill(*arguments, backend="decoder")) == [
        "decoder: has no kernel for flash_attn_varlen",
        "decoder: has no kernel for gather_and_maybe_dequant_cache",
        "decoder: has no kernel for merge_attn_states",
    ]
    assert not launched


@pytest.mark.parametrize("backend, planner", [(None, "cpu"), ("decoder", "cpu"), ({"plan_decode": "cpu"}, "cpu")])
def test_a_graph_binds_what_a_backend_declares(backend, planner, launched):
    builder = fast.MLAMetadataBuilder(DIRECT, 16, 32, 2, backend=backend)
    graph = fast.DecodeGraph(lambda hidden, *_: hidden, builder, [2], 2, DIRECT.hidden_size, torch.float32, "cpu")
    graph.replay(2)
    counter = "decoder" if backend == "decoder" else "cpu"
    assert launched == {(counter, "decode_programs"), (counter, "schedule_costs"), (planner, "plan_decode"),
                        ("cpu", "compute_visible_lens")}  # fmt: skip


WRONG = [
    ("nosuch", "^backend: expected one of cpu, triton, hopper, .*trtllm_ragged, got nosuch$"),
    (7, "^backend: expected None, a name or a mapping from op to name, got int$"),
    (
        {"mla_decod": "cpu"},
        r"^backend: .* keys are among advance_step, .*_tokens \(the most similar name: mla_decode\), got mla_decod$",
    ),
    ({"mla_decode": "nosuch"}, r"^backend\['mla_decode'\]: expected one of cpu, .*trtllm_ragged, got nosuch$"),
    ({"mla_decode": None}, r"^backend\['mla_decode'\]: expected one of cpu, triton, .*trtllm_ragged, got None$"),
    ({"plan_decode": "cpu", "apply_rope": "hopper"}, "^hopper: has no kernel for apply_rope$"),
    ({"mla_decode": "hopper", "decode_programs": "triton"},
     "^backend: expected one name for mla_decode, decode_programs, schedule_costs, got hopper and triton$"),
]  # fmt: skip


@pytest.mark.parametrize("backend, message", WRONG, ids=str)
def test_what_nothing_has_is_refused_at_construction(backend, message, plain_errors):
    """Every function with a parameter `backend` refuses an invalid value with one line, before anything runs.

    An invalid mapping from op to backend is refused even if the function calls none of the ops in the mapping.
    """
    state = fast.AttentionState(torch.zeros(2, 3, 4), torch.zeros(3, 2))
    calls = [
        lambda: make_layer(fast, DIRECT, make_weights(DIRECT, torch.float32), torch.float32, backend=backend),
        lambda: fast.MLAMetadataBuilder(DIRECT, 16, 32, 2, backend=backend),
        lambda: fast.warmup(DIRECT, device="cpu", dtype=torch.float32, backend=backend),
        lambda: backends.explain(DIRECT, device="cpu", dtype=torch.float32, backend=backend),
        lambda: fast.merge_attn_states(state, state, backend=backend),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["cpu", "triton", "hopper"])
def test_a_backend_declares_kernels_of_its_own(name):
    """Every launcher (function that launches kernels) of a backend is defined in the modules of this backend."""
    if name != "cpu":
        pytest.importorskip("triton")
    (declared,) = (backend for backend in backends.registered() if backend.name == name)
    for op, support in declared.ops.items():
        module, _, function = support.launcher.partition(":")
        assert module == f"fast.kernels.{name}" and function == op
        assert getattr(importlib.import_module(module), function).__module__.startswith(f"{module}."), op


def test_a_name_at_an_op_is_that_backend_or_every_reason(capability, monkeypatch):
    """A call that names a backend runs a kernel of this backend, or raises an error.

    The error lists every reason why the backend cannot serve the call. For example, `hopper` serves only the ops of a
    decode, and `flash_attn_varlen`.
    """
    capability(9, 0)
    with_backends(monkeypatch, *own_backends())
    assert backends.select(ON_GPU, "hopper").name == "hopper"
    prefill = KernelRequest("flash_attn_varlen", GPU, torch.bfloat16)
    assert backends.select(prefill, "triton").name == "triton"
    assert backends.select(prefill, "hopper").name == backends.select(prefill).name == "hopper"
    for op in sorted(set(OPS) - {*DECODES, prefill.op}):
        request = KernelRequest(op, GPU, torch.bfloat16)
        assert refusal(lambda request=request: backends.select(request, "hopper")) == [
            f"hopper: has no kernel for {op}"
        ]
        assert backends.select(request).name == backends.select(request, "triton").name == "triton"
    state = fast.AttentionState(torch.zeros(2, 3, 4), torch.zeros(3, 2))
    assert refusal(lambda: fast.merge_attn_states(state, state, backend="hopper")) == [
        "hopper: has no kernel for merge_attn_states",
        "hopper: serves device cuda, got cpu",
    ]


def test_ops_with_private_buffers_between_them_stay_together(capability):
    """All ops of a decode get the same backend, and so do the two ops that write and read a message between ranks.

    If a mapping names a backend for one op of a decode, this backend serves all ops of a decode. A backend that
    declares the writing op of a message, but not the reading op, does not serve the writing op.
    """
    capability(9, 0)
    for op in DECODES:
        assert backends.bind({op: "triton", "apply_rope": "triton"}) == dict.fromkeys(
            (*DECODES, "apply_rope"), "triton"
        )
        for other in DECODES:
            assert backends.select(replace(ON_GPU, op=other), {op: "triton"}).name == "triton"
            assert backends.select(replace(ON_GPU, op=other), {"apply_rope": "triton"}).name == "hopper"
    half = deviceless("half", 1, ("pack_attn_state",), reads="merge_packed_attn_states")
    request = KernelRequest("pack_attn_state", CPU, torch.float32)
    assert half.validate_configuration(request) == ["half: has no kernel for merge_packed_attn_states"]


def test_ops_say_which_output_they_need(capability):
    """The GPU backends refuse a float64 output, and the `cpu` backend serves a float64 output."""
    capability(9, 0)
    for out_dtype in (torch.float32, torch.bfloat16):
        assert backends.select(replace(ON_GPU, out_dtype=out_dtype)).name == "hopper"
    written = "writes torch.float32, torch.bfloat16, torch.float16, got torch.float64"
    reasons = refusal(lambda: backends.select(replace(ON_GPU, out_dtype=torch.float64)))
    own = [reason for reason in reasons if "writes" in reason and reason.startswith(("hopper:", "triton:", "cpu:"))]
    assert own == [f"hopper: {written}", f"triton: {written}"]
    q, k_pe, cache, plan, scale = decode_arguments()
    keys, offsets = torch.randn(2, 3, 8), integers(0, 1, 2)
    calls = [
        lambda backend: fast.mla_decode(q, k_pe, cache, plan, scale, out_dtype=torch.float64, backend=backend),
        lambda backend: fast.flash_attn_varlen(
            keys, keys, keys, offsets, offsets, 1, 1, scale, True, out_dtype=torch.float64, backend=backend
        ),
    ]
    for call in calls:
        assert f"triton: {written}" in refusal(lambda call=call: call("triton"))
        assert call("cpu").out.dtype == torch.float64


@pytest.mark.parametrize("found, served", [((8, 9), "triton"), ((9, 0), "hopper"), ((10, 0), "triton")])
def test_capability_end(found, served, capability):
    """The `hopper` backend serves compute capability 9.0, and neither 8.9 nor 10.0."""
    capability(*found)
    assert backends.select(ON_GPU).name == served
    if served != "hopper":
        assert refusal(lambda: backends.select(ON_GPU, "hopper")) == [
            f"hopper: needs a compute capability of at least (9, 0) and below (10, 0), got {found}"
        ]


def test_rocm_is_refused_by_name(capability, monkeypatch):
    """The GPU backends refuse an MI300, which reports capability (9, 4), because no backend was tested on ROCm.

    A backend that declares `rocm=True` serves an MI300.
    """
    capability(9, 4)
    assert backends.select(ON_GPU).name == "hopper"  # without ROCm, the GPU counts as an NVIDIA GPU
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    for name in ("hopper", "triton"):
        reason = f"{name}: is not tested on ROCm and serves only NVIDIA GPUs, got ROCm 6.4.1"
        assert refusal(lambda name=name: backends.select(ON_GPU, name)) == [reason]
        assert reason in refusal(lambda: backends.select(ON_GPU))
    assert backends.select(REQUEST).name == "cpu"
    tested = Backend("tested", 1, "cuda", {"mla_decode": OpSupport(print)}, capability=(8, 0), rocm=True)
    assert tested.validate_configuration(ON_GPU) == []


def test_an_mi300_is_no_hopper_for_the_launchers(monkeypatch):
    """The launchers of the `triton` backend do not treat an MI300 as a Hopper GPU.

    Both GPUs report major capability 9, but an MI300 has no copy engine (TMA) and no programmatic dependent launch.
    """
    pytest.importorskip("triton")
    from fast.kernels.device import device_facts

    card = SimpleNamespace(multi_processor_count=304, major=9, minor=4, shared_memory_per_block_optin=65536)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    facts = device_facts.__wrapped__(GPU)
    assert facts.capability == (9, 4) and facts.has_copy_engine and facts.has_dependent_launch
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    facts = device_facts.__wrapped__(GPU)
    assert facts.capability[0] != 9 and not facts.has_copy_engine and not facts.has_dependent_launch


def test_an_explicit_request_is_never_replaced(plain_errors):
    """A call with an unknown backend raises and writes nothing; no other backend serves the call."""
    q, k_pe, cache, plan, scale = decode_arguments()
    calls = [
        lambda: fast.mla_decode(q, k_pe, cache, plan, scale, backend="nosuch"),
        lambda: fast.concat_and_cache_mla(q[:, 0], k_pe[:, 0], cache, torch.tensor([0, 1]), backend="nosuch"),
        lambda: fast.apply_rope(torch.arange(2), k_pe, k_pe[:, 0], DIRECT.rope, backend="nosuch"),
        lambda: fast.copy_blocks([cache], torch.tensor([[0, 1]]), backend="nosuch"),
        lambda: fast.swap_blocks(cache, cache.clone(), torch.tensor([[0, 1]]), backend="nosuch"),
        lambda: fast.gather_and_maybe_dequant_cache(
            cache, plan.block_table, integers(0, 1, 2), integers(0, 0), 2, backend="nosuch"
        ),
    ]
    before = cache.clone()
    for call in calls:
        with pytest.raises(ValueError, match="^backend: expected one of .*, got nosuch$"):
            call()
    assert_same_bits(cache, before)


def test_an_explicit_request_is_served():
    arguments = decode_arguments()
    named, chosen = fast.mla_decode(*arguments, backend="cpu"), fast.mla_decode(*arguments)
    assert_same_bits(named.out, chosen.out)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_explain(config):
    """`explain` gives one line for each op: the backend that serves the op, or the reasons why no backend does."""
    lines = backends.explain(config, device="cpu", dtype=torch.bfloat16).splitlines()
    served = dict(line.split(": ", 1) for line in lines)
    assert served["mla_decode"].startswith("cpu") and served["flash_attn_varlen"].startswith("cpu")
    refused = backends.explain(config, device="meta", dtype=torch.float32).splitlines()
    assert all(": none (" in line and "serves device cpu, got meta" in line for line in refused)
    assert len(refused) == len(lines)
    with pytest.raises(ValueError, match="^backend: expected one of"):
        backends.explain(config, device="cpu", dtype=torch.float32, backend="nosuch")


def explained(**options) -> dict[str, str]:
    """Return the line of `explain` for each op of a bfloat16 layer on a GPU."""
    lines = backends.explain(V3, device="cuda", dtype=torch.bfloat16, **options).splitlines()
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.parametrize("block_size, served", [(64, "hopper"), (48, "triton")])
def test_explain_decodes_together(block_size, served, capability):
    """All ops of a decode get the same backend, even if several backends serve the GPU."""
    capability(9, 0)
    found = explained(block_size=block_size)
    for op in DECODES:
        assert found[op].startswith(f"{served}, chosen by priority"), op


def test_explain_lists_what_is_bound_and_what_is_chosen(capability, monkeypatch):
    capability(9, 0)
    with_backends(monkeypatch, *own_backends())
    prefills = "flash_attn_varlen"
    for backend, wanted in (("hopper", {*DECODES, prefills}), ({"mla_decode": "hopper"}, set(DECODES))):
        found = explained(backend=backend)
        bound = {op for op, said in found.items() if said == "hopper, bound"}
        assert bound == wanted
        assert (
            prefills in bound
            or found.pop(prefills)
            == "hopper, chosen by measured times for the nearest shape (measured on NVIDIA H200), for every measured "
            "shape (cpu: serves device cpu, got cuda)"
        )
        chosen = "triton, chosen by priority (cpu: serves device cpu, got cuda; hopper: has no kernel for apply_rope)"
        assert found["apply_rope"] == chosen
        assert all(said.startswith("triton, chosen by priority (") for op, said in found.items() if op not in bound)
    assert set(explained(backend="triton").values()) == {"triton, bound"}
    found = explained(backend="hopper", block_size=48)
    reason = "hopper: serves block sizes (16, 32, 64, 128), got 48"
    assert {found[op] for op in DECODES} == {f"none, bound to hopper ({reason})"}
    assert found["apply_rope"] == chosen


def test_warmup_refuses_the_other_family(plain_errors):
    """Warm up a layer of grouped-query attention -> one line that says that nothing is compiled for this family."""
    wanted = (
        "an MLAConfig, because the kernels of grouped-query attention are compiled at their first launch, got GQAConfig"
    )
    with pytest.raises(TypeError, match=f"^config: expected {wanted}$"):
        fast.warmup(fast.GQAConfig(4, 2, 32), device="cpu", dtype=torch.float32)
    with pytest.raises(TypeError, match="^config: expected an MLAConfig, got str$"):
        fast.warmup("deepseek-v3", device="cpu", dtype=torch.float32)


def test_a_device_without_kernels_is_refused():
    """A call on a device that no backend serves raises the reason of every backend."""
    with pytest.raises(UnsupportedConfiguration, match="cpu: serves device cpu, got meta"):
        fast.merge_attn_states(
            *(
                fast.AttentionState(torch.zeros(2, 3, 4, device="meta"), torch.zeros(3, 2, device="meta"))
                for _ in range(2)
            )
        )


HOPPER_REFUSES = [
    (dict(qk_rope_head_dim=48), "hopper: serves qk_head_dim in (64, 96, 128, 192, 256), got 176"),
    (dict(v_head_dim=96), "hopper: serves v_head_dim in (64, 128, 256), got 96"),
]


@pytest.mark.parametrize("changes, reason", HOPPER_REFUSES)
def test_prefills_that_hopper_does_not_serve(changes, reason, capability, monkeypatch):
    """On compute capability 9.0 `hopper` serves prefills, but not of all head dims; `explain` has the reason.

    `triton` serves the other head dims, float32, and GPUs of other capabilities.
    """
    capability(9, 0)
    with_backends(monkeypatch, *own_backends())
    said = "triton, chosen by priority (cpu: serves device cpu, got cuda; "
    op, config, asked = "flash_attn_varlen", replace(V3, **changes), dict(device="cuda", dtype=torch.bfloat16)
    lines = dict(line.split(": ", 1) for line in backends.explain(config, **asked).splitlines())
    assert lines[op] == f"{said}{reason})"
    widths = (("qk_head_dim", 192), ("v_head_dim", 128))
    served = KernelRequest(op, GPU, torch.bfloat16, widths, out_dtype=torch.float32, mask="causal", lse=True)
    assert backends.select(served).name == "hopper"
    assert backends.select(replace(served, dtype=torch.float32)).name == "triton"
    assert backends.select(replace(served, batch_invariant=True)).name == "hopper"
    capability(8, 9)
    assert backends.select(served).name == "triton"
