"""Tests of the fields of transformers configs that this family refuses, of fields that are off, and of wrong values."""

from __future__ import annotations

import pytest
import torch

from reference.interfaces import UnsupportedConfiguration
from reference.interfaces.gqa import AttentionType, GQAConfig, configs_from_hf

from .test_gqa_from_hf import CHUNKED, FULL, SLIDING, configs, hf, transformers_config

WANTED = GQAConfig(8, 2, 32)


def reasons_of(config) -> tuple[str, ...]:
    with pytest.raises(UnsupportedConfiguration) as error:
        configs_from_hf(config)
    return error.value.reasons


ONLY = "config.layer_types: only 'full_attention', 'sliding_attention' and 'chunked_attention' are implemented"
REFUSED = [
    # (fields, beginning of the reason)
    (dict(kv_lora_rank=512),
     "config.kv_lora_rank: latent attention is not implemented in this family (use MLAConfig.from_hf), got 512"),
    (dict(blocksparse_block_size=64), "config.blocksparse_block_size: block-sparse attention is not implemented,"),
    (dict(blocksparse_num_local_blocks=16), "config.blocksparse_num_local_blocks: block-sparse attention is not"),
    (dict(blocksparse_vert_stride=8), "config.blocksparse_vert_stride: block-sparse attention is not implemented,"),
    (dict(blocksparse_homo_head_pattern=True), "config.blocksparse_homo_head_pattern: block-sparse attention is not"),
    (dict(dense_attention_every_n_layers=2), "config.dense_attention_every_n_layers: block-sparse attention is not"),
    (dict(attention_type="block_sparse"), "config.attention_type: block-sparse attention is not implemented, got"),
    (dict(index_topk=2048), "config.index_topk: sparse-attention indexers are not implemented, got 2048"),
    (dict(relative_attention=True), "config.relative_attention: relative position biases are not implemented, got"),
    (dict(position_embedding_type="relative_key"), "config.position_embedding_type: position biases of the scores are"),
    (dict(position_embedding_type="alibi"), "config.position_embedding_type: position biases of the scores are not"),
    (dict(alibi=True), "config.alibi: the ALiBi slopes of 'llama' are not implemented (only those of bloom and"),
    (dict(use_alibi=True), "config.use_alibi: the ALiBi slopes of 'llama' are not implemented"),
    (dict(model_type="falcon", alibi=True), "config.alibi: the ALiBi slopes of 'falcon' are not implemented"),
    (dict(model_type="mpt", attn_config=dict(alibi=True, alibi_bias_max=16)),
     "config.attn_config.alibi_bias_max: only 8 is implemented, got 16"),
    (dict(model_type="mpt", attn_config=dict(alibi=False)),
     "config.attn_config.alibi: models without ALiBi are not implemented, got False"),
    (dict(model_type="mpt", attn_config=dict(prefix_lm=True)),
     "config.attn_config.prefix_lm: attention that is not causal is not implemented, got True"),
    (dict(attn_config=5), "config.attn_config: expected a dict or None, got 5"),
    (dict(is_causal=False), "config.is_causal: attention that is not causal is not implemented, got False"),
    (dict(causal=False), "config.causal: attention that is not causal is not implemented, got False"),
    (dict(use_bidirectional_attention=True), "config.use_bidirectional_attention: attention that is not causal is not"),
    (dict(use_bidirectional_attention="all"), "config.use_bidirectional_attention: attention that is not causal is"),
    (dict(use_bidirectional_attention="vision"),
     "config.use_bidirectional_attention: bidirectional ranges of image tokens are not implemented, got 'vision'"),
    (dict(mm_tokens_per_image=256),
     "config.mm_tokens_per_image: bidirectional ranges of image tokens are not implemented, got 256"),
    (dict(add_cross_attention=True), "config.add_cross_attention: cross attention is not implemented for decoders"),
    (dict(cross_attention_layers=[3]), "config.cross_attention_layers: cross attention is not implemented for"),
    (dict(is_encoder_decoder=True), "config.is_encoder_decoder: expected False, or a call of"),
    (dict(decoder_attention_heads=8), "config.decoder_attention_heads: decoders of encoder-decoder models are not"),
    (dict(text_config=hf()),
     "config.text_config: models with several parts are not implemented; pass config.text_config, the config of the "
     "text model, got SimpleNamespace in a config of 'llama'"),
    (dict(vision_config=dict(depth=2)), "config.vision_config: models with several parts are not implemented, got"),
    (dict(mamba_d_state=16), "config.mamba_d_state: layers without attention are not implemented, got 16"),
    (dict(layers_block_type=["mamba", "attention"]), "config.layers_block_type: layers without attention are not"),
    (dict(layer_types=[FULL, "linear_attention", FULL]), f"{ONLY}, got 'linear_attention'"),
    (dict(layer_types=["mamba", "conv", FULL]), f"{ONLY}, got 'mamba', 'conv'"),
    (dict(layer_types="full_attention"), "config.layer_types: expected a list or None, got 'full_attention'"),
    (dict(layer_types=torch.ones(3)), "config.layer_types: expected a list or None, got tensor("),
    (dict(sliding_window_pattern=4), "config.layer_types: expected the type of each layer of 'llama', got None"),
    (dict(attention_chunk_size=64), "config.layer_types: expected the type of each layer of 'llama', got None"),
    (dict(model_type="gpt_oss"), "config.layer_types: expected the type of each layer of 'gpt_oss', got None"),
    (dict(attention_window=256), "config.attention_window: windows under this name are not implemented (only"),
    (dict(local_attention=128), "config.local_attention: windows under this name are not implemented (only"),
    (dict(attn_logits_soft_cap=30.0), "config.attn_logits_soft_cap: softcapping of the scores under this name is not"),
    (dict(model_type="gemma3_text", layer_types=[FULL] * 3, attn_logit_softcapping=5.0),
     "config.attn_logit_softcapping: expected None for 'gemma3_text', whose attention ignores it, got 5.0"),
    (dict(global_head_dim=512), "config.global_head_dim: heads that differ between layers are not implemented under"),
    (dict(lambda_std_dev=0.1), "config.lambda_std_dev: differential attention is not implemented, got 0.1"),
    (dict(keep_window_size=2048), "config.keep_window_size: masks that depend on the values are not implemented,"),
    (dict(use_cla=True), "config.use_cla: this way to share keys and values is not implemented (only"),
    (dict(kv_source_layers=[0, 0, 2]), "config.kv_source_layers: this way to share keys and values is not implemented"),
    (dict(num_kv_shared_layers=1), "config.layer_types: expected the type of each layer for num_kv_shared_layers,"),
    (dict(num_kv_shared_layers=1, layer_types=[FULL, FULL, SLIDING], sliding_window=4),
     "config.num_kv_shared_layers: expected a layer of type 'sliding_attention' with a cache for layer 2, got none"),
    (dict(v_head_dim=64), "config.v_head_dim: expected the head dim 32, got 64"),
    (dict(head_dim=72), "config.head_dim: expected one of 32, 64, 80, 96, 112, 120, 128, 160, 192, 224, 256, got 72"),
    (dict(hidden_size=384), "config.head_dim: expected one of 32, 64, 80, 96, 112, 120, 128, 160, 192, 224, 256,"),
    (dict(model_type="jetmoe", vocab_size=9, use_cache=True), "config.model_type: query heads that are divided"),
    (dict(per_layer_config={"0": {"head_dim": 64}}), "config.per_layer_config: expected a list of configs or None,"),
    (dict(per_layer_config=[hf(), hf()]), "config.per_layer_config: expected a config of each of 3 layers, got 2"),
    (dict(per_layer_config=[hf(), hf(skip=["self_attn"]), hf()]),
     "config.per_layer_config: layers that skip a module are not implemented, got layer 1"),
]  # fmt: skip


