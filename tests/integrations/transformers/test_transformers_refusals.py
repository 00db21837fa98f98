"""Tests of calls under `use_mla` that must be refused, as their results would be wrong, and of similar valid calls.

`use_mla` makes a DeepSeek model of transformers compute its attention with `reference` or `fast`.
"""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="the integration runs transformers models")
from transformers.cache_utils import DynamicCache

from fast.integrations.transformers import use_mla
from fast.parity import compare

from ...support.transformers_models import (
    BLOCK,
    HEAD_SIZE,
    LAYERS,
    STOCK,
    VOCAB,
    WITHOUT_SHAPE_CHECKS,
    eager_model,
    furthest_off,
    gold_model,
    packed_step,
    served,
)

pytestmark = WITHOUT_SHAPE_CHECKS
AUTOCAST = r"^model: expected no autocast, because the cache has one dtype, got autocast$"
TABLE = torch.tensor([[3, 0]], dtype=torch.int32)


def packed_call(ops, model, caches):
    """Return the logits of a packed batch (one row of all tokens) with one request of 6 tokens in blocks 3 and 0."""
    with torch.no_grad():
        return model(torch.arange(1, 7)[None], mla_kv_caches=caches, **packed_step(ops, [6], [6], TABLE)).logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_refused(ops, dtype):
    """Call a model under autocast -> an error, and no cache entry is written.

    Under autocast, the dtype of the projections would differ from the dtype of the cache.
    """
    model, ids = served("v3-yarn", ops), torch.arange(1, 13).view(2, 6)
    cache = DynamicCache(config=model.config)
    caches = [torch.zeros(4, BLOCK, HEAD_SIZE) for _ in range(LAYERS)]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with torch.autocast("cpu", dtype=dtype):
            for use_cache in (True, False):
                with pytest.raises(ValueError, match=AUTOCAST):
                    model(ids, past_key_values=cache if use_cache else None, use_cache=use_cache)
            with pytest.raises(ValueError, match=AUTOCAST):
                packed_call(ops, model, caches)
            with torch.autocast("cpu", enabled=False):
                assert torch.equal(model(ids, use_cache=False).logits, expected)
    assert cache.get_seq_length() == 0 and not any(each.any() for each in caches)


def test_autocast_to_the_dtype_of_the_model_is_refused(ops):
    """Call a bfloat16 model under autocast to bfloat16 -> an error."""
    model = use_mla(copy.deepcopy(STOCK["v3-yarn"]).bfloat16(), ops=ops, block_size=BLOCK)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match=AUTOCAST):
        model(torch.arange(1, 7)[None])


def test_one_cache_for_two_layers_is_refused(ops):
    """Pass one cache for two layers, or two views of one cache -> an error.

    The second layer would overwrite the entries of the first layer. Different slices of one tensor are accepted.
    """
    model = served("v3-yarn", ops)
    for wide in (torch.zeros(4, BLOCK, HEAD_SIZE), torch.zeros(4, 2, BLOCK, HEAD_SIZE)):
        one = wide if wide.dim() == 3 else wide[:, 1]
        for caches in ([one] * LAYERS, [one, one.view(one.shape)], [one, one.detach()]):
            with pytest.raises(ValueError, match="^mla_kv_caches: expected a separate cache for each layer, got one"):
                packed_call(ops, model, caches)
        assert not wide.any()
    layers = torch.zeros(4, LAYERS, BLOCK, HEAD_SIZE)  # one tensor with the caches of all layers
    apart = [torch.zeros(4, BLOCK, HEAD_SIZE) for _ in range(LAYERS)]
    inside = packed_call(ops, model, list(layers.unbind(1)))
    assert torch.equal(inside, packed_call(ops, model, apart))
    for layer, kv_cache in enumerate(apart):
        assert torch.equal(layers[:, layer], kv_cache) and int(kv_cache.any(-1).sum()) == 6


# Operations that remove all padding from a cache. Row 0 of the cache ends in three padding tokens.
REMOVALS = {
    "crop": lambda cache, ids: (cache.crop(-3), ids[:, :-3])[1],
    "crop, then crop": lambda cache, ids: (cache.crop(-1), cache.crop(-2), ids[:, :-3])[2],
    "crop beyond": lambda cache, ids: (cache.crop(-5), ids[:, :-5])[1],
    "select": lambda cache, ids: (cache.batch_select_indices(torch.tensor([2, 1])), ids[[2, 1]])[1],
    "reorder": lambda cache, ids: (cache.reorder_cache(torch.tensor([1, 1, 2])), ids[[1, 1, 2]])[1],
}


@pytest.mark.parametrize("operation", REMOVALS)
def test_a_cache_without_padding_left_needs_no_mask(ops, operation):
    """Remove all padding from a cache, then continue without a mask -> logits within the budget, no error.

    The budget is computed from the error of stock transformers.
    """
    ids = torch.randint(1, VOCAB, (3, 9))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    new = torch.randint(1, VOCAB, (3, 4))

    def scenario(model):
        cache, logits = DynamicCache(config=model.config), []
        model(ids, attention_mask=mask, past_key_values=cache)
        kept = REMOVALS[operation](cache, ids)
        for step in (new[: len(kept), :3], new[: len(kept), 3:]):
            logits.append(model(step, past_key_values=cache).logits)
        assert cache.get_seq_length() == kept.shape[1] + 4
        return torch.cat(logits, dim=1), kept

    with torch.no_grad():
        value, kept = scenario(served("v3-yarn", ops, workspace_tokens=24))
        whole = torch.cat((kept, new[: len(kept)]), dim=1)
        gold = gold_model("v3-yarn")(whole).logits[:, kept.shape[1] :]
        low, other = (model(whole).logits[:, kept.shape[1] :] for model in (STOCK["v3-yarn"], eager_model("v3-yarn")))
    result = compare("logits", value, furthest_off([low, other], gold), gold)
    assert result.passed, result


def test_a_cropped_cache_that_holds_padding_still_needs_its_mask(ops):
    """Remove two of three padding tokens from a cache, then continue without a mask -> an error."""
    ids = torch.randint(1, VOCAB, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    model = served("v3-yarn", ops)
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        cache.crop(-2)
        with pytest.raises(ValueError, match=r"^attention_mask: .* because past_key_values holds padding, got None$"):
            model(ids[:, :1], past_key_values=cache)
        again = torch.cat((mask[:, :7], mask.new_ones(2, 1)), dim=1)
        model(ids[:, :1], attention_mask=again, past_key_values=cache)
    assert cache.get_seq_length() == 8
