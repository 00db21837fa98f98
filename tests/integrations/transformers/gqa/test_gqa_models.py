"""Tests of `use_attention` for every kind of model: tokens and logits of a stock model, packed batches, `restore`.

`use_attention` makes a model of transformers compute grouped-query attention with `reference` or `fast`. A stock model
is a model without `use_attention`.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

pytest.importorskip("transformers", reason="the integration runs transformers models")
import transformers
from transformers.cache_utils import DynamicCache

import fast
from fast.integrations.transformers import calibrate_model, gqa_layers, restore, use_attention
from reference.interfaces import FP8_E4M3, CommonAttentionMetadata, save_kv_scales, to_e4m3
from reference.interfaces.gqa import AttentionType, group_layers

from ....support.factories import positions_of
from ....support.gqa_models import (
    BLOCK,
    CHANGES,
    CONFIGS,
    GREEDY,
    HEAD_DIM,
    PROMPT,
    assert_same,
    attributes,
    build,
    call_of,
    inputs_of,
    random_ids,
    served,
    stock,
    stock_tokens,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("plain_errors")  # run-time checks of annotations would make the tests much slower


@pytest.mark.parametrize("kind", CONFIGS)
def test_generate_gives_the_same_tokens(kind, ops):
    assert torch.equal(tokens_of(served(kind, ops), kind, **inputs_of(kind), **GREEDY), stock_tokens(kind))


@pytest.mark.parametrize(
    ("kind", "changes"), [(kind, changes) for kind, several in CHANGES.items() for changes in several]
)
def test_the_tokens_depend_on_the_attention(kind, changes):
    """Change the window, the soft cap or the attention chunk of a stock model a little -> it generates other tokens.

    So `test_generate_gives_the_same_tokens` fails if one of these numbers is wrong.
    """
    changed = build(kind, **changes)
    assert not torch.equal(tokens_of(changed, kind, **inputs_of(kind), **GREEDY), stock_tokens(kind))


def test_the_tokens_depend_on_sinks():
    without = copy.deepcopy(stock("gpt_oss"))
    for layer in without.model.layers:
        torch.nn.init.constant_(layer.self_attn.sinks, -1e4)
    assert not torch.equal(tokens_of(without, "gpt_oss", **inputs_of("gpt_oss"), **GREEDY), stock_tokens("gpt_oss"))


@pytest.mark.parametrize("kind", ["gemma2", "gemma3n", "gpt_oss", "llama4"])
def test_logits(kind, ops):
    """Run a prefill with padding, one token, and three tokens -> the logits differ from float64 as those of stock.

    Gemma 2 gets no padding, because its attention in transformers returns NaN for padding in float64.
    """
    inputs = inputs_of(kind, padded=kind != "gemma2")
    new = random_ids(2, 4)

    def scenario(model):
        cache, mask = DynamicCache(config=model.config), inputs["attention_mask"]
        logits = [call_of(model, kind, **inputs, past_key_values=cache).logits[:, 5:]]
        for step in (new[:, :1], new[:, 1:]):
            mask = torch.cat((mask, mask.new_ones(step.shape)), dim=1)
            logits.append(call_of(model, kind, input_ids=step, attention_mask=mask, past_key_values=cache).logits)
        return torch.cat(logits, dim=1)

    assert_same(scenario, kind, ops)


@pytest.mark.parametrize("kind", ["bart", "whisper"])
def test_logits_of_a_model_with_an_encoder(kind, ops):
    """Run the encoder with a first step, then three tokens over the cached keys of the encoder."""
    new = random_ids(2, 3)

    def scenario(model):
        inputs = inputs_of(kind)
        if kind == "whisper":
            inputs["input_features"] = inputs["input_features"].to(model.dtype)
        first = call_of(model, kind, **inputs)
        inputs.pop("input_features", None)
        inputs.pop("input_ids", None)
        states = (first.encoder_last_hidden_state,)
        past = dict(past_key_values=first.past_key_values, encoder_outputs=states, decoder_input_ids=new)
        return torch.cat((first.logits, call_of(model, kind, **inputs, **past).logits), dim=1)

    assert_same(scenario, kind, ops)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3n", "llama4"])
def test_each_group_of_layers_has_one_plan_a_step(kind, ops, monkeypatch):
    model = served(kind, ops)
    plan, calls = ops.build_gqa_metadata, []
    monkeypatch.setattr(
        ops, "build_gqa_metadata", lambda *args, **kwargs: calls.append(kwargs) or plan(*args, **kwargs)
    )
    call_of(model, kind, **inputs_of(kind))
    groups = group_layers(gqa_layers(model))
    assert len(calls) == len(groups) == (1 if kind == "llama" else 2)
    assert all(options["dtype"] == model.dtype == torch.float32 for options in calls)
    assert sorted(name for names in groups.values() for name in names) == sorted(gqa_layers(model))


@pytest.mark.parametrize("kind", ["gemma3n", "gpt_oss", "llama4"])
def test_a_packed_batch_gives_what_each_request_gives_alone(kind, ops):
    """Run two requests of different lengths in one packed batch, then one token of each -> the logits of stock.

    With floor_scale 64, `attn_temperature_tuning` of Llama 4 scales no query of these requests.
    """
    plain = build(kind, floor_scale=64) if kind == "llama4" else stock(kind)
    model = use_attention(copy.deepcopy(plain), ops=ops, block_size=BLOCK)
    lens, blocks = (PROMPT, 9), torch.tensor([[4, 0, 2], [1, 3, -1]], dtype=torch.int32)
    prompts = [random_ids(1, length + 1) for length in lens]
    expected = [call_of(plain, kind, input_ids=ids).logits[0] for ids in prompts]
    layers = gqa_layers(model)
    caches = {
        name: ops.allocate_key_value_cache(
            5, BLOCK, layer.config.num_kv_heads, HEAD_DIM, torch.float32, device=model.device
        )
        for name, layer in layers.items()
        if layer.config.kv_sharing_layer is None
    }
    for query_lens, seq_lens in ((lens, lens), ((1, 1), [length + 1 for length in lens])):
        batch = CommonAttentionMetadata.from_lens(query_lens, seq_lens, blocks, BLOCK)
        plans = {
            name: ops.build_gqa_metadata(batch, BLOCK, config)
            for config, names in group_layers(layers).items()
            for name in names
        }
        ids = [
            ids[0, length - count : length] for ids, count, length in zip(prompts, query_lens, seq_lens, strict=True)
        ]
        logits = call_of(
            model, kind, input_ids=torch.cat(ids)[None], position_ids=positions_of(query_lens, seq_lens)[None],
            use_cache=False, gqa_metadata=plans, gqa_kv_caches=caches,
        ).logits[0]  # fmt: skip
        wanted = torch.cat([each[n - count : n] for each, count, n in zip(expected, query_lens, seq_lens, strict=True)])
        assert torch.equal(logits.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("kind", ["gpt_oss", "bart"])
def test_restore_leaves_the_model_as_it_was(kind, ops):
    model, inputs = copy.deepcopy(stock(kind)), inputs_of(kind)
    expected = call_of(model, kind, **inputs, output_hidden_states=True).logits  # this option adds hooks at first
    before, config = attributes(model), copy.deepcopy(vars(model.config))
    tensors = {key: id(value) for key, value in model.named_parameters()}
    names = [name for name, _ in model.named_modules()]
    for _ in range(2):  # `use_attention` can be called again after `restore`
        assert use_attention(model, ops=ops) is model
        assert [name for name, _ in model.named_modules()] == names
        assert {key: id(value) for key, value in model.named_parameters()} == tensors
        call_of(model, kind, **inputs)
        assert restore(model) is model
        assert attributes(model) == before and vars(model.config) == config
    assert torch.equal(call_of(model, kind, **inputs).logits, expected)


def test_restore_keeps_what_the_user_changed_in_the_config(ops):
    model = copy.deepcopy(stock("llama"))
    config, implementation = model.config, model.config._attn_implementation
    use_attention(model, ops=ops)
    assert model.config is not config and model.model.layers[0].self_attn.config is model.config
    model.config.use_cache = False
    assert call_of(model, "llama", **inputs_of("llama")).past_key_values is None
    restore(model)
    assert model.config is config and not config.use_cache and config._attn_implementation == implementation


def test_a_model_of_the_same_config_is_left_alone(ops):
    model = copy.deepcopy(stock("gpt_oss"))
    sibling = type(model)(model.config).eval()
    inputs = inputs_of("gpt_oss")
    expected = sibling.generate(**inputs, **GREEDY)
    use_attention(model, ops=ops)
    model.generate(**inputs, **GREEDY)
    assert torch.equal(sibling.generate(**inputs, **GREEDY), expected)
    assert torch.equal(use_attention(sibling, ops=ops).generate(**inputs, **GREEDY), expected)


def test_a_copy_is_served_from_its_own_weights(ops):
    model, inputs = served("gpt_oss", ops), inputs_of("gpt_oss")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert torch.equal(model.generate(**inputs, **GREEDY), stock_tokens("gpt_oss"))
    changed = twin.generate(**inputs, **GREEDY)
    assert not torch.equal(changed, stock_tokens("gpt_oss"))
    assert torch.equal(restore(twin).generate(**inputs, **GREEDY), changed)
    assert torch.equal(model.generate(**inputs, **GREEDY), stock_tokens("gpt_oss"))


def test_save_pretrained_while_served(ops, tmp_path):
    model = served("llama", ops)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.to_dict().keys() == stock("llama").config.to_dict().keys()
    for (key, value), (other, expected) in itertools.zip_longest(
        loaded.state_dict().items(), stock("llama").state_dict().items()
    ):
        assert key == other and torch.equal(value, expected)


def test_a_cache_in_e4m3(ops):
    """Run one prompt with a cache in float32 and in e4m3 -> layer 0 stores the same keys and values, rounded to e4m3.

    The keys of layer 0 do not depend on attention. The scales come from the first prefill.
    """
    exact, rounded = served("gemma3n", ops), served("gemma3n", ops, cache_format="fp8_e4m3")
    inputs = inputs_of("gemma3n")
    caches = [call_of(model, "gemma3n", **inputs).past_key_values.layers[0].kv_cache for model in (exact, rounded)]
    layers = gqa_layers(rounded)
    first = layers["layers.0.self_attn"]
    slots = torch.cat((torch.arange(PROMPT - 5), 2 * BLOCK + torch.arange(PROMPT)))
    for half, scale in enumerate((first.k_scale.value, first.v_scale.value)):
        wanted, got = (cache[half].flatten(0, 1)[slots] for cache in caches)
        assert got.dtype is FP8_E4M3.storage_dtype
        assert torch.equal(got.view(torch.uint8), to_e4m3(wanted, scale).view(torch.uint8))
        assert scale != 1.0
    assert layers["layers.4.self_attn"].k_scale is layers["layers.2.self_attn"].k_scale
    assert layers["layers.3.self_attn"].v_scale is layers["layers.1.self_attn"].v_scale


def test_scales_come_from_the_mapping_then_from_the_checkpoint(ops):
    model = copy.deepcopy(stock("llama"))
    names = [f"layers.{index}.self_attn" for index in range(2)]
    for layer in model.model.layers:
        layer.self_attn.register_buffer("k_scale", torch.tensor(0.25))
        layer.self_attn.register_buffer("v_scale", torch.tensor(0.125))
    fp8 = dict(ops=ops, cache_format="fp8_e4m3")
    layers = gqa_layers(use_attention(model, **fp8))
    assert [(layer.k_scale.value, layer.v_scale.value) for layer in layers.values()] == [(0.25, 0.125)] * 2
    given = {name: (0.5, 0.75) for name in names}
    layers = gqa_layers(use_attention(restore(model), **fp8, kv_scales=given, q_scales=dict.fromkeys(names, 2.0)))
    assert [(layer.k_scale.value, layer.v_scale.value) for layer in layers.values()] == [(0.5, 0.75)] * 2
    assert all(layer.q_scale.value == 2.0 for layer in layers.values())


@pytest.mark.parametrize("kind", ["gemma3n", "bart"])
def test_a_calibration_gives_the_scales_of_every_cache(kind, ops, tmp_path):
    """Calibrate, save the scales, and pass the file -> each layer with a cache of its own has these scales."""
    model, inputs = copy.deepcopy(stock(kind)), inputs_of(kind)
    scales = calibrate_model(model, [inputs], ops, max_new_tokens=3)
    save_kv_scales(tmp_path / "scales.json", scales)
    use_attention(
        model, ops, cache_format="fp8_e4m3", kv_scales=tmp_path / "scales.json", q_scales=tmp_path / "scales.json"
    )
    layers = {name: layer for name, layer in gqa_layers(model).items() if layer.config.attention_type.cached}
    own = [name for name, layer in layers.items() if layer.config.kv_sharing_layer is None]
    assert sorted(scales) == sorted(scales.cached_values) == sorted(own) and sorted(scales.queries) == sorted(layers)
    for name in own:
        expected = torch.tensor([scales[name], scales.cached_values[name], scales.queries[name]])
        layer = layers[name]
        value = torch.stack((layer.k_scale.value, layer.v_scale.value, layer.q_scale.value.flatten()[0]))
        assert torch.equal(value, expected)


def test_the_shipped_checkpoint(ops):
    """Load tiny-gqa -> it has windows in every other layer, and generates the tokens of stock."""
    folder = f"{fast.__path__[0]}/assets/tiny-gqa"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompts = ["def gcd(a, b):", "import os\n\n\nclass Path(os.PathLike):\n    def __init__(self, *parts):"]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    inputs = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    expected = model.generate(**inputs, **GREEDY)
    use_attention(model, ops=ops)
    configs = [layer.config for layer in gqa_layers(model).values()]
    assert configs[0].group_size > 1 and all(config.attention_type is AttentionType.DECODER for config in configs)
    assert len({config.sliding_window for config in configs}) == 2
    assert torch.equal(model.generate(**inputs, **GREEDY), expected)
