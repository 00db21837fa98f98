"""Tests of the keys and caches that a layer of grouped-query attention needs: cross attention and KV sharing.

Both packages run each test. A cache has NaN in every slot that no key was written to.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from reference.interfaces import FP8_E4M3
from reference.interfaces.gqa import AttentionType

from ..support.factories import assert_close64, assert_same_bits, make_batch
from ..support.gqa import GROUPED, MHA, gqa_batch, gqa_step, poisoned_cache
from ..support.gqa_plans import cross_batch

CROSS = replace(MHA, attention_type=AttentionType.CROSS, attention_sinks=True)
SHARED = replace(GROUPED, kv_sharing_layer="layers.3.attention")
NEW = ((1, 1), (1, 0), (5, 5), (17, 17))  # requests without context, one of them a padding row


def cross_inputs(ops, encoder_lens, ran=None, columns=None):
    """Return a layer of cross attention, its queries and its plan, for requests with 1, 1 and 3 new tokens.

    Args:
        ops: the package.
        encoder_lens: tokens of the encoder's output of each request.
        ran: indices of the requests whose encoder runs in this step; None means none.
        columns: number of columns of the encoder's block table; None means as many as the lengths need, and one more.
    """
    common = cross_batch(make_batch([1, 1, 3], [4, 9, 3]), encoder_lens, ran=ran)
    common = replace(common, encoder_block_table=common.encoder_block_table[:, :columns])
    plan = ops.GQAMetadataBuilder(CROSS, 16, 64, 4).build(0, common)
    sinks = torch.randn(3, dtype=torch.float64)
    return ops.GQAAttention(CROSS, sinks=sinks), torch.randn(5, 3, 32, dtype=torch.float64), plan


# Cross attention.


@pytest.mark.parametrize("keys", [0, 1, 24, 26])
def test_every_slot_needs_a_key(ops, keys, plain_errors):
    """Pass another number of keys than slots -> an error that names it; nothing is written, as the rest is NaN."""
    layer, q, plan = cross_inputs(ops, (20, 0, 5), ran=(0, 2))
    k = torch.randn(keys, 3, 32, dtype=torch.float64)
    cache, output = poisoned_cache(6, 16, CROSS, torch.float64), torch.full_like(q, 7)
    before = cache.clone()
    message = (
        "^metadata.slot_mapping: expected a slot for each of the 26 keys, got 25$"
        if keys == 26
        else f"^k: expected a key for each of the 25 slots of metadata.slot_mapping, got {keys}$"
    )
    with pytest.raises(ValueError, match=message):
        layer(q, k, k, cache, plan, output)
    assert_same_bits(cache, before)
    assert output.eq(7).all()


def test_later_steps_pass_no_keys(ops):
    """Write the keys of two encoders, then of the third one, then none -> all keys are attended in the last step."""
    layer, q, _ = cross_inputs(ops, (20, 7, 5))
    common = cross_batch(make_batch([1, 1, 3], [4, 9, 3]), (20, 7, 5), ran=(0, 1, 2))
    slots, builder = common.encoder_slot_mapping, ops.GQAMetadataBuilder(CROSS, 16, 64, 4)
    k, v = torch.randn(2, 32, 3, 32, dtype=torch.float64)
    whole = layer(q, k, v, poisoned_cache(6, 16, CROSS, torch.float64), builder.build(0, common))
    cache = poisoned_cache(6, 16, CROSS, torch.float64)
    for rows in (slice(0, 27), slice(27, 32), slice(0, 0)):
        plan = builder.build(0, replace(common, encoder_slot_mapping=slots[rows]))
        given = (k[rows], v[rows]) if slots[rows].shape[0] else (None, None)
        output = layer(q, *given, cache, plan)
    assert whole.isfinite().all() and output.isfinite().all()
    assert_close64(output, whole)


def test_a_table_without_columns_is_named(ops, plain_errors):
    """Attend cached keys of encoders without their blocks -> an error that names the table, not the cache."""
    layer, q, plan = cross_inputs(ops, (20, 0, 5), columns=0)
    cache, output = poisoned_cache(6, 16, CROSS, torch.float64), torch.full_like(q, 7)
    wanted = "^encoder_block_table: expected columns for the blocks of the encoder's keys, because k is None, got no co"
    with pytest.raises(ValueError, match=wanted):
        layer(q, None, None, cache, plan, output)
    with pytest.raises(ValueError, match="^kv_cache: expected the cache of the encoder's keys, because k is None, got"):
        layer(q, None, None, None, plan, output)
    assert output.eq(7).all()


@pytest.mark.parametrize("columns", [0, None])
def test_encoders_without_tokens(ops, columns):
    """Attend outputs of encoders that all have length 0 -> zeros, with and without cache, columns and keys."""
    layer, q, plan = cross_inputs(ops, (0, 0, 0), columns=columns)
    empty = q.new_empty(0, 3, 32)
    for cache in (poisoned_cache(3, 16, CROSS, torch.float64), None):
        for keys in (None, empty):
            output = layer(q, keys, keys, cache, plan, torch.full_like(q, 7))
            assert output.eq(0).all()
    scale = torch.tensor(0.5)
    assert layer(q, None, None, None, plan, output_scale=scale).view(torch.uint8).eq(0).all()


# KV sharing.


@pytest.mark.parametrize("cache_format", [None, FP8_E4M3], ids=["compute_dtype", "fp8_e4m3"])
def test_a_sharing_layer_without_a_cache(ops, cache_format):
    """Prefill without a cache -> a KV-sharing layer attends the given keys as its owner does, and chooses no scale."""
    given = {} if cache_format is None else {"cache_format": cache_format}
    batch = gqa_batch(GROUPED, NEW, padding=2, new_tokens=False, **given)
    owner = ops.GQAAttention(GROUPED, batch.cache_format)
    sharing = ops.GQAAttention(SHARED, batch.cache_format, k_scale=owner.k_scale, v_scale=owner.v_scale)
    plan, tokens, before = gqa_step(batch, 2), (batch.q, batch.new_k, batch.new_v), batch.kv_cache.clone()
    parts = {name: replace(getattr(plan, name), block_table=getattr(plan, name).block_table[:, :0])
             for name in ("decode", "prefill")}  # fmt: skip
    no_columns = replace(plan, **parts)
    for cache, each in ((None, plan), (batch.kv_cache[:, :0], plan), (batch.kv_cache, no_columns)):
        output = sharing(*tokens, cache, each)
        assert_same_bits(output, owner(*tokens, None, plan))
        assert output.abs().max() > 0.1
    for keys in ((None, None), tokens[1:]):  # a memory profile
        assert sharing(batch.q, *keys, None, None).eq(0).all()
    assert_same_bits(batch.kv_cache, before)
    assert cache_format is None or owner.k_scale.source is owner.v_scale.source is None


def test_a_sharing_layer_needs_a_cache_or_keys(ops, plain_errors):
    """Run a KV-sharing layer with neither cache nor keys, with half of them or with both -> one-line errors."""
    batch = gqa_batch(GROUPED, NEW, new_tokens=False)
    sharing, plan, output = ops.GQAAttention(SHARED), gqa_step(batch, 2), torch.full_like(batch.q, 7)
    k, v, cache = batch.new_k, batch.new_v, batch.kv_cache
    for keys, given, message in (
        ((None, None), None, "^kv_cache: expected the cache of the layer 'layers.3.attention', because k is None, got"),
        ((k, None), None, "^v: expected a tensor, because k is a tensor, got None$"),
        ((None, v), None, "^v: expected None, because k is None, got a tensor$"),
        ((k[1:], v[1:]), None, r"^k: expected shape \[24, 2, 80\], got \[23, 2, 80\]$"),
        ((k, v), cache, "^k: expected None for a layer with kv_sharing_layer 'layers.3.attention', got a tensor$"),
        ((None, v), cache, "^v: expected None for a layer with kv_sharing_layer 'layers.3.attention', got a tensor$"),
    ):
        with pytest.raises(ValueError, match=message):
            sharing(batch.q, *keys, given, plan, output)
    context = gqa_batch(GROUPED, [(2, 2), (3, 5)])
    with pytest.raises(ValueError, match=r"^metadata.prefill.seq_lens: expected at most the query length 3 .* got 5"):
        sharing(context.q, context.new_k, context.new_v, None, gqa_step(context, 1))
    assert output.eq(7).all()
