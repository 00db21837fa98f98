"""Tests of `generate` of models under `use_attention`: modes of generation, beams, passed caches, cache operations.

`use_attention` makes a model of transformers compute grouped-query attention with `reference` or `fast`. A stock model
is a model without `use_attention`.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch

pytest.importorskip("transformers", reason="the integration runs transformers models")
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from fast.integrations.transformers import use_attention

from ....support.gqa_models import (
    BLOCK,
    CHUNK,
    GREEDY,
    HEAD_DIM,
    SOURCE,
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

MODES = {
    "beams": dict(num_beams=3, num_return_sequences=2),
    "no cache": dict(use_cache=False),
    "sampling": dict(do_sample=True, temperature=0.8, top_k=20, num_return_sequences=2),
}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *((kind, "beams") for kind in ("llama", "gemma3n", "gpt_oss", "llama4", "bart", "whisper")),
        *((kind, "no cache") for kind in ("mistral", "gemma3n", "llama4", "bart")),
        ("gemma2", "sampling"),
    ],
)
def test_generate_gives_the_same_tokens(kind, mode, ops):
    value = tokens_of(served(kind, ops), kind, **inputs_of(kind), **{**GREEDY, **MODES[mode]})
    assert torch.equal(value, stock_tokens(kind, **MODES[mode]))


@pytest.mark.parametrize("kind", ["mistral", "llama4"])
def test_prompt_lookup(kind, ops):
    """Guess tokens from the prompt and crop wrong guesses from the cache, beyond a window or an attention chunk."""
    torch.manual_seed(3)
    ids = random_ids(1, 9).repeat(1, 4)
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), prompt_lookup_num_tokens=3, **GREEDY)
    assert torch.equal(tokens_of(served(kind, ops), kind, **inputs), tokens_of(stock(kind), kind, **inputs))


def test_assisted_generation(ops):
    ids = random_ids(1, CHUNK + 3)
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), **GREEDY)
    expected = tokens_of(stock("llama"), "llama", **inputs)
    for assistant in (build("qwen3", seed=3), served("qwen3", ops)):
        value = tokens_of(served("llama", ops), "llama", **inputs, assistant_model=assistant)
        assert torch.equal(value, expected)


@pytest.mark.parametrize("kind", ["gemma3", "llama4"])
def test_generate_continues_from_a_passed_cache(kind, ops):
    def conversation(model):
        torch.manual_seed(1)
        ids, mask = random_ids(2, 14), torch.ones(2, 14, dtype=torch.long)
        mask[1, :3] = 0
        cache = DynamicCache(config=model.config)
        for _ in range(2):
            ids = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
            ids = torch.cat((ids, random_ids(2, 4)), dim=1)
            mask = torch.cat((mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])), dim=1)
        return ids, cache.get_seq_length()

    ids, length = conversation(served(kind, ops))
    stock_ids, stock_length = conversation(stock(kind))
    assert torch.equal(ids, stock_ids) and length == stock_length


def test_cached_tokens_cannot_be_hidden_in_a_later_turn(ops):
    """End row 0 of a first turn early, and hide its padding in the second turn -> an error.

    The padding behind the end is cached, and a plan cannot hide keys between two visible keys. If the padding is
    visible, the second turn gives the tokens of stock.
    """
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])
    end = int(stock("llama").generate(ids, do_sample=False, max_new_tokens=2)[0, 7])
    first = dict(do_sample=False, max_new_tokens=4, eos_token_id=end, pad_token_id=0)
    second = dict(do_sample=False, max_new_tokens=2)
    found = []
    for model in (stock("llama"), served("llama", ops)):
        cache = DynamicCache(config=model.config)
        both = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **first)
        assert (both[0, 8:] == 0).all() and both.shape[1] == 10
        both = torch.cat((both, torch.tensor([[9, 8], [7, 6]])), dim=1)
        mask = torch.ones_like(both)
        if model is not stock("llama"):
            mask[0, 8:10] = 0
            with pytest.raises(ValueError, match="^attention_mask: expected every cached token visible, got a hidden"):
                model.generate(both, attention_mask=mask, past_key_values=cache, **second)
            mask[0, 8:10] = 1
        found.append(model.generate(both, attention_mask=mask, past_key_values=cache, **second))
    assert torch.equal(*found)


def test_an_assistant_with_a_window_and_a_generated_padding_token(ops):
    """Let a model generate the token `pad_token_id` -> an assistant with windows refuses the mask that it gets.

    The mask hides the token, which lies between two tokens. An assistant without windows takes this mask. Older
    versions of transformers hide no token, so that every assistant is served.
    """
    torch.manual_seed(9)
    ids = random_ids(1, BLOCK + 3)
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), **GREEDY)
    model = served("gemma2", ops)
    expected = stock("gemma2").generate(**inputs)
    inputs["pad_token_id"] = int(expected[0, -5])
    assert not (ids == inputs["pad_token_id"]).any()
    assistant, masks = served("llama", ops), []
    assistant.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    assert torch.equal(model.generate(**inputs, assistant_model=assistant), expected)
    windowed = use_attention(build("gemma2", seed=3), ops=ops)
    if all(mask is None or mask.all() for mask in masks):
        assert torch.equal(model.generate(**inputs, assistant_model=windowed), expected)
        return
    with pytest.raises(ValueError, match="attention_mask: expected no padding between the tokens of a row"):
        model.generate(**inputs, assistant_model=windowed)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_prompt_in_chunks_with_more_padding_than_a_chunk(kind, ops):
    """Prefill a prompt in chunks -> the first chunks of row 0 are padding alone, and no error takes it for the end."""
    inputs = inputs_of(kind)
    inputs["attention_mask"][0, :9] = 0
    expected = stock(kind).generate(**inputs, **GREEDY)
    assert torch.equal(served(kind, ops).generate(**inputs, **GREEDY, prefill_chunk_size=4), expected)


def test_a_prompt_of_a_decoder_with_an_encoder(ops):
    """Pad the tokens with which a decoder begins on the left, and search with beams -> the tokens of stock."""
    inputs = inputs_of("bart")
    inputs |= dict(decoder_input_ids=torch.tensor([[2, 4, 5, 6], [2, 7, 8, 9]]))
    inputs |= dict(decoder_attention_mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), num_beams=2)
    expected = stock("bart").generate(**inputs, **GREEDY)
    assert torch.equal(served("bart", ops).generate(**inputs, **GREEDY), expected)


def test_a_copied_cache_is_a_cache_of_its_own(ops):
    model = served("gpt_oss", ops)
    prompt = random_ids(1, 20)
    cache = call_of(model, "gpt_oss", input_ids=prompt, use_cache=True).past_key_values
    for _ in range(2):
        ids = torch.cat((prompt, random_ids(1, 3)), dim=1)
        expected = stock("gpt_oss").generate(ids, **GREEDY)
        assert torch.equal(model.generate(ids, past_key_values=copy.deepcopy(cache), **GREEDY), expected)
    assert cache.get_seq_length() == 20


CACHE_OPERATIONS = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "select by mask": (lambda cache: cache.batch_select_indices(torch.tensor([False, True])), [1]),
    "crop": (lambda cache: cache.crop(-3), [0, 1]),
}


@pytest.mark.parametrize("operation", CACHE_OPERATIONS)
def test_cache_operations_mean_what_stock_means(operation, ops):
    """Change a filled cache of a model whose last layers share caches, then run one more token -> as without a cache.

    The stock cache cannot be cropped below a window, so the expected logits come from the whole sequences.
    """
    model, inputs = served("gemma3n", ops), inputs_of("gemma3n")
    change, rows = CACHE_OPERATIONS[operation]
    cache = call_of(model, "gemma3n", **inputs).past_key_values
    change(cache)
    kept = cache.get_seq_length()
    assert kept == inputs["input_ids"].shape[1] - (3 if operation == "crop" else 0)
    ids = torch.cat((inputs["input_ids"][rows, :kept], random_ids(len(rows), 1)), dim=1)
    mask = torch.cat((inputs["attention_mask"][rows, :kept], ids.new_ones(len(rows), 1)), dim=1)
    value = call_of(model, "gemma3n", input_ids=ids[:, -1:], attention_mask=mask, past_key_values=cache).logits
    expected = call_of(stock("gemma3n"), "gemma3n", input_ids=ids, attention_mask=mask).logits
    assert torch.equal(value[:, -1].argmax(-1), expected[:, -1].argmax(-1))


def test_a_cache_of_an_encoder_is_written_once(ops, monkeypatch):
    """Decode two steps -> the second step gives no keys to cross attention, and the cached keys stay as they are."""
    model, inputs = served("bart", ops), inputs_of("bart")
    first = call_of(model, "bart", **inputs)
    cache = first.past_key_values
    assert type(cache) is EncoderDecoderCache
    layers = cache.cross_attention_cache.layers
    assert [layer.get_seq_length() for layer in layers] == [SOURCE, SOURCE]
    before = [layer.kv_cache.clone() for layer in layers]
    module = model.get_decoder().layers[0].encoder_attn
    monkeypatch.setattr(module.k_proj, "forward", lambda *args: pytest.fail("cross attention computed keys again"))
    call_of(
        model, "bart", attention_mask=inputs["attention_mask"], encoder_outputs=(first.encoder_last_hidden_state,),
        past_key_values=cache, decoder_input_ids=torch.tensor([[5], [6]]),
    )  # fmt: skip
    for layer, entries in zip(layers, before, strict=True):
        assert torch.equal(layer.kv_cache.nan_to_num(nan=0.5), entries.nan_to_num(nan=0.5))


def test_padding_is_never_written_and_unwritten_bytes_reach_nothing(ops, monkeypatch):
    """Run a padded batch with caches full of NaN -> entries without a token stay NaN, and all logits are finite."""
    allocate = ops.allocate_key_value_cache
    monkeypatch.setattr(ops, "allocate_key_value_cache", lambda *args: allocate(*args).fill_(math.nan))
    model, inputs = served("mistral", ops), inputs_of("mistral")
    out = call_of(model, "mistral", **inputs)
    mask = torch.cat((inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)), dim=1)
    second = call_of(
        model, "mistral", input_ids=torch.tensor([[3], [4]]), attention_mask=mask, past_key_values=out.past_key_values
    )
    assert out.logits.isfinite().all() and second.logits.isfinite().all()
    for layer in out.past_key_values.layers:
        tokens = layer.kv_cache.view(2, 2, -1, 2 * HEAD_DIM)
        owned = (torch.arange(tokens.shape[2]) < mask.sum(1)[:, None]).expand(2, -1, -1)
        assert tokens[owned].isfinite().all() and tokens[~owned].isnan().all()


def test_blocks_grow_by_doubling(ops, monkeypatch):
    made, allocate = [], ops.allocate_key_value_cache
    monkeypatch.setattr(
        ops, "allocate_key_value_cache", lambda blocks, *args: made.append(blocks) or allocate(blocks, *args)
    )
    ids = random_ids(2, BLOCK - 2)
    served("llama", ops).generate(ids, **{**GREEDY, "max_new_tokens": BLOCK + 4})
    assert made == [2 * width for width in (1, 2, 4) for _ in range(2)]  # rows x blocks, for each of two layers


@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_a_failed_forward_leaves_the_cache_as_it_was(kind, ops, monkeypatch):
    model, inputs = served(kind, ops), inputs_of(kind, padded=False)
    kinds = {"llama": DynamicCache, "bart": lambda: EncoderDecoderCache(DynamicCache(), DynamicCache())}
    out = call_of(model, kind, **inputs)
    later = dict(past_key_values=out.past_key_values)
    if kind == "llama":
        later |= dict(input_ids=torch.tensor([[3], [4]]))
    else:
        later |= dict(encoder_outputs=(out.encoder_last_hidden_state,), decoder_input_ids=torch.tensor([[3], [4]]))
    expected = call_of(model, kind, **copy.deepcopy(later)).logits
    length = out.past_key_values.get_seq_length()
    last = model.get_decoder().layers[-1]
    fresh = kinds[kind]()
    with monkeypatch.context() as patch:
        patch.setattr(last, "forward", lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("planted")))
        for arguments in (later, dict(inputs, past_key_values=fresh)):
            with pytest.raises(RuntimeError, match="planted"):
                call_of(model, kind, **arguments)
    assert out.past_key_values.get_seq_length() == length and fresh.get_seq_length() == 0
    assert torch.equal(call_of(model, kind, **later).logits, expected)
    again = call_of(model, kind, **inputs, past_key_values=fresh).logits
    assert torch.equal(again, out.logits)


def test_a_backward_pass_raises(ops):
    model = served("llama", ops)
    loss = model(torch.tensor([[1, 2, 3]])).logits.sum()
    with pytest.raises(RuntimeError, match="backward: expected no gradient"):
        loss.backward()
