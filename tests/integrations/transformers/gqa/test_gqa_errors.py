"""Tests of the errors of `use_attention`, of `restore` and of models under `use_attention`.

Each error must name the wrong argument. A call that raises must change neither the model nor the cache.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings

import pytest
import torch

pytest.importorskip("transformers", reason="the integration runs transformers models")
import transformers
from transformers import masking_utils
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, QuantizedCache, StaticCache

import fast
from fast.integrations.transformers import gqa_layers, restore, use_attention
from reference.interfaces import CalibratedScales, CommonAttentionMetadata, UnsupportedConfiguration

from ....support.gqa_models import BLOCK, GREEDY, HEAD_DIM, VOCAB, attributes, call_of, inputs_of, served, stock

IDS = [[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]]


def tiny(name: str, **fields):
    """Return a tiny model of a config class, with a language model head."""
    sizes = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = getattr(transformers, name)(**{**sizes, **fields})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def deepseek():
    return tiny("DeepseekV3Config", kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
                first_k_dense_replace=1, n_routed_experts=2, n_group=1, topk_group=1, num_experts_per_tok=1,
                q_lora_rank=None)  # fmt: skip


def t5():
    config = transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=32, d_ff=16, num_layers=1, num_heads=1)
    return transformers.T5ForConditionalGeneration(config).eval()


def images():
    text = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=1, head_dim=HEAD_DIM)  # fmt: skip
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28,
                  patch_size=14)  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda model: torch.nn.Linear(2, 2), {}, "model: expected a transformers model .* got Linear"),
        (lambda model: deepseek(), {}, r"model: expected grouped-query attention \(use_mla .* Deepseek"),
        (lambda model: images(), {}, "config.text_config: models with several parts are not implemented"),
        (lambda model: t5(), {}, "config.model_type: expected one of bart, .* got 't5'"),
        (lambda model: tiny("FalconConfig", alibi=False), {}, "model: expected .*, got FalconForCausalLM"),
        (lambda model: tiny("BartConfig", d_model=64, decoder_layers=1, decoder_attention_heads=2), {},
         "model: expected a decoder together with its encoder, got BartForCausalLM, whose decoder has cross attention"),
        (lambda model: tiny("StableLmConfig", num_key_value_heads=1), {},
         "layers that pass all keyword arguments on to self_attn, got StableLmDecoderLayer in layer 0"),
        (lambda model: tiny("NemotronConfig", num_key_value_heads=1), {}, "got NemotronDecoderLayer in layer 0"),
        (lambda model: tiny("LlamaConfig", head_dim=48), {}, "head_dim: expected one of 32, 64, .* got 48"),
        (lambda model: tiny("Gemma3TextConfig", head_dim=HEAD_DIM, num_key_value_heads=1,
                            use_bidirectional_attention=True), {}, "use_bidirectional_attention"),
        (lambda model: model.train(), {}, "model: expected eval mode .* got training mode"),
        (lambda model: use_attention(model), {}, "model: expected a model that is not under use_attention"),
        (lambda model: model, dict(block_size=8), "block_size: expected a positive multiple of 16, got 8"),
        (lambda model: model, dict(ops=math), "ops: expected a module that keeps the contract .* got math without"),
        (lambda model: model, dict(no_such_option=1), "no_such_option"),
        (lambda model: model, dict(cache_format="int4"), "cache_format: expected one of .* got int4"),
        (lambda model: model, dict(cache_format="fp8_ds_mla"), "cache_format: expected .* for a key/value cache"),
        (lambda model: model, dict(kv_scales={}), "kv_scales: expected None for format compute_dtype"),
        (lambda model: model, dict(kv_scales=3), "kv_scales: expected a mapping"),
        (lambda model: model, dict(cache_format="fp8_e4m3", kv_scales={"layers.0.self_attn": (1.0, 1.0)}),
         "kv_scales: expected a scale for each of 2 layers, got none for layers.1.self_attn"),
        (lambda model: model, dict(cache_format="fp8_e4m3", kv_scales={
            f"layers.{index}.self_attn": (1.0, 1.0) for index in range(3)}), "got a scale for layers.2.self_attn"),
        (lambda model: model, dict(cache_format="fp8_e4m3", kv_scales={
            f"layers.{index}.self_attn": 1.0 for index in range(2)}), "expected the scale of the keys and the scale"),
        (lambda model: model, dict(cache_format="fp8_e4m3", kv_scales=CalibratedScales({"layers.0.self_attn": 1.0})),
         "kv_scales: expected a calibration with scales of values, got none"),
        (lambda model: model, dict(ops=fast, backend="nosuch"), "^backend: expected .*, got nosuch$"),
    ],
)  # fmt: skip
def test_use_attention_refuses(ops, change, options, message, plain_errors):
    model = change(copy.deepcopy(stock("llama")))
    before = attributes(model)
    with pytest.raises((ValueError, TypeError), match=message):
        use_attention(model, **{"ops": ops, **options})
    assert attributes(model) == before


@pytest.mark.parametrize("module", ["layer", "attention"])
def test_a_module_without_keyword_arguments_is_refused(module, ops):
    model = copy.deepcopy(stock("llama"))
    layer = model.model.layers[1]
    changed = layer if module == "layer" else layer.self_attn
    forward = lambda self, hidden_states, attention_mask=None, position_embeddings=None: None  # noqa: E731
    changed.__class__ = type("Changed", (type(changed),), dict(forward=forward))
    before = attributes(model)
    with pytest.raises(UnsupportedConfiguration, match="pass all keyword arguments on to self_attn, got .* in layer 1"):
        use_attention(model, ops=ops)
    assert attributes(model) == before


def test_a_block_must_divide_an_attention_chunk(ops):
    with pytest.raises(ValueError, match="block_size: expected a divisor of the 16 tokens of an attention chunk"):
        served("llama4", ops, block_size=32)


def test_a_replaced_forward_is_not_overwritten(ops):
    model = copy.deepcopy(stock("llama"))
    module = model.model.layers[1].self_attn
    module.forward = type(module).forward.__get__(module)
    before = attributes(model)
    with pytest.raises(ValueError, match="a LlamaAttention whose forward was replaced"):
        use_attention(model, ops=ops)
    assert attributes(model) == before


def test_restore_and_gqa_layers_refuse_a_model_that_is_not_served():
    with pytest.raises(ValueError, match="model: expected a model under use_attention, got a model that is not"):
        restore(stock("llama"))
    with pytest.raises(ValueError, match="model: expected a model under use_attention, got other attention"):
        gqa_layers(stock("llama"))
    with pytest.raises(ValueError, match="model: expected a model under use_mla"):
        restore(deepseek())


def offloaded_cache():
    cache = DynamicCache()
    cache.offloading = True
    return cache


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda m: dict(past_key_values=StaticCache(config=m.config, max_cache_len=32)),
         "past_key_values: expected a DynamicCache, got StaticCache"),
        (lambda m: dict(past_key_values=object.__new__(QuantizedCache)), "a DynamicCache, got QuantizedCache"),
        (lambda m: dict(past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache())),
         "past_key_values: expected a DynamicCache, got EncoderDecoderCache"),
        (lambda m: dict(past_key_values=offloaded_cache()), "its device, got a DynamicCache with offloading"),
        (lambda m: dict(past_key_values=call_of(stock("llama"), "llama", input_ids=torch.tensor(IDS)).past_key_values),
         "expected an empty DynamicCache .* got 6 tokens"),
        (lambda m: dict(attention_mask=torch.ones(2, 1, 6, 6)), r"attention_mask: expected a padding mask \[2, 6\]"),
        (lambda m: dict(attention_mask=torch.ones(2, 7)), r"attention_mask: .* got shape \[2, 7\]"),
        (lambda m: dict(attention_mask={"full_attention": None}), "attention_mask: .* got dict"),
        (lambda m: dict(position_ids=torch.ones(3, 6, dtype=torch.long)), "position_ids: expected shape"),
        (lambda m: dict(position_ids=torch.arange(6)[None] % 3, use_cache=False), "position_ids: .* gqa_metadata"),
        (lambda m: dict(cu_seq_lens_q=torch.tensor([0, 12])), "a packed batch with gqa_metadata, got cu_seq_lens_q"),
        (lambda m: dict(output_attentions=True), "output_attentions: expected False"),
        (lambda m: dict(is_causal=False), "is_causal: expected True, got False"),
        (lambda m: dict(inputs_embeds=torch.ones(2, 6, 48)), "exactly one of input_ids and inputs_embeds"),
        (lambda m: dict(gqa_metadata=1), "gqa_metadata: expected a mapping by the names of gqa_layers, got int"),
        (lambda m: dict(gqa_kv_caches={}), "gqa_metadata: expected a mapping by the names of gqa_layers, got NoneType"),
        (lambda m: dict(gqa_metadata={}, gqa_kv_caches={}),
         r"gqa_metadata\['layers.0.self_attn'\]: expected the plan of ops.build_gqa_metadata, got NoneType"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_served(ops, arguments, message):
    model = served("llama", ops)
    kwargs = arguments(model)
    past = kwargs.get("past_key_values")
    layers = list(getattr(past, "layers", []))
    with pytest.raises(ValueError, match=message):
        call_of(model, "llama", input_ids=torch.tensor(IDS), **kwargs)
    assert list(getattr(past, "layers", [])) == layers


NAMES = ("layers.0.self_attn", "layers.1.self_attn")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(gqa_kv_caches=None), "gqa_kv_caches: expected a mapping by the names of gqa_layers, got NoneType"),
        (dict(gqa_metadata={}), r"gqa_metadata\['layers.0.self_attn'\]: expected the plan .* got NoneType"),
        (dict(gqa_kv_caches={NAMES[0]: torch.zeros(2, 1, BLOCK, 2, HEAD_DIM)}),
         r"gqa_kv_caches\['layers.1.self_attn'\]: expected a tensor"),
        (dict(gqa_kv_caches=dict.fromkeys(NAMES, torch.zeros(2, 1, BLOCK, 1, HEAD_DIM))),
         r"gqa_kv_caches\['layers.0.self_attn'\]: expected shape \[2, num_blocks, block_size, 2, 32\]"),
        (dict(gqa_kv_caches=dict.fromkeys(NAMES, torch.zeros(2, 1, BLOCK, 2, HEAD_DIM))),
         "gqa_kv_caches: expected a separate cache for each layer, got one tensor"),
        (dict(attention_mask=torch.ones(1, 6)), "attention_mask: expected None beside gqa_metadata, got Tensor"),
        (dict(past_key_values=DynamicCache()), "past_key_values: expected None beside gqa_metadata, got DynamicCache"),
        (dict(use_cache=True), "use_cache: expected False beside gqa_metadata, got True"),
        (dict(input_ids=torch.tensor(IDS)), r"input_ids: expected one packed row \[1, T\]"),
        (dict(position_ids=torch.zeros(1, 5, dtype=torch.long)), r"position_ids: .* \[1, 6\], got \[1, 5\]"),
    ],
)  # fmt: skip
def test_a_packed_batch_that_does_not_fit(ops, changes, message, plain_errors):
    model = served("llama", ops)
    caches = {name: torch.zeros(2, 1, BLOCK, 2, HEAD_DIM) for name in NAMES}
    batch = CommonAttentionMetadata.from_lens([6], [6], torch.zeros(1, 1, dtype=torch.int32), BLOCK)
    plan = ops.build_gqa_metadata(batch, BLOCK, gqa_layers(model)[NAMES[0]].config)
    call = dict(
        input_ids=torch.tensor(IDS[:1]), position_ids=torch.arange(6)[None], use_cache=False,
        gqa_metadata=dict.fromkeys(NAMES, plan), gqa_kv_caches=caches,
    )  # fmt: skip
    with pytest.raises((ValueError, TypeError), match=message):
        model(**{**call, **changes})
    assert not any(cache.any() for cache in caches.values())


@pytest.mark.parametrize(("lens", "got"), [((4, 4), 8), ((1, 1), 9)])
def test_a_packed_batch_whose_queries_would_get_another_scale(lens, got, ops):
    """Pack 8 tokens, or the ninth token of a request, for a Llama 4 that scales queries from the eighth token on.

    transformers takes the index in the batch for the position, so that the queries would silently get a wrong scale.
    """
    model = served("llama4", ops)
    layers = gqa_layers(model)
    assert model.model.layers[3].self_attn.floor_scale == 8 and not model.model.layers[3].self_attn.use_rope
    seq_lens = lens if lens == (4, 4) else (9, 5)
    batch = CommonAttentionMetadata.from_lens(lens, seq_lens, torch.tensor([[0], [1]], dtype=torch.int32), BLOCK)
    plans = {name: ops.build_gqa_metadata(batch, BLOCK, layer.config) for name, layer in layers.items()}
    caches = {name: torch.zeros(2, 2, BLOCK, 2, HEAD_DIM) for name in layers}
    ids = torch.ones(1, sum(lens), dtype=torch.long)
    with pytest.raises(ValueError, match=f"gqa_metadata: expected .* of less than 8 tokens, because .*, got {got}$"):
        model(ids, position_ids=ids, use_cache=False, gqa_metadata=plans, gqa_kv_caches=caches)
    assert not any(cache.any() for cache in caches.values())


@pytest.mark.parametrize("kind", ["mistral", "llama4"])
def test_padding_between_tokens_is_refused_where_it_would_change_a_window(kind, ops):
    """Call a model with padding between two tokens -> an error: transformers counts the padding in windows."""
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 2] = 0
    with pytest.raises(ValueError, match="attention_mask: expected no padding between .* in row 1"):
        call_of(served(kind, ops), kind, input_ids=torch.tensor(IDS), attention_mask=mask)
    ids = torch.tensor(IDS)
    value = call_of(served("llama", ops), "llama", input_ids=ids, attention_mask=mask).logits
    expected = call_of(stock("llama"), "llama", input_ids=ids, attention_mask=mask).logits
    assert torch.equal(value[mask.bool()].argmax(-1), expected[mask.bool()].argmax(-1))


RIGHT = r"padding on the left \(on the right only with use_cache=False\), got padding behind the last token of row 1"


@pytest.mark.parametrize("kind", ["llama", "mistral", "llama4"])
def test_right_padding_is_refused_where_a_cache_is_filled(kind, ops):
    """Pad row 1 on the right -> an error before anything is written; without a cache, the real tokens are as in stock.

    Without the error, `generate` would read the logits of a padding token, whose attention output is 0.
    """
    model, cache = served(kind, ops), DynamicCache()
    inputs = dict(input_ids=torch.tensor(IDS), attention_mask=torch.ones(2, 6, dtype=torch.long))
    inputs["attention_mask"][1, 4:] = 0
    for call in (
        functools.partial(call_of, model, kind, **inputs, past_key_values=cache),
        functools.partial(call_of, model, kind, **inputs, past_key_values=cache, use_cache=False),
        functools.partial(call_of, model, kind, **inputs),
        functools.partial(model.generate, **inputs, past_key_values=cache, **GREEDY),
        functools.partial(model.generate, **inputs, num_beams=2, **GREEDY),
    ):
        with pytest.raises(ValueError, match=f"^attention_mask: expected {RIGHT.replace('row 1', 'row [12]')}$"):
            call()
        assert cache.layers == [] and cache.get_seq_length() == 0
    real = inputs["attention_mask"].bool()
    value, expected = (call_of(each, kind, **inputs, use_cache=False).logits[real] for each in (model, stock(kind)))
    assert torch.equal(value.argmax(-1), expected.argmax(-1))


def test_right_padding_of_the_prompt_of_a_decoder_with_an_encoder(ops):
    """Pad row 1 of the decoder's tokens on the right -> an error; the encoder takes padding on the right as before."""
    model, inputs = served("bart", ops), inputs_of("bart")
    assert not inputs["attention_mask"][0, -1]
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    inputs |= dict(decoder_input_ids=torch.tensor(IDS), decoder_attention_mask=torch.ones(2, 6, dtype=torch.long))
    inputs["decoder_attention_mask"][1, 4:] = 0
    for call in (functools.partial(call_of, model, "bart"), functools.partial(model.generate, **GREEDY)):
        with pytest.raises(ValueError, match=f"^decoder_attention_mask: expected {RIGHT}$"):
            call(**inputs, past_key_values=cache)
        assert cache.get_seq_length() == 0 and cache.cross_attention_cache.layers == [] and not cache.is_updated
    real = inputs["decoder_attention_mask"].bool()
    value, expected = (call_of(each, "bart", **inputs, use_cache=False).logits[real] for each in (model, stock("bart")))
    assert torch.equal(value.argmax(-1), expected.argmax(-1))


