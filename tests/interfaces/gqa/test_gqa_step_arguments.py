"""Tests of the argument checks of a layer of grouped-query attention: each wrong combination is a one-line error.

The queries, keys and plans are made by hand: two requests decode, one request prefills without context.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch

from reference.interfaces import (
    COMPUTE_FORMAT,
    E4M3,
    FP8_DS_MLA,
    FP8_E4M3,
    CascadeMetadata,
    CommonAttentionMetadata,
    TokenOwnership,
    UnsupportedConfiguration,
)
from reference.interfaces.gqa import (
    AttentionType,
    CrossAttentionBatch,
    EncoderMetadata,
    GQAConfig,
    check_cross_batch,
    check_gqa_output,
    check_gqa_step,
    check_gqa_step_values,
    has_cache,
)

from ...support.factories import integers, offsets
from ...support.gqa import gqa_batch, gqa_step

DECODER = GQAConfig(4, 2, 32)
WINDOW = replace(DECODER, sliding_window=9)
CHUNKED = replace(DECODER, attention_chunk_size=32)
SHARED = replace(DECODER, kv_sharing_layer="layers.3.self_attn")
ENCODER, ONLY, CROSS = (
    replace(DECODER, attention_type=kind)
    for kind in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY, AttentionType.CROSS)
)
LENS = [(1, 20), (1, 17), (5, 5)]
ONE = torch.tensor(1.0)


def step(config=DECODER, lens=LENS, **fields):
    """Return the arguments of a valid call of `check_gqa_step`, with other values of some fields of the plan."""
    planned = replace(config, kv_sharing_layer=None)
    batch = gqa_batch(planned, lens, dtype=torch.float32, seed=0)
    tokens = batch.q.shape[0]
    plan = replace(gqa_step(batch, 2), **fields)
    keys = torch.zeros(tokens, 2, 32)
    good = dict(metadata=plan, q=batch.q, k=keys, v=keys, kv_cache=batch.kv_cache, config=config)
    return good | (dict(k=None, v=None) if config.kv_sharing_layer else {})


def encoder_step(config=ENCODER, **fields):
    """Return the arguments of a valid call for a layer without a cache: two requests with 3 and 4 tokens."""
    plan = EncoderMetadata(config, offsets([3, 4]), 4, 7)
    keys = torch.zeros(7, 2, 32)
    return dict(metadata=replace(plan, **fields), q=torch.zeros(7, 4, 32), k=keys, v=keys, kv_cache=None, config=config)


def cross_step(keys=6, **fields):
    """Return the arguments of a valid call for cross attention; None keys: the encoder did not run in this step."""
    batch = gqa_batch(CROSS, [(1, 20), (1, 17), (2, 9)], dtype=torch.float32, seed=0)
    given = None if keys is None else torch.zeros(keys, 2, 32)
    plan = replace(gqa_step(batch, 2), slot_mapping=torch.arange(keys or 0), **fields)
    return dict(metadata=plan, q=batch.q, k=given, v=given, kv_cache=batch.kv_cache, config=CROSS)


STEPS = {
    "decoder": step(), "window": step(WINDOW), "chunked": step(CHUNKED), "shared": step(SHARED),
    "encoder": encoder_step(), "encoder only": encoder_step(ONLY), "cross": cross_step(),
    "cross, later": cross_step(None), "profile": step() | dict(metadata=None, kv_cache=None),
    "no cache": step(lens=[(1, 1), (2, 2), (5, 5)]) | dict(kv_cache=None),
    "shared, no cache": step(SHARED, [(1, 1), (2, 2), (5, 5)])
    | dict(kv_cache=None, k=torch.zeros(8, 2, 32), v=torch.zeros(8, 2, 32)),
    "empty cache": step(lens=[(1, 1), (2, 2), (5, 5)]) | dict(kv_cache=torch.zeros(0)),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_good_steps(name):
    good = STEPS[name]
    check_gqa_step(**good)
    if good["metadata"] is not None:
        cross_keys = None if good["k"] is None or name != "cross" else good["k"].shape[0]
        check_gqa_step_values(good["metadata"], good["kv_cache"], good["config"], cross_keys)


def without_columns(plan):
    """Return the plan of a step whose block tables have no column."""
    parts = {name: replace(getattr(plan, name), block_table=getattr(plan, name).block_table[:, :0])
             for name in ("decode", "prefill")}  # fmt: skip
    return replace(plan, **parts)


def test_steps_without_a_cache():
    good = STEPS["decoder"]
    assert has_cache(good["kv_cache"], good["metadata"])
    for none in (None, torch.zeros(0), good["kv_cache"][:, :0]):
        assert not has_cache(none, good["metadata"])
    plan = good["metadata"]
    assert has_cache(good["kv_cache"], replace(plan, decode=without_columns(plan).decode))
    assert not has_cache(good["kv_cache"], without_columns(plan))


COMBINATIONS = [
    # (step, changed arguments, message)
    ("encoder", dict(metadata=STEPS["decoder"]["metadata"]),
     "metadata: expected an EncoderMetadata or None for attention type encoder, which is not causal, got GQAMetadata"),
    ("encoder only", dict(metadata=STEPS["decoder"]["metadata"]),
     "metadata: expected an EncoderMetadata or None for attention type encoder_only, which is not causal, got "
     "GQAMetadata"),
    ("decoder", dict(metadata=STEPS["encoder"]["metadata"]),
     "metadata: expected a GQAMetadata or None for attention type decoder, got EncoderMetadata"),
    ("cross", dict(metadata=STEPS["encoder"]["metadata"]),
     "metadata: expected a GQAMetadata or None for attention type cross, got EncoderMetadata"),
    ("cross", dict(metadata=STEPS["decoder"]["metadata"]),
     "metadata.config.attention_type: expected cross, as in the config of the layer, got decoder"),
    ("encoder", dict(metadata=STEPS["encoder only"]["metadata"]),
     "metadata.config.attention_type: expected encoder, as in the config of the layer, got encoder_only"),
    ("decoder", dict(metadata=STEPS["window"]["metadata"]),
     "metadata.config.sliding_window: expected None, as in the config of the layer, got 9"),
    ("window", dict(metadata=STEPS["decoder"]["metadata"]),
     "metadata.config.sliding_window: expected 9, as in the config of the layer, got None"),
    ("window", dict(config=replace(WINDOW, sliding_window=8)),
     "metadata.config.sliding_window: expected 8, as in the config of the layer, got 9"),
    ("chunked", dict(metadata=STEPS["decoder"]["metadata"]),
     "metadata.config.attention_chunk_size: expected 32, as in the config of the layer, got None"),
    ("decoder", dict(metadata=STEPS["chunked"]["metadata"]),
     "metadata.config.attention_chunk_size: expected None, as in the config of the layer, got 32"),
    ("decoder", dict(metadata=replace(STEPS["decoder"]["metadata"], cache_format=FP8_E4M3)),
     "metadata.cache_format: expected compute_dtype, the layer's format, got fp8_e4m3"),
    ("decoder", dict(ownership=TokenOwnership(2, 0)),
     "metadata.ownership: expected TokenOwnership(size=2, rank=0, interleave=1), got None"),
    ("decoder", dict(metadata=replace(STEPS["decoder"]["metadata"], ownership=TokenOwnership(2, 1))),
     "metadata.ownership: expected None (one rank), got TokenOwnership(size=2, rank=1, interleave=1)"),
    # keys and values
    ("decoder", dict(k=None, v=None), "k: expected a tensor for attention type decoder, got None"),
    ("encoder", dict(k=None, v=None), "k: expected a tensor for attention type encoder, got None"),
    ("decoder", dict(v=None), "v: expected a tensor, because k is a tensor, got None"),
    ("cross", dict(k=None), "v: expected None, because k is None, got a tensor"),
    ("cross", dict(k=None, v=None), "k: expected the keys of the 6 slots of metadata.slot_mapping, got None"),
    ("cross, later", dict(k=torch.zeros(4, 2, 32), v=torch.zeros(4, 2, 32)),
     "metadata.slot_mapping: expected a slot for each of the 4 keys, got 0"),
    ("cross", dict(k=torch.zeros(5, 2, 32), v=torch.zeros(5, 2, 32)),
     "k: expected a key for each of the 6 slots of metadata.slot_mapping, got 5"),
    ("cross, later", dict(metadata=without_columns(STEPS["cross, later"]["metadata"])),
     "encoder_block_table: expected columns for the blocks of the encoder's keys, because k is None, got no column"),
    ("cross, later", dict(kv_cache=None),
     "kv_cache: expected the cache of the encoder's keys, because k is None, got no cache"),
    ("shared", dict(k=torch.zeros(7, 2, 32)),
     "k: expected None for a layer with kv_sharing_layer 'layers.3.self_attn', got a tensor"),
    ("shared", dict(v=torch.zeros(7, 2, 32)),
     "v: expected None for a layer with kv_sharing_layer 'layers.3.self_attn', got a tensor"),
    ("shared", dict(kv_cache=None),
     "kv_cache: expected the cache of the layer 'layers.3.self_attn', because k is None, got no cache"),
    ("shared", dict(kv_cache=None, k=torch.zeros(7, 2, 32)), "v: expected a tensor, because k is a tensor, got None"),
    ("decoder", dict(k=torch.zeros(6, 2, 32)), "k: expected shape [7, 2, 32], got [6, 2, 32]"),
    ("decoder", dict(v=torch.zeros(7, 4, 32)), "v: expected shape [7, 2, 32], got [7, 4, 32]"),
    ("decoder", dict(k=torch.zeros(7, 2, 32).double()), "k: expected dtype torch.float32, got torch.float64"),
    # caches
    ("encoder", dict(kv_cache=STEPS["decoder"]["kv_cache"]),
     "kv_cache: expected None or an empty tensor for attention type encoder, got a cache"),
    ("decoder", dict(kv_cache=torch.zeros(4, 16, 64)),
     "kv_cache: expected shape [2, num_blocks, block_size, 2, 32], got [4, 16, 64]"),
    ("decoder", dict(kv_cache=torch.zeros(2, 4, 2, 16, 32)),
     "kv_cache: expected shape [2, num_blocks, block_size, 2, 32], got [2, 4, 2, 16, 32]"),
    ("decoder", dict(kv_cache=torch.zeros(2, 4, 16, 2, 32).to(E4M3)),
     "kv_cache: expected dtype torch.float32, got torch.float8_e4m3fn"),
    ("decoder", dict(cache_format=FP8_E4M3, k_scale=ONE, v_scale=ONE),
     "kv_cache: expected dtype torch.float8_e4m3fn, got torch.float32"),
    ("decoder", dict(kv_cache=torch.zeros(2, 9, 32, 2, 32)),
     "metadata.decode.block_size: expected 32, the block size of kv_cache, got 16"),
    ("decoder", dict(metadata=replace(STEPS["decoder"]["metadata"], slot_mapping=torch.arange(6))),
     "metadata.slot_mapping: expected at least 7 slots, got 6"),
    ("decoder", dict(metadata=replace(STEPS["decoder"]["metadata"], num_actual_tokens=8)),
     "metadata: expected 0 <= num_decode_tokens <= num_actual_tokens <= 7, got 2 and 8"),
    ("decoder", dict(metadata=replace(STEPS["decoder"]["metadata"], num_decodes=3)),
     "metadata.num_decodes: expected the 2 requests of metadata.decode, got 3"),
    ("encoder", dict(metadata=replace(STEPS["encoder"]["metadata"], num_actual_tokens=8)),
     "metadata.num_actual_tokens: expected at most the 7 tokens of q, got 8"),
]  # fmt: skip


@pytest.mark.parametrize(
    "name, changed, message", COMBINATIONS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_wrong_combinations(name, changed, message, plain_errors):
    with pytest.raises((ValueError, TypeError)) as error:
        check_gqa_step(**STEPS[name] | changed)
    assert str(error.value) == message


def test_latent_formats_are_refused():
    with pytest.raises(
        UnsupportedConfiguration, match="^cache_format: expected compute_dtype or fp8_e4m3 .*, got fp8_ds_mla$"
    ):
        check_gqa_step(**STEPS["decoder"] | dict(cache_format=FP8_DS_MLA))


def test_no_cascade_where_ranks_share_sequences():
    good, owned = STEPS["decoder"], TokenOwnership(2, 0)
    part = good["metadata"].decode
    plan = replace(good["metadata"], ownership=owned, cascade=CascadeMetadata(part, part))
    with pytest.raises(ValueError, match="^metadata.cascade: expected None if ranks share sequences, got a cascade$"):
        check_gqa_step(**good | dict(metadata=plan, ownership=owned))


def test_a_shared_cache_needs_a_block_table():
    good = STEPS["shared"]
    wanted = (
        "^metadata.block_table: expected columns, because the layer reads the cache of 'layers.3.self_attn', got no"
    )
    with pytest.raises(ValueError, match=wanted):
        check_gqa_step(**good | dict(metadata=without_columns(good["metadata"])))


# Values.


def test_context_without_a_cache():
    """A step without a cache would ignore the context, so context is an error."""
    plan = STEPS["decoder"]["metadata"]
    wanted = (
        "^metadata.decode.seq_lens: expected at most the query length 1 in a step without a cache, got 20 at request 0$"
    )
    with pytest.raises(ValueError, match=wanted):
        check_gqa_step_values(plan, None, DECODER)
    plan = step(lens=[(1, 1), (1, 1), (5, 6)])["metadata"]
    with pytest.raises(ValueError, match="^metadata.prefill.seq_lens: expected at most the query length 5 .*, got 6"):
        check_gqa_step_values(plan, None, DECODER)
    check_gqa_step_values(STEPS["cross"]["metadata"], None, CROSS)  # an encoder's output is no context


def test_values_of_a_step():
    good = STEPS["decoder"]
    plan, cache = good["metadata"], good["kv_cache"]
    slots = 16 * cache.shape[1]
    for slot, got in ((slots, slots), (-2, -2)):
        changed = plan.slot_mapping.clone()
        changed[6] = slot
        with pytest.raises(ValueError, match=rf"^metadata.slot_mapping: expected slots in \[-1, {slots}\), got {got}$"):
            check_gqa_step_values(replace(plan, slot_mapping=changed), cache, DECODER)
        check_gqa_step_values(replace(plan, slot_mapping=changed), cache, SHARED)  # this layer writes nothing
        check_gqa_step_values(replace(plan, slot_mapping=changed), cache, DECODER, num_keys=6)
    for name in ("decode", "prefill"):
        part = getattr(plan, name)
        wrong = replace(part, visible_lens=part.visible_lens + 100)
        with pytest.raises(ValueError, match=f"^metadata.{name}.visible_lens: expected a value in "):
            check_gqa_step_values(replace(plan, **{name: wrong}), cache, DECODER)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(query_start_loc=offsets([3, 3])), "metadata.query_start_loc: expected a last element of 7, got 6"),
        (dict(query_start_loc=integers(0, 8, 7)),
         "metadata.query_start_loc: expected values that never decrease, got 8 then 7 at request 1"),
        (dict(max_query_len=3), "metadata.query_start_loc: expected query lengths up to max_query_len 3, got 4"),
    ],
    ids=str,
)  # fmt: skip
def test_values_of_an_encoder(fields, message):
    with pytest.raises(ValueError) as error:
        check_gqa_step_values(encoder_step(**fields)["metadata"], None, ENCODER)
    assert str(error.value) == message


# Outputs and batches.


def test_outputs():
    q = torch.zeros(3, 4, 32)
    check_gqa_output(torch.zeros(3, 4, 32), None, q, None)
    check_gqa_output(torch.zeros(3, 4, 32).to(E4M3), ONE, q, None)
    for wrong, message in (
        (torch.zeros(3, 4, 64), "output: expected shape [3, 4, 32], got [3, 4, 64]"),
        (torch.zeros(3, 4, 32).to(E4M3), "output: expected dtype torch.float32, got torch.float8_e4m3fn"),
        (q, "output: expected memory that no input has, got a tensor that overlaps an input"),
    ):
        with pytest.raises(ValueError) as error:
            check_gqa_output(wrong, None, q, None)
        assert str(error.value) == message


def test_cross_attention_needs_encoder_lengths(plain_errors):
    common = CommonAttentionMetadata.from_lens([1, 2], [4, 2], torch.zeros(2, 1, dtype=torch.int32), 16)
    wanted = (
        "common: expected a CrossAttentionBatch with encoder_seq_lens, encoder_block_table and encoder_slot_mapping, "
        "got CommonAttentionMetadata"
    )
    with pytest.raises(TypeError) as error:
        check_cross_batch(common)
    assert str(error.value) == wanted
    held = {field.name: getattr(common, field.name) for field in dataclasses.fields(common)}
    encoder = dict(
        encoder_seq_lens=integers(5, 0), encoder_seq_lens_cpu=integers(5, 0),
        encoder_block_table=torch.zeros(2, 1, dtype=torch.int32), encoder_slot_mapping=torch.arange(5),
    )  # fmt: skip
    check_cross_batch(CrossAttentionBatch(**held, **encoder))
    for name, value, message in (
        ("encoder_seq_lens", None, "common.encoder_seq_lens: expected a tensor, got NoneType"),
        ("encoder_seq_lens", integers(5), "common.encoder_seq_lens: expected shape [2], got [1]"),
        ("encoder_seq_lens_cpu", None, "common.encoder_seq_lens_cpu: expected a tensor, got NoneType"),
        ("encoder_seq_lens_cpu", integers(5, -1),
         "common.encoder_seq_lens_cpu: expected lengths >= 0, got -1 at request 1"),
        ("encoder_block_table", torch.zeros(2, 1),
         "common.encoder_block_table: expected dtype torch.int32, got torch.float32"),
        ("encoder_slot_mapping", torch.arange(5).int(),
         "common.encoder_slot_mapping: expected dtype torch.int64, got torch.int32"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError)) as error:
            check_cross_batch(CrossAttentionBatch(**held, **encoder | {name: value}))
        assert str(error.value) == message


def test_formats_of_the_cache():
    scaled = dict(cache_format=FP8_E4M3, k_scale=ONE, v_scale=ONE)
    good = step(cache_format=FP8_E4M3) | scaled
    check_gqa_step(**good | dict(kv_cache=good["kv_cache"].to(E4M3)))
    with pytest.raises(ValueError, match="^v_scale: expected a float32 tensor .. for format fp8_e4m3, got None$"):
        check_gqa_step(**good | dict(kv_cache=good["kv_cache"].to(E4M3), v_scale=None))
    check_gqa_step(**good | dict(kv_cache=None))  # a step without a cache reads no scales
    assert step()["metadata"].cache_format is COMPUTE_FORMAT
