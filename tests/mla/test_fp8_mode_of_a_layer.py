"""Tests of layers whose decodes have queries in e4m3 (8 bits): the options `fp8_mode` and `q_scale` of a layer.

The modes of a decode over a cache in e4m3 are explained at `reference.mla_decode`.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings

import pytest
import torch

import fast
import reference
from fast.mla.weights import multiply_heads
from reference.interfaces import (
    COMPUTE_FORMAT,
    E4M3,
    FP8_E4M3,
    FP8_MODES,
    CommonAttentionMetadata,
    QueryScale,
    ScaleSource,
    to_e4m3,
)

from ..support.context_parallel import of_rank
from ..support.factories import assert_close64, assert_same_bits, make_batch, make_layer, make_weights
from ..support.format_caches import FORMATS, SMALL, exact_entries, poisoned_cache, step_of
from ..support.ranks import Steps, make_rank_layer, serve

IN_E4M3 = FP8_MODES[1:]
Q_SCALES = {"one": 2.0**-6, "of heads": 2.0 ** -torch.arange(3, 3 + SMALL.num_heads).float()}
LENS = (21, 9)
# (new tokens, tokens after the step) of each request: prompts; a mixed step; drafted tokens; decodes
GROWING = (((40, 40), (5, 5)), ((1, 41), (20, 25)), ((2, 43), (3, 28)), ((1, 44), (1, 29)))


@pytest.fixture(params=FORMATS)
def format_config(request):
    """Return a cache format, a config for it, and a scale of the cache."""
    return FORMATS[request.param]


class Case:
    """A layer, its cache in e4m3 with all tokens of two requests, and a step that decodes each request's last token.

    Args:
        ops: package of the layer.
        format_config: cache format, config and scale of the cache.
        dtype: dtype of the layer.
        options: options of the layer.
    """

    def __init__(self, ops, format_config, dtype=torch.float64, **options):
        self.ops, (self.cache_format, self.config, scale) = ops, format_config
        torch.manual_seed(5)
        self.weights = make_weights(self.config, torch.float64)
        self.layer = self.make(dtype, kv_scale=scale, **options)
        self.batch = make_batch(LENS, LENS)
        self.cache = poisoned_cache(self.batch.num_blocks, 16, self.config, self.cache_format, dtype)
        self.hidden = torch.randn(sum(LENS), self.config.hidden_size, dtype=torch.float64).to(dtype)
        kv_scale = None if scale is None else torch.tensor(scale)
        entries = exact_entries(sum(LENS), self.config, dtype, scale or 2.0**-5)
        ops.concat_and_cache_mla(*entries, self.cache, self.batch.common.slot_mapping, self.cache_format, kv_scale)
        self.common = step_of(self.batch, tuple((1, length) for length in LENS))
        self.positions = torch.tensor(LENS) - 1

    def make(self, dtype, **options):
        return make_layer(self.ops, self.config, self.weights, dtype, cache_format=self.cache_format, **options)

    def plan(self, common=None, fp8_mode=None):
        common = self.common if common is None else common
        mode = self.layer.fp8_mode if fp8_mode is None else fp8_mode
        return self.ops.build_mla_metadata(common, 16, 64, cache_format=self.cache_format, fp8_mode=mode)

    def decode(self, plan=None):
        plan = self.plan() if plan is None else plan
        return self.layer(self.hidden[:2], self.positions, self.cache, plan)

    def by_hand(self, scale):
        """Compute the output of `decode` with the public functions, over the cache that `decode` has written."""
        ops, layer, c = self.ops, self.layer, self.config
        q = layer.q_b_proj(
            ops.mla.layer.rms_norm(layer.q_a_proj(self.hidden[:2]), layer.q_a_layernorm.weight, c.latent_norm_eps)
        )
        q_nope, q_pe = q.view(2, c.num_heads, -1).split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        w_uk_t, w_uv = ops.absorb(*layer.up_projections())
        k_pe = torch.zeros(2, c.qk_rope_head_dim, dtype=q.dtype)
        queries = (
            ops.query_to_latent(q_nope, w_uk_t, scale), ops.apply_rope(self.positions, q_pe, k_pe, c.rope, scale)[0]
        )  # fmt: skip
        assert {x.dtype for x in queries} == {E4M3}
        state = ops.mla_decode(
            *queries, self.cache, self.plan().decode, c.softmax_scale, None, q.dtype, self.cache_format,
            None if layer.kv_scale is None else layer.kv_scale.value, layer.fp8_mode, scale,
        )  # fmt: skip
        return layer.o_proj(ops.latent_to_value(state.out, w_uv).flatten(1))


# The output of a layer.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", IN_E4M3)
@pytest.mark.parametrize("q_scale", Q_SCALES.values(), ids=Q_SCALES)
def test_layer_calls_the_functions(ops, format_config, q_scale, mode, dtype):
    """A decode of a layer has the same bits as a decode that calls the public functions one after another."""
    case = Case(ops, format_config, dtype, fp8_mode=mode, q_scale=q_scale)
    found = case.decode()
    wanted = case.by_hand(torch.as_tensor(q_scale, dtype=torch.float32))
    assert_same_bits(found, wanted)
    converted = Case(ops, format_config, dtype)
    assert not torch.equal(found, converted.decode())
    assert_same_bits(*(each.cache.view(torch.uint8) for each in (case, converted)))


def test_packages_agree(format_config):
    """Whole layers of both packages agree in float64, over prompts, mixed steps, drafts and decodes."""
    cache_format, config, scale = format_config
    for q_scale in Q_SCALES.values():
        for workspace_tokens in (4096, 64):
            outputs = [
                serve(ops, config, Steps(GROWING, 64, workspace_tokens, 3), cache_format=cache_format, kv_scale=scale,
                      fp8_mode="fp8_query", q_scale=q_scale)
                for ops in (reference, fast)
            ]  # fmt: skip
            for found, wanted in zip(*outputs, strict=True):
                assert_close64(found, wanted)


@pytest.mark.parametrize("mode", IN_E4M3)
def test_decodes_do_not_depend_on_prefills(ops, format_config, mode):
    """A decode has the same output beside a prefill and alone; the mode changes no bit of the prefill."""
    case = Case(ops, format_config, fp8_mode=mode, q_scale=2.0**-6)
    common = step_of(case.batch, ((1, LENS[0]), (LENS[1], LENS[1])))
    hidden, positions = case.hidden[: 1 + LENS[1]], torch.cat((torch.tensor([LENS[0] - 1]), torch.arange(LENS[1])))
    mixed = case.layer(hidden, positions, case.cache, case.plan(common))
    alone = step_of(case.batch, ((1, LENS[0]), (0, 0)))
    alone = case.layer(hidden[:1], positions[:1], case.cache, case.plan(alone))
    assert_close64(mixed[:1], alone)
    plain = Case(ops, format_config)
    plain = plain.layer(hidden, positions, plain.cache, plain.plan(common))
    assert_same_bits(mixed[1:], plain[1:])
    assert not torch.equal(mixed[:1], plain[:1])


@pytest.mark.parametrize("mode", IN_E4M3)
def test_forward_attention(ops, format_config, mode):
    """`forward_attention` quantises queries that are already rotated; in float32 it gives the output of `forward`."""
    case = Case(ops, format_config, torch.float32, fp8_mode=mode, q_scale=Q_SCALES["of heads"])
    wanted = case.decode()
    projected = case.layer.project(case.hidden[:2], case.positions)
    output = wanted.new_empty(2, case.config.num_heads, case.config.v_head_dim)
    case.layer.forward_attention(*projected, case.cache, case.plan(), output)
    assert_same_bits(case.layer.o_proj(output.flatten(1)), wanted)


def test_cascade_is_a_decode(ops, format_config):
    """A cascade over a shared prefix gives the output of the decode without a cascade."""
    case = Case(ops, format_config, fp8_mode="fp8_query", q_scale=2.0**-6)
    table = case.batch.common.block_table.clone()
    table[1, :2] = table[0, :2]
    common = CommonAttentionMetadata.make(
        torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([21, 20], dtype=torch.int32), table,
        torch.tensor([-1, -1]),
    )  # fmt: skip
    plan = case.plan(common)
    cascade = dataclasses.replace(plan, cascade=ops.split_shared_prefix(plan.decode, 16, 16))
    assert_close64(case.decode(cascade), case.decode(plan))
    with pytest.raises(ValueError, match="^out_dtype: expected a dtype for fp8_mode fp8_query, got None$"):
        queries = (torch.zeros(2, case.config.num_heads, width).to(E4M3) for width in
                   (case.config.kv_lora_rank, case.config.qk_rope_head_dim))  # fmt: skip
        kv_scale = None if case.layer.kv_scale is None else case.layer.kv_scale.value
        ops.cascade_attention(
            *queries, case.cache, cascade.cascade, 1.0, case.cache_format, kv_scale, "fp8_query", torch.tensor(1.0)
        )


@functools.cache
def alone(name: str, q_scale: str) -> tuple[torch.Tensor, ...]:
    """Return the outputs of `reference` on one rank in float64."""
    cache_format, config, scale = FORMATS[name]
    options = dict(cache_format=cache_format, kv_scale=scale, fp8_mode="fp8_query", q_scale=Q_SCALES[q_scale])
    return tuple(serve(reference, config, Steps(GROWING, 64, 4096, 3), **options))


@pytest.mark.parametrize("q_scale", Q_SCALES)
@pytest.mark.parametrize(("size", "merge", "total"), [(2, "a2a", 2), (2, "ag_rs", 4), (4, "a2a", 4)])
@pytest.mark.parametrize("name", FORMATS)
def test_ranks_are_one(ops, name, size, merge, total, q_scale):
    """Each of several ranks gives the output that a layer gives on one rank alone, also with a scale for each head."""
    cache_format, config, scale = FORMATS[name]
    options = dict(cache_format=cache_format, kv_scale=scale, fp8_mode="fp8_query", q_scale=Q_SCALES[q_scale])
    steps = Steps(GROWING, 64, reference.interfaces.context_unit(64, size, 16), 3)

    def program(ranks):
        return serve(ops, config, steps, context_parallel=ranks, **options)

    for outputs in ops.simulate(size, 16, program, total, merge):
        for found, wanted in zip(outputs, alone(name, q_scale), strict=True):
            assert_close64(found, wanted)


@pytest.mark.parametrize("merge", ["ag_rs", "a2a"])
def test_exchanged_queries_have_one_byte(ops, merge):
    """In a decode on two ranks, the queries are gathered in e4m3; `dcp_wire_bytes` returns the bytes of this gather."""
    config, tokens, size = SMALL, 2, 2
    widths, heads = (config.kv_lora_rank, config.qk_rope_head_dim), config.num_heads // size
    batch = make_batch((1, 1), LENS)
    cache = torch.zeros(batch.num_blocks, 16, sum(widths)).to(E4M3)

    def program(ranks):
        plan = ops.build_mla_metadata(of_rank(batch.common, 16, ranks.ownership), 16, 4096, ownership=ranks.ownership)
        queries = [torch.randn(tokens, heads, width).to(E4M3) for width in widths]
        ops.dcp_decode(*queries, cache, plan.decode, 0.1, ranks, None, torch.float32, FP8_E4M3, torch.tensor(1.0),
                       "fp8_query", torch.tensor(1.0))  # fmt: skip
        return ranks.cp_group.received

    wanted = ops.dcp_wire_bytes(tokens, config.num_heads, *widths, size, merge, 4, query_size=1)
    sixteen = ops.dcp_wire_bytes(tokens, config.num_heads, *widths, size, merge, 4, query_size=2)
    assert sixteen["all_gather"] - wanted["all_gather"] == tokens * heads * sum(widths)
    for received in ops.simulate(size, 1, program, merge=merge):
        assert received["all_gather"] == wanted["all_gather"]
    with pytest.raises(ValueError, match="^query_size: expected"):
        ops.dcp_wire_bytes(tokens, config.num_heads, *widths, size, merge, 4, query_size=0)


def test_ranks_refuse_before_they_exchange(ops):
    """A wrong scale of the queries raises an error on each rank before the ranks exchange any byte."""
    config, batch = SMALL, make_batch((1, 1), LENS)
    cache = torch.zeros(batch.num_blocks, 16, config.kv_lora_rank + config.qk_rope_head_dim).to(E4M3)

    def program(ranks):
        plan = ops.build_mla_metadata(of_rank(batch.common, 16, ranks.ownership), 16, 4096, ownership=ranks.ownership)
        queries = [torch.zeros(2, 6, width).to(E4M3) for width in (config.kv_lora_rank, config.qk_rope_head_dim)]
        for scale, message in ((torch.ones(6), r"shape \[12\], got \[6\]"), (torch.tensor(0.0), "a finite number")):
            with pytest.raises(ValueError, match=f"^q_scale: expected {message}"):
                ops.dcp_decode(*queries, cache, plan.decode, 0.1, ranks, None, torch.float32, FP8_E4M3,
                               torch.tensor(1.0), "fp8_query", scale)  # fmt: skip
        return sum(ranks.cp_group.received.values())

    assert list(ops.simulate(2, 1, program)) == [0, 0]


# The scale of the queries.


def test_sources(ops):
    """The argument `q_scale` sets the scale; without this argument, the scale is 1.0 and one warning says so.

    The argument is one number, or a tensor with one number for each head.
    """
    options = dict(cache_format=FP8_E4M3, fp8_mode="fp8_query")
    weights = make_weights(SMALL, torch.float32)
    for value in (0.5, torch.tensor(0.5), torch.tensor([0.5], dtype=torch.bfloat16)):
        scale = make_layer(ops, SMALL, weights, torch.float32, **options, q_scale=value).q_scale
        assert scale.value.dim() == 0 and scale.value.item() == 0.5 and scale.source is ScaleSource.ARGUMENT
    layer = make_layer(ops, SMALL, weights, torch.float32, **options, q_scale=Q_SCALES["of heads"])
    assert_same_bits(layer.q_scale.value, Q_SCALES["of heads"])
    with pytest.warns(UserWarning, match="^q_scale: a layer with fp8_mode fp8_query has no scale") as found:
        scale = make_layer(ops, SMALL, weights, torch.float32, **options).q_scale
    assert len(found) == 1 and scale.value.item() == 1.0 and scale.source is ScaleSource.DEFAULT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make_layer(ops, SMALL, weights, torch.float32, cache_format=FP8_E4M3).q_scale is None


def test_calibration_records_queries(ops, tmp_path):
    """A calibration records the largest element of each layer's absorbed queries; the saved file has the scales."""
    case = Case(ops, (COMPUTE_FORMAT, SMALL, None), torch.float32)
    case.cache.fill_(0)
    with ops.calibrate_kv_scales({"a": case.layer}) as scales:
        case.layer(case.hidden, case.batch.positions, case.cache, case.plan(case.batch.common))
        case.hidden *= 2
        projected = case.layer.project(case.hidden[:2], case.positions)
        output = torch.empty(2, SMALL.num_heads, SMALL.v_head_dim)
        case.layer.forward_attention(*projected, case.cache, case.plan(), output)
        case.hidden /= 2
        assert scales.queries == {}
    assert case.layer.observed_queries is None
    w_uk_t, _ = ops.absorb(*case.layer.up_projections())
    q = torch.cat((projected.q, case.layer.project(case.hidden, case.batch.positions).q))
    q_nope, q_pe = q.split([SMALL.qk_nope_head_dim, SMALL.qk_rope_head_dim], dim=-1)
    largest = max(float(ops.query_to_latent(q_nope, w_uk_t).abs().max()), float(q_pe.abs().max()))
    assert scales.queries["a"] == pytest.approx(largest / 448, rel=1e-6)
    path = tmp_path / "scales.json"
    ops.save_kv_scales(path, scales)
    found = ops.load_kv_scales(path)
    assert found == scales and found.queries == {"a": torch.tensor(scales.queries["a"]).item()}
    ops.save_kv_scales(path, {"a": 1.0})
    assert ops.load_kv_scales(path).queries == {}
    for content, message in (('{"a": 0}', r"q_scales\['a'\]: expected a finite"), ("3", "path: expected q_scales by")):
        path.write_text('{"cache_format": "fp8_e4m3", "kv_scales": {"a": 1.0}, "q_scales": ' + content + "}")
        with pytest.raises(ValueError, match=f"^{message}"):
            ops.load_kv_scales(path)


