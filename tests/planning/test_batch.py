"""Tests of functions on a batch: decodes and prefills, reordering, slots, local attention.

Some tests find the expected result by trying every possibility. A query token is also called a new token. "Pitfall 8"
is entry 8 of the list in `tests/__init__.py`.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import fast
import reference
from reference.interfaces import BatchSplit

from ..support.factories import assert_same_bits, assert_states64, integers, make_batch, offsets
from ..support.planning import PACKAGES, QUERY_LENS, batches, same
from ..support.properties import given, st


def check_slots(ops, query_lens, seq_lens, block_size, padding=0):
    """Assert that each new token gets the slot of its position, each slot occurs once, and padding tokens get -1."""
    batch = make_batch(query_lens, seq_lens, block_size, padding)
    common = batch.common
    got = ops.slot_mapping(
        common.query_start_loc, common.seq_lens, common.block_table, block_size, batch.num_tokens + padding
    )
    assert_same_bits(got, common.slot_mapping)
    owned = got[got >= 0].tolist()
    assert len(set(owned)) == len(owned)


@given(batches(), st.sampled_from([1, 2, 7, 16, 64]), st.integers(0, 3), PACKAGES)
def test_slot_mapping(lens, block_size, padding, ops):
    check_slots(ops, *lens, block_size, padding)


def test_slot_mapping_is_64_bit(ops):
    """Slots are right if block x block_size exceeds 2^31 (pitfall 8)."""
    table = integers(2**31 - 2, 40_000_000).view(1, 2)
    slots = ops.slot_mapping(integers(0, 2), integers(65), table, 64, 3)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [(2**31 - 2) * 64 + 63, 40_000_000 * 64, -1]


def brute_split(query_lens, threshold, uniform):
    """Return the expected split: its decodes are the longest prefix of the batch in which every request may decode."""

    def fits(prefix):
        lengths = {n for n in prefix if n > 0}
        return all(n <= threshold for n in prefix) and not (uniform and len(lengths) > 1)

    decodes = max(n for n in range(len(query_lens) + 1) if fits(query_lens[:n]))
    return BatchSplit(
        num_decodes=decodes,
        num_prefills=len(query_lens) - decodes,
        num_decode_tokens=sum(query_lens[:decodes]),
        num_prefill_tokens=sum(query_lens[decodes:]),
    )


def check_split(ops, query_lens, threshold, uniform):
    common = make_batch(query_lens, query_lens).common
    split = ops.split_decodes_and_prefills(common, threshold, uniform)
    assert type(split) is BatchSplit and split == brute_split(query_lens, threshold, uniform)


@given(QUERY_LENS, st.sampled_from([1, 2, 3, 16, 17]), st.booleans(), PACKAGES)
def test_split(query_lens, threshold, uniform, ops):
    check_split(ops, query_lens, threshold, uniform)


def apply(swaps, order):
    order = list(order)
    for i, j in swaps:
        order[i], order[j] = order[j], order[i]
    return order


def fewest_swaps(flags):
    """Return the smallest number of swaps that bring decodes to the front, by breadth-first search."""
    seen, front, depth = {flags}, {flags}, 0
    while not any(state == tuple(sorted(state, reverse=True)) for state in front):
        reached = {
            tuple(apply([pair], state)) for state in front for pair in itertools.combinations(range(len(flags)), 2)
        }
        front, depth = reached - seen, depth + 1
        seen |= front
    return depth


@pytest.mark.parametrize("requests", range(8))
def test_reorder_with_the_fewest_swaps(requests, ops):
    """For every batch of up to 7 requests, decodes come first after the smallest possible number of swaps."""
    for flags in itertools.product((True, False), repeat=requests):
        swaps = ops.reorder_batch_to_split_decodes_and_prefills(torch.tensor(flags, dtype=torch.bool, device="cpu"))
        assert apply(swaps, flags) == sorted(flags, reverse=True)
        assert len(swaps) == fewest_swaps(flags)


@given(st.lists(st.booleans(), max_size=40))
def test_reorder_keeps_every_request(flags):
    decodes = torch.tensor(flags, dtype=torch.bool, device="cpu")
    ours, theirs = (ops.reorder_batch_to_split_decodes_and_prefills(decodes) for ops in (reference, fast))
    assert ours == theirs
    order = apply(ours, range(len(flags)))
    assert sorted(order) == list(range(len(flags)))
    assert [flags[place] for place in order] == sorted(flags, reverse=True)


# Tests of chunked local attention, in which a token at position i attends the positions from (i // chunk) * chunk to i.
# `chunk` is the length of an attention chunk. All query tokens of a real request in one attention chunk are one request
# of the virtual batch. Ordinary attention over the virtual batch gives the result of local attention over the real
# batch.


def local_attention(ops, batch, chunk, q, entries):
    """Return the virtual batch and its attention state over the paged cache: out [T, N, head dim], lse [N, T]."""
    virtual = ops.make_local_attention_virtual_batches(batch.common, chunk, batch.block_size)
    lens = virtual.seq_lens
    ends = offsets(lens.tolist())
    cache = torch.full((batch.num_blocks, batch.block_size, q.shape[2]), torch.nan, dtype=torch.float64)
    for own, slots in zip(entries, batch.slots, strict=True):
        for entry, (block, at) in zip(own, slots, strict=True):
            cache[block, at] = entry
    keys = ops.gather_and_maybe_dequant_cache(cache, virtual.block_table, ends, torch.zeros_like(lens), int(ends[-1]))
    k = keys[:, None].expand(-1, q.shape[1], -1)
    bounds = virtual.max_query_len, max(lens.tolist(), default=0)
    return virtual, ops.flash_attn_varlen(q, k, k, virtual.query_start_loc, ends, *bounds, 0.3, True)


def check_virtual_batches(ops, query_lens, seq_lens, chunk, block_size):
    batch = make_batch(query_lens, seq_lens, block_size)
    entries = [torch.randn(length, 6, dtype=torch.float64) for length in seq_lens]
    q = torch.randn(batch.num_tokens, 2, 6, dtype=torch.float64)
    virtual, state = local_attention(ops, batch, chunk, q, entries)
    assert virtual.num_actual_tokens == batch.num_tokens and virtual.slot_mapping is batch.common.slot_mapping
    out, lse = torch.zeros_like(q), torch.full((2, batch.num_tokens), -torch.inf, dtype=torch.float64)
    row = 0
    for query_len, length, own in zip(query_lens, seq_lens, entries, strict=True):
        for position in range(length - query_len, length) if length else ():
            seen = [key for key in range(position + 1) if key // chunk == position // chunk]
            scores = 0.3 * q[row] @ own[seen].T
            lse[:, row] = scores.logsumexp(-1)
            out[row] = scores.softmax(-1) @ own[seen]
            row += 1
        row += query_len if length == 0 else 0
    assert_states64(state, reference.AttentionState(out, lse))
    return virtual


@pytest.mark.parametrize("length", range(1, 26))
def test_local_attention_of_every_length(length, ops):
    """With chunks of three blocks and any query length, each query token attends only the keys of its own chunk."""
    for query_len in range(1, length + 1):
        check_virtual_batches(ops, [query_len], [length], 6, 2)


@given(batches(), st.sampled_from([(4, 4), (12, 4), (16, 4), (32, 16)]))
def test_local_attention(lens, sizes):
    chunk, block_size = sizes
    found = []
    for ops in (reference, fast):
        torch.manual_seed(0)
        found.append(check_virtual_batches(ops, *lens, chunk, block_size))
    same(*found)
