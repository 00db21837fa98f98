"""Tests of a layer of grouped-query attention: what each kind of step writes and attends, scales, outputs, bad input.

The plans are made by hand (`tests/support/gqa.py`). The letters of shapes: T query tokens, S keys of a request, N
heads, Nkv key/value heads, Dh head dim, D ranks that share every sequence.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import reference
from reference.interfaces import E4M3, FP8_DS_MLA, FP8_E4M3, KVScale, ScaleSource, UnsupportedConfiguration
from reference.interfaces.gqa import AttentionType, EncoderMetadata, GQAConfig, checkpoint_key_value_scales

from ..support.factories import assert_close64, assert_same_bits, offsets
from ..support.gqa import (
    CONFIGS,
    GROUPED,
    LENS,
    MHA,
    MQA,
    GQABatch,
    as_cached,
    gqa_batch,
    gqa_step,
    oracle_batch,
    oracle_request,
    to_stored,
)

F64 = torch.float64
CROSS = replace(MHA, attention_type=AttentionType.CROSS, attention_sinks=True)
ENCODER = replace(GROUPED, attention_type=AttentionType.ENCODER, sliding_window=4)
NEW = ((1, 1), (1, 0), (5, 5), (17, 17))  # requests without context, one of them a padding row


def new_layer(ops, batch: GQABatch, **options):
    """Return a layer for a batch, with its sinks, its cache format and its scales."""
    given = dict(sinks=batch.sinks, **batch.scales) | options
    return ops.GQAAttention(batch.config, **given)


def check_step(ops, config: GQAConfig, cache_format=None, padding: int = 2):
    """Compare the output and the cache of a step, which has padding, with the oracle and with a filled cache."""
    given = {} if cache_format is None else {"cache_format": cache_format}
    full = gqa_batch(config, LENS, padding=padding, seed=11, **given)
    batch = gqa_batch(config, LENS, padding=padding, seed=11, new_tokens=False, **given)
    assert not torch.equal(full.kv_cache.view(torch.uint8), batch.kv_cache.view(torch.uint8))
    out = new_layer(ops, batch)(batch.q, batch.new_k, batch.new_v, batch.kv_cache, gqa_step(batch, 5))
    assert_same_bits(batch.kv_cache, full.kv_cache)
    assert_close64(out, oracle_batch(full).out)


@pytest.mark.parametrize("name", CONFIGS)
def test_step(ops, name):
    """Run one step with 5 decodes -> the new keys are written before they are attended; padding rows are 0."""
    check_step(ops, CONFIGS[name])


@pytest.mark.parametrize("name", ["grouped", "all of them"])
def test_step_over_e4m3(ops, name):
    """Run one step over a cache in e4m3 -> new and old keys are attended as the cache returns them."""
    check_step(ops, CONFIGS[name], FP8_E4M3)


def test_cascade_of_a_step(ops):
    """Run a step whose plan has a cascade -> the output of a step without it, sinks included."""
    config = replace(GROUPED, attention_sinks=True)
    batch = gqa_batch(config, [(1, 33), (1, 50), (1, 0), (1, 49), (7, 7)], new_tokens=False)
    table = batch.metadata.block_table.clone()
    table[:4, :2] = table[0, :2]
    batch = replace(batch, metadata=replace(batch.metadata, block_table=table))
    plan, layer = gqa_step(batch, 4), new_layer(ops, batch)
    given = batch.q, batch.new_k, batch.new_v, batch.kv_cache
    whole = layer(*given, plan)
    cascade = ops.split_shared_prefix(plan.decode, 32, 16)
    assert_close64(layer(*given, replace(plan, cascade=cascade)), whole)


# Outputs.


def test_output_in_place(ops):
    """Pass `output`, also with strides -> it is returned and filled; rows behind the last token are 0."""
    batch = gqa_batch(GROUPED, LENS, padding=3, new_tokens=False)
    layer, plan = new_layer(ops, batch), gqa_step(batch, 5)
    expected = layer(batch.q, batch.new_k, batch.new_v, batch.kv_cache, plan)
    assert expected.dtype == F64 and expected[-3:].eq(0).all()
    for output in (torch.full_like(batch.q, torch.nan), torch.full((6, len(batch.q), 80), torch.nan, dtype=F64)):
        output = output if output.shape == batch.q.shape else output.transpose(0, 1)
        assert layer(batch.q, batch.new_k, batch.new_v, batch.kv_cache, plan, output) is output
        assert_close64(output, expected)


def check_output_scale(ops, dtype, config=CONFIGS["all of them"]):
    """Ask for an output in e4m3: the unrounded output is divided by the scale and rounded once."""
    batch = gqa_batch(config, LENS, dtype=dtype, padding=2, new_tokens=False)
    layer, plan, scale = new_layer(ops, batch), gqa_step(batch, 5), torch.tensor(0.007)
    given = batch.q, batch.new_k, batch.new_v, batch.kv_cache, plan
    got = layer(*given, output_scale=scale)
    output = torch.empty_like(got)
    assert layer(*given, output, scale) is output
    assert got.dtype == E4M3 and got[-2:].float().eq(0).all()
    assert_same_bits(output, got)
    wide = F64 if dtype == F64 else torch.float32
    split = plan.num_decode_tokens
    parts = [
        ops.gqa_paged_attention(q, batch.kv_cache, part, config, batch.sinks, out_dtype=wide).out
        for q, part in ((batch.q[:split], plan.decode), (batch.q[split:-2], plan.prefill))
    ]
    assert_same_bits(got[:-2], to_stored(torch.cat(parts), scale))


@pytest.mark.parametrize("dtype", [F64, torch.bfloat16])
def test_output_scale(ops, dtype):
    """Ask for an output in e4m3 -> the stored numbers of the unrounded output, for decodes and prefills."""
    check_output_scale(ops, dtype)


def test_memory_profile(ops):
    """Call the layer without a plan, with and without a cache -> zeros; nothing is written, no scale is chosen."""
    for cache_format, config in ((FP8_E4M3, GROUPED), (reference.CACHE_FORMATS["compute_dtype"], CROSS)):
        batch = gqa_batch(config, NEW, cache_format=cache_format, new_tokens=False)
        before = batch.kv_cache.clone()
        layer = new_layer(ops, batch, k_scale=None, v_scale=None)
        for cache in (batch.kv_cache, None, batch.kv_cache[:, :0]):
            out = layer(batch.q, batch.new_k, batch.new_v, cache, None)
            assert out.shape == batch.q.shape and out.eq(0).all()
        assert_same_bits(batch.kv_cache, before)
        assert layer.k_scale is None or layer.k_scale.source is layer.v_scale.source is None


# Steps without a cache, and layers that write nothing.


def without_columns(plan):
    """Return the plan of a step whose block tables have no column."""
    parts = {name: replace(part, block_table=part.block_table[:, :0])
             for name, part in (("decode", plan.decode), ("prefill", plan.prefill))}  # fmt: skip
    return replace(plan, **parts)


def check_step_without_cache(ops, config: GQAConfig, cache_format=None):
    """Run a prefill without a cache, with an empty cache, and without table columns: the output of a cached step."""
    given = {} if cache_format is None else {"cache_format": cache_format}
    batch = gqa_batch(config, NEW, padding=2, new_tokens=False, **given)
    plan, layer, before = gqa_step(batch, 2), new_layer(ops, batch), batch.kv_cache.clone()
    tokens = batch.q, batch.new_k, batch.new_v
    cases = (None, plan), (batch.kv_cache[:, :0], plan), (batch.kv_cache, without_columns(plan))
    outputs = [layer(*tokens, *case) for case in cases]
    assert_same_bits(batch.kv_cache, before)
    expected = layer(*tokens, batch.kv_cache, plan)
    for out in outputs:
        assert_close64(out, expected)


@pytest.mark.parametrize("name", ["multi-head", "window of a page", "all of them"])
def test_step_without_cache(ops, name):
    """Run a step without a cache -> the given keys are attended, nothing is written, and padding rows are 0."""
    check_step_without_cache(ops, CONFIGS[name])


def test_step_without_cache_rounds_as_the_cache(ops):
    """Run a step without a cache in a layer with an e4m3 cache -> keys and values are rounded through e4m3."""
    check_step_without_cache(ops, GROUPED, FP8_E4M3)


def test_step_without_cache_chooses_no_scale(ops):
    """Run a step without a cache before any write -> the scale that a write would choose; the layer keeps none."""
    batch = gqa_batch(GROUPED, NEW, cache_format=FP8_E4M3, new_tokens=False)
    layer = new_layer(ops, batch, k_scale=None, v_scale=None)
    tokens = batch.q, batch.new_k, batch.new_v
    out = layer(*tokens, None, gqa_step(batch, 2))
    assert layer.k_scale.source is layer.v_scale.source is None and not layer.k_scale.written
    assert_close64(out, layer(*tokens, batch.kv_cache, gqa_step(batch, 2)))
    assert layer.k_scale.source is layer.v_scale.source is ScaleSource.FIRST_PREFILL


def test_context_without_cache_is_refused(ops, plain_errors):
    """Run a step with context and without a cache -> an error that names the length."""
    batch = gqa_batch(GROUPED, [(2, 2), (3, 5)])
    with pytest.raises(ValueError, match=r"^metadata.prefill.seq_lens: expected at most the query length 3 .* got 5"):
        new_layer(ops, batch)(batch.q, batch.new_k, batch.new_v, None, gqa_step(batch, 1))


def check_kv_sharing(ops, cache_format=None):
    """Run a layer that reads the cache of another layer, after that layer has written its keys."""
    given = {} if cache_format is None else {"cache_format": cache_format}
    batch = gqa_batch(GROUPED, LENS, new_tokens=False, **given)
    plan, owner = gqa_step(batch, 5), new_layer(ops, batch, k_scale=None, v_scale=None)
    first = owner(batch.q, batch.new_k, batch.new_v, batch.kv_cache, plan)
    before = batch.kv_cache.clone()
    config = replace(GROUPED, kv_sharing_layer="layers.3.attention")
    sharing = ops.GQAAttention(config, batch.cache_format, k_scale=owner.k_scale, v_scale=owner.v_scale)
    assert_same_bits(sharing(batch.q, None, None, batch.kv_cache, plan), first)
    assert_same_bits(batch.kv_cache, before)
    for k, v in ((batch.new_k, batch.new_v), (None, batch.new_v)):
        with pytest.raises(ValueError, match="^[kv]: expected None for a layer with kv_sharing_layer 'layers.3.attent"):
            sharing(batch.q, k, v, batch.kv_cache, plan)


@pytest.mark.parametrize("cache_format", [None, FP8_E4M3])
def test_kv_sharing(ops, cache_format):
    """Run a KV-sharing layer -> it writes nothing and reads the named layer's cache, with the scales of this layer."""
    check_kv_sharing(ops, cache_format)


