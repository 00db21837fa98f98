"""Tests of the layer of grouped-query attention in `fast`: errors within budgets, outputs, backends and compilation.

tests/gqa/test_reference_layer.py tests what each kind of step writes and attends, for both packages. The budgets are
those of `fast.parity`.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fast
import reference
from fast.backends import Backend
from fast.backends.own import TORCH as TORCH_BACKEND
from fast.parity import compare
from reference.interfaces import COMPUTE_FORMAT, E4M3, FP8_E4M3, GraphSupport, UnsupportedConfiguration, to_e4m3
from reference.interfaces.gqa import AttentionType, EncoderMetadata

from ..support.backends import registered
from ..support.factories import assert_close64, assert_same_bits, integers, offsets
from ..support.gqa import CONFIGS, GROUPED, LENS, MHA, gqa_batch, gqa_step

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NEW = ((1, 1), (2, 2), (1, 0), (5, 5), (2, 0), (17, 17))  # requests without context; two of them are padding rows
ALL = CONFIGS["all of them"]


@pytest.fixture
def padded():
    """Register the kernels of the backend "torch" for CPU tensors, and return the name of the new backend."""
    with registered(Backend("padded", -1, torch.get_default_device().type, TORCH_BACKEND.ops)):
        yield "padded"


def new_layer(ops, batch, **options):
    return ops.GQAAttention(batch.config, sinks=batch.sinks, **batch.scales, **options)


def converted(batch, dtype):
    """Return a batch whose numbers are in another dtype; a cache in e4m3 stays as it is."""
    cache = batch.kv_cache if batch.cache_format.scaled else batch.kv_cache.to(dtype)
    sinks = None if batch.sinks is None else batch.sinks.to(dtype)
    given = {name: tuple(x.to(dtype) for x in getattr(batch, name)) for name in ("k", "v")}
    return replace(batch, q=batch.q.to(dtype), kv_cache=cache, sinks=sinks, **given)


def run(ops, batch, num_decodes=5, cached=True, output=None, output_scale=None, **options):
    """Run one step over a copy of the cache; return the output and the cache."""
    cache = batch.kv_cache.clone() if cached else None
    given = batch.q, batch.new_k, batch.new_v, cache, gqa_step(batch, num_decodes), output, output_scale
    return new_layer(ops, batch, **options)(*given), cache


def verdict(value, low, gold) -> None:
    if value.dtype == torch.float64:
        return assert_close64(value, gold)
    parity = compare("GQAAttention", value, low, gold)
    assert parity.passed, parity


@pytest.mark.parametrize("cache_format", [COMPUTE_FORMAT, FP8_E4M3], ids=lambda each: each.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["multi-head", "window of a page", "all of them"])
def test_steps(name, dtype, cache_format, padded):
    """Run a step with decodes, prefills and padding -> outputs within the budgets, and the bits of the caches."""
    batch = gqa_batch(
        CONFIGS[name], LENS, dtype=dtype, layout="HND", cache_format=cache_format, padding=3, new_tokens=False
    )
    gold, _ = run(reference, converted(batch, torch.float64))
    low, wanted = run(reference, batch)
    for backend in (None, padded):
        value, cache = run(fast, batch, backend=backend)
        assert_same_bits(cache, wanted)
        assert value[-3:].eq(0).all()
        verdict(value, low, gold)


@pytest.mark.parametrize("name", ["grouped", "window of a page", "all of them"])
@pytest.mark.parametrize("num_decodes", [0, 3, 6])
def test_steps_without_a_cache(num_decodes, name, padded):
    """Run a step without a cache, with padding rows between its requests -> the outputs of the reference."""
    batch = gqa_batch(CONFIGS[name], NEW, dtype=torch.float64, padding=2, new_tokens=False)
    wanted, _ = run(reference, batch, num_decodes, cached=False)
    for backend in (None, padded):
        value, _ = run(fast, batch, num_decodes, cached=False, backend=backend)
        assert_close64(value, wanted)
        assert value[3].eq(0).all() and value[9:11].eq(0).all() and value[-2:].eq(0).all()


def test_padding_tokens_of_a_decode_without_a_cache():
    """Run a decode that has padding tokens and no cache -> their output is 0, and the other rows stay."""
    batch = gqa_batch(ALL, ((1, 1), (2, 2)), dtype=torch.float64, new_tokens=False)
    wanted, _ = run(fast, batch, 2, cached=False)
    longer = gqa_batch(ALL, ((1, 1), (2, 2), (4, 0)), dtype=torch.float64, new_tokens=False)
    plan, given = gqa_step(batch, 2), [torch.cat((x, y[3:])) for x, y in (
        (batch.q, longer.q), (batch.new_k, longer.new_k), (batch.new_v, longer.new_v))]  # fmt: skip
    padding = torch.zeros(4, dtype=torch.int32)
    decode = replace(plan.decode, visible_lens=torch.cat((plan.decode.visible_lens, padding)), graph=GraphSupport.ANY,
                     first_visible=torch.cat((plan.decode.first_visible, padding)), max_query_len=4)  # fmt: skip
    plan = replace(plan, decode=decode, num_actual_tokens=7, num_decode_tokens=7, slot_mapping=torch.full((7,), -1))
    for ops in (fast, reference):
        value = new_layer(ops, batch)(*given, None, plan)
        assert_close64(value[:3], wanted)
        assert value[3:].eq(0).all()


@pytest.mark.parametrize("kind", [AttentionType.ENCODER, AttentionType.ENCODER_ONLY])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_encoders(dtype, kind, padded):
    """Run a step of an encoder -> outputs within the budgets; tokens behind the last request get 0."""
    config = replace(ALL, attention_type=kind)
    batch = gqa_batch(config, ((1, 1), (17, 17), (0, 0), (6, 6)), dtype=dtype)
    plan = EncoderMetadata(config, offsets((1, 17, 0, 6)), 17, 24)
    q, k, v = (torch.cat((x, torch.full_like(x[:2], torch.nan))) for x in (batch.q, batch.new_k, batch.new_v))

    def encode(ops, *tensors, sinks=batch.sinks, **options):
        return ops.GQAAttention(config, sinks=sinks, **options)(*tensors, None, plan)

    gold = encode(reference, q.double(), k.double(), v.double(), sinks=batch.sinks.double())
    low = encode(reference, q, k, v)
    for backend in (None, padded):
        value = encode(fast, q, k, v, backend=backend)
        assert value[24:].eq(0).all()
        verdict(value[:24], low[:24], gold[:24])


@pytest.mark.parametrize("cached", [True, False])
def test_outputs_in_place(cached):
    """Write the output to a tensor with any strides, and in e4m3 -> the numbers of a new output; rounded once."""
    lens, num_decodes = (LENS, 5) if cached else (NEW, 3)
    batch = gqa_batch(ALL, lens, dtype=torch.bfloat16, padding=3, new_tokens=False)
    tokens, scale = len(batch.q), torch.tensor(0.013)
    wanted, _ = run(fast, batch, num_decodes, cached)
    for output in (
        torch.empty_like(wanted),
        torch.empty(6, tokens, 160, dtype=torch.bfloat16)[..., ::2].transpose(0, 1),
    ):
        value, _ = run(fast, batch, num_decodes, cached, output)
        assert value is output
        assert_same_bits(output, wanted)
    output = torch.full(wanted.shape, torch.nan).to(E4M3)
    value, _ = run(fast, batch, num_decodes, cached, output, scale)
    assert value is output and value[-3:].view(torch.uint8).eq(0).all()
    step = (wanted.float().abs() * 2**-3).clamp(min=scale.item() * 2**-9)  # from one number in e4m3 to the next
    assert ((value.float() * scale - wanted.float()).abs() <= step).all()
    assert_same_bits(run(fast, batch, num_decodes, cached, None, scale)[0], output)
    # these kernels compute 16-bit inputs in float32, so the same inputs in float32 give the numbers before the rounding
    exact_backend = "cpu" if batch.q.device.type == "cpu" else "torch"
    exact, _ = run(fast, converted(batch, torch.float32), num_decodes, cached, backend=exact_backend)
    value, _ = run(fast, batch, num_decodes, cached, output, scale, backend=exact_backend)
    assert_same_bits(value, to_e4m3(exact, scale))


def test_a_refused_step_writes_nothing(plain_errors):
    """Run steps with an invalid value -> an error that names it; neither the cache nor the output is written."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("on a GPU the host does not know the values")
    batch = gqa_batch(ALL, LENS, dtype=torch.float32, new_tokens=False)
    plan, cache, output = gqa_step(batch, 5), batch.kv_cache.clone(), torch.full_like(batch.q, 7)
    layer = new_layer(fast, batch)
    wrong_slot = batch.slot_mapping.clone()
    wrong_slot[9] = 10**6
    visible = plan.prefill.visible_lens.clone()
    visible[-1] = 1000
    for change, message in (
        ({"slot_mapping": wrong_slot}, "^metadata.slot_mapping: expected slots in"),
        ({"prefill": replace(plan.prefill, visible_lens=visible)}, "^metadata.prefill.visible_lens: expected a value"),
        ({"config": GROUPED}, "^metadata.config.sliding_window: expected 19, as in the config of the layer, got None"),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                layer(batch.q, batch.new_k, batch.new_v, cache, replace(plan, **change), output)
    assert_same_bits(cache, batch.kv_cache)
    assert output.eq(7).all()


# Backends and compilation.


def test_backends_of_a_layer(padded, plain_errors, monkeypatch):
    """Name a backend of a layer -> it serves the ops that it declares; unknown names are refused at once."""
    launched, right = set(), fast.backends.kernel
    monkeypatch.setattr(fast.backends, "kernel", lambda name, op: launched.add((name, op)) or right(name, op))
    batch = gqa_batch(ALL, LENS, dtype=torch.float32, new_tokens=False)
    own = "cpu" if batch.q.device.type == "cpu" else "triton"
    for backend, names in (
        (None, {own}), (padded, {padded}), ({"gqa_paged_attention": padded}, {own, padded}),
    ):  # fmt: skip
        launched.clear()
        run(fast, batch, backend=backend)
        assert {name for name, _ in launched} == names
        assert {op for _, op in launched} == {"gqa_paged_attention", "reshape_and_cache"}
    with pytest.raises(ValueError, match="^backend: expected one of cpu, triton, hopper, torch, .*, got nosuch"):
        fast.GQAAttention(GROUPED, backend="nosuch")
    with pytest.raises(UnsupportedConfiguration, match="hopper: has no kernel for gqa_paged_attention"):
        fast.GQAAttention(GROUPED, backend="hopper")
    with pytest.raises(TypeError, match="^check_every_call: expected True or False, got int"):
        fast.GQAAttention(GROUPED, check_every_call=1)


def test_checks_of_every_call():
    """Run the same step twice, with and without the checks of every call -> the same bits."""
    batch = gqa_batch(ALL, LENS, dtype=torch.float32, new_tokens=False)
    outputs = []
    for check_every_call in (False, True):
        layer, plan = new_layer(fast, batch, check_every_call=check_every_call), gqa_step(batch, 5)
        outputs += [layer(batch.q, batch.new_k, batch.new_v, batch.kv_cache.clone(), plan) for _ in range(2)]
    for output in outputs[1:]:
        assert_same_bits(output, outputs[0])


@pytest.mark.parametrize("cross", [False, True])
def test_no_gradients(cross):
    """Run a step with queries and keys that need gradients -> an output without a gradient."""
    kind = AttentionType.CROSS if cross else AttentionType.DECODER
    config = replace(MHA, attention_type=kind)
    batch = gqa_batch(config, ((1, 4), (3, 3)), dtype=torch.float32, new_tokens=False)
    plan = gqa_step(batch, 1)
    k, v = (batch.k[0], batch.v[0]) if cross else (batch.new_k, batch.new_v)
    if cross:
        plan = replace(plan, slot_mapping=torch.tensor(batch.slots[0], dtype=torch.int64))
        batch.kv_cache.nan_to_num_(0)
    value = fast.GQAAttention(config)(*(x.clone().requires_grad_() for x in (batch.q, k, v)), batch.kv_cache, plan)
    assert not value.requires_grad and value.isfinite().all()


def test_layers_of_a_plan_with_a_cascade():
    """Run a cascade in 16 bits -> within the budget of the reference, whose states are merged in float32 too."""
    config = replace(GROUPED, attention_sinks=True)
    batch = gqa_batch(config, [(1, 33), (1, 50), (1, 49)], dtype=torch.bfloat16)
    table = batch.metadata.block_table.clone()
    table[:, :2] = table[0, :2]
    batch = replace(batch, metadata=replace(batch.metadata, block_table=table))
    cascade = fast.split_shared_prefix(batch.metadata, 32, 16, 0)
    given = batch.kv_cache, cascade, config
    gold = reference.gqa_cascade_attention(
        batch.q.double(), batch.kv_cache.double(), cascade, config, batch.sinks.double()
    )
    low = reference.gqa_cascade_attention(batch.q, *given, batch.sinks)
    value = fast.gqa_cascade_attention(batch.q, *given, batch.sinks)
    verdict(value.out, low.out, gold.out)
    rounding = value.out.shape[-1] ** 0.5 * torch.finfo(value.lse.dtype).eps  # as in test_fast_attention.py
    on_cpu = value.lse.device.type == "cpu"  # a GPU merges with approximate exp and log
    parity = compare("lse", value.lse, low.lse, gold.lse, relative=rounding if on_cpu else fast.parity.LSE_RELATIVE)
    assert parity.passed, parity
    whole = fast.gqa_paged_attention(batch.q, batch.kv_cache, batch.metadata, config, batch.sinks)
    assert compare("cascade", value.out, low.out, whole.out.double()).passed


COMPILE = """
import torch
import fast
from dataclasses import replace
from tests.support.gqa import CONFIGS, gqa_batch, gqa_step

full = CONFIGS["all of them"]
chunks = replace(CONFIGS["sinks"], attention_chunk_size=32)
cross = replace(CONFIGS["sinks"], logits_soft_cap=1.1, attention_type=fast.AttentionType.CROSS)
decodes = ((1, 20), (1, 33), (1, 1))
for config, lens, num_decodes, name in (
    (full, decodes, 3, "fp8_e4m3"), (full, ((1, 20), (1, 33), (1, 0)), 3, "compute_dtype"),
    (full, ((1, 20), (2, 33), (6, 6)), 2, "compute_dtype"), (full, ((1, 1), (5, 5), (1, 1)), 3, None),
    (replace(full, alibi_slopes=None), decodes, 3, "compute_dtype"), (chunks, decodes, 3, "compute_dtype"),
    (cross, decodes, 3, "written before"), (cross, ((1, 20), (2, 33), (6, 6)), 1, "written in this step"),
):
    torch._dynamo.reset()
    compiled = None
    for step in range(4):
        torch._dynamo.config.error_on_recompile = step > 1  # at the second step max_seq_len becomes a symbol
        context = step if name not in (None, "written in this step") else 0  # the number of new keys is constant
        stored, written = fast.CACHE_FORMATS.get(name, fast.CACHE_FORMATS["compute_dtype"]), name == "written before"
        batch = gqa_batch(
            config, [(q, s + context if s else 0) for q, s in lens], dtype=torch.float32, new_tokens=written,
            free_behind_window=False, cache_format=stored,
        )
        table = torch.full((3, 9), 2147480000, dtype=torch.int32)
        table[:, : batch.metadata.block_table.shape[1]] = batch.metadata.block_table
        batch = replace(batch, metadata=replace(batch.metadata, block_table=table))
        plan, cache = gqa_step(batch, num_decodes), torch.zeros(2, 12, 16, 2, 80).to(batch.kv_cache.dtype)
        cache.view(torch.uint8)[:, : batch.kv_cache.shape[1]] = batch.kv_cache.view(torch.uint8)
        caches = [cache.clone(), cache.clone()] if name else [None, None]
        if compiled is None:
            layer = fast.GQAAttention(config, sinks=batch.sinks, **batch.scales)
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        if layer.k_scale is not None:
            assert torch.equal(layer.k_scale.value, batch.k_scale)
            layer.k_scale.written = layer.v_scale.written = True
        given = batch.q, batch.new_k, batch.new_v
        if config is chunks:
            common = fast.CommonAttentionMetadata.from_lens([1, 1, 1], plan.decode.seq_lens.tolist(), table, 16)
            plan = fast.build_gqa_metadata(common, 16, config)
            assert plan.decode.seq_lens.tolist() == [20 + step, 1 + step, 1 + step]  # keys in the last attention chunk
        if config is cross:
            slots = torch.tensor([slot for each in batch.slots for slot in each if not written], dtype=torch.int64)
            plan = replace(plan, slot_mapping=slots)
            given = (batch.q, None, None) if written else (batch.q, torch.cat(batch.k), torch.cat(batch.v))
        with torch.no_grad():
            wanted = layer(*given, caches[0], plan)
            got = compiled(*given, caches[1], plan)
        assert wanted.isfinite().all() and wanted.abs().max() > 0.01
        assert torch.equal(got, wanted)
        if name:
            assert torch.equal(*(each.view(torch.uint8) for each in caches))
print("compiled")
"""


def test_compile_fullgraph():
    """Compile a layer with `fullgraph=True` -> the bits of eager mode: decodes, a mixed step, a step without a cache.

    The configs have windows, sinks and soft caps, with and without ALiBi; attention chunks; and cross attention, whose
    keys are written in an earlier step or in this one. While sequences grow, the layer is recompiled once:
    `max_seq_len` is a constant in the first graph and a symbol in the second graph. The test runs in its own process,
    because the run-time shape checks of the tests cannot be traced.
    """
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=Path(fast.__file__).parents[1], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0 and done.stdout.endswith("compiled\n"), done.stderr


def test_slots_are_integers():
    """Compare the hand-made plan of a step with the plan of the builder -> the same slots and visible keys."""
    batch = gqa_batch(GROUPED, LENS, new_tokens=False)
    common = fast.CommonAttentionMetadata.from_lens(
        [query_len for query_len, _ in LENS], [length for _, length in LENS], batch.metadata.block_table, 16
    )
    plan, made = fast.build_gqa_metadata(common, 16, GROUPED, 1), gqa_step(batch, 0)
    assert plan.slot_mapping[: len(made.slot_mapping)].equal(made.slot_mapping)
    visible = torch.cat((plan.decode.visible_lens, plan.prefill.visible_lens))
    assert visible.equal(batch.metadata.visible_lens) and plan.decode.seq_lens[:3].equal(integers(1, 16, 37))