@pytest.mark.parametrize("fields, reason", REFUSED, ids=[reason for _, reason in REFUSED])
def test_refused_by_name(fields, reason, plain_errors):
    found = reasons_of(hf(**fields))
    assert [each[: len(reason)] for each in found] == [reason]


def test_all_reasons_at_once():
    fields = dict(kv_lora_rank=512, index_topk=8, alibi=True, v_head_dim=64, layer_types=[FULL, "conv", FULL],
                  is_causal=False, attn_config={"blocksparse_block_size": 4})  # fmt: skip
    assert [reason.split(":")[0] for reason in reasons_of(hf(**fields))] == [
        "config.kv_lora_rank", "config.index_topk", "config.is_causal", "config.attn_config.blocksparse_block_size",
        "config.layer_types", "config.v_head_dim", "config.alibi",
    ]  # fmt: skip


NOT_ZERO = ("sliding_window", "attn_logit_softcapping", "query_pre_attn_scalar")  # 0 is an error, and does not mean off
OFF = [
    "sliding_window", "kv_lora_rank", "index_topk", "alibi", "use_alibi", "attn_logit_softcapping", "v_head_dim",
    "layer_types", "attention_chunk_size", "num_kv_shared_layers", "attn_config", "query_pre_attn_scalar", "head_dim",
    "blocksparse_block_size", "use_bidirectional_attention", "add_cross_attention", "is_encoder_decoder", "text_config",
    "vision_config", "mamba_d_state", "per_layer_config", "sliding_window_pattern", "attention_sinks",
    "attention_window", "scale_attn_by_inverse_layer_idx", "num_attention_heads_per_layer", "kv_source_layers",
]  # fmt: skip