def test_right_padding_of_a_later_step(ops):
    """Pad a new row on the right in a later step of several rows -> an error; a row without new tokens is served."""
    model, inputs = served("llama", ops), inputs_of("llama")
    cache = call_of(model, "llama", **inputs).past_key_values
    new = torch.tensor([[3, 4, 5], [6, 7, 8]])
    tail = torch.tensor([[1, 1, 1], [1, 1, 0]])
    mask = torch.cat((inputs["attention_mask"], tail), dim=1)
    with pytest.raises(ValueError, match=f"^attention_mask: expected {RIGHT}$"):
        call_of(model, "llama", input_ids=new, attention_mask=mask, past_key_values=cache)
    assert cache.get_seq_length() == inputs["input_ids"].shape[1]
    mask[1, -3:] = 0  # row 1 has ended
    value = call_of(model, "llama", input_ids=new, attention_mask=mask, past_key_values=cache).logits[0]
    ids = torch.cat((inputs["input_ids"], new), dim=1)
    expected = call_of(stock("llama"), "llama", input_ids=ids, attention_mask=mask).logits[0, -3:]
    assert torch.equal(value.argmax(-1), expected.argmax(-1))


def test_training_mode_and_autocast_are_refused_at_the_forward(ops):
    model = served("llama", ops)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="model: expected no autocast"):
        call_of(model, "llama", input_ids=torch.tensor(IDS, device="cpu"))
    model.model.layers[1].self_attn.train()
    with pytest.raises(ValueError, match="model: expected eval mode"):
        call_of(model, "llama", input_ids=torch.tensor(IDS))