def test_kv_sharing_needs_the_scales_of_its_layer(ops):
    """Make a KV-sharing layer for an e4m3 cache without the other layer's `KVScale` -> an error."""
    config = replace(GROUPED, kv_sharing_layer="a")
    for given in ({}, {"k_scale": 0.5, "v_scale": 0.5}):
        with pytest.raises(ValueError, match="^k_scale: expected the KVScale of the layer 'a', got "):
            ops.GQAAttention(config, FP8_E4M3, **given)


# Cross attention and encoders.


def check_cross(ops):
    """Run a step whose encoders run, a later step without keys, and a step without a cache."""
    lens = [(1, 17), (2, 5), (1, 0), (3, 33)]
    full = gqa_batch(CROSS, lens, padding=1, seed=7)
    batch = gqa_batch(CROSS, lens, padding=1, seed=7, new_tokens=False)
    batch.kv_cache.view(torch.uint8).fill_(0xFF)
    slots = torch.tensor([slot for own in batch.slots for slot in own], dtype=torch.int64)
    k, v = torch.cat(batch.k), torch.cat(batch.v)
    layer, plan = new_layer(ops, batch), replace(gqa_step(batch, 1), slot_mapping=slots)  # one decode, three prefills
    expected = oracle_batch(full).out
    assert_close64(layer(batch.q, k, v, batch.kv_cache, plan), expected)
    assert_same_bits(batch.kv_cache, full.kv_cache)
    later = replace(plan, slot_mapping=slots[:0])
    assert_close64(layer(batch.q, None, None, batch.kv_cache, later), expected)
    assert_same_bits(batch.kv_cache, full.kv_cache)
    assert_close64(layer(batch.q, k, v, None, plan), expected)
    with pytest.raises(ValueError, match=r"^k: expected the keys of the \d+ slots of metadata.slot_mapping, got None"):
        layer(batch.q, None, None, batch.kv_cache, plan)
    with pytest.raises(ValueError, match="^k: expected the 55 keys of metadata.seq_lens in a step without a cache"):
        layer(batch.q, k[:-1], v[:-1], None, plan)
    with pytest.raises(ValueError, match="^kv_cache: expected the cache of the encoder's keys"):
        layer(batch.q, None, None, None, later)


