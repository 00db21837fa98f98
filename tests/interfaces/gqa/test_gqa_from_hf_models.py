"""Tests that the configs read from transformers describe the calls of attention which its models make.

Tiny random models run with an attention function of this module. For every call, it compares the config of the layer
with the arguments: numbers of heads, head dim, scale, soft cap, sinks, and the mask, element by element.
"""

from __future__ import annotations

import pytest
import torch

from reference.interfaces.gqa import (
    AttentionType,
    GQAConfig,
    configs_from_hf,
    encoder_decoder_configs_from_hf,
)

from .test_gqa_from_hf import transformers_config

TOKENS, SHORT = 24, 10  # tokens of a decoder or an encoder; tokens of the decoder of an encoder-decoder model
SMALL = dict(
    vocab_size=64, hidden_size=64, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    intermediate_size=16, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
ALTERNATING = dict(layer_types=["sliding_attention", "full_attention"] * 3)
MULTI_HEAD = dict(num_key_value_heads=None, head_dim=None)  # for models without these fields
MIXED = dict(num_experts=2, num_local_experts=2, num_experts_per_tok=1, moe_intermediate_size=8)
MODELS = [
    # (name of the test, class of the config, fields)
    ("llama", "LlamaConfig", {}),
    ("llama 4", "Llama4TextConfig", dict(attention_chunk_size=7, intermediate_size_mlp=16, **MIXED)),
    ("qwen 2", "Qwen2Config", dict(use_sliding_window=True, max_window_layers=3, sliding_window=5)),
    ("qwen 2, no window", "Qwen2Config", dict(use_sliding_window=False, sliding_window=5)),
    ("qwen 2 moe", "Qwen2MoeConfig", dict(use_sliding_window=True, max_window_layers=3, sliding_window=5,
                                          shared_expert_intermediate_size=8, **MIXED)),
    ("qwen 3", "Qwen3Config", dict(use_sliding_window=True, max_window_layers=3, sliding_window=5)),
    ("qwen 3 moe", "Qwen3MoeConfig", dict(use_sliding_window=True, sliding_window=5, **MIXED)),
    ("mistral", "MistralConfig", dict(sliding_window=1)),
    ("mixtral", "MixtralConfig", dict(sliding_window=5, **MIXED)),
    ("gemma", "GemmaConfig", {}),
    ("gemma 2", "Gemma2Config", dict(sliding_window=5, query_pre_attn_scalar=50, attn_logit_softcapping=3.0)),
    ("gemma 3", "Gemma3TextConfig", dict(sliding_window=5, query_pre_attn_scalar=50)),
    ("gemma 3n", "Gemma3nTextConfig", dict(
        sliding_window=5, num_kv_shared_layers=2, laurel_rank=4, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64, **ALTERNATING)),
    ("phi", "PhiConfig", {}),
    ("phi 3", "Phi3Config", dict(sliding_window=5)),
    ("gpt-oss", "GptOssConfig", dict(sliding_window=5, **ALTERNATING, **MIXED)),
    ("gpt 2", "GPT2Config", dict(scale_attn_by_inverse_layer_idx=True, **MULTI_HEAD)),
    ("opt", "OPTConfig", dict(ffn_dim=16, word_embed_proj_dim=64, **MULTI_HEAD)),
    ("granite", "GraniteConfig", dict(attention_multiplier=0.3)),
    ("cohere 2", "Cohere2Config", dict(sliding_window=5)),
    ("olmo 3", "Olmo3Config", dict(sliding_window=5)),
    ("modernbert decoder", "ModernBertDecoderConfig", dict(local_attention=10, **MULTI_HEAD)),
    ("modernbert", "ModernBertConfig", dict(local_attention=10, **MULTI_HEAD)),
    ("bert", "BertConfig", MULTI_HEAD),
    ("bert as a decoder", "BertConfig", dict(is_decoder=True, **MULTI_HEAD)),
]  # fmt: skip


def wanted_mask(config: GQAConfig, queries: int, keys: int) -> torch.Tensor:
    """Return which keys [queries, keys] each query attends, if the queries are the last tokens of a sequence."""
    row, column = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
    if config.attention_type is AttentionType.CROSS:
        return torch.ones(queries, keys, dtype=torch.bool)
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if config.attention_type is AttentionType.DECODER:
        visible &= column <= row
    if config.sliding_window is not None:
        visible &= (row - column).abs() < config.sliding_window
    if config.attention_chunk_size is not None:
        visible &= row // config.attention_chunk_size == column // config.attention_chunk_size
    return visible


def compared(config_of):
    """Return an attention function of transformers that compares each call with a config, and the list of its calls."""
    called = []

    def attend(module, query, key, value, attention_mask, scaling=None, **options):
        config = config_of(module, query.shape[2], key.shape[2])
        called.append(config)
        assert (query.shape[1], query.shape[3]) == (config.num_heads, config.head_dim)
        assert tuple(key.shape[1::2]) == tuple(value.shape[1::2]) == (config.num_kv_heads, config.head_dim)
        assert scaling == pytest.approx(config.softmax_scale)
        assert options.get("softcap") == config.logits_soft_cap
        assert (options.get("s_aux") is not None) == config.attention_sinks
        if "sliding_window" in options:
            assert options["sliding_window"] == config.sliding_window
        queries, keys = query.shape[2], key.shape[2]
        mask = torch.zeros(1, 1, queries, keys) if attention_mask is None else attention_mask
        assert torch.equal(mask[0, 0] == 0, wanted_mask(config, queries, keys))
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return value.mean(2, keepdim=True).expand(query.shape).transpose(1, 2).contiguous(), None

    return attend, called


def run(config, config_of, **inputs) -> list[GQAConfig]:
    """Run a random model of a config with the attention function `compared`; return the config of each call."""
    import transformers
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    attend, called = compared(config_of)
    transformers.AttentionInterface.register("compared", attend)
    transformers.AttentionMaskInterface.register("compared", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    config._attn_implementation = "compared"
    with torch.no_grad():
        transformers.AutoModel.from_config(config).eval()(**inputs)
    return called


@pytest.mark.parametrize("name, kind, fields", MODELS, ids=[name for name, *_ in MODELS])
def test_calls_of_a_model(name, kind, fields):
    torch.manual_seed(0)
    config = transformers_config(kind, **SMALL | fields)
    wanted = [GQAConfig(**each) for each in configs_from_hf(config)]
    ids = torch.randint(3, 64, (1, TOKENS))
    called = run(config, lambda module, *_: wanted[module.layer_idx], input_ids=ids)
    assert called == wanted and len(wanted) == 6


@pytest.mark.parametrize("kind", ["BartConfig", "MBartConfig", "MarianConfig", "PegasusConfig", "WhisperConfig"])
def test_calls_of_an_encoder_decoder(kind):
    torch.manual_seed(0)
    config = transformers_config(
        kind, vocab_size=64, d_model=64, encoder_layers=2, decoder_layers=3, encoder_attention_heads=1,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, num_mel_bins=4, max_source_positions=TOKENS,
    )  # fmt: skip
    wanted = encoder_decoder_configs_from_hf(config)

    def config_of(module, queries, keys):
        return getattr(wanted, {(TOKENS, TOKENS): "encoder", (SHORT, SHORT): "decoder"}.get((queries, keys), "cross"))[
            0
        ]

    inputs = dict(input_ids=torch.randint(3, 64, (1, TOKENS)))
    if kind == "WhisperConfig":
        inputs = dict(input_features=torch.randn(1, 4, 2 * TOKENS))
    called = run(config, config_of, **inputs, decoder_input_ids=torch.randint(3, 64, (1, SHORT)))
    kinds = [each.attention_type.value for each in called]
    assert kinds == ["encoder"] * 2 + ["decoder", "cross"] * 3
