"""Tests of `reference.interfaces`: configurations, presets, formulas for sizes, the softmax scale, checks.

`from_hf` makes an `MLAConfig` from a config of transformers. P is the head dim without rope, and R is the rope dim.
"Pitfall 14" is entry 14 of the list in tests/__init__.py.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from jaxtyping import TypeCheckError

import reference
from fast.mla.cache_write import WrittenTokens
from reference.interfaces import (
    PRESETS,
    CommonAttentionMetadata,
    MLAConfig,
    RopeConfig,
    UnsupportedConfiguration,
    YarnConfig,
    check_blocks,
    check_lengths,
    check_offsets,
    check_slots,
    check_tensor,
)
from reference.interfaces.gqa import Descales
from reference.interfaces.layer_results import ProjectedTokens

from ..support.factories import CONFIGS, integers, preset, softmax_scale
from ..support.properties import given, st

DEEPSEEK = dict(
    model_type="deepseek_v3", hidden_size=64, num_attention_heads=4, q_lora_rank=24, kv_lora_rank=32,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, rope_interleave=True, max_position_embeddings=4096,
)  # fmt: skip
YARN_HF = dict(rope_type="yarn", rope_theta=10000.0, factor=40.0, original_max_position_embeddings=4096, mscale=1.0,
               mscale_all_dim=1.0, beta_fast=32, beta_slow=1)  # fmt: skip


def hf(**fields):
    return SimpleNamespace(**(DEEPSEEK | fields))


def check_scale_law(config: MLAConfig):
    """Assert that the softmax scale is (P + R)^-1/2, multiplied by m(f, mscale_all_dim)^2 with YaRN (pitfall 14).

    f is YaRN's factor, and m(f, s) = 0.1 s ln(f) + 1.
    """
    assert math.isclose(config.softmax_scale, softmax_scale(config), rel_tol=1e-12)
    assert not math.isclose(config.softmax_scale, config.head_size**-0.5, rel_tol=1e-3)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_scale_law(config):
    """The softmax scale of every test config follows from its dims and its rope (pitfall 14)."""
    check_scale_law(config)


@pytest.mark.parametrize("mscale", [None, 0.707, 1.0])
@pytest.mark.parametrize("mscale_all_dim", [None, 0.707, 1.0])
def test_yarn_scales(mscale, mscale_all_dim):
    """YaRN multiplies cos and sin, and the softmax scale, by functions of m(f, s) = 0.1 s ln(f) + 1 (pitfall 14).

    - cos and sin are multiplied by m(f, mscale) / m(f, mscale_all_dim) if both are given, else by m(f, 1).
    - The softmax scale is multiplied by m(f, mscale_all_dim)^2 if mscale_all_dim is given, else by 1.
    """
    yarn = YarnConfig(40.0, 4096, mscale=mscale, mscale_all_dim=mscale_all_dim)
    config = MLAConfig(64, 4, None, 32, 16, 8, 12, rope=RopeConfig(yarn=yarn))
    log = math.log(40.0)
    both = mscale is not None and mscale_all_dim is not None
    ratio = (0.1 * mscale * log + 1) / (0.1 * mscale_all_dim * log + 1) if both else 0.1 * log + 1
    assert math.isclose(yarn.cos_sin_scale, ratio, rel_tol=1e-14)
    squared = (0.1 * mscale_all_dim * log + 1) ** 2 if mscale_all_dim is not None else 1.0
    assert math.isclose(config.softmax_scale, squared / math.sqrt(24), rel_tol=1e-14)
    check_scale_law(config)


def test_yarn_scale_below_one():
    assert YarnConfig(1.0, 4096, mscale=2.0).cos_sin_scale == 1.0


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    config = preset(name)
    assert config.head_size == config.kv_lora_rank + config.qk_rope_head_dim
    assert config.qk_head_dim == config.qk_nope_head_dim + config.qk_rope_head_dim
    with pytest.raises(ValueError, match="^name: expected one of .*, got llama$"):
        MLAConfig.from_preset("llama")


# preset: theta, YaRN's factor, beta_fast and mscale (= mscale_all_dim) of its config.json, and its softmax scale
PUBLISHED_SCALES = {
    "deepseek-v2-lite": (1e4, 40, 32, 0.707, 0.114721),
    "deepseek-v2": (1e4, 40, 32, 0.707, 0.114721),
    "deepseek-v3": (1e4, 40, 32, 1.0, 0.135234),
    "kimi-k2": (5e4, 32, 1, 1.0, 0.130861),
    "moonlight": (5e4, None, None, None, 0.072169),
    "glm-5": (1e6, None, None, None, 0.0625),
    "longcat-flash": (1e7, None, None, None, 0.072169),
}


@pytest.mark.parametrize("name", PUBLISHED_SCALES)
def test_presets_have_the_published_rope(name):
    """The rope and the softmax scale of a preset equal what `from_hf` computes from its published config.json."""
    theta, factor, beta_fast, mscale, scale = PUBLISHED_SCALES[name]
    yarn = dict(rope_type="yarn", factor=factor, beta_fast=beta_fast, beta_slow=1, mscale=mscale, mscale_all_dim=mscale,
                original_max_position_embeddings=4096)  # fmt: skip
    fields = dict(MLAConfig.from_preset(name).__dict__) | dict(rope_parameters=yarn if factor else {}, rope_theta=theta)
    published = MLAConfig.from_hf(SimpleNamespace(**DEEPSEEK | fields | dict(num_attention_heads=fields["num_heads"])))
    config = MLAConfig.from_preset(name)
    assert config.softmax_scale == pytest.approx(scale, abs=5e-7)
    assert config.rope.theta == theta and config.rope.interleaved
    assert config == published


def test_fields_replace_those_of_a_preset():
    rope = RopeConfig(theta=123.0)
    config = MLAConfig.from_preset("deepseek-v3", latent_norm_eps=1e-5, num_heads=16, rope=rope, softmax_scale=0.1)
    assert (config.latent_norm_eps, config.num_heads, config.rope, config.softmax_scale) == (1e-5, 16, rope, 0.1)


def test_a_preset_without_its_rope_is_refused(plain_errors):
    """The preset of MiniCPM3 needs the argument `rope`: its kind of rope, LongRoPE, is not implemented."""
    with pytest.raises(UnsupportedConfiguration, match="^rope: expected a RopeConfig for 'minicpm3', whose LongRoPE "):
        MLAConfig.from_preset("minicpm3")
    rope = RopeConfig(interleaved=False)
    assert MLAConfig.from_preset("minicpm3", rope=rope).rope == rope
    with pytest.raises(TypeError, match="^rope: expected a RopeConfig, got NoneType$"):
        MLAConfig.from_preset("deepseek-v3", rope=None)
    assert MLAConfig(**PRESETS["minicpm3"]).kv_lora_rank == 256
    assert set(PRESETS) == {*PUBLISHED_SCALES, "minicpm3"}


def test_a_computed_scale_is_computed_anew():
    """Replace dims or the rope of a config without a given softmax scale -> the new config computes its own scale."""
    config = MLAConfig.from_preset("deepseek-v3")
    for changes in (dict(qk_nope_head_dim=64), dict(rope=RopeConfig()), dict(qk_nope_head_dim=192, v_head_dim=256)):
        changed = dataclasses.replace(config, **changes)
        assert changed.softmax_scale == pytest.approx(softmax_scale(changed), rel=1e-12) != config.softmax_scale
    assert dataclasses.replace(config, num_heads=8).softmax_scale == config.softmax_scale
    assert config.given_softmax_scale is None and MLAConfig(**vars(config)) == config


def test_a_given_scale_is_kept():
    """`replace`, copies and pickles keep a given softmax scale, unless `replace` gets another scale or None."""
    config = MLAConfig(64, 4, None, 32, 16, 8, 12, softmax_scale=0.1)
    assert config.softmax_scale == config.given_softmax_scale == 0.1
    smaller = dataclasses.replace(config, num_heads=2, qk_nope_head_dim=8, rope=RopeConfig(yarn=YarnConfig(4.0, 64)))
    assert smaller.softmax_scale == 0.1
    for same in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)), eval(repr(config))):
        assert same == config and hash(same) == hash(config) and same.softmax_scale == 0.1
    assert dataclasses.replace(config, softmax_scale=0.2).softmax_scale == 0.2
    computed = dataclasses.replace(config, softmax_scale=None)
    assert computed == MLAConfig(64, 4, None, 32, 16, 8, 12) != config and computed.softmax_scale == 24**-0.5
    kept = dataclasses.replace(computed, softmax_scale=computed.softmax_scale, qk_nope_head_dim=8)
    assert kept.softmax_scale == 24**-0.5  # the scale was given, so the smaller head dim does not change it
    assert type(MLAConfig(64, 4, None, 32, 16, 8, 12, softmax_scale=1).softmax_scale) is float
    parameter = inspect.signature(MLAConfig).parameters["softmax_scale"]
    assert parameter.default is None and "given_softmax_scale" not in inspect.signature(MLAConfig).parameters


@pytest.mark.parametrize("scale", [True, math.nan, math.inf, -math.inf, "0.1", 10**400, 1j, torch.tensor(0.1)])
def test_a_scale_that_is_no_finite_number_is_refused(scale, plain_errors):
    with pytest.raises(ValueError, match="^softmax_scale: expected a finite number or None, got ") as error:
        MLAConfig(64, 4, None, 32, 16, 8, 12, softmax_scale=scale)
    assert "\n" not in str(error.value) and len(str(error.value)) < 130


# preset: hidden size, heads, query latent, key/value latent, P, R and value dim of its published config.json
PUBLISHED = {
    "deepseek-v2-lite": [2048, 16, None, 512, 128, 64, 128],
    "deepseek-v2": [5120, 128, 1536, 512, 128, 64, 128],
    "deepseek-v3": [7168, 128, 1536, 512, 128, 64, 128],
    "kimi-k2": [7168, 64, 1536, 512, 128, 64, 128],
    "moonlight": [2048, 16, None, 512, 128, 64, 128],
    "minicpm3": [2560, 40, 768, 256, 64, 32, 64],
    "glm-5": [6144, 64, 2048, 512, 192, 64, 256],
    "longcat-flash": [6144, 64, 1536, 512, 128, 64, 128],
}


def test_presets_are_the_published_dims():
    assert {name: list(dims.values()) for name, dims in PRESETS.items()} == PUBLISHED


def test_presets_against_transformers():
    """The dims of the preset deepseek-v3 equal the defaults of `DeepseekV3Config` in transformers."""
    transformers = pytest.importorskip("transformers")
    v3 = transformers.DeepseekV3Config()
    names = ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
             "qk_rope_head_dim", "v_head_dim")  # fmt: skip
    assert [getattr(v3, name) for name in names] == PUBLISHED["deepseek-v3"]


def test_presets_against_published_layouts():
    """A cache entry of MiniCPM3 has 288 elements, and a cache entry of every other preset has 576 elements."""
    for name in ("deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "kimi-k2", "moonlight", "glm-5", "longcat-flash"):
        assert MLAConfig.from_preset(name).head_size == 576
    assert preset("minicpm3").head_size == 288


def test_contract_is_frozen():
    config = CONFIGS["direct"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_heads = 5
    state = reference.AttentionState(torch.zeros(1, 2, 3), torch.zeros(2, 1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.out = state.out


def test_shapes_of_results_are_checked():
    """Make a result of a layer with shapes that contradict each other -> the type check of the tests fails."""
    results = [
        (ProjectedTokens, [(2, 3, 4), (2, 5), (2, 6)], (3, 6)),
        (WrittenTokens, [(2, 3, 4), (2, 5), (2, 4)], (3, 4)),
        (Descales, [(2, 3), (2, 3), (2, 3)], (2, 4)),
    ]
    for make, shapes, wrong in results:
        tensors = [torch.zeros(shape) for shape in shapes]
        assert [tuple(x.shape) for x in make(*tensors)] == shapes
        with pytest.raises(TypeCheckError):
            make(*tensors[:-1], torch.zeros(wrong))


@pytest.mark.parametrize(
    "field, value",
    [("hidden_size", 0), ("num_heads", -1), ("kv_lora_rank", 0), ("qk_nope_head_dim", 0), ("v_head_dim", 0),
     ("q_lora_rank", 0), ("qk_rope_head_dim", 3), ("qk_rope_head_dim", -2)],
)  # fmt: skip
def test_config_refuses(field, value, plain_errors):
    with pytest.raises(ValueError, match=f"^{field}: expected .*, got {value}$"):
        dataclasses.replace(CONFIGS["direct"], **{field: value})


def test_from_hf_reads_every_field():
    config = MLAConfig.from_hf(hf(rope_parameters=YARN_HF))
    assert config == MLAConfig(
        64, 4, 24, 32, 16, 8, 12, 1e-6, RopeConfig(10000.0, True, YarnConfig(40.0, 4096, 32.0, 1.0, 1.0, 1.0))
    )
    old_names = dict(type="yarn", factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
    assert MLAConfig.from_hf(hf(rope_scaling=old_names, rope_theta=10000.0)) == config
    plain = MLAConfig.from_hf(hf(rope_interleave=False, q_lora_rank=None, rope_theta=5e4))
    assert plain.rope == RopeConfig(5e4, False, None) and plain.q_lora_rank is None


def test_from_hf_deepseek_classes():
    """For DeepSeek-V2, `from_hf` gives interleaved rope; for DeepSeek-V3, it reads `rope_interleave` (pitfall 15)."""
    transformers = pytest.importorskip("transformers")
    small = dict(hidden_size=64, num_attention_heads=4, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16,
                 qk_rope_head_dim=8, v_head_dim=12, num_hidden_layers=1)  # fmt: skip
    assert MLAConfig.from_hf(transformers.DeepseekV2Config(**small)).rope.interleaved is True
    for interleaved in (True, False):
        config = MLAConfig.from_hf(transformers.DeepseekV3Config(**small, rope_interleave=interleaved))
        assert config.rope.interleaved is interleaved
        assert (config.num_heads, config.kv_lora_rank, config.v_head_dim) == (4, 32, 12)


@pytest.mark.parametrize(
    "fields, reasons",
    [
        (dict(kv_lora_rank=None), ["config: expected a Multi-head Latent Attention model, got 'deepseek_v3'"]),
        (dict(mla_scale_q_lora=2.0), ["config.mla_scale_q_lora"]),
        (dict(index_topk=2048, mla_scale_kv_lora=True), ["config.mla_scale_kv_lora", "config.index_topk"]),
        (dict(rope_parameters=dict(rope_type="llama3")), ["config.rope_parameters: rope type 'llama3'"]),
        (
            dict(rope_parameters=YARN_HF | dict(attention_factor=1.0)),
            ["config.rope_parameters: an explicit attention_f"],
        ),
        (dict(rope_parameters=YARN_HF | dict(truncate=False)), ["config.rope_parameters: truncate=False"]),
        (
            dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5)),
            ["config.rope_parameters: a partial"],
        ),
        (dict(rope_interleave=None), ["config.rope_interleave"]),
        (dict(index_topk=8, rope_parameters=dict(rope_type="su")), ["config.index_topk", "config.rope_parameters"]),
    ],
)
def test_from_hf_refuses_with_every_reason(fields, reasons):
    with pytest.raises(UnsupportedConfiguration) as error:
        MLAConfig.from_hf(hf(**fields))
    assert len(error.value.reasons) == len(reasons)
    for reason, wanted in zip(error.value.reasons, reasons, strict=True):
        assert reason.startswith(wanted)
    assert "\n" not in str(error.value)


OTHER_ATTENTION = [
    dict(sliding_window=4096),
    dict(sliding_window=4096, use_sliding_window=True),
    dict(layer_types=["full_attention", "sliding_attention"]),
    dict(layer_types=["chunked_attention"] * 61),
    dict(layer_types=["full_attention", "linear_attention"]),
    dict(layer_types=["indexed_attention"]),
    dict(attention_chunk_size=8192),
    dict(attn_logit_softcapping=50.0),
    dict(alibi=True),
    dict(use_alibi=True),
    dict(position_embedding_type="alibi"),
    dict(position_embedding_type="relative_key"),
    dict(num_kv_shared_layers=2),
    dict(kv_source_layers=[0, 0, 2]),
    dict(is_causal=False),
    dict(use_bidirectional_attention=True),
    dict(is_encoder_decoder=True),
    dict(add_cross_attention=True),
    dict(cross_attention_layers=[3, 8]),
    dict(no_rope_layers=[1, 1, 1, 0]),
    dict(mla_use_nope=True),
    dict(use_qk_norm=True),
    dict(clip_qkv=8.0),
    dict(query_pre_attn_scalar=256),
    dict(attention_multiplier=0.015625),
    dict(attn_temperature_tuning=True),
    dict(attn_output_gate=True),
    dict(attn_logit_softcap=50.0),
    dict(logits_soft_cap=30.0),
    dict(use_cla=True),
    dict(cla_share_factor=2),
    dict(is_encoder=True),
    dict(causal=0),
    dict(alibi_bias_max=8),
    dict(add_swa_attention_sink_bias=True),
]
SWITCHED_OFF = [
    dict(sliding_window=4096, use_sliding_window=False),
    dict(sliding_window=None, use_sliding_window=True),
    dict(layer_types=["full_attention"] * 61),
    dict(layer_types=None),
    dict(attention_chunk_size=None, attn_logit_softcapping=None, attn_temperature_tuning=False, clip_qkv=None),
    dict(alibi=False, use_alibi=None, position_embedding_type="rope"),
    dict(num_kv_shared_layers=0, kv_source_layers=[0, 1, 2]),
    dict(is_causal=True, use_bidirectional_attention=False),
    dict(is_encoder_decoder=False, is_decoder=False, add_cross_attention=False, cross_attention_layers=[]),
    dict(use_cla=False, cla_share_factor=2, is_encoder=False, causal=1, partial_rotary_factor=1.0),
    dict(attn_config={"alibi": False, "alibi_bias_max": 8, "softmax_scale": None}),
    dict(no_rope_layers=[1, 1], use_qk_norm=False, attention_bias=True, final_logit_softcapping=30.0),
]


@pytest.mark.parametrize("fields", OTHER_ATTENTION, ids=lambda fields: ", ".join(fields))
def test_from_hf_refuses_other_attention(fields):
    """A config with a kind of attention that is not implemented is refused; the reason names the config's field."""
    with pytest.raises(UnsupportedConfiguration) as error:
        MLAConfig.from_hf(hf(**fields))
    (reason,) = error.value.reasons
    asked = next(iter(fields))
    assert reason.startswith(f"config.{asked}: ") and " implemented, got " in reason
    assert "\n" not in reason and len(reason) < 150