def test_cross(ops, plain_errors):
    """Run cross attention -> keys are written once, at the encoder's slots; later steps pass no keys."""
    check_cross(ops)


def test_cross_chooses_scales_from_the_encoder(ops):
    """Write the keys of an encoder in a step that only decodes -> they choose the scales, as a prefill does."""
    config = replace(MHA, attention_type=AttentionType.CROSS)
    batch = gqa_batch(config, [(1, 20), (1, 3)], cache_format=FP8_E4M3)
    layer = new_layer(ops, batch, k_scale=None, v_scale=None)
    plan = replace(gqa_step(batch, 2), slot_mapping=torch.tensor([s for own in batch.slots for s in own]))
    layer(batch.q, torch.cat(batch.k), torch.cat(batch.v), batch.kv_cache, plan)
    assert layer.k_scale.source is layer.v_scale.source is ScaleSource.FIRST_PREFILL


def check_encoder(ops, kind: AttentionType):
    """Run an encoder with two padding tokens, compared with the oracle."""
    config, lens = replace(ENCODER, attention_type=kind), [5, 0, 17]
    q, k, v = (torch.randn(24, heads, 80, dtype=F64) for heads in (6, 2, 2))
    plan = EncoderMetadata(config, offsets(lens), 17, 22)
    out = ops.GQAAttention(config)(q, k, v, None, plan)
    assert out[22:].eq(0).all()
    for n, start in ((5, 0), (17, 5)):
        rows, seen = slice(start, start + n), [[j for j in range(n) if abs(i - j) < 4] for i in range(n)]
        assert_close64(out[rows], oracle_request(config, q[rows], k[rows], v[rows], seen, range(n)).out)


