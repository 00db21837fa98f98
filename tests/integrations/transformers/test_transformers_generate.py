"""Tests of `generate` of DeepSeek models under `use_mla`: every mode generates the tokens of a stock model.

`use_mla` makes a model compute its attention with `reference` or `fast`. A stock model is a model without `use_mla`.
"""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch

pytest.importorskip("transformers", reason="the integration runs transformers models")
from transformers.cache_utils import DynamicCache

from ...support.transformers_models import GREEDY, STOCK, VOCAB, WITHOUT_SHAPE_CHECKS, build, served, tokens_of

MODES = {
    "greedy": GREEDY,
    "no cache": dict(GREEDY, use_cache=False),
    "sampling": dict(do_sample=True, temperature=0.8, top_k=20, max_new_tokens=5, num_return_sequences=2),
    "beams": dict(GREEDY, num_beams=3, num_return_sequences=2),
    "prompt lookup": dict(GREEDY, prompt_lookup_num_tokens=3),
}


def mode_inputs(mode: str):
    """Return arguments of `generate` for two prompts of 18 tokens; row 0 begins with five padding tokens.

    The mode "prompt lookup" gets one prompt without padding. In every prompt, the last nine tokens repeat the first
    nine.
    """
    torch.manual_seed(11)
    rows = 1 if mode == "prompt lookup" else 2
    ids = torch.randint(1, VOCAB, (rows, 9)).repeat(1, 2)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0 if rows > 1 else 1
    return dict(input_ids=ids, attention_mask=mask, **MODES[mode])


@functools.cache
def stock_tokens(name: str, mode: str):
    return tokens_of(STOCK[name], **mode_inputs(mode))


@WITHOUT_SHAPE_CHECKS
@pytest.mark.parametrize(
    ("name", "mode"),
    [*itertools.product(("v2", "v3-yarn"), MODES), *itertools.product(("v2-yarn", "v3-half"), ("greedy", "beams"))],
)
def test_generate_gives_the_same_tokens(name, ops, mode):
    assert torch.equal(tokens_of(served(name, ops), **mode_inputs(mode)), stock_tokens(name, mode))


@WITHOUT_SHAPE_CHECKS
def test_assisted_generation(ops):
    ids = torch.randint(1, VOCAB, (1, 9))
    inputs = dict(
        input_ids=ids, attention_mask=torch.ones_like(ids), assistant_model=build("v3-half", seed=3), **GREEDY
    )
    assert torch.equal(tokens_of(served("v3-yarn", ops), **inputs), tokens_of(STOCK["v3-yarn"], **inputs))
    inputs["assistant_model"] = served("v3-half", ops)  # the assistant is under `use_mla` as well
    assert torch.equal(tokens_of(served("v3-yarn", ops), **inputs), tokens_of(STOCK["v3-yarn"], **inputs))


@WITHOUT_SHAPE_CHECKS
def test_generate_continues_from_a_passed_cache(ops):
    def conversation(model):
        torch.manual_seed(1)
        ids, mask = torch.randint(1, VOCAB, (2, 6)), torch.ones(2, 6, dtype=torch.long)
        mask[1, :3] = 0
        cache = DynamicCache(config=model.config)
        for _ in range(2):
            ids = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
            ids = torch.cat((ids, torch.randint(1, VOCAB, (2, 4))), dim=1)
            mask = torch.cat((mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])), dim=1)
        return ids, cache.get_seq_length()

    ids, length = conversation(served("v2-yarn", ops))
    stock_ids, stock_length = conversation(STOCK["v2-yarn"])
    assert torch.equal(ids, stock_ids) and length == stock_length


@WITHOUT_SHAPE_CHECKS
def test_a_copied_cache_is_a_cache_of_its_own(ops):
    model = served("v3-yarn", ops)
    prompt = torch.randint(1, VOCAB, (1, 10))
    with torch.no_grad():
        cache = model(prompt, use_cache=True).past_key_values
    for _ in range(2):
        ids = torch.cat((prompt, torch.randint(1, VOCAB, (1, 3))), dim=1)
        expected = STOCK["v3-yarn"].generate(ids, **GREEDY)
        assert torch.equal(model.generate(ids, past_key_values=copy.deepcopy(cache), **GREEDY), expected)
    assert cache.get_seq_length() == 10