def test_from_hf_refuses_with_all_reasons_at_once():
    together = {name: value for fields in OTHER_ATTENTION for name, value in fields.items()}
    with pytest.raises(UnsupportedConfiguration) as error:
        MLAConfig.from_hf(hf(**together, rope_parameters=dict(rope_type="su"), index_topk=8))
    named = {reason.split(":")[0] for reason in error.value.reasons}
    wanted = set(together) - {"use_sliding_window"} | {"rope_parameters", "index_topk"}
    assert named == {f"config.{name}" for name in wanted} and len(error.value.reasons) == len(named)


@pytest.mark.parametrize("fields", SWITCHED_OFF, ids=lambda fields: ", ".join(fields))
def test_from_hf_accepts_what_is_switched_off(fields):
    assert MLAConfig.from_hf(hf(**fields)) == MLAConfig.from_hf(hf())


@pytest.mark.parametrize(
    "fields, reason",
    [
        (dict(layer_types=5), "config.layer_types: expected a list or None, got 5"),
        (dict(layer_types=[["full_attention"]]), "config.layer_types: only 'full_attention' is implemented, got "),
        (dict(no_rope_layers=5), "config.no_rope_layers: expected a list or None, got 5"),
        (dict(kv_source_layers="012"), "config.kv_source_layers: expected a list or None, got '012'"),
        (dict(rope_parameters=5), "config.rope_parameters: expected a dict or None, got 5"),
        (dict(rope_scaling="yarn"), "config.rope_scaling: expected a dict or None, got 'yarn'"),
        (dict(rope_theta="x"), "config.rope_theta: expected a finite number, got 'x'"),
        (dict(rope_theta=0.5), "config.rope_theta: expected a number above 1, got 0.5"),
        (dict(rope_parameters=YARN_HF | dict(factor="40")), "config.rope_parameters['factor']: expected a finite num"),
        (dict(rope_parameters=YARN_HF | dict(factor=-1.0)), "config.rope_parameters: factor: expected a number above"),
        (dict(rope_parameters=YARN_HF | dict(beta_fast=True)), "config.rope_parameters['beta_fast']: expected a fini"),
        (dict(rope_interleave="yes"), "config.rope_interleave: expected True or False, got 'yes'"),
        (dict(partial_rotary_factor=0.5), "config.rope_parameters: a partial_rotary_factor is not implemented, got 0."),
        (dict(sliding_window=torch.zeros(2)), "config.sliding_window: sliding windows are not implemented, got tens"),
        (dict(is_causal=0), "config.is_causal: attention that is not causal is not implemented, got 0"),
        (dict(attn_config=5), "config.attn_config: expected a dict or None, got 5"),
        (
            dict(attn_config={"layer_types": ["sliding"]}),
            "config.attn_config.layer_types: only 'full_attention' is impl",
        ),
        (dict(rope_theta=0), "config.rope_theta: expected a number above 1, got 0"),
        (dict(rope_parameters=YARN_HF | dict(factor=0)), "config.rope_parameters: factor: expected a number above 0"),
        (dict(rope_scaling=YARN_HF | dict(factor="4")), "config.rope_scaling['factor']: expected a finite number"),
        (dict(attn_config={"alibi": True}), "config.attn_config.alibi: ALiBi is not implemented, got True"),
        (dict(attn_config={"clip_qkv": 8}), "config.attn_config.clip_qkv: clipping of queries, keys and values is not"),
    ],
    ids=str,
)
def test_from_hf_refuses_a_malformed_field_by_name(fields, reason, plain_errors):
    """The error for a malformed field names the field."""
    with pytest.raises(UnsupportedConfiguration) as error:
        MLAConfig.from_hf(hf(**fields))
    assert [got[: len(reason)] for got in error.value.reasons] == [reason]


