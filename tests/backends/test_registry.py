"""Tests of registered backends: registration by a call or an entry point, declared capabilities, and cache formats."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fast
import reference
from fast import backends
from fast.backends import Backend, OpSupport
from fast.backends.own import CPU as CPU_BACKEND
from fast.backends.own import OPS
from reference.interfaces import (
    COMPUTE_FORMAT,
    CacheFormat,
    GraphSupport,
    InvariantSplitRule,
    MLAConfig,
    QueryLenSupport,
    ScheduleCosts,
    UnsupportedConfiguration,
)

from ..support.backends import registered, with_backends
from ..support.commands import ROOT
from ..support.factories import (
    DIRECT,
    assert_same_bits,
    integers,
    make_batch,
)
from .test_backends import REQUEST, STEP, decode_arguments, step_of_a_layer


def negated_merge(prefix_out, prefix_lse, suffix_out, suffix_lse):
    """Return the negated state of the prefix, which no built-in backend returns."""
    return -prefix_out, -prefix_lse


FOREIGN = Backend("foreign", 50, "cpu", {"merge_attn_states": OpSupport(negated_merge, (torch.float32,))})


def merge(**options):
    state = fast.AttentionState(torch.ones(2, 3, 4), torch.zeros(3, 2))
    return fast.merge_attn_states(state, state, **options).out


def test_a_backend_for_one_op(plain_errors):
    """A registered backend serves only its own op; after its removal a built-in backend serves this op again."""
    with registered(FOREIGN):
        assert merge().eq(-1).all() and merge(backend="cpu").gt(0).all()
        assert backends.select(REQUEST).name == "cpu"
        assert backends.bind("foreign") == {"merge_attn_states": "foreign"}
        lines = backends.explain(DIRECT, device="cpu", dtype=torch.float32).splitlines()
        assert [line for line in lines if line.startswith("merge_attn_states: foreign")]
        with pytest.raises(ValueError, match="^backend.name: expected a name that no backend has, got foreign$"):
            backends.register(FOREIGN)
    assert merge().gt(0).all()
    with pytest.raises(ValueError, match="^name: expected one of cpu, triton, hopper, .*trtllm_ragged, got foreign$"):
        backends.unregister("foreign")
    with pytest.raises(TypeError, match="^backend: expected a Backend, got str$"):
        backends.register("foreign")


@pytest.mark.parametrize("found", [FOREIGN, lambda: FOREIGN, lambda: [FOREIGN]], ids=["a backend", "one", "a list"])
def test_entry_points(found, monkeypatch, plain_errors):
    """The first choice of a backend registers the backends of all entry points; later choices read no entry point.

    If the code of an entry point raises, its backends are not registered, and a warning names the entry point. The
    error of an unknown name and `failed_entry_points` keep the error, in one line.
    """
    registry = sys.modules["fast.backends.registry"]

    def broken():
        raise ImportError("libforeign.so\nis missing")

    def halfway():
        backends.register(replace(FOREIGN, name="halfway", priority=99))
        return [FOREIGN, "no backend"]

    points = [
        SimpleNamespace(name="broken", value="other:backend", load=broken),
        SimpleNamespace(name="halfway", value="third:backend", load=halfway),
        SimpleNamespace(name="exiting", value="fourth:backend", load=lambda: sys.exit(3)),
        SimpleNamespace(name="empty", value="fifth:backend", load=lambda: None),
        SimpleNamespace(name="foreign", value="foreign:backend", load=lambda: found),
    ]
    asked = []
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: asked.append(group) or points)
    monkeypatch.setattr(registry, "_ENTRY_POINTS_READ", [])
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    monkeypatch.setattr(registry, "_FAILED", [])
    with pytest.warns(RuntimeWarning) as warned:
        assert merge().eq(-1).all()
    assert [str(warning.message).split(":")[0] for warning in warned] == [
        "backend broken of other",
        "backend halfway of third",
        "backend exiting of fourth",
        "backend empty of fifth",
    ]
    errors = {each.name: each.error for each in registry.failed_entry_points()}
    assert errors.pop("halfway").startswith("TypeError: backend: expected a Backend, got str")
    assert errors == {
        "broken": "ImportError: libforeign.so is missing",
        "exiting": "SystemExit: 3",
        "empty": "TypeError: the entry point: expected a Backend, backends or a function, got NoneType",
    }
    assert str(warned[0].message).endswith("is left out: ImportError: libforeign.so is missing")
    failure = r"\(backend broken of other:backend is left out: ImportError: libforeign.so is missing\), got broken$"
    for name in ("broken", {"merge_attn_states": "broken"}):
        with pytest.raises(ValueError, match=failure):
            backends.bind(name)
    own = [backend.name for backend in backends.registered() if backend.library is None]
    assert own == ["cpu", "triton", "hopper", "torch", "foreign"]
    assert merge().eq(-1).all() and asked == ["mla_twins.backends"]


@pytest.mark.parametrize(
    "record, fields, message",
    [
        (FOREIGN, dict(priority="high"), "priority: expected an int, got high"),
        (FOREIGN, dict(name=5), "name: expected a name without spaces, got 5"),
        (FOREIGN, dict(ops=["merge_attn_states"]), "ops: expected a mapping from op to OpSupport, got list"),
        (FOREIGN, dict(ops={"mla_decode": print}), "ops['mla_decode']: expected an OpSupport, got builtin_function_or"),
        (OpSupport(print), dict(launcher=None), 'launcher: expected a function or "package.module:function", got None'),
        (OpSupport(print), dict(launcher="package.module"), "launcher: expected a function or"),
        (OpSupport(print), dict(dtypes=torch.float32), "dtypes: expected a tuple, got dtype"),
        (
            OpSupport(print),
            dict(masks=("window",)),
            "masks: expected some of causal, causal_over_ranks, visible_lens, got ('window',)",
        ),
        (OpSupport(print), dict(head_dims={"lkv": (512,)}), "head_dims: expected names among kv_lora_rank, "),
        (OpSupport(print), dict(query_lens="any"), "query_lens: expected a QueryLenSupport, got str"),
        (OpSupport(print), dict(format_modes=("converted",)), "format_modes: expected a mapping from cache format to"),
        (OpSupport(print), dict(format_modes={"fp8_e4m3": ()}), "format_modes: expected formats among compute_dtype"),
        (
            OpSupport(print),
            dict(format_modes={"compute_dtype": ("fp8_query",)}),
            "format_modes['compute_dtype']: expected some of ('converted',), got ('fp8_query',)",
        ),
        (OpSupport(print), dict(head_scales=1), "head_scales: expected True or False, got int"),
        (OpSupport(print), dict(plans_steps=None), "plans_steps: expected True or False, got NoneType"),
        (OpSupport(print), dict(dtypes=("bfloat16",)), "dtypes: expected a tuple of torch.dtype, got ('bfloat16',)"),
        (OpSupport(print), dict(out_dtypes=("float",)), "out_dtypes: expected a tuple of torch.dtype, got ('float',)"),
        (OpSupport(print), dict(block_sizes=("64",)), "block_sizes: expected positive ints, got 64"),
        (OpSupport(print), dict(block_sizes=(0,)), "block_sizes: expected positive ints, got 0"),
        (
            OpSupport(print),
            dict(cache_formats=("fp4",)),
            "cache_formats: expected names among compute_dtype, fp8_e4m3, ",
        ),
        (OpSupport(print), dict(cache_formats=([],)), "cache_formats: expected names among compute_dtype, fp8_e4m3, "),
        (OpSupport(print), dict(reads="pack_state"), "reads: expected ops among advance_step, "),
        (
            OpSupport(print),
            dict(head_dims={"qk_head_dim": 512}),
            "head_dims['qk_head_dim']: expected a tuple of sizes, g",
        ),
        (
            OpSupport(print),
            dict(head_dims={"qk_head_dim": ("5",)}),
            "head_dims['qk_head_dim']: expected ints >= 0, got 5",
        ),
        (OpSupport(print), dict(head_dims={"lkv": (1,), 3: (1,)}), "head_dims: expected names among kv_lora_rank, "),
        (OpSupport(print), dict(masks=([],)), "masks: expected some of causal, "),
        (OpSupport(print), dict(features=({},)), "features: expected some of alibi, "),
        (OpSupport(print), dict(fp8_modes=("fp8",)), "fp8_modes: expected one of converted, "),
        (
            OpSupport(print),
            dict(format_modes={"compute_dtype": 3}),
            "format_modes['compute_dtype']: expected a tuple of",
        ),
        (FOREIGN, dict(ops={"mla_decod": OpSupport(print)}), "ops: expected ops among advance_step, "),
        (FOREIGN, dict(ops={3: OpSupport(print)}), "ops: expected ops among advance_step, "),
        (FOREIGN, dict(capability=(9,)), "capability: expected two ints, (major, minor), got (9,)"),
        (FOREIGN, dict(capability=("9", "0")), "capability: expected two ints, (major, minor), got ('9', '0')"),
        (FOREIGN, dict(capability_end=(9, True)), "capability_end: expected two ints, (major, minor), got (9, True)"),
        (
            FOREIGN,
            dict(capability=(9, 0), capability_end=(8, 0)),
            "capability_end: expected more than (9, 0), got (8, 0)",
        ),
        (
            FOREIGN,
            dict(device_type="gpu"),
            'device_type: expected a type of torch.device, such as "cuda" or "cpu", got gp',
        ),
        (FOREIGN, dict(device_type="cuda:0"), "device_type: expected a type of torch.device, such as "),
        (FOREIGN, dict(device_type=""), "device_type: expected a type of torch.device, such as "),
        (FOREIGN, dict(missing_package=3), "missing_package: expected a str or None, got int"),
        (FOREIGN, dict(hooks=print), 'hooks: expected None, a class or "package.module:Class", got <built-in function'),
        (
            FOREIGN,
            dict(missing_artifacts=type("Look", (), {"__call__": print, "__hash__": None})()),
            "missing_artifacts: expected None, a function or ",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_a_declaration_checks_itself(record, fields, message, plain_errors):
    """The constructors of `Backend` and `OpSupport` refuse invalid fields with one line that begins with the field."""
    with pytest.raises((ValueError, TypeError)) as error:
        replace(record, **fields)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize("wrong, right", [("mla_decod", "mla_decode"), ("merge-attn-states", "merge_attn_states")])
def test_a_misspelt_op(wrong, right):
    """Declare an op that does not exist -> the error has the most similar op."""
    for make in (lambda: replace(FOREIGN, ops={wrong: OpSupport(print)}), lambda: OpSupport(print, reads=wrong)):
        with pytest.raises(ValueError, match=rf"\(the most similar name: {right}\), got {wrong}$"):
            make()


def test_a_builder_forgets_programs_of_a_backend_that_is_gone():
    """After a backend is removed, a builder no longer uses the number of programs that this backend reported."""

    def planned() -> int:
        builder = fast.MLAMetadataBuilder(DIRECT, 16, 4096, 8)
        return builder.build(0, make_batch([1, 1], [300, 20]).common).schedule_choice.num_programs

    assert planned() == 1
    with registered(Backend("seven", 50, "cpu", {"decode_programs": OpSupport(lambda *_: 7)})):
        assert planned() == 7
    assert planned() == 1


def test_builders_pass_the_costs_of_the_backend(plain_errors):
    """A builder makes schedules with the costs that the backend reports, unless the caller gives other costs.

    The test fails if a builder uses the neutral costs (`ScheduleCosts()`) instead.
    """
    own = ScheduleCosts(request_cost=11, split_cost=3, split_rule=InvariantSplitRule(2, 3, 6, 9), invariant_starts=1)
    lens, config = [9000, 20, 300], DIRECT
    common = make_batch([1, 1, 1], lens).common
    unlike = Backend("unlike", 50, "cpu", {"schedule_costs": OpSupport(lambda *_: own)})
    with registered(unlike):
        assert fast.schedule_costs(config, device="cpu", dtype=torch.bfloat16, block_size=16) == own
        for invariant in (False, True):
            wanted = reference.plan_decode(integers(*lens), 4, own, invariant)
            neutral = reference.plan_decode(integers(*lens), 4, None, invariant)
            assert not wanted.tile_ranges.equal(neutral.tile_ranges)
            builder = fast.MLAMetadataBuilder(config, 16, 16384, 8, num_programs=4, batch_invariant=invariant)
            plans = [builder.build(0, common), builder.build_for_cudagraph_capture(common)]
            if not invariant:
                plans.append(fast.build_mla_metadata(common, 16, 4096, config=config, num_programs=4))
            for plan in plans:
                assert (
                    plan.schedule.tile_ranges.equal(wanted.tile_ranges) and plan.schedule.split_rule == own.split_rule
                )
            given = fast.MLAMetadataBuilder(config, 16, 16384, 8, num_programs=4, schedule_costs=ScheduleCosts())
            assert given.build(0, common).schedule.split_rule == ScheduleCosts().split_rule
        unplanned = fast.MLAMetadataBuilder(config, 16, 16384, 8, num_programs=0, batch_invariant=True)
        assert unplanned.build(0, common).schedule.split_rule == own.split_rule


def test_no_backend_has_to_tell_programs_or_costs(monkeypatch):
    """If no backend reports a number of programs and costs, a decode gets no schedule by default.

    A caller who gives a number of programs gets a schedule with the neutral costs (`ScheduleCosts()`).
    """
    ops = {op: support for op, support in CPU_BACKEND.ops.items() if op not in ("decode_programs", "schedule_costs")}
    with_backends(monkeypatch, replace(CPU_BACKEND, ops=ops))
    common = make_batch([1, 1, 1], [9000, 20, 300]).common
    for options, planned in (({}, False), ({"num_programs": 0}, False), ({"num_programs": 4}, True)):
        builder = fast.MLAMetadataBuilder(DIRECT, 16, 16384, 8, **options)
        assert builder.build(0, common).schedule_choice.planned is planned
        captured = builder.build_for_cudagraph_capture(common)
        assert (captured.schedule is not None) is planned
        if planned:
            assert captured.schedule.tile_ranges.equal(reference.plan_decode(common.seq_lens, 4).tile_ranges)
    fast.warmup(DIRECT, device="cpu", dtype=torch.float32, block_size=16)
    half = Backend("half", 0, "cpu", {"decode_programs": OpSupport(lambda *_: 7, dtypes=(torch.float16,))})
    with_backends(monkeypatch, replace(CPU_BACKEND, ops=ops), half)
    asked = fast.MLAMetadataBuilder(DIRECT, 16, 16384, 8, backend={"decode_programs": "half"})
    with pytest.raises(UnsupportedConfiguration, match="half: serves torch.float16, got torch.bfloat16"):
        asked.build(0, common)  # the backend that the caller named is never replaced silently


def test_a_captured_decode_asks_for_a_backend_that_can_be_captured():
    """A backend that declares no graph support does not serve a captured decode."""
    launched = set()

    def noted(op):
        right = backends.kernel("cpu", op)
        return lambda *given: launched.add(op) or right(*given)

    ops = {op: OpSupport(noted(op), graph=GraphSupport.NONE) for op in ("mla_decode", "plan_decode")}
    with registered(Backend("eager", 50, "cpu", ops)):
        q, k_pe, cache, plan, scale = decode_arguments()
        fast.mla_decode(q, k_pe, cache, plan, scale)
        fast.plan_decode(plan.seq_lens, 2)
        assert launched == set(ops)
        launched.clear()
        chosen = fast.MLAMetadataBuilder(DIRECT, 16, 4096, 8, device="cpu")
        assert chosen.graph_support is GraphSupport.NONE  # it chooses "eager"
        builder = fast.MLAMetadataBuilder(
            DIRECT, 16, 4096, 8, num_programs=2, graph_support=GraphSupport.ANY, device="cpu"
        )
        captured = builder.build_for_cudagraph_capture(make_batch([1, 1], [20, 33]).common)
        assert captured.decode.graph is GraphSupport.ONE_QUERY_LEN
        fast.mla_decode(q, k_pe, cache, replace(plan, graph=captured.decode.graph), scale)
        assert not launched
        with pytest.raises(UnsupportedConfiguration, match="eager: has graph support 'none'"):
            fast.mla_decode(q, k_pe, cache, replace(plan, graph=captured.decode.graph), scale, backend="eager")


OTHER_FORMAT = CacheFormat("other")


def test_a_format_reaches_every_op(monkeypatch):
    """A layer, a cascade and a decode over ranks pass the cache format to every op that reads or writes the cache.

    Only the backend `formatted` serves the format `other`, so `formatted` must serve all these ops.
    """
    reading = [op for op in OPS if op in ("mla_decode", "decode_programs", "gather_and_maybe_dequant_cache",
                                          "rope_norm_and_cache", "concat_and_cache_mla")]  # fmt: skip
    formats = sys.modules["reference.interfaces.cache_format"]
    monkeypatch.setattr(formats, "CACHE_FORMATS", {"compute_dtype": COMPUTE_FORMAT, "other": OTHER_FORMAT})
    other = {op: replace(CPU_BACKEND.ops[op], cache_formats=("other",)) for op in reading}
    with_backends(monkeypatch, CPU_BACKEND, Backend("formatted", -1, "cpu", other))
    launched, right = set(), backends.kernel
    monkeypatch.setattr(backends, "kernel", lambda name, op: launched.add((name, op)) or right(name, op))
    step_of_a_layer(None, cache_format=OTHER_FORMAT)
    read = STEP & set(reading)
    assert launched == {("formatted", op) for op in read} | {("cpu", op) for op in STEP - read}
    q, k_pe, cache, plan, scale = decode_arguments()
    launched.clear()
    fast.cascade_attention(q, k_pe, cache, fast.split_shared_prefix(plan, 16, 16, 0), scale, OTHER_FORMAT)
    assert ("formatted", "mla_decode") in launched and ("cpu", "mla_decode") not in launched
    launched.clear()
    fast.simulate(2, 1, lambda ranks: fast.dcp_decode(q, k_pe, cache, plan, scale, ranks, cache_format=OTHER_FORMAT))
    assert ("formatted", "mla_decode") in launched and ("cpu", "mla_decode") not in launched


def test_a_format_that_nothing_implements_is_refused(ops):
    """Both packages refuse a cache format that no kernel implements, and do not write the cache."""
    q, k_pe, cache, plan, scale = decode_arguments()
    before = cache.clone()
    calls = [
        lambda: ops.mla_decode(q, k_pe, cache, plan, scale, cache_format=OTHER_FORMAT),
        lambda: ops.concat_and_cache_mla(q[:, 0], k_pe[:, 0], cache, torch.tensor([0, 1]), OTHER_FORMAT),
        lambda: ops.gather_and_maybe_dequant_cache(
            cache, plan.block_table, integers(0, 1, 2), integers(0, 0), 2, OTHER_FORMAT
        ),
    ]
    for call in calls:
        with pytest.raises(
            ValueError, match="^cache_format: expected one of compute_dtype, fp8_e4m3, fp8_ds_mla, got other$"
        ):
            call()
    assert_same_bits(cache, before)


def test_declarations_import_no_kernel():
    """The first call of an op imports kernels; `import fast` and the choice of a backend import no kernels.

    The function `rotate` is not an op, so a call of `rotate` imports no kernels.
    """
    code = """
