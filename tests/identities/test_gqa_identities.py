"""Identities of grouped-query attention (GQA) that hold in float64 to about 1e-12, whatever the order of arithmetic.

No test compares `fast` with `reference`. Each check (a function `check_...`) gets a package as its argument `ops`. The
tests in tests/mutations call the checks with packages that have a planted mistake.

The letters of shapes: T query tokens, S keys of a request, Sq query tokens of a request, N heads, Nkv key/value heads,
Dh head dim, W keys in a window.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import reference
from reference.interfaces import AttentionState, CommonAttentionMetadata
from reference.interfaces.gqa import AttentionType, GQAConfig, PagedAttentionMetadata

from ..support.factories import assert_close64, assert_same_bits, assert_states64, integers, offsets
from ..support.gqa import (
    CONFIGS,
    GROUPED,
    LENS,
    MHA,
    MQA,
    SLOPES,
    GQABatch,
    gqa_batch,
    oracle_batch,
    oracle_request,
    visible_ranges,
)
from ..support.properties import given, st

F64 = torch.float64
CASCADED = {
    "grouped": GROUPED,
    "sinks and soft cap": replace(GROUPED, attention_sinks=True, logits_soft_cap=0.9),
    "multi-query": MQA,
}
SPLIT = {name: config for name, config in CONFIGS.items() if config.alibi_slopes is None}
ENCODER = replace(GROUPED, attention_type=AttentionType.ENCODER)
CROSS = replace(MHA, attention_type=AttentionType.CROSS)
LOCAL = replace(GROUPED, attention_chunk_size=32)


def paged(ops, batch: GQABatch, metadata: PagedAttentionMetadata | None = None, q=None, **changed) -> AttentionState:
    """Attend the cache of a batch; `changed` replaces `config` and `sinks`."""
    options = {"config": batch.config, "sinks": batch.sinks, **batch.scales, **changed}
    metadata = batch.metadata if metadata is None else metadata
    return ops.gqa_paged_attention(batch.q if q is None else q, batch.kv_cache, metadata, **options)


def packed(per_request) -> torch.Tensor:
    return torch.cat(per_request)


def contiguous(ops, batch: GQABatch) -> AttentionState:
    """Attend the keys and values of a batch without a cache."""
    query_lens, key_lens = ([each[i] for each in batch.lens] for i in (0, 1))
    return ops.gqa_varlen_attention(
        batch.q, packed(batch.k), packed(batch.v), offsets(query_lens), offsets(key_lens), max(query_lens),
        max(key_lens), batch.config, batch.sinks,
    )  # fmt: skip


# Paged attention, compared with attention of contiguous keys and with a masked softmax that is written out.


def check_paged_is_contiguous(ops, config: GQAConfig, lens=LENS, block_size: int = 16, layout: str = "NHD"):
    """Compare attention over a cache with attention without a cache."""
    batch = gqa_batch(config, lens, block_size, layout=layout)
    assert_states64(paged(ops, batch), contiguous(ops, batch))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", CONFIGS)
def test_paged_is_contiguous(ops, name, layout):
    """Attend keys in pages of both layouts -> attention over contiguous keys."""
    check_paged_is_contiguous(ops, CONFIGS[name], layout=layout)


def check_masked_softmax(ops, config: GQAConfig, lens=LENS, freed: bool = True):
    """Compare attention over a cache with the oracle; two tokens are behind the last request.

    If `freed` is true, blocks that a window no longer reaches are freed.
    """
    batch = gqa_batch(config, lens, padding=2 if lens else 0, free_behind_window=freed)
    assert_states64(paged(ops, batch), oracle_batch(batch))


@pytest.mark.parametrize("name", CONFIGS)
def test_masked_softmax(ops, name):
    """Attend with a window, a soft cap, ALiBi and sinks -> a masked softmax that is written out row by row."""
    check_masked_softmax(ops, CONFIGS[name])


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=3),
    st.sampled_from([None, 1, 15, 16, 17, 23]),
    st.booleans(),
    st.sampled_from([(3, 3, 32), (6, 2, 80), (4, 1, 96)]),
)
def test_masked_softmax_any_lengths(lens, window, sinks, shape):
    lens = [(query_len, query_len + context if context else 0) for query_len, context in lens]
    check_masked_softmax(reference, GQAConfig(*shape, sliding_window=window, attention_sinks=sinks), lens)


def check_lse_contains_the_sink(ops):
    """Recompute the output of a row from its LSE: sum of exp(score) v / exp(lse), with the sink in the LSE alone."""
    batch = gqa_batch(replace(MQA, attention_sinks=True), [(1, 5)])
    out, lse = paged(ops, batch)
    scores = torch.einsum("hd,kd->hk", batch.q[0], batch.k[0][:, 0]) * 96**-0.5
    weights = scores.exp() / lse[:, :1].exp()
    assert_close64(out[0], weights @ batch.v[0][:, 0])
    assert_close64(1 - weights.sum(1), (batch.sinks - lse[:, 0]).exp())


def test_lse_contains_the_sink(ops):
    """Divide exp(score) by exp(LSE) -> the probabilities of the keys; the missing probability is that of the sink."""
    check_lse_contains_the_sink(ops)


# Merges of states over disjoint keys.


def check_chunked_is_whole(ops, config: GQAConfig, cut: int, lens=LENS):
    """Divide the keys of all requests at key `cut` into two plans, and merge the two states.

    Exactly one of the states gets the sinks.
    """
    batch = gqa_batch(config, lens)
    whole, plan = paged(ops, batch), batch.metadata
    first = torch.zeros_like(plan.visible_lens) if plan.first_visible is None else plan.first_visible
    before = replace(plan, first_visible=first.clamp(max=cut), visible_lens=plan.visible_lens.clamp(max=cut))
    after = replace(plan, first_visible=torch.minimum(first.clamp(min=cut), plan.visible_lens))
    without = replace(config, attention_sinks=False)
    for with_sinks, other in ((before, after), (after, before)):
        states = paged(ops, batch, with_sinks), paged(ops, batch, other, config=without, sinks=None)
        assert_states64(ops.merge_attn_states(*states), whole)


@pytest.mark.parametrize("cut", [1, 16, 19])
@pytest.mark.parametrize("name", SPLIT)
def test_chunked_is_whole(ops, name, cut):
    """Merge the states over the keys before and after a cut -> attention over all keys."""
    check_chunked_is_whole(ops, SPLIT[name], cut)


def check_alibi_position(ops, cut: int = 16):
    """Merge the states of two plans with ALiBi, whose positions are `visible_lens` - 1.

    The plan over the keys before the cut has smaller `visible_lens`, so its scores are larger by slope * difference.
    """
    batch = gqa_batch(replace(GROUPED, alibi_slopes=SLOPES), [(1, 37), (3, 20), (1, 16)])
    plan = batch.metadata
    visible = plan.visible_lens.clamp(max=cut)
    before = paged(ops, batch, replace(plan, visible_lens=visible))
    too_near = torch.outer(torch.tensor(SLOPES, dtype=F64), (plan.visible_lens - visible).double())
    after = paged(ops, batch, replace(plan, first_visible=plan.visible_lens.clamp(max=cut)))
    assert_states64(ops.merge_attn_states(replace(before, lse=before.lse - too_near), after), paged(ops, batch))


def test_alibi_position(ops):
    """Move the position of the queries by n keys -> every score changes by slope * n."""
    check_alibi_position(ops)


def shared_prefix_batch(config: GQAConfig, prefix_blocks: int = 2) -> GQABatch:
    """Return a batch whose requests share their first blocks; one request is a padding row."""
    batch = gqa_batch(config, [(1, 33), (1, 50), (3, 48), (1, 0), (2, 37)])
    table = batch.metadata.block_table.clone()
    table[:, :prefix_blocks] = table[0, :prefix_blocks]
    return replace(batch, metadata=replace(batch.metadata, block_table=table))


def check_cascade_is_whole(ops, config: GQAConfig):
    """Attend a shared prefix once for all requests and the suffix of each request."""
    batch = shared_prefix_batch(config)
    cascade = ops.split_shared_prefix(batch.metadata, 32, 16, row=1)
    got = ops.gqa_cascade_attention(batch.q, batch.kv_cache, cascade, config, batch.sinks)
    assert_states64(got, paged(ops, batch))


@pytest.mark.parametrize("name", CASCADED)
def test_cascade_is_whole(ops, name):
    """Attend the shared prefix once -> the state of ordinary attention, sinks included."""
    check_cascade_is_whole(ops, CASCADED[name])


# Prefill and decode.


def check_prefill_is_decode(ops, config: GQAConfig, lens=((15, 15), (16, 33), (17, 53), (3, 3))):
    """Compare a prefill with one decode for each of its tokens, each a request of its own."""
    batch = gqa_batch(config, lens)
    plan, request = batch.metadata, [r for r, (query_len, _) in enumerate(lens) for _ in range(query_len)]
    tokens = len(request)
    single = replace(
        plan, block_table=plan.block_table[request], seq_lens=plan.visible_lens, max_query_len=1,
        query_start_loc=integers(*range(tokens + 1)),
    )  # fmt: skip
    assert_states64(paged(ops, batch), paged(ops, batch, single))


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_is_decode(ops, name):
    """Attend the tokens of a prefill one by one -> the state of the prefill."""
    check_prefill_is_decode(ops, CONFIGS[name])


def check_layouts(ops):
    """Attend and write caches of both layouts in memory."""
    batches = [gqa_batch(GROUPED, LENS, layout=layout, seed=3) for layout in ("NHD", "HND")]
    assert batches[0].kv_cache.stride() != batches[1].kv_cache.stride()
    for ours, theirs in zip(*(paged(ops, batch) for batch in batches), strict=True):
        assert_same_bits(ours, theirs)


def test_layouts(ops):
    """Attend the same cache in the layouts NHD and HND -> the same bits."""
    check_layouts(ops)


# Attention types.


def check_cross_attention(ops, lens=((1, 17), (5, 3), (2, 0), (0, 16), (3, 31)), layout: str = "NHD"):
    """Compare cross attention over a cache with cross attention without a cache."""
    batch = gqa_batch(CROSS, lens, layout=layout)
    expected = oracle_batch(batch)
    assert_states64(paged(ops, batch), expected)
    assert_states64(contiguous(ops, batch), expected)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_cross_attention(ops, layout):
    """Attend the keys of encoders, also with more queries than keys -> every query attends all keys of its request."""
    check_cross_attention(ops, layout=layout)


def check_encoder(ops, config: GQAConfig, lens=(1, 0, 17, 16, 23)):
    """Compare an encoder with the oracle: token i attends the tokens j with |i - j| < W."""
    total, window = sum(lens), config.sliding_window or 1000
    q, k, v = (
        torch.randn(total, heads, config.head_dim, dtype=F64)
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    )
    sinks = torch.randn(config.num_heads, dtype=F64) if config.attention_sinks else None
    got = ops.gqa_varlen_attention(q, k, v, offsets(lens), offsets(lens), max(lens), max(lens), config, sinks)
    parts = [
        oracle_request(
            config, *three, [[j for j in range(n) if abs(i - j) < window] for i in range(n)], range(n), sinks
        )
        for n, *three in zip(lens, q.split(lens), k.split(lens), v.split(lens), strict=True)
    ]
    expected = AttentionState(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts], 1))
    assert_states64(got, expected)


@pytest.mark.parametrize("window", [None, 1, 3, 16, 17, 100])
def test_encoder(ops, window):
    """Attend the tokens of encoders with windows of several sizes -> an explicit mask; the window has two sides."""
    check_encoder(ops, replace(ENCODER, sliding_window=window))
    check_encoder(ops, replace(ENCODER, sliding_window=window, alibi_slopes=SLOPES, attention_sinks=True))


def test_encoder_only_is_an_encoder(ops):
    """Attend with the attention types ENCODER and ENCODER_ONLY -> both have the same mask."""
    check_encoder(ops, replace(ENCODER, attention_type=AttentionType.ENCODER_ONLY, sliding_window=5))


def check_local_attention(ops, config: GQAConfig = LOCAL, lens=LENS, freed: bool = True):
    """Compare chunked local attention, planned as virtual batches, with an explicit mask.

    If `freed` is true, blocks in front of the attention chunks that the tokens attend are freed.
    """
    batch = gqa_batch(config, lens, free_behind_window=freed)
    common = CommonAttentionMetadata.make(
        offsets([query_len for query_len, _ in lens]).cpu(), integers(*(length for _, length in lens)).cpu(),
        batch.metadata.block_table, batch.slot_mapping, 16,
    )  # fmt: skip
    virtual = ops.make_local_attention_virtual_batches(common, config.attention_chunk_size, 16)
    plan = PagedAttentionMetadata(
        block_table=virtual.block_table, seq_lens=virtual.seq_lens, query_start_loc=virtual.query_start_loc,
        max_query_len=virtual.max_query_len, max_seq_len=virtual.max_seq_len, block_size=16,
        visible_lens=ops.compute_visible_lens(virtual.query_start_loc, virtual.seq_lens, batch.q.shape[0]),
    )  # fmt: skip
    expected = oracle_batch(batch)
    assert_states64(paged(ops, batch, plan), expected)
    assert_states64(contiguous(ops, batch), expected)


@pytest.mark.parametrize("chunk", [16, 32, 48])
def test_local_attention(ops, chunk):
    """Attend virtual batches -> attention with an explicit mask of attention chunks."""
    check_local_attention(ops, replace(LOCAL, attention_chunk_size=chunk))
    check_local_attention(ops, replace(LOCAL, attention_chunk_size=chunk, attention_sinks=True, logits_soft_cap=1.3))


def test_inputs_were_not_degenerate():
    """Look at the inputs -> each feature changes the expected result, and windows leave blocks behind."""
    batch = gqa_batch(CONFIGS["all of them"], LENS, seed=1)
    expected = oracle_batch(batch)
    for change in (
        dict(scale=0.21), dict(sliding_window=20), dict(logits_soft_cap=None), dict(alibi_slopes=None),
    ):  # fmt: skip
        config = replace(batch.config, **change)
        different = (oracle_batch(replace(batch, config=config)).out - expected.out).abs()
        assert different.amax() > 1e-3, change
    assert (oracle_batch(replace(batch, sinks=None)).out - expected.out).abs().amax() > 1e-3
    assert any(-1 in own for own in batch.slots)
    assert batch.kv_cache.isnan().any()
    assert max(end - first for each in LENS for first, end in visible_ranges(MHA, *each)) > 48