@pytest.mark.parametrize("field", ["hidden_size", "kv_lora_rank", "qk_rope_head_dim", "q_lora_rank"])
def test_from_hf_refuses_a_malformed_dim_by_name(field, plain_errors):
    for value in ("64", 3.5, -2, True):
        with pytest.raises(ValueError, match=f"^config.{field}: expected .*, got {value}$"):
            MLAConfig.from_hf(hf(**{field: value}))
    with pytest.raises(TypeError, match="^config.model_type: expected a str, got int$"):
        MLAConfig.from_hf(hf(model_type=5))


def test_from_hf_refuses_rope_by_layer_type():
    """A config with one rope for each layer type, or with the field `llama_4_scaling_beta`, is refused."""
    for parameters in (dict(full_attention=YARN_HF), YARN_HF | dict(llama_4_scaling_beta=0.1)):
        with pytest.raises(UnsupportedConfiguration, match="^config.rope_parameters: (rope param|llama_4_scaling)"):
            MLAConfig.from_hf(hf(rope_parameters=parameters))


def test_from_hf_takes_stock_configs():
    """Default configs of transformers are accepted, and a config in which a user set a sliding window is refused."""
    transformers = pytest.importorskip("transformers")
    for kind in (transformers.DeepseekV2Config, transformers.DeepseekV3Config):
        stock = kind()
        assert MLAConfig.from_hf(stock).num_heads == stock.num_attention_heads
        assert MLAConfig.from_hf(kind(**kind().to_dict())) == MLAConfig.from_hf(stock)
        with pytest.raises(UnsupportedConfiguration, match="^config.sliding_window: sliding windows are not impl"):
            MLAConfig.from_hf(kind(sliding_window=128))


