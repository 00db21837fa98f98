"""Tests of the errors of `use_mla`, of `restore` and of models under `use_mla`.

`use_mla` makes a model of transformers compute its attention with `reference` or `fast`, and `restore` undoes the
change. Each error must name the wrong argument. A call that raises must change neither the model nor the cache.
"""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch

pytest.importorskip("transformers", reason="the integration runs transformers models")
import transformers
from transformers.cache_utils import DynamicCache, QuantizedCache, StaticCache

import fast
from fast.integrations.transformers import restore, use_mla
from reference.interfaces import UnsupportedConfiguration

from ...support.transformers_models import (
    BLOCK,
    GREEDY,
    HEAD_SIZE,
    LAYERS,
    PLAIN,
    STOCK,
    VOCAB,
    attributes,
    packed_step,
    padded_batch,
    served,
)


def with_rope(**rope):
    config = copy.deepcopy(STOCK["v3-yarn"].config)
    config.rope_parameters = {**PLAIN, **rope}
    return config


def llama():
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=3
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda model: llama(), {}, "model: expected DeepseekV2 or DeepseekV3 .* got LlamaForCausalLM"),
        (lambda model: torch.nn.Linear(2, 2), {}, "model: expected DeepseekV2 or DeepseekV3 .* got Linear"),
        (lambda model: model.train(), {}, "model: expected eval mode .* got training mode"),
        (lambda model: use_mla(model), {}, "model: expected a model that is not under use_mla"),
        (lambda model: model, dict(block_size=0), "block_size: expected an int of at least 1, got 0"),
        (lambda model: model, dict(decode_threshold=0), "decode_threshold: expected an int of at least 1, got 0"),
        (lambda model: model, dict(workspace_tokens=63), "workspace_tokens: expected at least one block of 64, got 63"),
        (lambda model: model, dict(ops=math), "ops: expected a module that keeps the contract .* got math without"),
        (lambda model: model, dict(no_such_option=1), "no_such_option"),
        (lambda model: model, dict(ops=fast, backend="nosuch"), "^backend: expected one of cpu, .*, got nosuch$"),
        (lambda model: model, dict(ops=fast, backend={"mla": "cpu"}), "^backend: expected a mapping .*, got mla$"),
    ],
)  # fmt: skip
def test_use_mla_refuses(model, ops, change, options, message, plain_errors):
    model = change(model)
    before = attributes(model)
    with pytest.raises((ValueError, TypeError), match=message):
        use_mla(model, **{"ops": ops, **options})
    assert attributes(model) == before


def test_a_layer_that_cannot_be_served_leaves_the_others_untouched(model, ops):
    model.model.layers[1].self_attn.config = with_rope(rope_type="linear", factor=2.0)
    before = attributes(model)
    with pytest.raises(UnsupportedConfiguration, match="rope type 'linear' is not implemented"):
        use_mla(model, ops=ops)
    assert attributes(model) == before


def test_a_replaced_forward_is_not_overwritten(model, ops):
    module = model.model.layers[1].self_attn
    module.forward = type(module).forward.__get__(module)
    with pytest.raises(ValueError, match="a DeepseekV3Attention whose forward was replaced"):
        use_mla(model, ops=ops)
    assert "forward" not in vars(model.model) and "forward" not in vars(model.model.layers[0].self_attn)


def test_restore_refuses_a_model_that_is_not_served(model):
    with pytest.raises(ValueError, match="model: expected a model under use_mla, got a model that is not"):
        restore(model)


def test_restore_does_not_remove_what_something_else_put(model, ops):
    module = use_mla(model, ops=ops).model.layers[1].self_attn
    ours, module.forward = module.forward, type(module).forward.__get__(module)
    before = attributes(model)
    with pytest.raises(ValueError, match="a DeepseekV3Attention with another forward"):
        restore(model)
    assert attributes(model) == before
    module.forward = ours
    restore(model)


def static_cache(model):
    return StaticCache(config=model.config, max_cache_len=32)


def offloaded_cache(model):
    cache = DynamicCache()
    cache.offloading = True
    return cache


