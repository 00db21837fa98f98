"""Tests of grouped-query attention: the cache write, copies of blocks, attention over caches in e4m3, and bad input.

The identities of attention in float64 are in tests/identities/test_gqa_identities.py. The letters of shapes: T query
tokens, S keys of a request, N heads, Nkv key/value heads, Dh head dim.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import reference
from reference.interfaces import COMPUTE_FORMAT, FP8_DS_MLA, FP8_E4M3, AttentionState, UnsupportedConfiguration
from reference.interfaces.gqa import AttentionType, GQAConfig

from ..support.factories import assert_close64, assert_same_bits, assert_states64, integers
from ..support.gqa import (
    CONFIGS,
    GROUPED,
    LENS,
    MHA,
    MQA,
    as_cached,
    gqa_batch,
    oracle_batch,
    poisoned_cache,
    to_stored,
)

SMALL_LENS = ((1, 20), (3, 17), (2, 2))
LAYOUTS = ["NHD", "HND"]


# The cache.


def check_write(ops, config=GROUPED, layout="NHD", cache_format=COMPUTE_FORMAT, dtype=torch.bfloat16):
    """Write the new tokens of a batch: their slots get the stored numbers, and every other byte stays 0xFF."""
    batch = gqa_batch(config, LENS, 16, dtype, layout, cache_format, padding=2, new_tokens=False)
    before = batch.kv_cache.clone()
    ops.reshape_and_cache(batch.new_k, batch.new_v, batch.kv_cache, batch.slot_mapping, **batch.scales)
    written = torch.zeros(batch.kv_cache.shape[1:3], dtype=torch.bool)
    for (query_len, length), slots, k, v in zip(batch.lens, batch.slots, batch.k, batch.v, strict=True):
        for token in range(length - query_len if length else 0, length):
            block, offset = divmod(slots[token], 16)
            written[block, offset] = True
            for half, x, scale in ((0, k, batch.k_scale), (1, v, batch.v_scale)):
                assert_same_bits(batch.kv_cache[half, block, offset], to_stored(x[token], scale))
    assert written.sum() == sum(query_len for query_len, length in LENS if length)
    assert_same_bits(batch.kv_cache[:, ~written], before[:, ~written])


@pytest.mark.parametrize("cache_format", [COMPUTE_FORMAT, FP8_E4M3], ids=lambda each: each.name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_write(ops, layout, cache_format):
    """Write keys and values of decodes, prefills, a padding row and padding tokens -> only their slots change."""
    check_write(ops, layout=layout, cache_format=cache_format)


def test_write_saturates_and_keeps_nan(ops):
    """Write a number beyond the range of e4m3, and NaN -> the largest e4m3 number of the same sign, and NaN."""
    key = torch.tensor([1e6, -1e6, torch.nan] + [0.5] * 29).view(1, 1, 32)
    cache = poisoned_cache(1, 16, GQAConfig(1, 1, 32), torch.float32, FP8_E4M3)
    scales = torch.tensor(0.5), torch.tensor(2.0)
    ops.reshape_and_cache(key, key, cache, torch.tensor([3]), FP8_E4M3, *scales)
    stored = cache[:, 0, 3, 0].float()
    assert stored[:, :2].tolist() == [[448.0, -448.0]] * 2 and stored[:, 2].isnan().all()
    assert stored[:, 3].tolist() == [1.0, 0.25]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copy_blocks(ops, layout):
    """Copy blocks within a key/value cache -> both halves of the target blocks are the source blocks, bit for bit."""
    batch = gqa_batch(GROUPED, LENS, layout=layout)
    cache, before = batch.kv_cache, batch.kv_cache.clone()
    ops.copy_blocks([cache], torch.tensor([[0, 3], [1, 4]]))
    expected = before.clone()
    expected[:, 3], expected[:, 4] = before[:, 0], before[:, 1]
    assert_same_bits(cache, expected)


@pytest.mark.parametrize("layouts", [("NHD", "HND"), ("HND", "NHD"), ("NHD", "NHD")])
def test_swap_blocks(ops, layouts):
    """Copy blocks between key/value caches of two layouts -> both halves are equal, and other blocks stay."""
    source = gqa_batch(GROUPED, LENS, layout=layouts[0]).kv_cache
    target = poisoned_cache(5, 16, GROUPED, torch.float64, layout=layouts[1])
    before = target.clone()
    ops.swap_blocks(source, target, torch.tensor([[7, 2], [0, 4]]))
    assert_same_bits(target[:, [2, 4]], source[:, [7, 0]])
    assert_same_bits(target[:, [0, 1, 3]], before[:, [0, 1, 3]])


def test_swap_blocks_compares_both_scales(ops):
    """Copy between e4m3 caches whose scales of values differ -> an error, and nothing is written."""
    source = gqa_batch(GROUPED, LENS, cache_format=FP8_E4M3).kv_cache
    target = poisoned_cache(5, 16, GROUPED, torch.float64, FP8_E4M3)
    before, pairs = target.clone(), torch.tensor([[7, 2]])
    scales = torch.tensor([0.5, 0.25])
    with pytest.raises(
        ValueError, match=r"^target_scale: expected \[0.5, 0.25\], the scale of source, got \[0.5, 1.0\]"
    ):
        ops.swap_blocks(source, target, pairs, scales, torch.tensor([0.5, 1.0]))
    with pytest.raises(ValueError, match=r"^source_scale: expected shape \[2\], got \[\]"):
        ops.swap_blocks(source, target, pairs, scales[0], scales[0])
    for bad in (0.0, -1.0, torch.inf, torch.nan):  # a scale of values that is not finite and positive
        wrong = torch.tensor([0.5, bad])
        with pytest.raises(ValueError, match=f"^source_scale: expected a finite number above 0, got {bad}$"):
            ops.swap_blocks(source, target, pairs, wrong, wrong.clone())
    assert_same_bits(target, before)
    ops.swap_blocks(source, target, pairs, scales, scales.clone())
    assert_same_bits(target[:, 2], source[:, 7])


def test_blocks_of_another_cache_are_refused(ops, plain_errors):
    """Copy from a key/value cache to a cache of other heads, a latent cache, or with wrong blocks -> an error."""
    cache = gqa_batch(GROUPED, SMALL_LENS).kv_cache
    pairs = torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match=r"^target: expected shape \[2, target_blocks, 16, 2, 80\], got"):
        ops.swap_blocks(cache, gqa_batch(MHA, SMALL_LENS).kv_cache, pairs)
    with pytest.raises(ValueError, match=r"^target: expected shape"):
        ops.swap_blocks(cache, cache[0, :, :, 0], pairs)
    with pytest.raises(ValueError, match=r"^kv_caches: expected shape \[2, num_blocks, block_size, Nkv, Dh\], got"):
        ops.copy_blocks([cache[:1]], pairs)
    with pytest.raises(ValueError, match=r"^block_mapping: expected source blocks in \[0, "):
        ops.copy_blocks([cache], torch.tensor([[1000, 1]]))


# Attention over a cache.


def check_stored_formats(ops, config, layout="NHD", query_scale=None):
    """Attend an e4m3 cache: the result is attention of the numbers that the cache returns."""
    batch = gqa_batch(config, LENS, layout=layout, cache_format=FP8_E4M3, padding=1)
    q_scale = None if query_scale is None else torch.tensor(query_scale)
    state = ops.gqa_paged_attention(
        batch.q, batch.kv_cache, batch.metadata, config, batch.sinks, **batch.scales, q_scale=q_scale
    )
    assert_states64(state, oracle_batch(batch, None if q_scale is None else as_cached(batch.q, q_scale)))


@pytest.mark.parametrize("query_scale", [None, 0.013])
@pytest.mark.parametrize("name", ["multi-head", "multi-query", "all of them"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stored_formats(ops, name, layout, query_scale):
    """Attend a cache in e4m3, with and without queries in e4m3 -> the oracle with rounded numbers."""
    check_stored_formats(ops, CONFIGS[name], layout, query_scale)


def test_dtypes():
    """Attend in bfloat16 -> the dtype of the queries or `out_dtype`; the LSE is in float32; rounding errors are small.

    The errors are those of numbers with 8 significant bits: below 2^-7 of the largest value, which is about 3.
    """
    batch = gqa_batch(CONFIGS["all of them"], LENS, dtype=torch.bfloat16)
    expected = oracle_batch(batch)
    for out_dtype in (None, torch.float32, torch.float64):
        state = reference.gqa_paged_attention(
            batch.q, batch.kv_cache, batch.metadata, batch.config, batch.sinks, out_dtype=out_dtype
        )
        assert state.out.dtype == (out_dtype or torch.bfloat16)
        assert state.lse.dtype == (torch.float64 if out_dtype == torch.float64 else torch.float32)
        assert (state.out - expected.out).abs().amax() < 2**-7 * 3
        finite = expected.lse.isfinite()
        assert torch.equal(state.lse.isfinite(), finite)
        assert (state.lse - expected.lse)[finite].abs().amax() < 1e-4


def test_rows_without_keys(ops):
    """Attend a padding row, a row whose window is empty and a padding token -> output 0; LSE is the sink, or -inf."""
    config = replace(MQA, attention_sinks=True, sliding_window=4)
    batch = gqa_batch(config, [(1, 0), (1, 9)], padding=1)
    plan = replace(batch.metadata, first_visible=integers(0, 9, 0))
    out, lse = ops.gqa_paged_attention(batch.q, batch.kv_cache, plan, config, batch.sinks)
    assert out.eq(0).all()
    assert_close64(lse[:, :2], batch.sinks[:, None].expand(-1, 2))
    assert lse[:, 2].eq(-torch.inf).all()
    plain = replace(config, attention_sinks=False)
    out, lse = ops.gqa_paged_attention(batch.q, batch.kv_cache, plan, plain)
    assert out.eq(0).all() and lse.eq(-torch.inf).all()


def test_freed_blocks_are_not_read(ops):
    """Attend with a window whose earlier blocks were freed -> the bits of a batch whose blocks were not freed."""
    config = replace(GROUPED, sliding_window=5)
    batch = gqa_batch(config, [(1, 61), (2, 40)], seed=5)
    entries = batch.metadata.block_table
    freed = (entries.lt(0) | entries.ge(batch.kv_cache.shape[1])).sum()
    assert freed == 3 + 2 + 2 + 3  # three and two freed blocks, two and three unused columns
    table = batch.metadata.block_table.clone()
    table[0, :3], table[1, :2] = 0, 1  # blocks of other tokens
    states = [
        ops.gqa_paged_attention(batch.q, batch.kv_cache, replace(batch.metadata, block_table=each), config)
        for each in (batch.metadata.block_table, table)
    ]
    for ours, theirs in zip(*states, strict=True):
        assert_same_bits(ours, theirs)


def check_nan_stays_in_its_request(ops):
    """Poison an owned value of one request -> no other request changes."""
    batch = gqa_batch(GROUPED, SMALL_LENS)
    whole = ops.gqa_paged_attention(batch.q, batch.kv_cache, batch.metadata, GROUPED)
    assert whole.out.isfinite().all()
    block, offset = divmod(batch.slots[0][4], 16)
    batch.kv_cache[1, block, offset] = torch.nan
    state = ops.gqa_paged_attention(batch.q, batch.kv_cache, batch.metadata, GROUPED)
    assert state.out[0].isnan().any()
    assert_states64(AttentionState(state.out[1:], state.lse[:, 1:]), AttentionState(whole.out[1:], whole.lse[:, 1:]))


def test_nan_stays_in_its_request(ops):
    """Attend a cache with NaN in an owned value -> the other requests have their results."""
    check_nan_stays_in_its_request(ops)


# Bad input.


def refused(match, *, error=ValueError, **changed):
    """Assert that `gqa_paged_attention` of the reference refuses a batch in which arguments were changed."""
    batch = gqa_batch(GROUPED, SMALL_LENS)
    given = dict(q=batch.q, kv_cache=batch.kv_cache, metadata=batch.metadata, config=GROUPED) | changed
    with pytest.raises(error, match=match) as caught:
        reference.gqa_paged_attention(**given)
    assert "\n" not in str(caught.value)


def test_bad_input(plain_errors):
    """Attend with one wrong argument -> a one-line error that names the argument."""
    batch = gqa_batch(GROUPED, SMALL_LENS)
    plan = batch.metadata
    refused("^q: expected shape", q=batch.q[:, :5])
    refused("^kv_cache: expected shape", kv_cache=gqa_batch(MHA, SMALL_LENS).kv_cache)
    refused("^kv_cache: expected dtype", kv_cache=batch.kv_cache.float())
    refused("^cache_format: expected compute_dtype or fp8_e4m3 for a key/value cache, got fp8_ds_mla$",
            error=UnsupportedConfiguration, cache_format=FP8_DS_MLA)  # fmt: skip
    refused("^kv_cache: expected dtype torch.float8_e4m3fn", cache_format=FP8_E4M3)
    refused("^k_scale: expected None for format compute_dtype", k_scale=torch.tensor(1.0))
    refused("^q_scale: expected None for format compute_dtype", q_scale=torch.tensor(1.0))
    refused("^sinks: expected None", sinks=torch.zeros(6))
    refused(r"^sinks: expected a tensor \[6\]", config=replace(GROUPED, attention_sinks=True))
    refused("^sinks: expected shape", config=replace(GROUPED, attention_sinks=True), sinks=torch.zeros(5))
    refused("^metadata.first_visible: expected a tensor", config=replace(GROUPED, sliding_window=3))
    refused("^config.attention_type: expected decoder or cross",
            config=replace(GROUPED, attention_type=AttentionType.ENCODER))  # fmt: skip
    refused("^metadata.block_size: expected 16", metadata=replace(plan, block_size=32))
    refused("^metadata.block_table: expected blocks in", metadata=replace(plan, block_table=plan.block_table + 1000))
    refused("^metadata.visible_lens: expected a value in", metadata=replace(plan, visible_lens=plan.visible_lens + 1))
    refused("^metadata.first_visible: expected a value in",
            metadata=replace(plan, first_visible=plan.visible_lens + 1))  # fmt: skip
    refused("^out_dtype: expected one of", out_dtype=torch.int32)


def test_bad_scales(plain_errors):
    """Attend and write an e4m3 cache without a scale, or with an invalid scale -> an error, and nothing is written."""
    batch = gqa_batch(GROUPED, SMALL_LENS, cache_format=FP8_E4M3)
    before = batch.kv_cache.clone()
    for name, wrong, match in (
        ("v_scale", None, "v_scale: expected a float32 tensor"),
        ("k_scale", torch.tensor(0.0), "k_scale: expected a finite number above 0"),
        ("v_scale", torch.ones(2), r"v_scale: expected shape \[\]"),
    ):
        with pytest.raises(ValueError, match=match):
            scales = batch.scales | {name: wrong}
            reference.gqa_paged_attention(batch.q, batch.kv_cache, batch.metadata, GROUPED, **scales)
        with pytest.raises(ValueError, match=match):
            reference.reshape_and_cache(batch.new_k, batch.new_v, batch.kv_cache, batch.slot_mapping, **scales)
    assert_same_bits(batch.kv_cache, before)


def test_bad_writes(plain_errors):
    """Write with a slot outside the cache, too few slots, or other values -> an error, and nothing is written."""
    batch = gqa_batch(GROUPED, SMALL_LENS)
    before = batch.kv_cache.clone()
    slots = batch.slot_mapping.clone()
    slots[-1] = 16 * batch.kv_cache.shape[1]
    for match, *given in (
        (r"^slot_mapping: expected slots in \[-1, ", batch.new_k, batch.new_v, slots),
        ("^slot_mapping: expected at least 6 slots", batch.new_k, batch.new_v, slots[:5]),
        ("^value: expected shape", batch.new_k, batch.new_v[:, :1], batch.slot_mapping),
        ("^slot_mapping: expected dtype", batch.new_k, batch.new_v, batch.slot_mapping.int()),
    ):
        with pytest.raises(ValueError, match=match):
            reference.reshape_and_cache(*given[:2], batch.kv_cache, given[2])
    assert_same_bits(batch.kv_cache, before)


def test_bad_packed_input(plain_errors):
    """Attend without a cache with offsets that do not fit -> an error that names the offsets."""
    q, k = torch.randn(5, 6, 80), torch.randn(7, 2, 80)
    encoder = replace(GROUPED, attention_type=AttentionType.ENCODER)
    for match, *given in (
        ("^cu_seqlens_k: expected a last element of 7", q, k, k, integers(0, 5), integers(0, 6), 5, 7, GROUPED),
        ("^k: expected shape", q, k, k, integers(0, 5), integers(0, 7), 5, 7, encoder),
        ("^cu_seqlens_k: expected cu_seqlens_q itself", q, k[:5], k[:5], integers(0, 2, 5), integers(0, 3, 5), 5, 5,
         encoder),
        ("^v: expected shape", q, k, k[:, :1], integers(0, 5), integers(0, 7), 5, 7, GROUPED),
        ("^max_seqlen_k: expected an int", q, k, k, integers(0, 5), integers(0, 7), 5, -1, GROUPED),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            reference.gqa_varlen_attention(*given)


@pytest.mark.parametrize("field, value", [("sliding_window", 5), ("alibi_slopes", (0.5,) * 6),
                                          ("attention_chunk_size", 32)])  # fmt: skip
def test_cascade_refuses_positions(field, value):
    """Attend a cascade with a window, ALiBi or attention chunks -> an error: its parts do not know the positions."""
    batch = gqa_batch(GROUPED, [(1, 33), (1, 40)])
    cascade = reference.split_shared_prefix(batch.metadata, 16, 16)
    config = replace(GROUPED, **{field: value})
    with pytest.raises(ValueError, match=f"^config.{field}: expected None for a cascade"):
        reference.gqa_cascade_attention(batch.q, batch.kv_cache, cascade, config)


def test_bad_parts_of_a_cascade(plain_errors):
    """Attend a cascade with a wrong number in one part -> an error that names the part."""
    batch = gqa_batch(GROUPED, [(1, 33), (1, 40)])
    cascade = reference.split_shared_prefix(batch.metadata, 16, 16)
    for part, field, change in (("prefix", "block_table", 10**6), ("suffix", "visible_lens", 1)):
        plan = getattr(cascade, part)
        wrong = replace(cascade, **{part: replace(plan, **{field: getattr(plan, field) + change})})
        with pytest.raises(ValueError, match=f"^cascade.{part}.{field}: expected"):
            reference.gqa_cascade_attention(batch.q, batch.kv_cache, wrong, GROUPED)