@given(
    st.integers(1, 300_000), st.integers(1, 600), st.sampled_from([1, 16, 64, 100, 128]),
    st.sampled_from([(1, 1), (1, 7), (3, 1), (8, 64)]),
)  # fmt: skip
def test_workspace_size(max_model_len, max_num_seqs, block_size, ranks):
    """The size of a workspace is a multiple of a unit of tokens, and at least one unit for each sequence.

    On a single rank, the unit is the block size. On D ranks that share sequences, with interleave I, the unit is the
    least common multiple of the block size and D x I. The workspace is at least as large as in vLLM, unless one more
    unit would exceed vLLM's limit of 65536 tokens.
    """
    size = reference.chunked_prefill_workspace_size(max_model_len, max_num_seqs, block_size, *ranks)
    wanted = sorted((max_model_len * 8, max_num_seqs * block_size * 4))[1]
    unit = next(n for n in range(block_size, 10**9, block_size) if ranks[0] == 1 or n % (ranks[0] * ranks[1]) == 0)
    floor = max_num_seqs * unit
    assert size % unit == 0 and size >= floor
    assert size >= wanted or size + unit > 65536
    assert size == floor or (size - unit < wanted and size <= 65536)


def test_cache_shape():
    assert reference.kv_cache_shape(7, 64, 576) == (7, 64, 576)
    assert reference.kv_cache_shape(0, 64, 576) == (0, 64, 576)
    for arguments, name in (((-1, 64, 576), "num_blocks"), ((1, 0, 576), "block_size"), ((1, 64, 0), "head_size")):
        with pytest.raises(ValueError, match=f"^{name}: expected .*, got (-1|0)$"):
            reference.kv_cache_shape(*arguments)
    for arguments in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="expected a positive int, got 0$"):
            reference.chunked_prefill_workspace_size(*arguments)