@pytest.mark.parametrize("kind", [AttentionType.ENCODER, AttentionType.ENCODER_ONLY])
def test_encoder(ops, kind):
    """Run an encoder with a two-sided window -> an explicit mask; padding rows are 0."""
    check_encoder(ops, kind)


def test_encoder_refuses_a_cache_and_a_causal_plan(ops, plain_errors):
    """Run an encoder with a cache or with the plan of a decoder -> an error that names the argument."""
    batch = gqa_batch(GROUPED, NEW)
    layer, plan = ops.GQAAttention(ENCODER), EncoderMetadata(ENCODER, offsets([24]), 24, 24)
    tokens = batch.q, batch.new_k, batch.new_v
    with pytest.raises(ValueError, match="^kv_cache: expected None or an empty tensor for attention type encoder"):
        layer(*tokens, batch.kv_cache, plan)
    with pytest.raises(TypeError, match="^metadata: expected an EncoderMetadata .* which is not causal"):
        layer(*tokens, None, gqa_step(batch, 2))
    with pytest.raises(ValueError, match="^cache_format: expected compute_dtype for attention type encoder"):
        ops.GQAAttention(ENCODER, FP8_E4M3)


# The scales of an e4m3 cache.


def e4m3_batch(lens=((1, 20), (4, 9), (17, 17)), **options) -> GQABatch:
    return gqa_batch(GROUPED, lens, cache_format=FP8_E4M3, new_tokens=False, **options)


def run(layer, batch, num_decodes=1):
    return layer(batch.q, batch.new_k, batch.new_v, batch.kv_cache, gqa_step(batch, num_decodes))