def test_a_layer_called_alone_is_refused(ops):
    model = served("llama", ops)
    rope = model.model.rotary_emb(torch.zeros(1, 2, 48), torch.arange(2)[None])
    with pytest.raises(ValueError, match="model: expected a call through the model"):
        model.model.layers[0].self_attn(torch.zeros(1, 2, 48), position_embeddings=rope)


def test_a_layer_that_begins_to_drop_keyword_arguments_is_found_at_the_next_call(ops):
    model, cache = served("llama", ops), DynamicCache()
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda hidden_states, gqa_step, **kwargs: forward(hidden_states, **kwargs)
    with pytest.raises(ValueError, match="model: expected .* whose layers pass keyword arguments .* without gqa_step"):
        call_of(model, "llama", input_ids=torch.tensor(IDS), past_key_values=cache)
    assert cache.layers == [] and cache.get_seq_length() == 0


def test_another_attention_implementation_is_refused(ops):
    model = served("llama", ops)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="model: expected the attention mla_twins_gqa .* got eager"):
        call_of(model, "llama", input_ids=torch.tensor(IDS))
    restore(model)
    assert torch.equal(
        call_of(model, "llama", input_ids=torch.tensor(IDS)).logits,
        call_of(stock("llama"), "llama", input_ids=torch.tensor(IDS)).logits,
    )


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama", lambda m: setattr(m, "scaling", 0.3), r"model \(layers.0.self_attn\): expected scaling .* got 0.3"),
        ("llama", lambda m: setattr(m, "is_causal", False), "expected is_causal True, .* got False"),
        ("gemma2", lambda m: setattr(m, "sliding_window", 8), "expected sliding_window 7, .* got 8"),
        ("gemma2", lambda m: setattr(m, "attn_logit_softcapping", None), "expected softcap 3.0, .* got None"),
        ("gpt_oss", lambda m: setattr(m, "sinks", torch.nn.Parameter(m.sinks + 1)), "got other sinks"),
        ("mistral", lambda m: setattr(m.config, "sliding_window", 8), "expected sliding_window 7, .* got 8"),
        ("llama4", lambda m: setattr(m.config, "attention_chunk_size", 32),
         "expected a window or an attention chunk of 16, .* got 32"),
    ],
)  # fmt: skip
def test_attention_that_differs_from_the_config_of_the_layer_is_refused(kind, change, message, ops):
    """Change what layer 0 passes to attention after `use_attention` -> one error that names the layer and the number.

    Without the error, the model would silently get other attention than it asks for.
    """
    model = served(kind, ops)
    change(model.model.layers[0].self_attn)
    cache = DynamicCache()
    with pytest.raises(ValueError, match=message):
        call_of(model, kind, input_ids=torch.tensor(IDS), past_key_values=cache)
    assert cache.layers == [] and cache.get_seq_length() == 0


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (functools.partial(masking_utils.create_causal_mask, or_mask_function=lambda *indices: indices[-1] < 2),
         "got a mask that the model changes"),
        (lambda position_ids, **kwargs: masking_utils.create_bidirectional_mask(**kwargs),
         "expected a causal mask, .* got a mask that is not causal"),
        (lambda inputs_embeds, **kwargs: inputs_embeds.new_zeros(2, 1, 6, 6),
         "the mask of the attention interface .* got Tensor"),
        (lambda **kwargs: None, "the mask of the attention interface .* got NoneType"),
    ],
)  # fmt: skip
def test_a_model_that_asks_for_another_mask_is_refused(ops, mask, message, monkeypatch):
    model = served("llama", ops)
    monkeypatch.setattr(transformers.models.llama.modeling_llama, "create_causal_mask", mask)
    with pytest.raises(ValueError, match=message):
        call_of(model, "llama", input_ids=torch.tensor(IDS))


