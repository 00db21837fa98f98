"""Tests of the transformers adapter: smallest sizes, arguments by position, growing caches, packed batches.

`use_mla(model, ops=...)` makes a DeepSeek model of transformers compute its attention with `reference` or `fast`, over
a paged cache of latents. A model without `use_mla` is a stock model.
"""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="the integration runs transformers models")
from transformers.cache_utils import DynamicCache

from fast.integrations.transformers import use_mla
from fast.integrations.transformers.cache import BatchRecord, LatentCacheLayer, latent_layers
from fast.integrations.transformers.models import CacheEntry

from ...support.transformers_models import BLOCK, GREEDY, HEAD_SIZE, LAYERS, STOCK, VOCAB, packed_step, served

pytestmark = pytest.mark.usefixtures("plain_errors")


def prompt(rows=2, tokens=6):
    return torch.randint(1, VOCAB, (rows, tokens))


def test_the_least_sizes_serve(ops):
    """Generate with the smallest block size, decode threshold and workspace -> the tokens of the stock model."""
    model = copy.deepcopy(STOCK["v3-yarn"])
    use_mla(model, ops=ops, block_size=1, decode_threshold=1, workspace_tokens=2)
    ids = prompt()
    assert torch.equal(model.generate(ids, **GREEDY), STOCK["v3-yarn"].generate(ids, **GREEDY))
    again = use_mla(copy.deepcopy(STOCK["v3-yarn"]), ops=ops, block_size=BLOCK, workspace_tokens=BLOCK)
    assert torch.equal(again.generate(ids[:1], **GREEDY), STOCK["v3-yarn"].generate(ids[:1], **GREEDY))


def test_arguments_by_position(ops):
    """Pass six arguments by position -> the same result as by name. Pass a seventh argument by position -> an error."""
    base, ids = served("v3-yarn", ops).model, prompt()
    positions, mask = torch.arange(6)[None], torch.ones_like(ids)
    mask[0, :2] = 0
    with torch.no_grad():
        named = base(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)
        placed = base(ids, mask, positions, DynamicCache(), None, True)
        assert torch.equal(named.last_hidden_state, placed.last_hidden_state)
        assert placed.past_key_values.get_seq_length() == 6
        assert base(ids, mask, positions, None, None, False).past_key_values is None
        with pytest.raises(TypeError, match="^model: expected at most 6 positional arguments, got 7$"):
            base(ids, mask, positions, None, None, False, None)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_positions_of_one_row_are_those_of_all(ops, dtype):
    """Pass positions of shape [1, Sq], of shape [B, Sq], or none -> the same logits.

    B is the number of rows, and Sq is the number of new tokens of a row. Without `position_ids`, the positions continue
    after the cached tokens. Positions that do not rise by one are refused.
    """
    model, ids = served("v3-yarn", ops), prompt(3, 7)
    with torch.no_grad():
        found = []
        for rows in (1, 3, None):
            cache = DynamicCache()
            for first, last in ((0, 4), (4, 7)):
                given = None if rows is None else torch.arange(first, last, dtype=dtype).expand(rows, -1)
                logits = model(ids[:, first:last], position_ids=given, past_key_values=cache).logits
            found.append(logits)
        shifted = model(ids, position_ids=torch.arange(9, 16)[None], use_cache=False).logits
        jump = torch.tensor([[0, 1, 2, 3, 4, 5, 9]])
        with pytest.raises(ValueError, match="^position_ids: expected positions that rise by one in each row"):
            model(ids, position_ids=jump, use_cache=False)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert shifted.shape == (3, 7, VOCAB)


def test_pages_are_reserved_for_what_comes():
    """Let a block table grow -> its new width is the larger of two widths: the needed width, and twice the old width.

    If the number of rows changes, the new block table has exactly the needed width. All layers use one `BatchRecord`,
    which has the block table and the lengths of the rows of a batch.
    """
    record = BatchRecord(4)
    asked = [(2, 0, 0), (2, 1, 1), (2, 4, 1), (2, 5, 2), (2, 8, 2), (2, 9, 4), (2, 16, 4), (2, 40, 10), (2, 41, 20)]
    for rows, tokens, width in asked:
        table = record.reserve(rows, tokens)
        assert table.shape == (rows, width) and table.dtype == torch.int32
        assert table.flatten().tolist() == list(range(rows * width)), "two rows share a block"
        assert record.reserve(rows, tokens) is table
        record.commit(tokens, torch.full((rows,), tokens, dtype=torch.int32), None)
    assert record.reserve(3, 9).shape == (3, 3)
    record.clear()
    assert (record.rows, record.length, record.width, record.mask) == (0, 0, 0, None)
    assert record.lens.shape == (0,) and record.block_table.shape == (0, 0)


