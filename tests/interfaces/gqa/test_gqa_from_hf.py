"""Tests of the configs that are read from transformers: fields of published models, and refusals by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from reference.interfaces import UnsupportedConfiguration
from reference.interfaces.gqa import AttentionType, GQAConfig, configs_from_hf, encoder_decoder_configs_from_hf
from reference.interfaces.gqa.alibi import mpt_alibi_slopes, standard_alibi_slopes

LLAMA = dict(model_type="llama", hidden_size=256, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=3)
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def hf(**fields):
    """Return an object with the fields of a small Llama config, and with other values of some fields."""
    return SimpleNamespace(**LLAMA | fields)


def configs(config) -> list[GQAConfig]:
    return [GQAConfig(**fields) for fields in configs_from_hf(config)]


def transformers_config(name: str, **fields):
    """Return a config of a class of transformers; skip the test if the installed version has no such class."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)(**fields)


# Published models: the fields that differ from the defaults of the class, and the configs of their first layers.

ONE_LAYER_KIND = [
    # (class, fields, number of layers, config of every layer)
    ("LlamaConfig", dict(hidden_size=4096, num_attention_heads=32, num_hidden_layers=32), 32, GQAConfig(32, 32, 128)),
    ("LlamaConfig", dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32), 32,
     GQAConfig(32, 8, 128)),  # Llama-3-8B
    ("LlamaConfig", dict(hidden_size=2048, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=16,
                         head_dim=64), 16, GQAConfig(32, 8, 64)),  # Llama-3.2-1B
    ("Qwen2Config", dict(hidden_size=3584, num_attention_heads=28, num_key_value_heads=4, num_hidden_layers=28), 28,
     GQAConfig(28, 4, 128)),
    ("Qwen3Config", dict(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, num_hidden_layers=28,
                         head_dim=128), 28, GQAConfig(16, 8, 128)),  # Qwen3-0.6B: the heads are wider than the model
    ("Qwen2MoeConfig", dict(hidden_size=2048, num_attention_heads=16, num_key_value_heads=16), 24,
     GQAConfig(16, 16, 128)),
    ("Qwen3MoeConfig", dict(hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, num_hidden_layers=48,
                            head_dim=128), 48, GQAConfig(32, 4, 128)),
    ("MistralConfig", dict(), 32, GQAConfig(32, 8, 128, sliding_window=4096)),  # Mistral-7B-v0.1
    ("MistralConfig", dict(sliding_window=None), 32, GQAConfig(32, 8, 128)),
    ("MixtralConfig", dict(), 32, GQAConfig(32, 8, 128)),
    ("GemmaConfig", dict(hidden_size=2048, num_attention_heads=8, num_key_value_heads=1, num_hidden_layers=18), 18,
     GQAConfig(8, 1, 256)),
    ("PhiConfig", dict(hidden_size=2560, num_attention_heads=32, num_hidden_layers=32), 32, GQAConfig(32, 32, 80)),
    ("Phi3Config", dict(sliding_window=2047), 32, GQAConfig(32, 32, 96, sliding_window=2047)),
    ("GraniteConfig", dict(hidden_size=2048, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=40,
                           attention_multiplier=0.015625), 40, GQAConfig(32, 8, 64, scale=0.015625)),
    ("OPTConfig", dict(hidden_size=768, num_attention_heads=12, num_hidden_layers=12), 12,
     GQAConfig(12, 12, 64, scale=1.0)),  # OPT scales the queries before the call
    ("GPT2Config", dict(), 12, GQAConfig(12, 12, 64)),
    ("GPT2Config", dict(scale_attn_weights=False), 12, GQAConfig(12, 12, 64, scale=1.0)),
    ("GPTBigCodeConfig", dict(n_embd=2048, n_head=16, n_layer=24), 24, GQAConfig(16, 1, 128)),
    ("FalconConfig", dict(), 32, GQAConfig(71, 1, 64)),  # Falcon-7B
    ("FalconConfig", dict(hidden_size=8192, num_attention_heads=128, num_kv_heads=8, num_hidden_layers=60,
                          new_decoder_architecture=True), 60, GQAConfig(128, 8, 64)),  # Falcon-40B
    ("BertConfig", dict(), 12, GQAConfig(12, 12, 64, attention_type=AttentionType.ENCODER_ONLY)),
    ("BertConfig", dict(is_decoder=True), 12, GQAConfig(12, 12, 64)),
]  # fmt: skip