@pytest.mark.parametrize(
    ("rows", "later_mask", "message"),
    [
        (2, lambda mask: None, "attention_mask: expected .* because past_key_values holds padding, got None"),
        (2, torch.ones_like, "attention_mask: expected the padding that past_key_values was filled"),
        (1, lambda mask: mask[:1], "input_ids: expected 2 rows as in past_key_values, got 1"),
    ],
)
def test_a_later_step_that_contradicts_the_cache(ops, rows, later_mask, message):
    model, inputs = served("llama", ops), inputs_of("llama")
    cache = call_of(model, "llama", **inputs).past_key_values
    mask = torch.cat((inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)), dim=1)
    with pytest.raises(ValueError, match=message):
        call_of(
            model, "llama", input_ids=torch.ones(rows, 1, dtype=torch.long), attention_mask=later_mask(mask),
            past_key_values=cache,
        )  # fmt: skip
    assert cache.get_seq_length() == inputs["input_ids"].shape[1]


def test_a_key_value_cache_is_refused_elsewhere(ops):
    ids = torch.tensor(IDS)
    cache = call_of(served("llama", ops), "llama", input_ids=ids).past_key_values
    with pytest.raises(TypeError, match="past_key_values: expected a cache of this model, got .* use_attention"):
        call_of(stock("llama"), "llama", input_ids=ids, past_key_values=cache)
    with pytest.raises(ValueError, match=f"past_key_values: expected blocks of 32 tokens, got {BLOCK}"):
        call_of(served("llama", ops, block_size=32), "llama", input_ids=ids, past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values: expected entries in torch.float8_e4m3fn, got torch.float32"):
        call_of(served("llama", ops, cache_format="fp8_e4m3"), "llama", input_ids=ids, past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values: expected 4 layers, got 2"):
        call_of(served("llama4", ops), "llama4", input_ids=ids, past_key_values=cache)
    assert cache.get_seq_length() == 6


def test_generate_with_a_static_cache_is_refused(ops):
    with warnings.catch_warnings(), pytest.raises(ValueError, match="past_key_values: expected a DynamicCache"):
        warnings.simplefilter("ignore")
        served("llama", ops).generate(torch.tensor(IDS), cache_implementation="static", **GREEDY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(past_key_values=DynamicCache()), "past_key_values: expected an EncoderDecoderCache .* got DynamicCache"),
        (dict(past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()), use_cache=False),
         "past_key_values: expected None beside use_cache=False"),
        (dict(gqa_metadata={}, gqa_kv_caches={}), "gqa_metadata"),
    ],
)  # fmt: skip
def test_a_call_with_an_encoder_that_cannot_be_served(ops, changes, message):
    model, inputs = served("bart", ops), inputs_of("bart")
    states = call_of(model, "bart", **inputs).encoder_last_hidden_state
    with pytest.raises(ValueError, match=message), torch.no_grad():
        model.get_decoder()(input_ids=torch.tensor([[3], [4]]), encoder_hidden_states=states, **changes)


