"""Tiny random models of transformers with grouped-query attention, with and without `use_attention`.

`use_attention` makes a model compute its attention with `reference` or `fast`. A model without `use_attention` is
called stock. Every model is small, but it has the kind of attention after which it is named.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch

pytest.importorskip("transformers", reason="the integration runs transformers models")
import transformers

from fast.integrations.transformers import use_attention
from fast.parity import compare

VOCAB, HEAD_DIM, WINDOW, CHUNK, BLOCK = 61, 32, 7, 16, 16
GREEDY = dict(do_sample=False, max_new_tokens=6)
PROMPT = 28  # tokens of a prompt: the generated tokens cross the end of the second block and attention chunk
SOURCE = 18  # tokens of an encoder's input: more than one block

_DECODER = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=HEAD_DIM, max_position_embeddings=128, initializer_range=0.3, bos_token_id=None,
    eos_token_id=None, pad_token_id=0, tie_word_embeddings=False,
)  # fmt: skip
_HIDDEN_BY_HEADS = {name: value for name, value in _DECODER.items() if name != "head_dim"} | dict(
    hidden_size=4 * HEAD_DIM
)
_MULTI_HEAD = {name: value for name, value in _HIDDEN_BY_HEADS.items() if name != "num_key_value_heads"}
_EXPERTS = dict(num_local_experts=2, num_experts_per_tok=1)
_CODED = dict(
    vocab_size=VOCAB, d_model=2 * HEAD_DIM, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=40, decoder_ffn_dim=40, init_std=0.3, bos_token_id=1, eos_token_id=None,
    pad_token_id=0, decoder_start_token_id=2, forced_eos_token_id=None, tie_word_embeddings=False,
    max_position_embeddings=64,
)  # fmt: skip
_ALTERNATING = ["sliding_attention", "full_attention"]
LLAMA3 = dict(
    rope_type="llama3", rope_theta=1000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip

# {kind: (config class, fields of the config)}
CONFIGS = {
    "llama": ("LlamaConfig", dict(_DECODER, rope_parameters=LLAMA3)),
    "qwen2": ("Qwen2Config", dict(_HIDDEN_BY_HEADS, use_sliding_window=True, sliding_window=WINDOW,
                                  max_window_layers=1)),
    "qwen3": ("Qwen3Config", _DECODER),
    "mistral": ("MistralConfig", dict(_DECODER, sliding_window=WINDOW)),
    "gemma2": ("Gemma2Config", dict(_DECODER, sliding_window=WINDOW, layer_types=_ALTERNATING,
                                    attn_logit_softcapping=3.0, query_pre_attn_scalar=20)),
    "gemma3": ("Gemma3TextConfig", dict(_DECODER, sliding_window=WINDOW, layer_types=_ALTERNATING,
                                        query_pre_attn_scalar=20)),
    "gemma3n": ("Gemma3nTextConfig", dict(
        _DECODER, num_hidden_layers=5, num_kv_shared_layers=2, sliding_window=WINDOW, intermediate_size=[40] * 5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, altup_num_inputs=2, laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 5)),
    "gpt_oss": ("GptOssConfig", dict(_DECODER, **_EXPERTS, sliding_window=WINDOW, layer_types=_ALTERNATING,
                                     rope_parameters=dict(rope_type="default", rope_theta=1000.0))),
    "llama4": ("Llama4TextConfig", dict(_DECODER, **_EXPERTS, num_hidden_layers=4, attention_chunk_size=CHUNK,
                                        intermediate_size_mlp=40, moe_layers=[1], attn_temperature_tuning=True,
                                        floor_scale=8)),
    "phi": ("PhiConfig", _HIDDEN_BY_HEADS),
    "phi3": ("Phi3Config", dict(_HIDDEN_BY_HEADS, sliding_window=WINDOW)),
    "mixtral": ("MixtralConfig", dict(_DECODER, **_EXPERTS, sliding_window=None)),
    "gemma": ("GemmaConfig", _DECODER),
    "olmo": ("OlmoConfig", dict(_HIDDEN_BY_HEADS, clip_qkv=1.0)),
    "granite": ("GraniteConfig", dict(_HIDDEN_BY_HEADS, attention_multiplier=0.1, residual_multiplier=0.7)),
    "opt": ("OPTConfig", dict(_MULTI_HEAD, ffn_dim=40, word_embed_proj_dim=4 * HEAD_DIM, init_std=0.3)),
    "gpt_neox": ("GPTNeoXConfig", _MULTI_HEAD),
    "bart": ("BartConfig", _CODED),
    "mbart": ("MBartConfig", _CODED),
    "marian": ("MarianConfig", dict(_CODED, decoder_vocab_size=VOCAB, scale_embedding=True)),
    "pegasus": ("PegasusConfig", _CODED),
    "blenderbot": ("BlenderbotConfig", _CODED),
    "m2m_100": ("M2M100Config", dict(_CODED, init_std=0.2)),
    "plbart": ("PLBartConfig", _CODED),
    "whisper": ("WhisperConfig", dict(_CODED, num_mel_bins=8, max_source_positions=SOURCE, max_target_positions=64,
                                      suppress_tokens=None, begin_suppress_tokens=None)),
}  # fmt: skip
CODED = tuple(kind for kind, (_, fields) in CONFIGS.items() if "encoder_layers" in fields)  # with encoder and decoder
# {kind: other values of fields with which attention differs}
CHANGES = {
    "qwen2": [dict(sliding_window=WINDOW + 1)],
    "mistral": [dict(sliding_window=WINDOW + 1)],
    "gemma2": [dict(sliding_window=WINDOW + 1), dict(attn_logit_softcapping=None)],
    "gemma3": [dict(sliding_window=WINDOW + 1)],
    "gemma3n": [dict(sliding_window=WINDOW + 1)],
    "gpt_oss": [dict(sliding_window=WINDOW + 1)],
    "llama4": [dict(attention_chunk_size=2 * CHUNK)],
    "phi3": [dict(sliding_window=WINDOW + 1)],
}


def build(kind: str, seed: int = 0, **fields):
    """Return a tiny random model in eval mode; `fields` replace fields of its config.

    The weights are drawn on the CPU, so that a model on a GPU has the same weights.
    """
    with torch.device("cpu"):
        model = _build_on_cpu(kind, seed, **fields)
    return model.to(torch.get_default_device())


def _build_on_cpu(kind: str, seed: int, **fields):
    name, known = CONFIGS[kind]
    config = getattr(transformers, name)(**{**known, **fields})
    torch.manual_seed(seed)
    if kind == "whisper":
        model = transformers.WhisperForConditionalGeneration(config)
    elif kind in CODED:
        model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-0.3, 0.3)
            elif parameter.dim() == 1:  # random norm weights and sinks in place of constants
                parameter.uniform_(0.5, 1.5)
            if name.endswith(("o_proj.weight", "out_proj.weight", "self_attn.dense.weight", "attention.dense.weight")):
                parameter.mul_(4.0)  # so that the tokens depend on attention
    if kind == "gemma2":  # scaled_dot_product_attention of PyTorch, the default of some versions, has no soft cap
        model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.eval()


@functools.cache
def stock(kind: str):
    """Return the stock model of a kind. A test must not change it."""
    return build(kind)


def served(kind: str, ops, **options):
    """Return a copy of the stock model under `use_attention`."""
    return use_attention(copy.deepcopy(stock(kind)), ops=ops, **{"block_size": BLOCK, **options})


def random_ids(rows: int, count: int) -> torch.Tensor:
    """Return random tokens [rows, count]. They are drawn on the CPU, so that they are the same on every device."""
    return torch.randint(1, VOCAB, (rows, count), device="cpu").to(torch.get_default_device())


def inputs_of(kind: str, rows: int = 2, padded: bool = True) -> dict:
    """Return arguments of `generate`: prompts for a decoder, or the input of an encoder.

    If `padded`, the first five tokens of row 0 are padding, for an encoder the last five. Whisper has no padding.
    """
    torch.manual_seed(11)
    if kind == "whisper":
        return dict(input_features=torch.randn(rows, 8, 2 * SOURCE, device="cpu").to(torch.get_default_device()))
    ids = random_ids(rows, SOURCE if kind in CODED else PROMPT)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, slice(-5, None) if kind in CODED else slice(5)] = 0
    return dict(input_ids=ids, attention_mask=mask)


def tokens_of(model, kind: str, **arguments) -> torch.Tensor:
    """Return the tokens that a model generates, with a fixed random seed."""
    torch.manual_seed(7)
    generate = transformers.GenerationMixin.generate if kind == "whisper" else type(model).generate
    return generate(model, **arguments)


@functools.cache
def stock_tokens(kind: str, padded: bool = True, **options) -> torch.Tensor:
    """Return the tokens of the stock model for `inputs_of`."""
    return tokens_of(stock(kind), kind, **inputs_of(kind, padded=padded), **{**GREEDY, **options})


def call_of(model, kind: str, **arguments):
    """Call a model without gradients and return its output; an encoder-decoder model gets a few tokens to decode."""
    if kind in CODED:
        arguments.setdefault("decoder_input_ids", torch.arange(3, 11).view(2, 4))
    with torch.no_grad():
        return model(**arguments)


@functools.cache
def gold_model(kind: str):
    """Return the stock model in float64."""
    return copy.deepcopy(stock(kind)).double()


@functools.cache
def moved_model(kind: str, draw: int):
    """Return the stock model with eager attention; each weight is changed by at most one unit in the last place."""
    model = copy.deepcopy(stock(kind))
    model.set_attn_implementation("eager")
    generator = torch.Generator(model.device).manual_seed(draw)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(2, parameter.shape, generator=generator, device=parameter.device) * 2.0 - 1
            parameter.copy_(parameter.double() * (1 + 2.0**-24 * signs.double()))
    return model


def assert_same(scenario, kind: str, ops, **options) -> None:
    """Run `scenario(model)` for a model with `use_attention` -> the error of its logits is within a budget.

    The error is measured against the stock model in float64 (gold). The budget is computed from the errors of four
    stock models in float32, three of them with weights that were changed by one unit in the last place. For each
    element the largest of these errors counts, because the error of one model can be small by chance.
    """
    gold = scenario(gold_model(kind))
    low = [scenario(model) for model in (stock(kind), *(moved_model(kind, draw) for draw in range(3)))]
    value = scenario(served(kind, ops, **options))
    furthest = functools.reduce(lambda a, b: torch.where((a - gold).abs() > (b - gold).abs(), a, b), low)
    result = compare("logits", value, furthest, gold)
    assert result.passed, result


def attributes(model):
    """Return the id of every attribute of every module."""
    return {path: {key: id(value) for key, value in vars(module).items()} for path, module in model.named_modules()}