def test_ranks_calibrate_the_same_scale(ops):
    """Each rank has other heads, but in a calibration all ranks get the scale of the largest query of all heads."""
    config = dataclasses.replace(SMALL, num_heads=4)
    weights, batch = make_weights(config, torch.float64), make_batch(LENS, LENS)
    weights["q_b_proj"][-1] *= 50  # the last head has the largest queries
    hidden = torch.randn(sum(LENS), config.hidden_size, dtype=torch.float64)

    def program(ranks):
        options = {} if ranks is None else {"ownership": ranks.ownership}
        layer = make_rank_layer(ops, config, weights, torch.float64, ranks, "cpu")
        common = batch.common if ranks is None else of_rank(batch.common, 16, ranks.ownership)
        cache = poisoned_cache(batch.num_blocks, 16, config, COMPUTE_FORMAT, torch.float64)
        with ops.calibrate_kv_scales({"a": layer}) as scales:
            layer(hidden, batch.positions, cache, ops.build_mla_metadata(common, 16, 64, **options))
        return scales.queries["a"]

    wanted = program(None)
    for total in (2, 4):
        assert list(ops.simulate(2, 1, program, total)) == pytest.approx([wanted] * total)


def test_scale_object():
    """A `QueryScale` changes its number in place, and stays float32 in a cast.

    A scale that was made on the device meta has its number after it was moved to the CPU.
    """
    scale = QueryScale(0.5, 3)
    held = scale.value
    scale.choose(torch.tensor([0.25]), ScaleSource.CHECKPOINT)
    assert scale.value is held and held.item() == 0.25 and scale.source is ScaleSource.CHECKPOINT
    with pytest.raises(ValueError, match="^value: expected"):
        scale.choose(torch.ones(3))
    for_heads = QueryScale(torch.tensor([0.5, 1.0, 2.0]), 3)
    for_heads.choose(4.0)
    assert for_heads.value.tolist() == [4.0] * 3
    for_heads.to(torch.bfloat16)
    assert for_heads.value.dtype == torch.float32 and not for_heads.state_dict()
    later = QueryScale(0.5, 3, device=torch.device("meta"))
    later.to_empty(device="cpu")
    assert later.value.item() == 0.5