def test_scales_of_the_arguments(ops):
    """Pass scales as numbers or tensors -> these are used, whatever a prefill writes, and cannot change afterwards."""
    for k_scale, v_scale in ((0.25, 0.5), (torch.tensor(0.25), torch.tensor([0.5], dtype=torch.bfloat16))):
        batch = e4m3_batch()
        layer = new_layer(ops, batch, k_scale=k_scale, v_scale=v_scale)
        run(layer, batch)
        assert float(layer.k_scale.value) == 0.25 and float(layer.v_scale.value) == 0.5
        assert layer.k_scale.source is ScaleSource.ARGUMENT
        block, offset = divmod(batch.slots[2][3], 16)
        assert_same_bits(batch.kv_cache[0, block, offset], to_stored(batch.k[2][3], torch.tensor(0.25)))
        assert_same_bits(batch.kv_cache[1, block, offset], to_stored(batch.v[2][3], torch.tensor(0.5)))
        with pytest.raises(ValueError, match="^v_scale: expected no change after the first write"):
            layer.v_scale.choose(1.0)


def test_scales_of_the_first_prefill(ops):
    """Run a first prefill -> keys and values get separate scales from their largest written numbers; both then stay."""
    batch = e4m3_batch(((1, 0), (4, 9), (17, 17)))  # the keys of the padding row are NaN and are not written
    batch.v[1][-1, 0, 0] = -9.0
    layer = new_layer(ops, batch, k_scale=None, v_scale=None)
    run(layer, batch)
    for scale, entries in ((layer.k_scale, batch.k), (layer.v_scale, batch.v)):
        largest = torch.cat((entries[1][-4:], entries[2])).float().abs().amax()
        assert float(scale.value) == float(largest / torch.tensor(448.0))
        assert scale.source is ScaleSource.FIRST_PREFILL
    chosen = [scale.value.clone() for scale in (layer.k_scale, layer.v_scale)]
    larger = e4m3_batch()
    for x in (*larger.k, *larger.v):
        x *= 10
    run(layer, larger)
    for scale, value in zip((layer.k_scale, layer.v_scale), chosen, strict=True):
        assert_same_bits(scale.value, value)