def test_another_output_of_the_encoder_is_refused(ops):
    """Continue over cached keys with an output of another length, with other padding or without output -> an error."""
    model, inputs = served("bart", ops), inputs_of("bart")
    out = call_of(model, "bart", **inputs)
    states, mask = out.encoder_last_hidden_state, inputs["attention_mask"]
    decoder = model.get_decoder()
    step = dict(input_ids=torch.tensor([[3], [4]]), past_key_values=out.past_key_values)
    for changes, message in (
        (dict(encoder_hidden_states=states[:, :-1]), r"encoder_hidden_states: expected shape \[2, 18, H\]"),
        (dict(encoder_hidden_states=states, encoder_attention_mask=torch.ones_like(mask)), "expected the padding that"),
        (dict(encoder_hidden_states=states), "attention_mask: expected .* because past_key_values holds padding"),
        (dict(encoder_attention_mask=mask), "encoder_hidden_states: expected the output of the encoder"),
    ):
        with pytest.raises(ValueError, match=message), torch.no_grad():
            decoder(**step, **changes)
    assert out.past_key_values.get_seq_length() == 4


def test_a_model_without_the_attention_interface_is_found_at_the_first_call(ops):
    """Give a layer an attention that does not call the interface -> an error, because it would ignore the cache."""
    model = served("qwen3", ops)
    module = model.model.layers[1].self_attn
    module.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(ValueError, match="in every layer, got other attention at layers.1.self_attn"):
        call_of(model, "qwen3", input_ids=torch.tensor(IDS))


def test_every_reason_is_listed():
    with pytest.raises(UnsupportedConfiguration) as error:
        use_attention(tiny("LlamaConfig", head_dim=48, sliding_window=4, layer_types=["linear_attention"]))
    assert len(error.value.reasons) == 2