REFUSED = {
    "unknown mode": (dict(fp8_mode="fp8"), "fp8_mode: expected one of converted, fp8_query, fp8_product, got fp8"),
    "format": (
        dict(fp8_mode="fp8_query", cache_format=COMPUTE_FORMAT),
        "fp8_mode: expected converted for format compute_dtype, got fp8_query",
    ),
    "scale of converted": (dict(q_scale=0.5), "q_scale: expected None for fp8_mode converted, got 0.5"),
    "zero": (dict(fp8_mode="fp8_query", q_scale=0.0), "q_scale: expected a finite number above 0, got 0.0"),
    "negative": (dict(fp8_mode="fp8_query", q_scale=-1.0), "q_scale: expected a finite number above 0, got -1.0"),
    "nan": (dict(fp8_mode="fp8_query", q_scale=float("nan")), "q_scale: expected a finite number above 0, got nan"),
    "infinite": (
        dict(fp8_mode="fp8_query", q_scale=torch.full((SMALL.num_heads,), float("inf"))),
        "q_scale: expected a finite number above 0, got inf",
    ),
    "shape": (dict(fp8_mode="fp8_query", q_scale=torch.ones(5)), r"q_scale: expected shape \[12\], got \[5\]"),
    "type": (dict(fp8_mode="fp8_query", q_scale="1"), "q_scale: expected a number or a tensor, got str"),
    "type of mode": (dict(fp8_mode=True), "fp8_mode: expected a str, got bool"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_constructor_refuses(ops, case, plain_errors):
    options, message = REFUSED[case]
    weights = make_weights(SMALL, torch.float32)
    with pytest.raises((ValueError, TypeError), match=f"^{message}$"):
        make_layer(ops, SMALL, weights, torch.float32, **{"cache_format": FP8_E4M3, **options})


@pytest.mark.parametrize("mode", FP8_MODES)
def test_plan_of_another_mode(ops, mode):
    """A layer refuses a plan for another mode before it writes."""
    case = Case(ops, FORMATS["fp8_e4m3"], fp8_mode="fp8_query", q_scale=1.0)
    before = case.cache.view(torch.uint8).clone()
    if mode == "fp8_query":
        case.decode(case.plan(fp8_mode=mode))
        assert not torch.equal(case.cache.view(torch.uint8), before)
        return
    message = f"^metadata.fp8_mode: expected fp8_query, the layer's mode, got {mode}$"
    with pytest.raises(ValueError, match=message):
        case.decode(case.plan(fp8_mode=mode))
    assert torch.equal(case.cache.view(torch.uint8), before)


def test_a_changed_scale_is_used(ops):
    """After a change of the scale, a layer gives the same bits as a layer that was made with the new scale."""
    case, other = (Case(ops, FORMATS["fp8_e4m3"], fp8_mode="fp8_query", q_scale=scale) for scale in (2.0**-6, 0.3))
    before = case.decode()
    case.layer.q_scale.choose(0.3)
    assert_same_bits(case.decode(), other.decode())
    assert not torch.equal(case.decode(), before)


def test_twice_is_the_same(ops):
    """Two calls of a layer with fp8 weights give the same bits; in `fast`, the second call skips checks."""
    case = Case(ops, FORMATS["fp8_e4m3"], torch.float32, fp8_mode="fp8_query", q_scale=2.0**-6, fp8_weights=True)
    assert_same_bits(case.decode(), case.decode())
    assert not torch.equal(case.decode(), Case(ops, FORMATS["fp8_e4m3"], torch.float32, fp8_weights=True).decode())


def test_queries_of_the_op():
    """`multiply_heads` with a scale is the product in float32, divided by the scale and rounded once."""
    x, weight, scale = torch.randn(3, 2, 5).bfloat16(), torch.randn(2, 5, 7).bfloat16(), torch.tensor([0.5, 0.25])
    product = torch.einsum("tnk,nkm->tnm", x.float(), weight.float())
    found = multiply_heads(x, weight, scale)
    assert_same_bits(found.view(torch.uint8), to_e4m3(product, scale[:, None]).view(torch.uint8))


# A layer cannot serve a `kv_b_proj` with a bias.


@pytest.mark.parametrize("hooked", [False, True])
def test_bias(ops, hooked):
    """A `kv_b_proj` with a bias is refused with an error of one line, also if the module has a forward hook."""
    layer = make_layer(ops, SMALL, make_weights(SMALL, torch.float32), torch.float32)
    modules = {name: getattr(layer, name) for name in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa",
                                                       "kv_a_layernorm", "kv_b_proj", "o_proj")}  # fmt: skip
    biased = torch.nn.Linear(SMALL.kv_lora_rank, layer.kv_b_proj.weight.shape[0])
    torch.nn.init.ones_(biased.bias)
    if hooked:
        biased.register_forward_hook(lambda module, given, output: output)
    name = "linear" if hooked else "kv_b_proj"
    with pytest.raises(ValueError, match=f"^{name}: expected no bias, got a bias$"):
        ops.MLAAttention(SMALL, **{**modules, "kv_b_proj": biased})
    layer.kv_b_proj.bias = torch.nn.Parameter(torch.ones(layer.kv_b_proj.weight.shape[0]))
    with pytest.raises(ValueError, match="^kv_b_proj: expected no bias, got a bias$"):
        layer.refresh_weights()