def test_layouts():
    """For both layouts, the stride order lists the axes of the cache, from the largest to the smallest stride."""
    assert reference.kv_cache_shape(5, 4, 24, 3) == (3, 5, 4, 24)
    assert reference.stride_order() == reference.stride_order(layout="blocks_first") == (0, 1, 2)
    assert reference.stride_order(True) == (0, 1, 2, 3) and reference.stride_order(True, "blocks_first") == (1, 0, 2, 3)
    with pytest.raises(ValueError, match="^layout: expected one of layers_first, blocks_first, got NHD$"):
        reference.stride_order(True, "NHD")
    with pytest.raises(ValueError, match="^num_layers: expected a positive int or None, got 0$"):
        reference.kv_cache_shape(5, 4, 24, 0)


def test_global_hyperparameters():
    """All layers must have the same dims and softmax scale.

    The error names the layer that differs, the field and both values.
    """
    same = {f"layers.{n}": MLAConfig.from_preset("deepseek-v3") for n in range(3)}
    found = reference.infer_global_hyperparameters(same)
    assert (found.num_heads, found.kv_lora_rank, found.softmax_scale) == (128, 512, pytest.approx(0.135234, abs=1e-6))
    assert reference.infer_global_hyperparameters({"a": SimpleNamespace(config=same["layers.0"])}) == found
    for field, value in (("num_heads", 64), ("kv_lora_rank", 256), ("qk_nope_head_dim", 64), ("qk_rope_head_dim", 32),
                         ("v_head_dim", 64)):  # fmt: skip
        layers = same | {"layers.1": MLAConfig.from_preset("deepseek-v3", **{field: value})}
        wanted = (
            f"^layers: expected {field} {getattr(found, field)} of 'layers.0' in all layers, got {value} at 'layers.1'$"
        )
        with pytest.raises(ValueError, match=wanted):
            reference.infer_global_hyperparameters(layers)
    for other in (dict(rope=RopeConfig()), dict(softmax_scale=0.0722)):
        wanted = "^layers: expected softmax_scale 0.135.* of 'layers.0' in all layers, got 0.072.* at 'x'$"
        with pytest.raises(ValueError, match=wanted):
            reference.infer_global_hyperparameters(same | {"x": MLAConfig.from_preset("deepseek-v3", **other)})
    with pytest.raises(ValueError, match="^layers: expected at least one layer, got none$"):
        reference.infer_global_hyperparameters({})
    wanted = "^layers: expected an MLAConfig or GQAConfig, or a layer with a config, at 'y', got int$"
    with pytest.raises(ValueError, match=wanted):
        reference.infer_global_hyperparameters({"y": 3})


