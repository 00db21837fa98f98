"""Tests of the latent cache under `use_mla`: cache operations of transformers, padding, growth, a failed forward.

`use_mla` makes a model of transformers compute its attention with `reference` or `fast`. The model's DynamicCache then
has layers with a paged cache of latents. A stock model does not use `use_mla`, and a stock cache is its DynamicCache.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch

pytest.importorskip("transformers", reason="the integration runs transformers models")
from transformers.cache_utils import DynamicCache, DynamicLayer

from ...support.transformers_models import (
    HEAD_SIZE,
    LAYERS,
    STOCK,
    VOCAB,
    WITHOUT_SHAPE_CHECKS,
    assert_same,
    padded_batch,
    served,
)

CACHE_OPERATIONS = {
    "reorder": lambda cache, mask: (cache.reorder_cache(torch.tensor([2, 0, 0])), mask[[2, 0, 0]])[1],
    "repeat": lambda cache, mask: (cache.batch_repeat_interleave(2), mask.repeat_interleave(2, 0))[1],
    "select": lambda cache, mask: (cache.batch_select_indices(torch.tensor([2, 0])), mask[[2, 0]])[1],
    "select by mask": lambda cache, mask: (
        cache.batch_select_indices(torch.tensor([True, False, True])), mask[[0, 2]])[1],
    "crop": lambda cache, mask: (cache.crop(-3), mask[:, :-3])[1],
    "crop nothing": lambda cache, mask: (cache.crop(0), mask)[1],
    "crop all": lambda cache, mask: (cache.crop(-11), mask[:, :0])[1],
}  # fmt: skip


@WITHOUT_SHAPE_CHECKS
@pytest.mark.parametrize("operation", CACHE_OPERATIONS)
def test_cache_operations_mean_what_stock_means(ops, operation):
    ids, mask = padded_batch()
    new = torch.randint(1, VOCAB, (6, 5))

    def scenario(model):
        cache = DynamicCache(config=model.config)
        model(ids, attention_mask=mask, past_key_values=cache)
        kept = CACHE_OPERATIONS[operation](cache, mask)
        assert cache.get_seq_length() == kept.shape[1]
        assert cache.get_mask_sizes(5, 0) == (kept.shape[1] + 5, 0)
        assert cache.get_max_length(0) == -1 and cache.is_croppable and not cache.is_compileable
        rows = kept.shape[0]
        logits = []
        for step in (new[:rows, :3], new[:rows, 3:4], new[:rows, 4:]):
            kept = torch.cat((kept, kept.new_ones(step.shape)), dim=1)
            logits.append(model(step, attention_mask=kept, past_key_values=cache).logits)
        return torch.cat(logits, dim=1)

    assert_same(scenario, "v3-yarn", ops, workspace_tokens=24)


@WITHOUT_SHAPE_CHECKS
@pytest.mark.parametrize("amount", [0, -1, -6, -9, 3, 6, 8])
def test_crop_takes_the_convention_of_the_installed_version(ops, amount):
    """Call `crop` of a latent cache and of a stock cache -> the same result or the same error.

    In some versions of transformers, a positive argument is the length to keep. Other versions refuse a positive
    argument.
    """
    outcomes = []
    for model in (STOCK["v3-yarn"], served("v3-yarn", ops)):
        with torch.no_grad():
            cache = model(torch.ones(2, 6, dtype=torch.long), use_cache=True).past_key_values
        try:
            cache.crop(amount)
        except ValueError as error:
            outcomes.append(str(error))
        else:
            # if `crop` removed all tokens, a stock layer counts its empty tensor as 0 tokens
            outcomes.append([cache.get_seq_length(layer) for layer in range(LAYERS)])
    assert outcomes[0] == outcomes[1]


@WITHOUT_SHAPE_CHECKS
def test_reset_takes_another_batch(ops):
    model = served("v3-yarn", ops)
    cache = DynamicCache()
    for rows in (3, 1):
        ids = torch.randint(1, VOCAB, (rows, 5))
        with torch.no_grad():
            value = model(ids, past_key_values=cache).logits
            alone = model(ids, use_cache=False).logits
        assert cache.get_seq_length() == 5 and torch.equal(value, alone)
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.layers[0].kv_cache is None


def record_allocations(ops, monkeypatch):
    """From now on, fill each cache that `ops` allocates with NaN, and append the cache to the returned list."""
    made, allocate = [], ops.allocate_kv_cache

    def poisoned(*args, **kwargs):
        made.append(allocate(*args, **kwargs).fill_(math.nan))
        return made[-1]

    monkeypatch.setattr(ops, "allocate_kv_cache", poisoned)
    return made


def test_padding_is_never_written_and_unwritten_bytes_reach_nothing(ops, monkeypatch):
    """Run a padded batch with a cache full of NaN -> entries without a token stay NaN, and all logits are finite.

    Entries without a token are, for example, the last entries of each row's last block (pitfall 7 of the list in
    tests/__init__.py).
    """
    record_allocations(ops, monkeypatch)
    ids, mask = padded_batch()
    model = served("v3-yarn", ops)
    cache = DynamicCache()
    with torch.no_grad():
        first = model(ids, attention_mask=mask, past_key_values=cache).logits
        mask = torch.cat((mask, mask.new_ones(3, 1)), dim=1)
        second = model(ids[:, :1], attention_mask=mask, past_key_values=cache).logits
    assert first.isfinite().all() and second.isfinite().all()
    lens = mask.sum(1)
    for layer in cache.layers:
        tokens = layer.kv_cache.view(3, -1, HEAD_SIZE)
        owned = torch.arange(tokens.shape[1]) < lens[:, None]
        assert tokens[owned].isfinite().all() and tokens[~owned].isnan().all()


@WITHOUT_SHAPE_CHECKS
def test_pages_grow_by_doubling(ops, monkeypatch):
    made = record_allocations(ops, monkeypatch)
    served("v3-yarn", ops).generate(torch.randint(1, VOCAB, (2, 5)), max_new_tokens=14, do_sample=False)
    widths = [2, 4, 8]  # blocks of each row, with 4 tokens in a block: 4 blocks from 9 tokens on, 8 from 17 tokens on
    assert [made[i].shape[0] for i in range(len(made))] == [2 * width for width in widths for _ in range(LAYERS)]


def test_a_failed_forward_leaves_the_cache_as_it_was(ops, monkeypatch):
    model = served("v3-yarn", ops)
    ids = torch.randint(1, VOCAB, (2, 9))
    fresh = DynamicCache(config=model.config)
    with torch.no_grad():
        cache = model(ids[:, :5]).past_key_values
        expected = model(ids[:, 5:], past_key_values=copy.deepcopy(cache)).logits
        attention = model.model.layers[1].self_attn.forward.attention
        with monkeypatch.context() as patch:
            patch.setattr(attention, "forward", lambda *args: (_ for _ in ()).throw(RuntimeError("planted")))
            for past, step in ((cache, ids[:, 5:] + 1), (fresh, ids)):
                with pytest.raises(RuntimeError, match="planted"):
                    model(step % VOCAB, past_key_values=past)
        assert cache.get_seq_length() == 5 and all(type(layer) is DynamicLayer for layer in fresh.layers)
        assert torch.equal(model(ids[:, 5:], past_key_values=cache).logits, expected)


def test_a_cache_made_in_inference_mode_is_used_outside(ops):
    model = served("v3-yarn", ops)
    ids = torch.randint(1, VOCAB, (1, 5))
    with torch.inference_mode():
        cache = model(ids).past_key_values
    with torch.no_grad():
        value = model(ids, past_key_values=cache).logits
        whole = model(ids.repeat(1, 2), use_cache=False).logits[:, 5:]
    assert torch.equal(value.argmax(-1), whole.argmax(-1))