@pytest.mark.parametrize("name, fields, count, wanted", ONE_LAYER_KIND, ids=[row[0] for row in ONE_LAYER_KIND])
def test_models_with_one_kind_of_layer(name, fields, count, wanted):
    assert configs(transformers_config(name, **fields)) == [wanted] * count


def test_llama4():
    """Three of four layers have attention chunks; the fourth attends all tokens. The text config alone works."""
    found = configs(transformers_config("Llama4TextConfig", num_hidden_layers=8))
    local, full = GQAConfig(40, 8, 128, attention_chunk_size=8192), GQAConfig(40, 8, 128)
    assert found == [local, local, local, full] * 2


def test_gemma2():
    """Gemma-2-9B: every second layer has a window; the scale is 256^-1/2 and the soft cap is 50."""
    config = transformers_config("Gemma2Config", num_attention_heads=16, num_key_value_heads=8, num_hidden_layers=42)
    full = GQAConfig(16, 8, 256, scale=1 / 16, logits_soft_cap=50.0)
    window = GQAConfig(16, 8, 256, scale=1 / 16, logits_soft_cap=50.0, sliding_window=4096)
    assert configs(config) == [window, full] * 21


def test_gemma3():
    """Gemma-3-27B: five of six layers have a window, and the scale is not head_dim^-1/2."""
    config = transformers_config(
        "Gemma3TextConfig", num_attention_heads=32, num_key_value_heads=16, head_dim=128, num_hidden_layers=62,
        query_pre_attn_scalar=168, sliding_window=1024,
    )  # fmt: skip
    full = GQAConfig(32, 16, 128, scale=168**-0.5)
    window = GQAConfig(32, 16, 128, scale=168**-0.5, sliding_window=1024)
    assert configs(config) == ([window] * 5 + [full]) * 10 + [window] * 2


def test_gemma3n():
    """The last layers read the cache of the last layer of their type that has a cache; the scale is 1."""
    config = transformers_config("Gemma3nTextConfig", num_hidden_layers=15, num_kv_shared_layers=6)
    full, window = (GQAConfig(8, 2, 256, scale=1.0, sliding_window=size) for size in (None, 512))
    found = configs(config)
    assert found[:9] == [window] * 4 + [full] + [window] * 4
    shared = ["layers.4.self_attn" if layer == 9 or layer == 14 else "layers.8.self_attn" for layer in range(9, 15)]
    assert [config.kv_sharing_layer for config in found[9:]] == shared
    assert [config.sliding_window for config in found[9:]] == [None, 512, 512, 512, 512, None]
    if (modes := getattr(config, "kv_sharing_modes", None)) is not None:
        assert [mode == "reuse" for mode in modes] == [layer >= 9 for layer in range(15)]
        assert [layer for layer, mode in enumerate(modes) if mode == "store"] == [4, 8]


def test_gpt_oss():
    """Every layer has attention sinks, and every second layer has a window."""
    found = configs(transformers_config("GptOssConfig", num_hidden_layers=24))
    window = GQAConfig(64, 8, 64, sliding_window=128, attention_sinks=True)
    assert found == [window, GQAConfig(64, 8, 64, attention_sinks=True)] * 12


