"""Tests of chunked local attention of grouped-query attention: plans of virtual requests, and layers over them.

In chunked local attention, a token attends itself and the tokens before it in the same attention chunk. A virtual
request is one attention chunk of a request with the query tokens in this chunk.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
import reference

from ..support.factories import assert_close64, integers, make_batch
from ..support.gqa import gqa_batch, oracle_batch, visible_ranges
from ..support.gqa_layers import GQAStep, common_of, hidden_of, token_positions
from ..support.gqa_plans import LOCAL, PLAIN
from ..support.planning import PACKAGES, batches, same
from ..support.properties import given, st

LENS = ((1, 33), (1, 32), (1, 1), (2, 34), (1, 0), (40, 40), (31, 95), (1, 64), (70, 130), (0, 20), (3, 65))


def seen_keys(plan, num_tokens):
    """Return for each query token the blocks and offsets of the keys that it attends, read from the plan."""
    found = []
    for part in (plan.decode, plan.prefill):
        starts = part.query_start_loc.tolist()
        for request in range(len(starts) - 1):
            for token in range(starts[request], starts[request + 1]):
                first = 0 if part.first_visible is None else int(part.first_visible[token])
                keys = range(first, int(part.visible_lens[token]))
                blocks = part.block_table[request].tolist()
                found.append([(blocks[key // part.block_size], key % part.block_size) for key in keys])
    assert len(found) == num_tokens
    return found


@given(batches(), st.sampled_from([16, 32, 48, 96]), st.sampled_from([None, 1, 20]), st.sampled_from([1, 2, 3]))
def test_plan(lens, chunk, window, threshold):
    """Every token attends the slots of the keys of its attention chunk and window; both packages give the same plan."""
    config = replace(PLAIN, attention_chunk_size=chunk, sliding_window=window)
    plans = []
    for ops in (reference, fast):
        torch.manual_seed(0)
        batch = make_batch(*lens, padding=2)
        plans.append(ops.build_gqa_metadata(batch.common, 16, config, threshold, num_programs=3))
    same(*plans)
    plan = plans[0]
    assert plan.num_actual_tokens == batch.num_tokens and plan.slot_mapping.equal(batch.common.slot_mapping)
    wanted = []
    for request, (query_len, length) in enumerate(zip(*lens, strict=True)):
        for first, end in visible_ranges(config, query_len, length):
            wanted.append(list(batch.slots[request][first:end]))
    assert seen_keys(plan, batch.num_tokens) == wanted
    for part in (plan.decode, plan.prefill):
        assert part.max_seq_len <= chunk or part.seq_lens.numel() == 0 or part.max_seq_len == int(part.seq_lens.max())
        assert (part.seq_lens <= chunk).all() and part.mask == "causal"
    query_lens = [*plan.decode.query_start_loc.diff().tolist()]
    assert all(query_len <= threshold for query_len in query_lens)


def test_virtual_requests_of_a_plan(ops):
    """A prefill over three attention chunks gives three virtual requests; a decode at a boundary gives one or two."""
    batch = make_batch([1, 2, 70], [33, 33, 100])
    plan = ops.build_gqa_metadata(batch.common, 16, LOCAL, 2)
    assert plan.num_decodes == 4 and plan.decode.query_start_loc.tolist() == [0, 1, 2, 3, 5]
    # the 70 tokens are at positions 30 to 99, so 2 of them are in the first attention chunk
    assert plan.decode.seq_lens.tolist() == [1, 32, 1, 32] and plan.decode.visible_lens.tolist() == [1, 32, 1, 31, 32]
    assert plan.prefill.query_start_loc.tolist() == [0, 32, 64, 68] and plan.prefill.seq_lens.tolist() == [32, 32, 4]
    assert plan.num_decode_tokens == 5 and plan.num_actual_tokens == 73
    assert plan.decode.block_table.shape[1] == plan.prefill.block_table.shape[1] == 2
    order = ops.build_gqa_metadata(batch.common, 16, LOCAL, 2, require_order=True)
    same(order, plan)  # the virtual request of 4 tokens behind longer ones is in order, because its request is


def test_builder(ops):
    """The builder plans virtual requests for its config, and no cascade; a window is counted inside the chunk."""
    batch = make_batch([1] * 6, [8000, 9, 8191, 40, 1, 64])
    config = replace(PLAIN, attention_chunk_size=8192)
    builder = ops.GQAMetadataBuilder(config, 16, 50_000, 8, num_programs=4)
    plan = builder.build(0, batch.common)
    assert plan.schedule_choice.longest_tiles == 128 and plan.num_decodes == 6
    same(plan, ops.build_gqa_metadata(batch.common, 16, config, num_programs=4))
    short = ops.GQAMetadataBuilder(replace(PLAIN, attention_chunk_size=4096), 16, 50_000, 8, num_programs=4)
    assert short.build(0, batch.common).schedule_choice.longest_tiles == 64
    assert not builder.use_cascade_attention(1024, integers(*[1] * 8), integers(*[5000] * 8))
    assert builder.build(1024, make_batch([1] * 8, [5000] * 8).common).cascade is None
    with pytest.raises(
        ValueError, match=r"^config.attention_chunk_size: expected a multiple of the block size 32, got"
    ):
        ops.GQAMetadataBuilder(replace(PLAIN, attention_chunk_size=48), 32, 64, 4)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("chunk", [16, 48])
def test_layer(ops, chunk, window):
    """A layer with the plan of virtual requests gives the oracle's chunked local attention, with freed blocks."""
    config = replace(PLAIN, attention_chunk_size=chunk, sliding_window=window)
    batch = gqa_batch(config, LENS, 16, torch.float64, new_tokens=False, seed=5)
    step = GQAStep.of(ops, config, batch.kv_cache.shape[1], torch.float64)
    step.load(batch.kv_cache)
    plan = ops.GQAMetadataBuilder(config, 16, 200, 16, num_speculative_tokens=1).build(0, common_of(batch))
    out = step(hidden_of(batch), token_positions(batch), plan)
    wanted = oracle_batch(batch).out
    assert_close64(out[:, : wanted[0].numel()].view(wanted.shape), wanted)
    whole = gqa_batch(replace(config, attention_chunk_size=None), LENS, 16, torch.float64, seed=5)
    assert (oracle_batch(whole).out - wanted).abs().max() > 0.1  # global attention gives another result


@given(PACKAGES, st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_prefill_in_steps(ops, steps):
    """A prompt that is prefilled in any steps gives the outputs of a prefill in one step."""
    config, total = LOCAL, sum(steps)
    whole = gqa_batch(config, [(total, total)], 16, torch.float64, new_tokens=False, seed=1, free_behind_window=False)
    hidden, table, slots = hidden_of(whole), whole.metadata.block_table, whole.slot_mapping
    outputs = []
    for lens in ([total], steps):
        step, done, parts = GQAStep.of(ops, config, whole.kv_cache.shape[1], torch.float64), 0, []
        for query_len in lens:
            rows = slice(done, done + query_len)
            done += query_len
            common = replace(
                make_batch([query_len], [done]).common, block_table=table, slot_mapping=slots[rows].contiguous()
            )
            parts.append(step(hidden[rows], torch.arange(rows.start, done), ops.build_gqa_metadata(common, 16, config)))
        outputs.append(torch.cat(parts))
    assert_close64(outputs[1], outputs[0])
