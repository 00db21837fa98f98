"""Tests of `GQAConfig`, and of the argument checks of grouped-query attention for calls of ops.

N is the number of query heads, Nkv the number of key/value heads, Dh the head dim.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from reference.interfaces import (
    COMPUTE_FORMAT,
    E4M3,
    FP8_DS_MLA,
    FP8_E4M3,
    CascadeMetadata,
    DecodeMetadata,
    UnsupportedConfiguration,
)
from reference.interfaces.gqa import (
    HEAD_DIMS,
    AttentionType,
    GQAConfig,
    check_gqa_cascade,
    check_gqa_inputs,
    check_gqa_varlen,
    check_gqa_varlen_values,
    check_key_value_write,
    check_paged_attention,
    check_paged_values,
    configs_from_hf,
)

from ...support.factories import DIRECT, GARBAGE, integers, offsets
from ...support.gqa import gqa_batch

GROUPED = GQAConfig(6, 2, 32)
ENCODER, CROSS = (replace(GROUPED, attention_type=kind) for kind in (AttentionType.ENCODER, AttentionType.CROSS))


def first_word(value):
    """Return the id of a parameter of a test: the argument that a message names."""
    return value.split(":")[0] if isinstance(value, str) else ""


# The config.


def test_defaults():
    config = GQAConfig(8, 2, 64)
    assert config.softmax_scale == 0.125 and config.group_size == 4
    assert config.attention_type is AttentionType.DECODER and not config.attention_sinks
    assert replace(config, scale=0.3).softmax_scale == 0.3
    assert replace(config, v_head_dim=64).v_head_dim == 64
    assert [kind.cached for kind in AttentionType] == [True, False, False, True]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_heads = 5


def test_head_dims():
    """Exactly the listed head dims are legal; the error for another one has the list."""
    assert HEAD_DIMS == (32, 64, 80, 96, 112, 120, 128, 160, 192, 224, 256)
    legal = []
    for dim in range(1, 300):
        try:
            legal.append(GQAConfig(2, 1, dim).head_dim)
        except UnsupportedConfiguration as error:
            wanted = f"head_dim: expected one of 32, 64, 80, 96, 112, 120, 128, 160, 192, 224, 256, got {dim}"
            assert error.reasons == (wanted,)
    assert tuple(legal) == HEAD_DIMS


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(num_heads=7), "num_heads: expected a multiple of num_kv_heads 2, got 7"),
        (dict(num_heads=0), "num_heads: expected a positive int, got 0"),
        (dict(num_kv_heads=-1), "num_kv_heads: expected a positive int, got -1"),
        (dict(num_kv_heads=True), "num_kv_heads: expected a positive int, got True"),
        (dict(head_dim=0), "head_dim: expected a positive int, got 0"),
        (dict(v_head_dim=64), "v_head_dim: expected the head dim 32, got 64"),
        (dict(v_head_dim=0), "v_head_dim: expected a positive int or None, got 0"),
        (dict(scale=-0.5), "scale: expected a finite number above 0, or None, got -0.5"),
        (dict(scale=0), "scale: expected a finite number above 0, or None, got 0"),
        (dict(scale=0.0), "scale: expected a finite number above 0, or None, got 0.0"),
        (dict(scale=float("nan")), "scale: expected a finite number above 0, or None, got nan"),
        (dict(scale=float("inf")), "scale: expected a finite number above 0, or None, got inf"),
        (dict(scale=True), "scale: expected a finite number above 0, or None, got True"),
        (dict(scale="1"), "scale: expected a finite number above 0, or None, got '1'"),
        (dict(kv_sharing_layer=""), "kv_sharing_layer: expected the name of a layer or None, got an empty name"),
        (dict(sliding_window=0), "sliding_window: expected a positive int or None, got 0"),
        (dict(sliding_window=-4), "sliding_window: expected a positive int or None, got -4"),
        (dict(attention_chunk_size=0), "attention_chunk_size: expected a positive int or None, got 0"),
        (dict(logits_soft_cap=0), "logits_soft_cap: expected a finite number above 0, or None, got 0"),
        (dict(logits_soft_cap=0.0), "logits_soft_cap: expected a finite number above 0, or None, got 0.0"),
        (dict(logits_soft_cap=-5.0), "logits_soft_cap: expected a finite number above 0, or None, got -5.0"),
        (dict(logits_soft_cap=float("nan")), "logits_soft_cap: expected a finite number above 0, or None, got nan"),
        (dict(alibi_slopes=(0.5,) * 5), "alibi_slopes: expected 6 slopes, one for each head, got 5"),
        (dict(alibi_slopes=(0.5,) * 5 + (-1.0,)), "alibi_slopes: expected a number >= 0, got -1.0"),
        (
            dict(attention_type=AttentionType.CROSS, sliding_window=4),
            "sliding_window: expected None for attention type cross, got 4",
        ),
        (
            dict(attention_type=AttentionType.CROSS, alibi_slopes=(0.5,) * 6),
            "alibi_slopes: expected None for attention type cross, got (0.5, 0.5, 0.5, 0.5, 0.5, 0.5)",
        ),
        (
            dict(attention_type=AttentionType.ENCODER, attention_chunk_size=16),
            "attention_chunk_size: expected None for attention type encoder, got 16",
        ),
        (
            dict(attention_type=AttentionType.ENCODER_ONLY, kv_sharing_layer="layers.1"),
            "kv_sharing_layer: expected None for attention type encoder_only, got layers.1",
        ),
    ],
    ids=first_word,
)
def test_config_refuses(fields, message, plain_errors):
    with pytest.raises(ValueError) as error:
        replace(GROUPED, **fields)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(attention_sinks=1), "attention_sinks: expected True or False, got int"),
        (dict(attention_type="decoder"), "attention_type: expected an AttentionType, got str"),
        (dict(attention_type=3), "attention_type: expected an AttentionType, got int"),
        (dict(kv_sharing_layer=3), "kv_sharing_layer: expected the name of a layer or None, got int"),
        (dict(alibi_slopes=[0.5] * 6), "alibi_slopes: expected a tuple of numbers or None, got list"),
    ],
    ids=first_word,
)
def test_config_refuses_another_type(fields, message, plain_errors):
    with pytest.raises(TypeError) as error:
        replace(GROUPED, **fields)
    assert str(error.value) == message


def test_encoders_may_have_windows_and_alibi():
    config = replace(ENCODER, sliding_window=5, alibi_slopes=(0.5,) * 6)
    assert config.sliding_window == 5


# The checks of the ops.


def queries(tokens=3, config=GROUPED, dtype=torch.float32):
    return torch.zeros(tokens, config.num_heads, config.head_dim, dtype=dtype)


def keys(tokens=3, config=GROUPED, dtype=torch.float32):
    return torch.zeros(tokens, config.num_kv_heads, config.head_dim, dtype=dtype)


def cache(*shape, dtype=torch.float32):
    return torch.zeros(*(shape or (2, 4, 16, 2, 32))).to(dtype)


SLOTS = torch.zeros(3, dtype=torch.int64)
ONE = torch.tensor(1.0)
FLOATS = "torch.float32 or torch.float64 or torch.bfloat16 or torch.float16"
SINKS = replace(GROUPED, attention_sinks=True)


@pytest.mark.parametrize(
    "changed, message",
    [
        (
            dict(kv_cache=cache(4, 16, 64)),
            "kv_cache: expected shape [2, num_blocks, block_size, 2, 32], got [4, 16, 64]",
        ),
        (
            dict(kv_cache=cache(4, 2, 16, 2, 32)),
            "kv_cache: expected shape [2, num_blocks, block_size, 2, 32], got [4, 2, 16, 2, 32]",
        ),
        (
            dict(kv_cache=cache(2, 4, 2, 16, 32)),
            "kv_cache: expected shape [2, num_blocks, block_size, 2, 32], got [2, 4, 2, 16, 32]",
        ),
        (
            dict(kv_cache=cache(2, 4, 8, 2, 32)),
            "kv_cache: expected a block size that is a positive multiple of 16, got 8",
        ),
        (
            dict(kv_cache=cache(2, 4, 0, 2, 32)),
            "kv_cache: expected a block size that is a positive multiple of 16, got 0",
        ),
        (dict(kv_cache=cache(dtype=torch.float64)), "kv_cache: expected dtype torch.float32, got torch.float64"),
        (dict(kv_cache=cache(dtype=E4M3)), "kv_cache: expected dtype torch.float32, got torch.float8_e4m3fn"),
        (dict(k_scale=ONE), "k_scale: expected None for format compute_dtype, got a tensor"),
        (dict(v_scale=ONE), "v_scale: expected None for format compute_dtype, got a tensor"),
        (
            dict(cache_format=FP8_E4M3, k_scale=ONE, v_scale=ONE),
            "kv_cache: expected dtype torch.float8_e4m3fn, got torch.float32",
        ),
        (
            dict(cache_format=FP8_E4M3, kv_cache=cache(dtype=E4M3), v_scale=ONE),
            "k_scale: expected a float32 tensor [] for format fp8_e4m3, got None",
        ),
        (
            dict(cache_format=FP8_E4M3, kv_cache=cache(dtype=E4M3), k_scale=ONE, v_scale=torch.ones(2)),
            "v_scale: expected shape [], got [2]",
        ),
        (
            dict(cache_format=FP8_DS_MLA),
            "cache_format: expected compute_dtype or fp8_e4m3 for a key/value cache, got fp8_ds_mla",
        ),
        (dict(value=keys(2)), "value: expected shape [3, 2, 32], got [2, 2, 32]"),
        (dict(value=keys(dtype=torch.float64)), "value: expected dtype torch.float32, got torch.float64"),
        (dict(slot_mapping=SLOTS[:2]), "slot_mapping: expected at least 3 slots, got 2"),
        (dict(slot_mapping=SLOTS.int()), "slot_mapping: expected dtype torch.int64, got torch.int32"),
    ],
    ids=first_word,
)
def test_a_write_refuses(changed, message):
    good = dict(key=keys(), value=keys(), kv_cache=cache(), slot_mapping=SLOTS, cache_format=COMPUTE_FORMAT)
    check_key_value_write(**good)
    check_key_value_write(**good | dict(kv_cache=cache(2, 4, 2, 16, 32).transpose(2, 3)))  # layout HND
    scaled = dict(cache_format=FP8_E4M3, kv_cache=cache(dtype=E4M3), k_scale=ONE, v_scale=ONE)
    check_key_value_write(**good | scaled)
    with pytest.raises(ValueError) as error:
        check_key_value_write(**good | changed)
    assert str(error.value) == message


def paged(config=GROUPED, **fields):
    """Return the arguments of a valid call of `gqa_paged_attention`, with other values of some fields of the plan."""
    batch = gqa_batch(config, [(1, 20), (2, 37)], dtype=torch.float32, seed=0)
    metadata = replace(batch.metadata, **fields)
    return dict(q=batch.q, kv_cache=batch.kv_cache, metadata=metadata, config=config, sinks=batch.sinks)


@pytest.mark.parametrize(
    "config, changed, message",
    [
        (GROUPED, dict(q=queries(3)[:, :5]), "q: expected shape [T, 6, 32], got [3, 5, 32]"),
        (GROUPED, dict(q=queries(4)), "metadata.visible_lens: expected shape [4], got [3]"),
        (GROUPED, dict(q=queries(3).int()), f"q: expected dtype {FLOATS}, got torch.int32"),
        (GROUPED, dict(sinks=torch.zeros(6)),
         "sinks: expected None for a config without attention_sinks, got a tensor"),
        (SINKS, dict(sinks=None), "sinks: expected a tensor [6] for a config with attention_sinks, got None"),
        (SINKS, dict(sinks=torch.zeros(2)), "sinks: expected shape [6], got [2]"),
        (ENCODER, {}, "config.attention_type: expected decoder or cross, which have a key/value cache, got encoder"),
        (GROUPED, dict(q_scale=ONE), "q_scale: expected None for format compute_dtype, got a tensor"),
        (GROUPED, dict(out_dtype=torch.int8),
         "out_dtype: expected one of torch.float32, torch.float64, torch.bfloat16, torch.float16, got torch.int8"),
        (GROUPED, dict(kv_cache=torch.zeros(2, 8, 32, 2, 32)),
         "metadata.block_size: expected 32, the block size of kv_cache, got 16"),
        (replace(GROUPED, num_kv_heads=3), {},
         "kv_cache: expected shape [2, num_blocks, block_size, 3, 32], got [2, 8, 16, 2, 32]"),
        (replace(GROUPED, sliding_window=3), dict(first_visible=None),
         "metadata.first_visible: expected a tensor for a config with sliding_window 3, got None"),
        (replace(GROUPED, sliding_window=3), dict(first_visible=integers(0, 0)),
         "metadata.first_visible: expected shape [3], got [2]"),
        (CROSS, dict(mask="causal"), "metadata.mask: expected a mask that is not causal for attention type cross, "
                   "got causal"),
    ],
    ids=first_word,
)  # fmt: skip
def test_paged_attention_refuses(config, changed, message, plain_errors):
    own = {name: value for name, value in changed.items() if name in ("first_visible", "mask")}
    cached = config if config.attention_type.cached else GROUPED
    good = paged(replace(cached, num_kv_heads=2))
    check_paged_attention(**good)
    arguments = good | dict(config=config, metadata=replace(good["metadata"], **own))
    with pytest.raises(ValueError) as error:
        check_paged_attention(**arguments | {name: value for name, value in changed.items() if name not in own})
    assert str(error.value) == message


def test_paged_attention_refuses_other_plans(plain_errors):
    good = paged()
    plain = DecodeMetadata(**{field.name: getattr(good["metadata"], field.name)
                              for field in dataclasses.fields(DecodeMetadata)})  # fmt: skip
    with pytest.raises(TypeError, match="^metadata: expected a PagedAttentionMetadata, got DecodeMetadata$"):
        check_paged_attention(**good | dict(metadata=plain))
    with pytest.raises(TypeError, match="^config: expected a GQAConfig, got MLAConfig$"):
        check_paged_attention(**good | dict(config=DIRECT))


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(visible_lens=integers(20, 36, 38)), "visible_lens: expected a value in [0, 37] at row 2, got 38"),
        (dict(visible_lens=integers(-1, 36, 37)), "visible_lens: expected a value in [0, 20] at row 0, got -1"),
        (dict(first_visible=integers(0, 37, 0)), "first_visible: expected a value in [0, 36] at row 1, got 37"),
        (dict(first_visible=integers(-1, 0, 0)), "first_visible: expected a value in [0, 20] at row 0, got -1"),
        (dict(seq_lens=integers(-2, 37)), "seq_lens: expected lengths >= 0, got -2"),
        (dict(max_seq_len=36), "seq_lens: expected lengths up to max_seq_len 36, got 37"),
        (dict(max_query_len=1), "query_start_loc: expected query lengths up to max_query_len 1, got 2"),
        (dict(query_start_loc=integers(0, 2, 1)),
         "query_start_loc: expected values that never decrease, got 2 then 1 at request 1"),
        (dict(query_start_loc=integers(0, 1, 2)), "query_start_loc: expected a last element of 3, got 2"),
        (dict(block_table=integers(0, 1, 2)[:2][None].repeat(2, 1)),
         "block_table: expected at least 3 columns for request 1, got 2"),
        (dict(block_table=torch.tensor([[0, 9, 0], [1, 2, 3]], dtype=torch.int32)),
         "block_table: expected blocks in [0, 8) at request 0, got 9"),
        (dict(block_table=torch.tensor([[0, 1, 0], [1, -2, 3]], dtype=torch.int32)),
         "block_table: expected blocks in [0, 8) at request 1, got -2"),
    ],
    ids=first_word,
)  # fmt: skip
def test_values_of_a_plan(fields, message):
    metadata = paged()["metadata"]
    check_paged_values(metadata, 8, 16)
    with pytest.raises(ValueError) as error:
        check_paged_values(replace(metadata, **fields), 8, 16)
    assert str(error.value) == f"metadata.{message}"


def test_blocks_behind_the_window_are_not_checked():
    """A block is not checked if it ends before the first visible key of every query token of its request."""
    table = torch.tensor([[GARBAGE, GARBAGE, 3, 5]], dtype=torch.int32)
    windowed = replace(GROUPED, sliding_window=20)
    plan = dict(
        block_table=table, seq_lens=integers(64), query_start_loc=offsets([2]), visible_lens=integers(63, 64),
        max_query_len=2, max_seq_len=64, first_visible=integers(43, 44),
    )  # fmt: skip
    metadata = replace(gqa_batch(windowed, [(2, 64)]).metadata, **plan)
    check_paged_values(metadata, 8, 16)
    for first in ((32, 44), (32, 33), (44, 32)):
        check_paged_values(replace(metadata, first_visible=integers(*first)), 8, 16)
    for first in ((31, 44), (43, 31)):  # key 31 is in the block of column 1
        with pytest.raises(
            ValueError, match=f"^metadata.block_table: expected blocks in .0, 8. at request 0, got {GARBAGE}"
        ):
            check_paged_values(replace(metadata, first_visible=integers(*first)), 8, 16)
    alone = replace(metadata, first_visible=None)
    with pytest.raises(ValueError, match="^metadata.block_table"):
        check_paged_values(alone, 8, 16)


def test_rows_without_keys_need_no_blocks():
    """A row of an empty range, a request without query tokens and a padding row need no valid block."""
    garbage = torch.full((3, 2), GARBAGE, dtype=torch.int32)
    metadata = replace(
        gqa_batch(GROUPED, [(1, 20)]).metadata, block_table=garbage, seq_lens=integers(20, 9, 0),
        query_start_loc=offsets([1, 0, 1]), visible_lens=integers(7, 0), first_visible=integers(7, 0), max_query_len=1,
        max_seq_len=20,
    )  # fmt: skip
    check_paged_values(metadata, 8, 16)
    with pytest.raises(ValueError, match="^metadata.block_table: expected blocks in .0, 8. at request 0"):
        check_paged_values(replace(metadata, first_visible=integers(6, 0)), 8, 16)


@pytest.mark.parametrize(
    "config, changed, message",
    [
        (GROUPED, dict(k=keys(4)[:, :1]), "k: expected shape [S, 2, 32], got [4, 1, 32]"),
        (GROUPED, dict(v=keys(5)), "v: expected shape [4, 2, 32], got [5, 2, 32]"),
        (GROUPED, dict(k=keys(4, dtype=torch.float64)), "k: expected dtype torch.float32, got torch.float64"),
        (ENCODER, dict(), "k: expected shape [3, 2, 32], got [4, 2, 32]"),
        (GROUPED, dict(cu_seqlens_k=offsets([4])), "cu_seqlens_k: expected shape [3], got [2]"),
        (GROUPED, dict(cu_seqlens_q=offsets([1, 2]).long()),
         "cu_seqlens_q: expected dtype torch.int32, got torch.int64"),
        (GROUPED, dict(max_seqlen_q=-1), "max_seqlen_q: expected an int >= 0, got -1"),
        (GROUPED, dict(max_seqlen_k=2.5), "max_seqlen_k: expected an int >= 0, got 2.5"),
        (SINKS, dict(), "sinks: expected a tensor [6] for a config with attention_sinks, got None"),
    ],
    ids=first_word,
)  # fmt: skip
def test_varlen_refuses(config, changed, message, plain_errors):
    good = dict(q=queries(3), k=keys(4), v=keys(4), cu_seqlens_q=offsets([1, 2]), cu_seqlens_k=offsets([2, 2]),
                max_seqlen_q=2, max_seqlen_k=2, config=GROUPED)  # fmt: skip
    check_gqa_varlen(**good)
    with pytest.raises(ValueError) as error:
        check_gqa_varlen(**good | dict(config=config) | changed)
    assert str(error.value) == message


def test_offsets_of_an_encoder():
    """In an encoder queries and keys are the same tokens, so their offsets must be equal."""
    check_gqa_varlen_values(offsets([1, 2]), offsets([2, 1]), 3, 3, GROUPED)
    check_gqa_varlen_values(offsets([1, 2]), offsets([1, 2]), 3, 3, ENCODER)
    wanted = "^cu_seqlens_k: expected cu_seqlens_q itself for attention type encoder, got other offsets$"
    with pytest.raises(ValueError, match=wanted):
        check_gqa_varlen_values(offsets([1, 2]), offsets([2, 1]), 3, 3, ENCODER)
    with pytest.raises(ValueError, match="^cu_seqlens_k: expected a last element of 4, got 3$"):
        check_gqa_varlen_values(offsets([1, 2]), offsets([2, 1]), 3, 4, GROUPED)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(alibi_slopes=(0.5,) * 6),
         "config.alibi_slopes: expected None for a cascade, got (0.5, 0.5, 0.5, 0.5, 0.5, 0.5)"),
        (dict(sliding_window=9), "config.sliding_window: expected None for a cascade, got 9"),
        (dict(attention_chunk_size=32), "config.attention_chunk_size: expected None for a cascade, got 32"),
        (dict(attention_type=AttentionType.CROSS), "config.attention_type: expected decoder for a cascade, got cross"),
    ],
    ids=first_word,
)  # fmt: skip
def test_cascade_refuses(fields, message):
    good = paged()
    metadata = good.pop("metadata")
    prefix = replace(metadata, seq_lens=integers(16), block_table=metadata.block_table[:1, :1],
                     query_start_loc=offsets([3]), max_query_len=3, visible_lens=integers(16, 16, 16))  # fmt: skip
    check_gqa_cascade(cascade=CascadeMetadata(prefix, metadata), **good)
    with pytest.raises(ValueError) as error:
        check_gqa_cascade(cascade=CascadeMetadata(prefix, metadata), **good | dict(config=replace(GROUPED, **fields)))
    assert str(error.value) == message
    wanted = "^cascade.prefix: expected a plan with one request, got 2$"
    with pytest.raises(ValueError, match=wanted):
        check_gqa_cascade(cascade=CascadeMetadata(metadata, metadata), **good)


def test_sinks_of_any_float_dtype():
    config = replace(GROUPED, attention_sinks=True)
    for dtype in (torch.float64, torch.bfloat16):
        check_gqa_inputs(queries(), config, torch.zeros(6, dtype=dtype))
    with pytest.raises(ValueError, match="^sinks: expected dtype"):
        check_gqa_inputs(queries(), config, torch.zeros(6, dtype=torch.int64))


def test_from_hf_of_one_layer(plain_errors):
    llama = SimpleNamespace(model_type="llama", num_attention_heads=4, num_hidden_layers=2, hidden_size=128)
    assert GQAConfig.from_hf(llama, 1) == GQAConfig(4, 4, 32)
    assert [GQAConfig(**fields) for fields in configs_from_hf(llama)] == [GQAConfig(4, 4, 32)] * 2
    for layer in (2, -1, 1.0):
        with pytest.raises(ValueError, match="^layer: expected "):
            GQAConfig.from_hf(llama, layer)