@pytest.mark.parametrize("name", ["Qwen2Config", "Qwen2MoeConfig", "Qwen3Config"])
def test_qwen_windows(name):
    """Qwen's layers have a window from layer `max_window_layers` on, if `use_sliding_window` is on.

    In Qwen2-MoE, the layers with an even index before layer `max_window_layers` have a window.
    """
    fields = dict(hidden_size=1024, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=4, head_dim=128,
                  max_window_layers=3, sliding_window=512)  # fmt: skip
    full, window = GQAConfig(8, 2, 128), GQAConfig(8, 2, 128, sliding_window=512)
    wanted = [window, full, window, full] if name == "Qwen2MoeConfig" else [full, full, full, window]
    assert configs(transformers_config(name, **fields, use_sliding_window=True)) == wanted
    assert configs(transformers_config(name, **fields, use_sliding_window=False)) == [full] * 4


@pytest.mark.parametrize(
    "name, pattern",
    [("Cohere2Config", "SSSF"), ("Olmo3Config", "SSSF"), ("SmolLM3Config", "FFFF"), ("Exaone4Config", "SSSF")],
)
def test_windows_by_layer_types(name, pattern):
    config = transformers_config(name, hidden_size=1024, num_attention_heads=8, num_key_value_heads=2,
                                 num_hidden_layers=4, head_dim=128, sliding_window=64)  # fmt: skip
    windows = {"S": 64, "F": None}
    assert configs(config) == [GQAConfig(8, 2, 128, sliding_window=windows[kind]) for kind in pattern]


def test_gpt2_scales_by_layer():
    found = configs(transformers_config("GPT2Config", scale_attn_by_inverse_layer_idx=True, n_layer=3))
    assert [config.softmax_scale for config in found] == [0.125, 0.125 / 2, 0.125 / 3]


def test_modernbert():
    """A window of an encoder has `sliding_window` tokens on each side of the token, so it is one larger here."""
    config = transformers_config("ModernBertConfig", num_hidden_layers=4)
    full, window = (
        GQAConfig(12, 12, 64, attention_type=AttentionType.ENCODER_ONLY, sliding_window=size) for size in (None, 65)
    )
    assert config.sliding_window == 64 and configs(config) == [full, window, window, full]


def test_heads_that_differ_between_layers():
    config = transformers_config("LagunaConfig", num_hidden_layers=3, num_attention_heads_per_layer=[48, 64, 8])
    assert [each.num_heads for each in configs(config)] == [48, 64, 8]


def test_configs_that_differ_between_layers():
    """The full layers of Gemma 4 have wider heads, which the kernels of this family do not support."""
    config = transformers_config("Gemma4TextConfig", num_hidden_layers=6, global_head_dim=192)
    found = configs(config)
    assert [each.head_dim for each in found] == [256] * 5 + [192] and found[0].softmax_scale == 1.0
    with pytest.raises(UnsupportedConfiguration, match="^config.head_dim: expected one of 32, .*, got 512$"):
        configs_from_hf(transformers_config("Gemma4TextConfig", num_hidden_layers=6))


# ALiBi.


def test_alibi_slopes():
    assert standard_alibi_slopes(8) == tuple(2.0**-power for power in range(1, 9))
    assert standard_alibi_slopes(4) == (2**-2, 2**-4, 2**-6, 2**-8)
    assert standard_alibi_slopes(6) == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)
    assert mpt_alibi_slopes(8) == standard_alibi_slopes(8)
    assert mpt_alibi_slopes(6) == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)
    assert mpt_alibi_slopes(5) == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1)
    assert standard_alibi_slopes(1) == mpt_alibi_slopes(1) == (2**-8,)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 22, 71, 112])
def test_alibi_slopes_are_those_of_transformers(heads):
    pytest.importorskip("transformers")
    import torch
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float64).view(heads, 2).diff()[:, 0]
    mpt = build_mpt_alibi_tensor(heads, 2).view(heads, 2).diff()[:, 0].double()
    for slopes, theirs in ((standard_alibi_slopes(heads), bloom), (mpt_alibi_slopes(heads), mpt)):
        torch.testing.assert_close(torch.tensor(slopes, dtype=torch.float64), theirs, rtol=1e-6, atol=0)