import sys, torch, fast
fast.backends.explain(fast.MLAConfig.from_preset("deepseek-v3"), device="cpu", dtype=torch.float32)
sets = tuple(f"fast.kernels.{name}" for name in ("cpu", "triton", "hopper", "combine"))
loaded = [name for name in sys.modules if name.startswith(sets)]
assert not loaded, loaded
fast.rotate(torch.ones(1, 2), torch.ones(1, 1), torch.ones(1, 1), True)
assert not [name for name in sys.modules if name.startswith(sets)]
fast.apply_rope(torch.zeros(1).long(), torch.ones(1, 1, 2), torch.ones(1, 2), fast.RopeConfig())
assert "fast.kernels.cpu" in sys.modules  # this proves that the search above finds imported kernels
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_backend_that_plans_steps(monkeypatch):
    """A backend that plans steps serves planned calls and calls that name it, but no other direct call."""
    ran = []

    def attend(q, k, k_pe, v, *_, out=None, lse=None):
        ran.append(q.shape)
        return q.new_zeros(*q.shape[:2], v.shape[2]), q.new_zeros(q.shape[1], q.shape[0])

    support = OpSupport(attend, masks=("causal",), plans_steps=True)
    planner = Backend("planner", 50, "cpu", {"flash_attn_varlen": support})
    with_backends(monkeypatch, CPU_BACKEND, planner)
    request = backends.KernelRequest(
        "flash_attn_varlen", torch.device("cpu"), torch.float32, (("qk_head_dim", 8), ("v_head_dim", 8)),
        query_lens=QueryLenSupport.VARLEN, out_dtype=torch.float32, lse=True,
    )  # fmt: skip
    assert backends.select(request).name == "planner"
    assert backends.select(replace(request, direct=True)).name == "cpu"
    assert backends.select(replace(request, direct=True), "planner").name == "planner"
    q, starts = torch.ones(3, 2, 8), integers(0, 3)
    given = (q, q, q, starts, starts, 3, 3, 1.0, True)
    assert fast.flash_attn_varlen(*given).out.gt(0).all() and not ran
    assert fast.flash_attn_varlen(*given, backend="planner").out.eq(0).all() and len(ran) == 1
    with_backends(monkeypatch, planner)
    with pytest.raises(UnsupportedConfiguration, match="planner: would plan in each direct call; name it to use it"):
        backends.select(replace(request, direct=True))