def test_scales_of_a_first_decode(ops):
    """Run a first step that only decodes -> both scales are 1.0, each with a warning."""
    batch = e4m3_batch(((1, 20), (1, 3)))
    layer = new_layer(ops, batch, k_scale=None, v_scale=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(layer, batch, 2)
    texts = [str(each.message) for each in caught]
    assert [text.partition(":")[0] for text in texts if "scale is 1.0" in text] == ["k_scale", "v_scale"]
    assert float(layer.k_scale.value) == 1.0 and layer.v_scale.source is ScaleSource.DEFAULT


def test_scales_of_a_calibration(ops, tmp_path):
    """Record two steps, save and load the scales -> separate scales of keys, values and queries."""
    batch = gqa_batch(GROUPED, ((1, 20), (17, 17)), dtype=torch.float32, new_tokens=False)
    layer = ops.GQAAttention(GROUPED)
    with ops.calibrate_kv_scales({"a": layer}) as scales:
        run(layer, batch)
        run(layer, replace(batch, q=batch.q / 2))
    written = [torch.cat((x[0][-1:], x[1])).abs().amax() / 448 for x in (batch.k, batch.v)]
    for found, wanted in ((scales, written[0]), (scales.cached_values, written[1]),
                          (scales.queries, batch.q.abs().amax() / 448)):  # fmt: skip
        assert set(found) == {"a"} and abs(found["a"] / float(wanted) - 1) < 1e-6
    assert layer.observed is layer.observed_values is layer.observed_queries is None
    ops.save_kv_scales(tmp_path / "scales.json", scales)
    loaded = ops.load_kv_scales(tmp_path / "scales.json")
    for read, saved in zip(*([each, each.cached_values, each.queries] for each in (loaded, scales)), strict=True):
        assert read == pytest.approx(saved, rel=1e-6)  # the file has float32 numbers
    unused = pytest.raises(ValueError, match="^layers: expected a step of the layer 'a'")
    with unused, ops.calibrate_kv_scales({"a": layer}):
        pass


def test_calibration_of_a_sharing_layer(ops):
    """Record a KV-sharing layer -> a scale of its queries alone."""
    batch = gqa_batch(GROUPED, LENS)
    layer = ops.GQAAttention(replace(GROUPED, kv_sharing_layer="a"))
    with ops.calibrate_kv_scales({"b": layer}) as scales:
        layer(batch.q, None, None, batch.kv_cache, gqa_step(batch, 5))
    assert not scales and not scales.cached_values and set(scales.queries) == {"b"}


def test_scales_of_a_checkpoint():
    """Read the attributes of a module -> k_scale and v_scale, or kv_scale for both."""
    module = nn.Module()
    assert checkpoint_key_value_scales(module) == (None, None)
    module.kv_scale = 0.5
    assert checkpoint_key_value_scales(module) == (0.5, 0.5)
    module.k_scale, module.v_scale = torch.tensor(0.25), 2.0
    assert checkpoint_key_value_scales(module) == (torch.tensor(0.25), 2.0)


def test_scales_are_buffers(ops):
    """Cast, copy and share layers with scales -> float32 buffers with their values; a shared `KVScale` stays shared."""
    sinks = nn.Parameter(torch.zeros(6), requires_grad=False)
    layer = ops.GQAAttention(replace(GROUPED, attention_sinks=True), FP8_E4M3, sinks=sinks, k_scale=0.3, q_scale=0.2)
    model = nn.ModuleDict({"a": layer})
    sharing = replace(GROUPED, kv_sharing_layer="a")
    model["b"] = ops.GQAAttention(sharing, FP8_E4M3, k_scale=layer.k_scale, v_scale=layer.v_scale)
    for moved in (model.half(), copy.deepcopy(model)):
        a, b = moved["a"], moved["b"]
        assert a.k_scale is b.k_scale and a.v_scale is b.v_scale
        assert a.k_scale.value.dtype == a.q_scale.value.dtype == torch.float32
        assert float(a.k_scale.value) == float(torch.tensor(0.3)) and float(a.q_scale.value) == float(torch.tensor(0.2))
        assert isinstance(a.sinks, nn.Parameter) and a.sinks.dtype == torch.float16
    buffer = ops.GQAAttention(replace(GROUPED, attention_sinks=True), sinks=torch.ones(6))
    assert "sinks" in dict(buffer.named_buffers())


def test_queries_in_e4m3(ops):
    """Give the layer a scale of queries -> queries are rounded to e4m3, with and without a cache."""
    batch = gqa_batch(GROUPED, NEW, cache_format=FP8_E4M3, new_tokens=False)
    layer, scale = new_layer(ops, batch, q_scale=0.011), torch.tensor(0.011)
    full = replace(batch, q=as_cached(batch.q, scale))
    tokens = batch.q, batch.new_k, batch.new_v
    expected = oracle_batch(full).out
    assert_close64(layer(*tokens, None, gqa_step(batch, 2)), expected)
    assert_close64(layer(*tokens, batch.kv_cache, gqa_step(batch, 2)), expected)


# Context parallelism.


RANK_LENS = ((1, 1), (1, 37), (1, 0), (4, 9), (17, 33))


def check_ranks_are_one_rank(ops, size, ranks, merge="a2a", interleave=1, lens=RANK_LENS, **options):
    """Run a step on several ranks, and compare it with a step on one rank.

    Args:
        ops: the package.
        size: D, number of ranks that divide every sequence.
        ranks: TP, number of ranks that divide the heads.
        merge: name of the merge of the states.
        interleave: number of consecutive tokens of a rank.
        lens: (query tokens, tokens after the step) of each request; the first three requests decode.
        options: options of the layer.
    """
    config = replace(GQAConfig(8, 2, 32), attention_sinks=True, sliding_window=21)
    given = {name: each for name, each in options.items() if name == "cache_format"}
    whole = gqa_batch(config, lens, free_behind_window=False, new_tokens=False, padding=1, seed=17, **given)
    options = dict(sinks=whole.sinks) | options
    expected = ops.GQAAttention(config, **options)(
        whole.q, whole.new_k, whole.new_v, whole.kv_cache, gqa_step(whole, 3)
    )
    blocks = [-(-length // (16 * size)) for _, length in lens]
    table = torch.full((len(lens), max(blocks) + 1), 2147480000, dtype=torch.int32)
    for request, count in enumerate(blocks):
        table[request, :count] = torch.arange(count, dtype=torch.int32) + sum(blocks[:request])

    def rank(groups):
        layer = ops.GQAAttention(config, context_parallel=groups, **options)
        ownership, heads = groups.ownership, 8 // ranks
        own = slice(groups.tp_group.rank * heads, (groups.tp_group.rank + 1) * heads)
        kv_heads = list(groups.kv_heads(config))
        cache = whole.kv_cache.new_empty(2, sum(blocks) + 1, 16, len(kv_heads), 32)
        cache.view(torch.uint8).fill_(0xFF)
        for request, (query_len, length) in enumerate(lens):
            for token in range(length - query_len if length else 0):
                local = ownership.count(token)
                if ownership.count(token + 1) > local:
                    block, offset = table[request, local // 16], local % 16
                    for half, x, scale in ((0, whole.k, whole.k_scale), (1, whole.v, whole.v_scale)):
                        cache[half, block, offset] = to_stored(x[request][token, kv_heads], scale)
        query_lens, seq_lens = ([each[i] for each in lens] for i in (0, 1))
        common = ops.CommonAttentionMetadata.from_lens(query_lens, seq_lens, table, 16, ownership)
        plan = ops.build_gqa_metadata(common, 16, config, ownership=ownership, cache_format=whole.cache_format)
        k, v = (x[:, kv_heads] for x in (whole.new_k, whole.new_v))
        return layer(whole.q[:, own], k, v, cache, plan)

    parts = reference.simulate(size, interleave, rank, ranks, merge)
    assert_close64(torch.cat(parts, dim=1), expected)


@pytest.mark.parametrize("size, ranks, merge, interleave", [(1, 2, "a2a", 1), (2, 2, "a2a", 1), (2, 2, "ag_rs", 16),
                                                            (2, 4, "a2a", 16)])  # fmt: skip
def test_ranks_are_one_rank(ops, size, ranks, merge, interleave):
    """Run a step with a window and sinks on several ranks -> the output of one rank; the sinks count once."""
    check_ranks_are_one_rank(ops, size, ranks, merge, interleave)


def test_ranks_choose_the_same_scales(ops):
    """Run a first prefill on ranks with e4m3 caches -> all ranks choose the scales of one rank."""
    lens = ((1, 1), (1, 0), (1, 1), (9, 9), (20, 20))
    check_ranks_are_one_rank(ops, 2, 4, lens=lens, cache_format=FP8_E4M3)


def test_ranks_refuse_a_step_without_cache(ops, plain_errors):
    """Run a step without a cache, or make an encoder, where ranks share sequences -> an error that names the reason."""

    def rank(groups):
        layer = ops.GQAAttention(GQAConfig(8, 2, 32), context_parallel=groups)
        batch = gqa_batch(layer.local_config, NEW, seed=1)
        plan = replace(gqa_step(batch, 2), ownership=groups.ownership, config=layer.config)
        with pytest.raises(ValueError, match="^kv_cache: expected a cache, because ranks share the tokens"):
            layer(batch.q, batch.new_k, batch.new_v, None, plan)
        with pytest.raises(ValueError, match="^context_parallel: expected ranks that share no sequences .* encoder"):
            ops.GQAAttention(GQAConfig(8, 2, 32, attention_type=AttentionType.ENCODER), context_parallel=groups)
        return True

    assert reference.simulate(2, 1, rank) == [True, True]


# Bad input.


def test_constructor_refuses(ops, plain_errors):
    """Make a layer with arguments that do not suit each other -> a one-line error that names the argument."""
    for match, error, given in (
        ("^cache_format: expected compute_dtype or fp8_e4m3 .* got fp8_ds_mla$", UnsupportedConfiguration,
         dict(cache_format=FP8_DS_MLA)),
        ("^k_scale: expected None for format compute_dtype, got float$", ValueError, dict(k_scale=0.5)),
        ("^v_scale: expected None for format compute_dtype", ValueError, dict(v_scale=KVScale(0.5))),
        ("^q_scale: expected None for format compute_dtype, got float$", ValueError, dict(q_scale=0.5)),
        ("^v_scale: expected a finite number above 0, got -1.0$", ValueError,
         dict(cache_format=FP8_E4M3, v_scale=-1.0)),
        ("^q_scale: expected one scale for each layer", ValueError,
         dict(cache_format=FP8_E4M3, q_scale=torch.ones(6))),
        ("^sinks: expected None", ValueError, dict(sinks=torch.ones(6))),
        ("^context_parallel: expected a ContextParallel or None, got int$", TypeError, dict(context_parallel=2)),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            ops.GQAAttention(GROUPED, **given)
    with pytest.raises(ValueError, match=r"^sinks: expected a tensor \[6\] for a config with attention_sinks, got"):
        ops.GQAAttention(replace(GROUPED, attention_sinks=True))
    with pytest.raises(ValueError, match=r"^sinks: expected shape \[6\], got \[5\]$"):
        ops.GQAAttention(replace(GROUPED, attention_sinks=True), sinks=torch.ones(5))


def test_refused_steps_write_nothing(ops, plain_errors):
    """Run a step with one wrong argument -> a one-line error; neither the cache nor the output has changed."""
    config = replace(GROUPED, sliding_window=9)
    batch = gqa_batch(config, LENS, new_tokens=False)
    plan, layer, output = gqa_step(batch, 5), ops.GQAAttention(config), torch.full_like(batch.q, 7.0)
    given = dict(q=batch.q, k=batch.new_k, v=batch.new_v, kv_cache=batch.kv_cache, metadata=plan, output=output)
    before, slots = batch.kv_cache.clone(), batch.slot_mapping.clone()
    slots[0] = 10**6
    bad_table = replace(plan.prefill, block_table=plan.prefill.block_table + 10**6)
    for match, error, changed in (
        ("^k: expected a tensor for attention type decoder, got None$", ValueError, dict(k=None)),
        ("^v: expected a tensor, because k is a tensor, got None$", ValueError, dict(v=None)),
        ("^k: expected shape", ValueError, dict(k=batch.new_k[:-1], v=batch.new_v[:-1])),
        ("^kv_cache: expected shape", ValueError, dict(kv_cache=batch.kv_cache[:, :, :, :1])),
        ("^kv_cache: expected dtype", ValueError, dict(kv_cache=batch.kv_cache.float())),
        ("^output: expected shape", ValueError, dict(output=output[:-1])),
        ("^output: expected memory that no input has", ValueError, dict(output=batch.q)),
        ("^output: expected dtype torch.float8_e4m3fn", ValueError, dict(output_scale=torch.tensor(1.0))),
        ("^output_scale: expected a finite number above 0", ValueError,
         dict(output_scale=torch.tensor(0.0), output=None)),
        ("^metadata: expected a GQAMetadata", TypeError, dict(metadata=plan.decode)),
        ("^metadata.config.sliding_window: expected 9", ValueError,
         dict(metadata=replace(plan, config=replace(config, sliding_window=8)))),
        ("^metadata.cache_format: expected compute_dtype", ValueError,
         dict(metadata=replace(plan, cache_format=FP8_E4M3))),
        ("^metadata.slot_mapping: expected slots in", ValueError, dict(metadata=replace(plan, slot_mapping=slots))),
        ("^metadata.prefill.block_table: expected blocks", ValueError, dict(metadata=replace(plan, prefill=bad_table))),
        ("^metadata.num_decodes: expected the 5 requests", ValueError, dict(metadata=replace(plan, num_decodes=4))),
    ):  # fmt: skip
        with pytest.raises(error, match=match) as caught:
            layer(**(given | changed))
        assert "\n" not in str(caught.value)
    cascade = ops.split_shared_prefix(plan.decode, 16, 16, row=2)
    with pytest.raises(ValueError, match="^config.sliding_window: expected None for a cascade, got 9$"):
        layer(**(given | dict(metadata=replace(plan, cascade=cascade))))
    assert_same_bits(batch.kv_cache, before)
    assert output.eq(7).all()
    assert_same_bits(layer(**given), output)


def test_inputs_were_not_degenerate():
    """Look at the batch of the steps -> a decode and a prefill have several pages, and new keys are NaN before."""
    batch = gqa_batch(MQA, LENS, new_tokens=False)
    decodes, prefills = LENS[:5], LENS[5:]
    for part in (decodes, prefills):
        assert any(length > 32 for _, length in part)
    assert sum(query_len for query_len, _ in prefills) > 32
    assert batch.kv_cache.isnan().any() and batch.new_k.isnan().any()