def test_a_record_counts_what_is_kept():
    """Call `crop` and `select` of a `BatchRecord` -> the right number of tokens of each row, without padding.

    The record drops its padding mask when no padding is left.
    """
    record, mask = BatchRecord(4), torch.ones(3, 6, dtype=torch.bool)
    mask[0, :2], mask[1, 5] = False, False
    record.commit(6, mask.sum(1, dtype=torch.int32), mask)
    record.select(torch.tensor([2, 0, 0]))
    assert (record.rows, record.length, record.lens.tolist()) == (3, 6, [6, 4, 4])
    assert torch.equal(record.mask, mask[[2, 0, 0]])
    record.crop(3)
    assert (record.length, record.lens.tolist()) == (3, [3, 1, 1]) and record.lens.dtype == torch.int32
    assert torch.equal(record.mask, mask[[2, 0, 0], :3])
    record.select(torch.tensor([True, False, False]))
    assert (record.rows, record.lens.tolist(), record.mask) == (1, [3], None)
    record.crop(1)
    assert (record.length, record.lens.tolist(), record.mask) == (1, [1], None)


def test_a_layer_keeps_its_entries_where_it_grows(ops):
    """Let the cache of a layer grow -> the larger cache has the entries of each row in the same order.

    If the cache has enough blocks, it is not copied. If the number of rows changes, the layer gets a new cache.
    """
    record = BatchRecord(BLOCK)
    layer = LatentCacheLayer(record, leads=True)
    entry = CacheEntry(HEAD_SIZE, torch.float32, torch.device("cpu"))
    first = layer.reserve(ops, 2, 2, entry)
    first.copy_(torch.randn_like(first))
    assert first.shape == (4, BLOCK, HEAD_SIZE) and layer.is_initialized
    for width in (1, 2):
        assert layer.reserve(ops, 2, width, entry) is first
    grown = layer.reserve(ops, 2, 3, entry)
    assert grown.shape[0] == 6 and layer.kv_cache is grown
    assert torch.equal(grown.unflatten(0, (2, 3))[:, :2], first.unflatten(0, (2, 2)))
    with pytest.raises(ValueError, match=f"^past_key_values: expected entries of 7 elements, got {HEAD_SIZE}$"):
        layer.reserve(ops, 2, 3, entry._replace(columns=7))
    with pytest.raises(ValueError, match="^past_key_values: expected entries in torch.float16, got torch.float32$"):
        layer.reserve(ops, 2, 3, entry._replace(dtype=torch.float16))
    assert layer.reserve(ops, 3, 1, entry).shape[0] == 3


def test_layers_of_a_cache(ops):
    """Make the layers of a cache -> all layers share one `BatchRecord`, and only the first layer updates it.

    A cache whose number of layers and block size are right is reused. Any other cache is refused.
    """
    layers = latent_layers(DynamicCache(), LAYERS, BLOCK)
    assert [layer.leads for layer in layers] == [True, False]
    assert layers[0].record is layers[1].record and layers[0].record.block_size == BLOCK
    cache = DynamicCache()
    cache.layers = layers
    assert latent_layers(cache, LAYERS, BLOCK) is layers
    for number, block_size, message in (
        (LAYERS + 1, BLOCK, f"{LAYERS + 1} layers, got {LAYERS}"),
        (LAYERS, 2 * BLOCK, f"blocks of {2 * BLOCK} tokens, got {BLOCK}"),
    ):
        with pytest.raises(ValueError, match=f"^past_key_values: expected {message}$"):
            latent_layers(cache, number, block_size)
    fresh = DynamicCache(config=STOCK["v3-yarn"].config)
    assert len(latent_layers(fresh, LAYERS, BLOCK)) == LAYERS and len(fresh.layers) == LAYERS
    with pytest.raises(ValueError, match=f"^past_key_values: expected {LAYERS + 1} layers, got {LAYERS}$"):
        latent_layers(fresh, LAYERS + 1, BLOCK)


@pytest.mark.parametrize("rows", [0, 2])
def test_a_packed_batch_is_one_row(ops, rows):
    """Pass a packed batch with 0 rows or with 2 rows -> an error, because a packed batch has one row of all tokens."""
    model = served("v3-yarn", ops)
    caches = [torch.zeros(2, BLOCK, HEAD_SIZE) for _ in range(LAYERS)]
    step = packed_step(ops, [6], [6], torch.tensor([[0, 1]], dtype=torch.int32))
    with pytest.raises(ValueError, match=rf"^input_ids: expected one packed row \[1, T\] .* got \[{rows}, 6\]$"):
        model(torch.ones(rows, 6, dtype=torch.long), mla_kv_caches=caches, **step)