def test_a_priority_of_one_op(monkeypatch):
    """A backend can give one op another priority, which replaces the priority of the backend for this op."""
    first = Backend("first", 5, "cpu", {"mla_decode": OpSupport(print, priority=-1), "apply_rope": OpSupport(print)})
    with_backends(monkeypatch, first, replace(CPU_BACKEND, priority=2))
    assert backends.select(REQUEST).name == "cpu"
    assert backends.select(replace(REQUEST, op="apply_rope")).name == "first"


def test_explain_asks_what_the_ops_ask(monkeypatch):
    """`explain` names only backends that serve the head dims of the model."""
    only_512 = {
        op: OpSupport(print, head_dims={"kv_lora_rank": (512,)}) for op in ("concat_and_cache_mla", "mla_decode")
    }
    only_576 = {"gather_and_maybe_dequant_cache": OpSupport(print, head_dims={"head_dim": (576,)})}
    only_128 = {"flash_attn_varlen": OpSupport(print, head_dims={"v_head_dim": (128,)})}
    with_backends(monkeypatch, CPU_BACKEND, Backend("wide", 5, "cpu", only_512 | only_576 | only_128))
    for config, name in ((DIRECT, "cpu"), (MLAConfig.from_preset("deepseek-v3"), "wide")):
        said = dict(line.split(": ", 1) for line in
                    backends.explain(config, device="cpu", dtype=torch.float32).splitlines())  # fmt: skip
        for op in only_512 | only_576 | only_128:
            assert said[op].startswith(name), op