def test_bloom_and_mpt():
    bloom = configs(transformers_config("BloomConfig", hidden_size=1024, n_head=16, n_layer=2))
    assert bloom == [GQAConfig(16, 16, 64, alibi_slopes=standard_alibi_slopes(16))] * 2
    mpt = configs(transformers_config("MptConfig", d_model=768, n_heads=12, n_layers=2))
    assert mpt == [GQAConfig(12, 12, 64, alibi_slopes=mpt_alibi_slopes(12))] * 2
    nested = dict(softmax_scale=0.3, alibi=True, alibi_bias_max=8)
    assert configs(hf(model_type="mpt", num_key_value_heads=None, attn_config=nested))[0].softmax_scale == 0.3


# Encoder-decoder models.


def test_bart():
    config = transformers_config("BartConfig", d_model=768, encoder_layers=6, decoder_layers=4,
                                 encoder_attention_heads=12, decoder_attention_heads=24)  # fmt: skip
    found = encoder_decoder_configs_from_hf(config)
    assert found.encoder == (GQAConfig(12, 12, 64, attention_type=AttentionType.ENCODER),) * 6
    assert found.decoder == (GQAConfig(24, 24, 32),) * 4
    assert found.cross == (GQAConfig(24, 24, 32, attention_type=AttentionType.CROSS),) * 4


def test_whisper():
    """Whisper scales the queries before the call of attention, so the scale is 1."""
    found = encoder_decoder_configs_from_hf(transformers_config("WhisperConfig"))
    for configs_, kind in zip(found, ("encoder", "decoder", "cross"), strict=True):
        assert configs_ == (GQAConfig(6, 6, 64, scale=1.0, attention_type=AttentionType(kind)),) * 4


BART = dict(model_type="bart", d_model=768, encoder_layers=2, decoder_layers=2, encoder_attention_heads=12,
            decoder_attention_heads=12, is_encoder_decoder=True)  # fmt: skip


@pytest.mark.parametrize(
    "changed, error, message",
    [
        (dict(model_type="t5"), UnsupportedConfiguration, "config.model_type: expected one of bart, .*, got 't5'"),
        (dict(model_type=None), TypeError, "config.model_type: expected a str, got NoneType"),
        (dict(encoder_layers=None, d_model=None), UnsupportedConfiguration,
         "config: expected an encoder-decoder model, got 'bart' without d_model, encoder_layers"),
        (dict(is_encoder_decoder=False), UnsupportedConfiguration,
         "config.is_encoder_decoder: expected True, got False"),
        (dict(relative_attention_num_buckets=32), UnsupportedConfiguration,
         "config.relative_attention_num_buckets: relative position biases are not implemented, got 32"),
        (dict(encoder_attention_heads=16), UnsupportedConfiguration,
         "config.d_model / encoder_attention_heads: expected one of 32, 64, .*, got 48"),
        (dict(decoder_attention_heads=0), ValueError, "config.decoder_attention_heads: expected a positive int, got 0"),
        (dict(decoder_layers=True), ValueError, "config.decoder_layers: expected a positive int, got True"),
        (dict(decoder_attention_heads=7), ValueError,
         "config.d_model: expected a multiple of decoder_attention_heads 7, got 768"),
    ],
    ids=str,
)  # fmt: skip
def test_encoder_decoders_refuse(changed, error, message, plain_errors):
    encoder_decoder_configs_from_hf(SimpleNamespace(**BART))
    with pytest.raises(error, match=f"^{message}$"):
        encoder_decoder_configs_from_hf(SimpleNamespace(**BART | changed))


def test_every_reason_of_an_encoder_decoder():
    changed = dict(is_encoder_decoder=False, encoder_attention_heads=16, attention_window=[4])
    with pytest.raises(UnsupportedConfiguration) as error:
        encoder_decoder_configs_from_hf(SimpleNamespace(**BART | changed))
    assert [reason.split(":")[0] for reason in error.value.reasons] == [
        "config.attention_window", "config.is_encoder_decoder", "config.d_model / encoder_attention_heads",
    ]  # fmt: skip