def filled_cache(model):
    with torch.no_grad():
        return STOCK["v3-yarn"](torch.ones(2, 3, dtype=torch.long), use_cache=True).past_key_values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda m: dict(past_key_values=static_cache(m)), "past_key_values: expected a DynamicCache, got StaticCache"),
        (lambda m: dict(past_key_values=object.__new__(QuantizedCache)), "a DynamicCache, got QuantizedCache"),
        (lambda m: dict(past_key_values=offloaded_cache(m)), "its device, got a DynamicCache with offloading"),
        (lambda m: dict(past_key_values=filled_cache(m)), "expected an empty DynamicCache .* got 3 tokens"),
        (lambda m: dict(past_key_values=((), ())), "past_key_values: expected a DynamicCache, got tuple"),
        (lambda m: dict(attention_mask=torch.ones(2, 1, 6, 6)), r"attention_mask: expected a padding mask \[2, 6\]"),
        (lambda m: dict(attention_mask=torch.ones(2, 6, 6)), r"attention_mask: .* got shape \[2, 6, 6\]"),
        (lambda m: dict(attention_mask=torch.ones(2, 7)), r"attention_mask: .* got shape \[2, 7\]"),
        (lambda m: dict(attention_mask={"full_attention": None}), "attention_mask: .* got dict"),
        (lambda m: dict(position_ids=torch.ones(3, 6, dtype=torch.long)), "position_ids: expected shape"),
        (lambda m: dict(position_ids=torch.arange(6)[None] % 3, use_cache=False), "position_ids: .* mla_metadata"),
        (lambda m: dict(cu_seq_lens_q=torch.tensor([0, 12])), "a packed batch with mla_metadata, got cu_seq_lens_q"),
        (lambda m: dict(output_attentions=True), "output_attentions: expected False"),
        (lambda m: dict(is_causal=False), "is_causal: expected True, got False"),
        (lambda m: dict(inputs_embeds=torch.ones(2, 6, 24)), "exactly one of input_ids and inputs_embeds"),
        (lambda m: dict(mla_metadata=1), "mla_metadata: expected the plan of ops.build_mla_metadata"),
        (lambda m: dict(mla_kv_caches=[]), "mla_metadata: expected .* beside mla_kv_caches, got NoneType"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_served(ops, arguments, message):
    model = served("v3-yarn", ops)
    kwargs = arguments(model)
    past = kwargs.get("past_key_values")
    layers = list(getattr(past, "layers", []))
    with pytest.raises(ValueError, match=message):
        model(torch.ones(2, 6, dtype=torch.long), **kwargs)
    assert list(getattr(past, "layers", [])) == layers


def test_training_mode_is_refused_at_the_forward(ops):
    model = served("v3-yarn", ops)
    model.model.layers[1].self_attn.train()
    with pytest.raises(ValueError, match="model: expected eval mode"):
        model(torch.ones(1, 3, dtype=torch.long))


def test_a_layer_called_alone_is_refused(ops):
    model = served("v3-yarn", ops)
    with pytest.raises(ValueError, match="model: expected a call through the model"):
        model.model.layers[0].self_attn(torch.zeros(1, 2, 24))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(mla_kv_caches=None), "mla_kv_caches: expected a list of one cache per layer .*, got NoneType"),
        (dict(mla_kv_caches=[0]), "mla_kv_caches: expected a cache for each of 2 layers, got 1"),
        (dict(mla_kv_caches=[torch.zeros(2, BLOCK, s) for s in (HEAD_SIZE, 7)]), r"mla_kv_caches\[1\]: expected shape"),
        (dict(attention_mask=torch.ones(1, 6)), "attention_mask: expected None beside mla_metadata, got Tensor"),
        (dict(past_key_values=DynamicCache()), "past_key_values: expected None beside mla_metadata, got DynamicCache"),
        (dict(use_cache=True), "use_cache: expected False beside mla_metadata, got True"),
        (dict(input_ids=torch.ones(2, 3, dtype=torch.long)), r"input_ids: expected one packed row \[1, T\]"),
        (dict(position_ids=torch.zeros(1, 5, dtype=torch.long)), r"position_ids: .* \[1, 6\], got \[1, 5\]"),
    ],
)  # fmt: skip
def test_a_packed_batch_that_does_not_fit(ops, changes, message, plain_errors):
    model = served("v3-yarn", ops)
    caches = [torch.zeros(2, BLOCK, HEAD_SIZE) for _ in range(LAYERS)]
    step = packed_step(ops, [6], [6], torch.tensor([[0, 1]], dtype=torch.int32))
    call = dict(input_ids=torch.ones(1, 6, dtype=torch.long), mla_kv_caches=caches, **step)
    with pytest.raises(ValueError, match=message):
        model(**{**call, **changes})
    assert not any(cache.any() for cache in caches)


@pytest.mark.parametrize(
    ("rows", "later_mask", "message"),
    [
        (3, None, "attention_mask: expected .* because past_key_values holds padding, got None"),
        (3, lambda mask: torch.ones_like(mask), "attention_mask: expected the padding that past_key_values was filled"),
        (3, lambda mask: mask.flip(0), "attention_mask: expected the padding that past_key_values was filled"),
        (3, lambda mask: mask[:, -1:], "attention_mask: expected a padding mask"),
        (2, lambda mask: mask[:2], "input_ids: expected 3 rows as in past_key_values, got 2"),
    ],
)  # fmt: skip
def test_a_later_step_that_contradicts_the_cache(ops, rows, later_mask, message):
    ids, mask = padded_batch()
    model = served("v3-yarn", ops)
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    entries = [layer.kv_cache.clone() for layer in cache.layers]
    longer = torch.cat((mask, mask.new_ones(3, 1)), dim=1)
    with pytest.raises(ValueError, match=message):
        model(ids[:rows, :1], attention_mask=later_mask and later_mask(longer), past_key_values=cache)
    assert cache.get_seq_length() == ids.shape[1]
    for layer, before in zip(cache.layers, entries, strict=True):
        assert torch.equal(layer.kv_cache.nan_to_num(nan=0.5), before.nan_to_num(nan=0.5))


def test_a_mask_that_hides_a_cached_token(ops):
    ids, _ = padded_batch()
    model = served("v3-yarn", ops)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    mask = torch.ones(3, 12)
    mask[1, 4] = 0
    with pytest.raises(ValueError, match="attention_mask: expected every cached token visible, got a hidden token"):
        model(ids[:, :1], attention_mask=mask, past_key_values=cache)


def test_a_latent_cache_is_refused_elsewhere(ops):
    ids = torch.ones(1, 3, dtype=torch.long)
    with torch.no_grad():
        cache = served("v3-yarn", ops)(ids, use_cache=True).past_key_values
        with pytest.raises(TypeError, match="past_key_values: expected a cache of this model"):
            STOCK["v3-yarn"](ids, past_key_values=cache)
        with pytest.raises(ValueError, match="past_key_values: expected blocks of 8 tokens, got 4"):
            served("v3-yarn", ops, block_size=8)(ids, past_key_values=cache)
    assert cache.get_seq_length() == 3


def test_generate_with_a_static_cache_is_refused(ops):
    with warnings.catch_warnings(), pytest.raises(ValueError, match="past_key_values: expected a DynamicCache"):
        warnings.simplefilter("ignore")
        served("v3-yarn", ops).generate(torch.ones(1, 3, dtype=torch.long), cache_implementation="static", **GREEDY)