def test_a_backend_without_lse_serves_no_attention(monkeypatch, plain_errors):
    """A backend that returns no LSE does not serve `mla_decode` or `flash_attn_varlen`, whose results have an LSE."""
    q, k_pe, cache, plan, scale = decode_arguments()
    attention = {op: replace(CPU_BACKEND.ops[op], lse=False) for op in ("mla_decode", "flash_attn_varlen")}
    with_backends(monkeypatch, CPU_BACKEND, Backend("outputs", 50, "cpu", attention))
    fast.mla_decode(q, k_pe, cache, plan, scale)
    with pytest.raises(UnsupportedConfiguration, match="^outputs: returns no LSE$"):
        fast.mla_decode(q, k_pe, cache, plan, scale, backend="outputs")
    heads, starts = torch.randn(3, 2, 8), integers(0, 3)
    fast.flash_attn_varlen(heads, heads, heads, starts, starts, 3, 3, 0.3, True)
    with pytest.raises(UnsupportedConfiguration, match="^outputs: returns no LSE$"):
        fast.flash_attn_varlen(heads, heads, heads, starts, starts, 3, 3, 0.3, True, backend="outputs")
    lines = backends.explain(DIRECT, device="cpu", dtype=torch.float32).splitlines()
    assert any(line.startswith("mla_decode: cpu, chosen by priority (outputs: returns no LSE") for line in lines)


def test_copies_know_no_dtype_and_no_format(monkeypatch):
    """`copy_blocks` and `swap_blocks` copy bytes, so the `cpu` backend serves them for every cache dtype and format."""
    formats = sys.modules["reference.interfaces.cache_format"]
    narrow = CacheFormat("narrow", torch.float8_e4m3fn)
    monkeypatch.setattr(formats, "CACHE_FORMATS", {"compute_dtype": COMPUTE_FORMAT, "narrow": narrow})
    caches = [torch.arange(96).reshape(4, 2, 12).to(torch.uint8).view(torch.float8_e4m3fn) for _ in range(2)]
    fast.copy_blocks(caches, torch.tensor([[0, 2]]))
    fast.swap_blocks(caches[0], caches[1], torch.tensor([[1, 3]]))
    raw = [cache.view(torch.uint8) for cache in caches]
    assert raw[0][2].equal(raw[0][0]) and raw[1][3].equal(raw[0][1])
    lines = backends.explain(DIRECT, device="cpu", dtype=torch.float32, cache_format=narrow).splitlines()
    assert {line.split(" ")[1] for line in lines if line.startswith(("copy_blocks:", "swap_blocks:"))} == {"cpu,"}
    assert any(line.startswith("mla_decode: none") for line in lines)