def test_make_derives_the_rest():
    common = CommonAttentionMetadata.make(
        integers(0, 3, 3, 7),
        integers(5, 0, 4),
        torch.zeros(3, 2, dtype=torch.int32),
        torch.tensor([0, 1, 2, 3, 4, 5, 6, -1, -1]),
    )
    assert (common.num_reqs, common.max_query_len, common.num_actual_tokens) == (3, 4, 7)
    assert common.num_computed_tokens_cpu.tolist() == [2, 0, 0]
    empty = CommonAttentionMetadata.make(integers(0), integers(), torch.zeros(0, 1, dtype=torch.int32), torch.arange(0))
    assert (empty.num_reqs, empty.max_query_len, empty.num_actual_tokens) == (0, 0, 0)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: check_offsets("o", integers(1, 2)), "o: expected a first element of 0, got 1"),
        (lambda: check_offsets("o", integers()), "o: expected a first element of 0, got no element"),
        (
            lambda: check_offsets("o", integers(0, 3, 2)),
            "o: expected values that never decrease, got 3 then 2 at request 1",
        ),
        (lambda: check_offsets("o", integers(0, 3), 4), "o: expected a last element of 4, got 3"),
        (
            lambda: check_lengths(integers(0, 2), integers(1)),
            "seq_lens: expected at least the query length 2, got 1 at request 0",
        ),
        (lambda: check_lengths(integers(0, 0), integers(-1)), "seq_lens: expected lengths >= 0, got -1 at request 0"),
        (lambda: check_slots(torch.tensor([0, -2]), 4), "slot_mapping: expected slots in [-1, 4), got -2"),
        (lambda: check_slots(torch.tensor([0, 4]), 4), "slot_mapping: expected slots in [-1, 4), got 4"),
        (
            lambda: check_blocks(integers(0, 9).view(1, 2), [5], 4, 3),
            "block_table: expected blocks in [0, 3) at request 0, got 9",
        ),
        (
            lambda: check_blocks(integers(0).view(1, 1), [5], 4, 3),
            "block_table: expected at least 2 columns for request 0, got 1",
        ),
        (lambda: check_tensor("x", torch.zeros(2), (3,)), "x: expected shape [3], got [2]"),
        (lambda: check_tensor("x", torch.zeros(2, 2), ("T",)), "x: expected shape [T], got [2, 2]"),
        (
            lambda: check_tensor("x", torch.zeros(2), ("T",), (torch.int32,)),
            "x: expected dtype torch.int32, got torch.float32",
        ),
        (
            lambda: check_tensor("x", torch.zeros(2, device="meta"), ("T",), device=torch.device("cpu")),
            "x: expected device cpu, got meta",
        ),
    ],
)
def test_checks_say_it_in_one_line(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


def test_check_tensor_wants_a_tensor(plain_errors):
    with pytest.raises(TypeError, match="^x: expected a tensor, got list$"):
        check_tensor("x", [1.0], ("T",))


def test_checks_pass_good_values():
    """The checks accept length 0 (a padding row), slot -1, and any number in the block table behind the last block."""
    check_lengths(integers(0, 3, 3), integers(0, 7))
    check_blocks(integers(2, 2147480000).view(1, 2), [4], 4, 3)
    check_slots(torch.tensor([-1, 0, 3]), 4)
    check_slots(torch.tensor([], dtype=torch.int64), 4)
