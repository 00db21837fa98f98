"""Tests that functions refuse a cache whose block size differs from the block size of the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
import reference
from reference.interfaces import CommonAttentionMetadata, ContextChunk

from ..support.factories import (
    CONFIGS,
    integers,
    make_batch,
    make_cache,
    make_entries,
    make_layer,
    make_up_projections,
    make_weights,
    new_cache,
)

CONFIG = CONFIGS["direct"]


@pytest.fixture(params=["reference", "fast"])
def ops(request):
    return {"reference": reference, "fast": fast}[request.param]


def other_blocks(cache):
    """Return a view of the cache with twice as many blocks and half as many tokens in a block."""
    return cache.view(2 * cache.shape[0], cache.shape[1] // 2, cache.shape[2])


def refuses(call, argument, cache):
    """Assert that a call raises an error and does not write the cache; the error names the argument and both sizes."""
    before = cache.clone()
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == f"{argument}: expected 8, the block size of kv_cache, got 16"
    assert torch.equal(cache.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("lens", [([1, 1], [20, 33]), ([9, 5], [9, 40])], ids=["decode", "prefill"])
def test_layer_refuses_a_plan_for_another_block_size(ops, lens, plain_errors):
    batch = make_batch(*lens)
    layer = make_layer(ops, CONFIG, make_weights(CONFIG, torch.float32), torch.float32)
    entries = make_entries(batch, CONFIG.head_size, torch.float32)
    cache = make_cache(batch, entries, CONFIG.head_size, torch.float32, new_tokens=False)
    metadata = ops.build_mla_metadata(batch.common, 16, 64)
    hidden, positions = torch.randn(batch.num_tokens, CONFIG.hidden_size), torch.arange(batch.num_tokens)
    refuses(lambda: layer(hidden, positions, other_blocks(cache), metadata), "metadata.decode.block_size", cache)
    assert layer(hidden, positions, cache, metadata).isfinite().all()


def test_ops_refuse_a_plan_for_another_block_size(ops, plain_errors):
    batch = make_batch([1, 1], [40, 33])
    cache = new_cache(batch, CONFIG.head_size, torch.float32)
    plan = ops.build_mla_metadata(batch.common, 16, 64).decode
    ql, q_pe = torch.randn(2, 3, 24), torch.randn(2, 3, 8)
    refuses(lambda: ops.mla_decode(ql, q_pe, other_blocks(cache), plan, 0.3), "metadata.block_size", cache)
    shared = replace(plan, block_table=plan.block_table[:1].expand(2, -1))
    cascade = ops.split_shared_prefix(shared, 16, 16)
    refuses(lambda: ops.cascade_attention(ql, q_pe, other_blocks(cache), cascade, 0.3), "metadata.block_size", cache)
    with pytest.raises(ValueError, match="^block_size: expected 16, as in metadata, got 8$"):
        ops.split_shared_prefix(shared, 16, 8)

    batch = make_batch([5, 6], [40, 33])
    cache = new_cache(batch, CONFIG.head_size, torch.float32)
    prefill = ops.build_mla_metadata(batch.common, 16, 64).prefill
    given = torch.randn(11, 3, 20), torch.randn(11, 24), torch.randn(11, 8)
    up = make_up_projections(CONFIG, torch.float32)
    refuses(lambda: ops.forward_prefill(*given, other_blocks(cache), prefill, *up, 0.3), "metadata.block_size", cache)
    chunk = prefill.context_chunks[0]
    refuses(lambda: ops.gather_context(other_blocks(cache), prefill, chunk), "metadata.block_size", cache)

    def program(ranks):
        part = ops.rank_local_chunk(ContextChunk(integers(0, 0), integers(0, 5, 7), 7, 5), ranks.ownership)
        refuses(lambda: ops.dcp_gather_context(other_blocks(cache), prefill, part, ranks), "metadata.block_size", cache)

    ops.simulate(2, 1, program)


def test_slots_of_another_block_size_are_refused(ops, plain_errors):
    """A plan is refused if the slots of the batch were computed for another block size.

    `from_lens` records the block size in the batch. A batch without a recorded block size is accepted.
    """
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    common = CommonAttentionMetadata.from_lens([1, 1], [20, 9], table, 16)
    wanted = "^common.block_size: expected 8, the block size of the plan, got 16$"
    with pytest.raises(ValueError, match=wanted):
        ops.build_mla_metadata(common, 8, 64)
    with pytest.raises(ValueError, match=wanted):
        ops.MLAMetadataBuilder(CONFIG, 8, 64, 2).build(0, common)
    with pytest.raises(ValueError, match=wanted):
        ops.make_local_attention_virtual_batches(common, 16, 8)
    builder = ops.MLAMetadataBuilder(CONFIG, 8, 32, 2)
    graph = ops.DecodeGraph(lambda hidden, *_: hidden, builder, [2], 4, CONFIG.hidden_size, torch.float32, "cpu")
    with pytest.raises(ValueError, match=wanted):
        graph.run(torch.zeros(2, CONFIG.hidden_size), torch.zeros(2, dtype=torch.int64), common)
    unknown = replace(common, block_size=None)
    assert ops.build_mla_metadata(unknown, 8, 64).decode.block_size == 8