@pytest.mark.parametrize("value", [None, False, 0, [], {}], ids=str)
@pytest.mark.parametrize("name", OFF)
def test_a_field_that_is_off_enables_nothing(name, value):
    if value == 0 and value is not False and name in NOT_ZERO:
        with pytest.raises(ValueError, match=f"^config.{name}: expected a .*, got 0$"):
            configs(hf(**{name: value}))
    else:
        assert configs(hf(**{name: value})) == [WANTED] * 3


def test_a_window_of_zero_that_is_switched_off():
    """Read a window of 0 next to `use_sliding_window=False`, as in Qwen2-MoE -> no window."""
    assert configs(hf(sliding_window=0, use_sliding_window=False)) == [WANTED] * 3


@pytest.mark.parametrize(
    "fields, changed",
    [
        (dict(head_dim=64), dict(head_dim=64)),
        (dict(num_key_value_heads=None), dict(num_kv_heads=8)),
        (dict(sliding_window=7), dict(sliding_window=7)),
        (dict(sliding_window=7, use_sliding_window=True), dict(sliding_window=7)),
        (dict(sliding_window=7, use_sliding_window=False), {}),
        (dict(attn_logit_softcapping=30), dict(logits_soft_cap=30.0)),
        (dict(query_pre_attn_scalar=144), dict(scale=1 / 12)),
        (dict(attention_multiplier=0.5), dict(scale=0.5)),
        (dict(attention_sinks=True), dict(attention_sinks=True)),
        (dict(use_attention_sinks=True), dict(attention_sinks=True)),
        (dict(add_full_attention_sink_bias=True), dict(attention_sinks=True)),
        (dict(add_swa_attention_sink_bias=True), {}),
        (dict(use_cla=False, cla_share_factor=2), {}),
        (dict(kv_source_layers=[0, 1, 2]), {}),
        (dict(is_causal=True, position_embedding_type="rope"), {}),
        (dict(clip_qkv=8.0, use_qk_norm=True, no_rope_layers=[1, 0, 1], attn_temperature_tuning=True), {}),
        (dict(local_attention=14, sliding_window=7), dict(sliding_window=7)),
        (dict(per_layer_config=[hf(head_dim=64)] * 3), dict(head_dim=64)),
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_are_read(fields, changed):
    wanted = dict(num_heads=8, num_kv_heads=2, head_dim=32) | changed
    assert configs(hf(**fields)) == [GQAConfig(**wanted)] * 3


def test_fields_by_layer():
    kinds = dict(layer_types=[SLIDING, FULL, CHUNKED], sliding_window=5, attention_chunk_size=64)
    found = configs(hf(**kinds, add_swa_attention_sink_bias=True))
    assert [config.sliding_window for config in found] == [5, None, None]
    assert [config.attention_chunk_size for config in found] == [None, None, 64]
    assert [config.attention_sinks for config in found] == [True, False, False]
    windows = configs(hf(sliding_window=5, use_sliding_window=True, max_window_layers=2))
    assert [config.sliding_window for config in windows] == [None, None, 5]
    assert [config.num_heads for config in configs(hf(num_attention_heads_per_layer=[8, 4, 2], head_dim=32))] == [
        8,
        4,
        2,
    ]
    assert GQAConfig.from_hf(hf(**kinds), 2) == GQAConfig(8, 2, 32, attention_chunk_size=64)


POSITIVE = "expected a finite number above 0"
WINDOW = "config.sliding_window: expected a positive int for layers of type 'sliding_attention'"


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(num_attention_heads=7),
         "config.num_attention_heads: expected a multiple of num_key_value_heads 2, got 7"),
        (dict(num_attention_heads="8"), "config.num_attention_heads: expected a positive int, got 8"),
        (dict(num_attention_heads=-8), "config.num_attention_heads: expected a positive int, got -8"),
        (dict(num_key_value_heads=0), "config.num_key_value_heads: expected a positive int, got 0"),
        (dict(num_key_value_heads=[2, 2, 2]), "config.num_key_value_heads: expected a positive int, got [2, 2, 2]"),
        (dict(num_hidden_layers=0), "config.num_hidden_layers: expected a positive int, got 0"),
        (dict(hidden_size=250), "config.hidden_size: expected a multiple of num_attention_heads 8, got 250"),
        (dict(hidden_size=None), "config.hidden_size: expected a positive int, got None"),
        (dict(head_dim=-32), "config.head_dim: expected a positive int, got -32"),
        (dict(sliding_window=-4), "config.sliding_window: expected a positive int or None, got -4"),
        (dict(sliding_window=7.5), "config.sliding_window: expected a positive int or None, got 7.5"),
        (dict(layer_types=[SLIDING] * 3), f"{WINDOW}, got None"),
        (dict(layer_types=[SLIDING] * 3, sliding_window=0), f"{WINDOW}, got 0"),
        (dict(layer_types=[SLIDING] * 3, sliding_window=5, use_sliding_window=False), f"{WINDOW}, got None"),
        (dict(layer_types=[CHUNKED] * 3), "config.attention_chunk_size: expected a positive int for layers of type "
         "'chunked_attention', got None"),
        (dict(layer_types=[FULL] * 2), "config.layer_types: expected one type for each of 3 layers, got 2"),
        (dict(attn_logit_softcapping=-30.0), f"config.attn_logit_softcapping: {POSITIVE}, got -30.0"),
        (dict(attn_logit_softcapping="30"), f"config.attn_logit_softcapping: {POSITIVE}, got '30'"),
        (dict(query_pre_attn_scalar=-1), f"config.query_pre_attn_scalar: {POSITIVE}, got -1"),
        (dict(query_pre_attn_scalar=float("inf")), f"config.query_pre_attn_scalar: {POSITIVE}, got inf"),
        (dict(attention_multiplier=float("nan")), f"config.attention_multiplier: {POSITIVE}, got nan"),
        (dict(attention_multiplier=0), f"config.attention_multiplier: {POSITIVE}, got 0"),
        (dict(model_type="mpt", attn_config=dict(alibi=True, softmax_scale=0.0)),
         f"config.attn_config.softmax_scale: {POSITIVE}, got 0.0"),
        (dict(max_window_layers=-1, sliding_window=5), "config.max_window_layers: expected an int >= 0, got -1"),
        (dict(num_kv_shared_layers=3, layer_types=[FULL] * 3),
         "config.num_kv_shared_layers: expected an int below num_hidden_layers 3, got 3"),
        (dict(num_attention_heads_per_layer=[8, 8]),
         "config.num_attention_heads_per_layer: expected one number for each of 3 layers, got 2"),
        (dict(num_attention_heads_per_layer=[8, 0, 8]), "config.num_attention_heads: expected a positive int, got 0"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_values(fields, message, plain_errors):
    with pytest.raises(ValueError) as error:
        configs_from_hf(hf(**fields))
    assert str(error.value) == message


def test_wrong_model_type(plain_errors):
    with pytest.raises(TypeError, match="^config.model_type: expected a str, got int$"):
        configs_from_hf(hf(model_type=3))


@pytest.mark.parametrize("config", [3, None, "llama", object()], ids=["int", "None", "str", "object"])
def test_no_config(config, plain_errors):
    wanted = f"config: expected a model with grouped-query attention, got '{type(config).__name__}' without "
    assert reasons_of(config) == (wanted + "num_attention_heads, num_hidden_layers",)


def test_unknown_models_must_be_causal_language_models():
    """A config of an unknown model needs the fields that only causal language models have, or it is refused."""
    wanted = "config: expected a causal language model, got 'new' without vocab_size, use_cache"
    assert reasons_of(hf(model_type="new")) == (wanted,)
    assert configs(hf(model_type="new", vocab_size=99, use_cache=True)) == [WANTED] * 3
    wanted = "config: expected a causal language model, got 'new' without num_key_value_heads"
    assert reasons_of(hf(model_type="new", vocab_size=99, use_cache=False, num_key_value_heads=None)) == (wanted,)


@pytest.mark.parametrize("decoder", [None, False, True])
def test_encoder_only(decoder):
    kind = AttentionType.DECODER if decoder else AttentionType.ENCODER_ONLY
    found = configs(hf(model_type="bert", is_decoder=decoder, add_cross_attention=False))
    assert found == [GQAConfig(8, 2, 32, attention_type=kind)] * 3


# Classes of transformers.

CLASSES = [
    # (class, fields, beginning of the first reason)
    ("DeepseekV3Config", {}, "config.kv_lora_rank: latent attention is not implemented in this family"),
    ("Gemma3Config", {}, "config.text_config: models with several parts are not implemented; pass config.text_config"),
    ("Llama4Config", {}, "config.text_config: models with several parts are not implemented; pass config.text_config"),
    ("Gemma3TextConfig", dict(use_bidirectional_attention=True), "config.use_bidirectional_attention: attention"),
    ("BartConfig", {}, "config.is_encoder_decoder: expected False, or a call of encoder_decoder_configs_from_hf"),
    ("WhisperConfig", {}, "config.is_encoder_decoder: expected False, or a call of encoder_decoder_configs_from_hf"),
    ("T5Config", {}, "config.is_encoder_decoder: expected False, or a call of encoder_decoder_configs_from_hf"),
    ("Qwen3NextConfig", {}, "config.layer_types: only 'full_attention', 'sliding_attention' and 'chunked_attention'"),
    ("MambaConfig", {}, "config: expected a model with grouped-query attention, got 'mamba' without"),
    ("JambaConfig", {}, "config.mamba_d_state: layers without attention are not implemented"),
    ("BambaConfig", {}, "config.mamba_d_state: layers without attention are not implemented"),
    ("DiffLlamaConfig", {}, "config.lambda_std_dev: differential attention is not implemented"),
    ("DogeConfig", {}, "config.keep_window_size: masks that depend on the values are not implemented"),
    ("JetMoeConfig", {}, "config.model_type: query heads that are divided among the key/value heads in another order"),
    ("BigBirdConfig", {}, "config: expected a causal language model, got 'big_bird' without num_key_value_heads"),
    ("ViTConfig", {}, "config: expected a causal language model, got 'vit' without num_key_value_heads, vocab_size,"),
    ("CLIPTextConfig", {}, "config: expected a causal language model, got 'clip_text_model' without"),
    ("RoFormerConfig", {}, "config: expected a causal language model, got 'roformer' without num_key_value_heads"),
    ("XLMConfig", {}, "config: expected a causal language model, got 'xlm' without num_key_value_heads"),
    ("FalconConfig", dict(alibi=True), "config.alibi: the ALiBi slopes of 'falcon' are not implemented"),
]  # fmt: skip


@pytest.mark.parametrize("name, fields, reason", CLASSES, ids=[name for name, *_ in CLASSES])
def test_refused_classes(name, fields, reason):
    assert reasons_of(transformers_config(name, **fields))[0][: len(reason)] == reason


RANGES = "bidirectional ranges of image tokens are not implemented, got"
BIDIRECTIONAL = "config.text_config.use_bidirectional_attention"


@pytest.mark.parametrize(
    "fields, text, reasons",
    [
        (dict(mm_tokens_per_image=256, image_token_id=9), {},
         [f"config.mm_tokens_per_image: {RANGES} 256 (image_token_id 9)"]),
        (dict(mm_tokens_per_image=256), {}, [f"config.mm_tokens_per_image: {RANGES} 256"]),
        (dict(mm_tokens_per_image=4, image_token_index=0), dict(use_bidirectional_attention=True),
         [f"config.mm_tokens_per_image: {RANGES} 4 (image_token_index 0)",
          f"{BIDIRECTIONAL}: {RANGES} True (image_token_index 0)"]),
        (dict(image_token_id=9), dict(use_bidirectional_attention="vision"),
         [f"{BIDIRECTIONAL}: {RANGES} 'vision' (image_token_id 9)"]),
        ({}, dict(use_bidirectional_attention="vision"), [f"{BIDIRECTIONAL}: {RANGES} 'vision'"]),
        # the image tokens of these models are attended causally, or the model has none
        (dict(image_token_id=9), {}, []),
        (dict(image_token_id=9), dict(use_bidirectional_attention="all"), []),
        (dict(image_token_id=None), dict(use_bidirectional_attention=True), []),
        (dict(mm_tokens_per_image=None), dict(use_bidirectional_attention=None), []),
    ],
    ids=str,
)  # fmt: skip
def test_ranges_of_image_tokens(fields, text, reasons):
    """A config with a text config is refused in any case; the reasons name image tokens that attend each other."""
    found = reasons_of(hf(text_config=hf(**text), **fields))
    assert found[0].startswith("config.text_config: models with several parts are not implemented; pass")
    assert list(found[1:]) == reasons


@pytest.mark.parametrize(
    "name, reason",
    [
        ("Gemma3Config", "config.mm_tokens_per_image: bidirectional ranges of image tokens"),
        ("ShieldGemma2Config", "config.mm_tokens_per_image: bidirectional ranges of image tokens"),
        ("PaliGemmaConfig", f"{BIDIRECTIONAL}: bidirectional ranges of image tokens"),
        ("Llama4Config", None),
        ("Gemma3nConfig", None),
    ],
)
def test_classes_with_images(name, reason):
    found = [each for each in reasons_of(transformers_config(name)) if "image tokens" in each]
    assert len(found) == (reason is not None) and all(each.startswith(reason) for each in found)


@pytest.mark.parametrize("name", ["Gemma3Config", "Gemma3nConfig", "Llama4Config"])
def test_the_text_config_of_a_refused_model_works(name):
    config = transformers_config(name)
    assert len(configs(config.text_config)) == config.text_config.num_hidden_layers
