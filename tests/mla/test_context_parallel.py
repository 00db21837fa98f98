"""Ranks that share sequences: who owns what, merges, gathers and whole layers, against one rank that holds everything.

The ranks are simulated here; `test_process_groups` runs the same on real ones. Ownership is dealt out card by card
(`ranks.owners`), never computed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast.parity import compare_states
from reference.interfaces import AttentionState, ContextChunk, SequenceShare

from ..support.even_chunks import even_chunks
from ..support.factories import (
    DIRECT,
    GARBAGE,
    LOW_RANK,
    NO_ROPE,
    assert_close64,
    assert_same_bits,
    assert_states64,
    integers,
    make_batch,
    offsets,
)
from ..support.planning import batches, same
from ..support.properties import given, st
from ..support.ranks import Steps, make_loop, owners, serve

HEADS = 24  # D of 1, 2, 3, 4 and 8 divide them
CONFIGS = {
    "direct": replace(DIRECT, num_heads=HEADS),
    "low-rank": replace(LOW_RANK, num_heads=HEADS),
    "no-rope": replace(NO_ROPE, num_heads=HEADS),
}
SIZES, INTERLEAVES, MERGES = (1, 2, 3, 4, 8), (1, 16, 64), ("a2a", "ag_rs")
LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300, 1021)
# prompts, then decodes of one to three tokens beside prefills that go on over their context; some ranks own nothing
GROWING = (((40, 40), (5, 5), (7, 7)), ((1, 41), (3, 8), (90, 97)), ((2, 43), (1, 9), (1, 98)),
           ((3, 46), (60, 69), (50, 148)))  # fmt: skip


# Who owns what.


@pytest.mark.parametrize("interleave", [1, 2, 16, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 64])
def test_local_lengths(ops, size, interleave):
    lens = integers(*LENGTHS)
    together = ops.get_dcp_local_seq_lens(lens, size, None, interleave)
    assert together.shape == (len(LENGTHS), size) and together.dtype == torch.int32
    for rank in range(size):
        dealt = [owners(length, size, interleave).count(rank) for length in LENGTHS]
        assert ops.get_dcp_local_seq_lens(lens, size, rank, interleave).tolist() == dealt
        assert together[:, rank].tolist() == dealt
        assert [SequenceShare(size, rank, interleave).count(length) for length in LENGTHS] == dealt
    assert together.sum(1).equal(lens)


def dealt_slots(batch, table, block_size, size, rank, interleave):
    """Slots by dealing every token of every request, and counting what a rank has."""
    slots = []
    for request, (query_len, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        held = 0
        for token, owner in enumerate(owners(length, size, interleave)):
            if token >= length - query_len:
                column, at = divmod(held, block_size)
                slots.append(int(table[request, column]) * block_size + at if owner == rank else -1)
            held += owner == rank
        slots += [-1] * (query_len if length == 0 else 0)
    return slots


@given(batch=batches(), size=st.sampled_from([1, 2, 3, 4, 8]), interleave=st.sampled_from([1, 2, 4, 8]),
       blocks=st.integers(1, 3), padding=st.integers(0, 2))  # fmt: skip
def test_slots(batch, size, interleave, blocks, padding):
    """Every token has one slot on one rank, and every block is filled in the order of its tokens."""
    block_size = interleave * blocks
    batch = make_batch(*batch, block_size, padding)
    common, tokens = batch.common, batch.num_tokens + padding
    arguments = (common.query_start_loc, common.seq_lens, common.block_table, block_size, tokens, size)
    found = []
    for rank in range(size):
        wanted = dealt_slots(batch, common.block_table, block_size, size, rank, interleave) + [-1] * padding
        for ops in (reference, fast):
            slots = ops.dcp_slot_mapping(*arguments, rank, interleave)
            assert slots.dtype == torch.int64 and slots.tolist() == wanted
        found.append(wanted)
    real = [s > 0 for q, s in zip(batch.query_lens, batch.seq_lens, strict=True) for _ in range(q)]
    owned = [sum(rank[token] >= 0 for rank in found) for token in range(batch.num_tokens)]
    assert owned == [int(is_real) for is_real in real]


def of_rank(common, block_size, share):
    """The same batch with a rank's slots instead of one rank's."""
    slots = reference.dcp_slot_mapping(
        common.query_start_loc, common.seq_lens, common.block_table, block_size, common.slot_mapping.shape[0],
        share.size, share.rank, share.interleave,
    )  # fmt: skip
    return replace(common, slot_mapping=slots)


def test_one_rank_is_plain(ops):
    batch = make_batch([1, 3, 16, 0], [20, 3, 40, 0])
    arguments = (batch.common.query_start_loc, batch.common.seq_lens, batch.common.block_table, 16, batch.num_tokens)
    assert ops.dcp_slot_mapping(*arguments, 1, 0, 16).equal(ops.slot_mapping(*arguments))


# Plans.


@given(batch=batches(), size=st.sampled_from([1, 2, 3, 8]), interleave=st.sampled_from([1, 4, 16]),
       units=st.integers(7, 9), threshold=st.integers(1, 4))  # fmt: skip
def test_plans(batch, size, interleave, units, threshold):
    """Both wings plan the same; lengths and masks are those of dealt tokens, pieces cover the context."""
    query_lens, seq_lens = batch
    # a padding row may stand among decodes only
    if any(q > 0 and s == 0 for q, s in zip(query_lens, seq_lens, strict=True)):
        query_lens = [min(q, 1) for q in query_lens]
    batch, block_size = make_batch(query_lens, seq_lens, 16), 16
    workspace = units * reference.interfaces.context_unit(block_size, size, interleave)
    for rank in range(size):
        share = SequenceShare(size, rank, interleave)
        common = of_rank(batch.common, block_size, share)
        plans = [
            ops.build_mla_metadata(common, block_size, workspace, threshold, share=share) for ops in (reference, fast)
        ]
        same(*plans)
        check_rank_plan(batch, plans[0], share, workspace)


def check_rank_plan(batch, plan, share, workspace):
    def held(length):
        return owners(length, share.size, share.interleave).count(share.rank)

    decodes = plan.num_decodes
    assert plan.share == share and plan.decode.seq_lens.tolist() == [held(s) for s in batch.seq_lens[:decodes]]
    seen = [
        held(max(0, length - query_len + i + 1)) if length else 0
        for query_len, length in zip(batch.query_lens[:decodes], batch.seq_lens[:decodes], strict=True)
        for i in range(query_len)
    ]
    assert plan.decode.visible_lens.tolist() == seen
    covered = [0] * (len(batch.seq_lens) - decodes)
    for chunk in plan.prefill.context_chunks:
        assert (share.size + 1) * chunk.padded_tokens <= workspace + workspace // share.size
        assert chunk.padded_tokens >= chunk.local_tokens == int(chunk.held[1][-1])
        for request, length in enumerate(chunk.cu_seq_lens.diff().tolist()):
            start = int(chunk.starts[request])
            dealt = owners(start + length, share.size, share.interleave)
            for rank in range(share.size):
                pieces = chunk.local_cu_seq_lens[rank].diff()
                assert int(pieces[request]) == dealt[start:].count(rank)
                assert length == 0 or dealt[:start].count(rank) == int(chunk.local_starts[request])
            assert length == 0 or start == covered[request]
            covered[request] += length
    assert covered == list(batch.context_lens[decodes:])


@pytest.mark.parametrize("merge", MERGES)
def test_builder(ops, merge):
    """The builder plans for its rank, and its schedule is of the gathered heads."""
    batch, config = make_batch([1, 1, 40], [7000, 9, 100], 16), CONFIGS["direct"]

    def program(ranks):
        options = dict(block_size=16, max_model_len=8192, max_num_seqs=4, num_programs=3, context_parallel=ranks)
        builder = ops.MLAMetadataBuilder(config, **options)
        assert builder.workspace_tokens % (16 * ranks.size) == 0
        return builder.build(64, of_rank(batch.common, 16, ranks.share))

    for rank, plan in enumerate(ops.simulate(2, 4, program, 4, merge)):
        assert plan.share == SequenceShare(2, rank % 2, 4) and plan.cascade is None
        same(plan.schedule, ops.plan_decode(plan.decode.seq_lens, 3, HEADS // 2))
        assert plan.prefill.context_chunks[0].share == plan.share


@pytest.mark.parametrize("query_len", [1, 3])
def test_captured_plans(ops, query_len):
    """A plan that a graph reads is brought up to date in place: lengths of this rank, its masks, its schedule."""
    first, second = ([(query_len, s) for s in lens] for lens in ((70, 9, 33), (17, 64, 65)))

    def program(ranks):
        builder = ops.MLAMetadataBuilder(CONFIGS["direct"], 16, 256, 4, num_speculative_tokens=query_len - 1,
                                         num_programs=3, context_parallel=ranks)  # fmt: skip
        batches = [
            of_rank(make_batch(*zip(*lens, strict=True), 16).common, 16, ranks.share) for lens in (first, second)
        ]
        captured = builder.build_for_cudagraph_capture(batches[0])
        held = captured.decode.seq_lens, captured.decode.visible_lens, captured.schedule.tile_ranges
        builder.update_captured(captured, batches[1])
        wanted = builder.build(0, batches[1])
        planned = ops.plan_decode(wanted.decode.seq_lens, 3, builder._decode_heads)
        fresh = wanted.decode.seq_lens, wanted.decode.visible_lens, planned.tile_ranges
        return [x.equal(y) for x, y in zip(held, fresh, strict=True)]

    assert ops.simulate(4, 8, program) == [[True] * 3] * 4


# The gather of context.


def dealt_pieces(entries, starts, share_size, interleave, padded):
    """What each rank hands in of the pieces [start, end) of requests: dealt tokens, then NaN."""
    gathered = torch.full((share_size, padded, entries[0].shape[1]), torch.nan, dtype=entries[0].dtype)
    for rank in range(share_size):
        rows = [
            own[token]
            for own, start in zip(entries, starts, strict=True)
            for token, owner in enumerate(owners(own.shape[0], share_size, interleave))
            if owner == rank and token >= start
        ]
        if rows:
            gathered[rank, : len(rows)] = torch.stack(rows)
    return gathered


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleave", [1, 3, 16])
@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_reorg(ops, size, interleave, dtype):
    """Equal to the entries themselves, bit by bit; NaN where nobody handed anything in reaches nothing."""
    turn = size * interleave
    lens, starts = (5, 0, 1, turn, 3 * turn + 2, 200), (0, 0, 0, 0, turn, 2 * turn)
    ends = [start + length for start, length in zip(starts, lens, strict=True)]
    entries = [torch.randn(end, 6, dtype=torch.float64).to(dtype) for end in ends]
    chunk = ContextChunk(integers(*starts), offsets(lens), sum(lens), max(lens))
    chunk = ops.share_chunk(chunk, SequenceShare(size, 0, interleave))
    gathered = dealt_pieces(entries, starts, size, interleave, chunk.padded_tokens)
    wanted = torch.cat([own[start:] for own, start in zip(entries, starts, strict=True)])
    assert_same_bits(ops.reorg_kvcache(gathered, chunk), wanted)
    wider = torch.cat((gathered, gathered), -1)[..., :6]
    assert_same_bits(ops.reorg_kvcache(wider, chunk), wanted)
    if ops is fast:
        out = torch.full((sum(lens) + 1, 6), 7.0, dtype=dtype)
        assert_same_bits(fast.reorg_kvcache(gathered, chunk, out=out[:-1]), wanted)
        assert out[-1].eq(7).all()


@pytest.mark.parametrize(("size", "interleave", "cut"), [(1, 1, "packed"), (2, 1, "packed"), (3, 16, "even"),
                                                            (4, 4, "packed"), (8, 2, "even")])  # fmt: skip
def test_gather_equals_one_rank(ops, size, interleave, cut):
    """Chunk by chunk the very bits that one rank with everything would read, on every rank, over NaN-poisoned pages."""
    contexts, block_size, width = (333, 0, 5, 64, 1), 16, 7
    entries = [torch.randn(length, width) for length in contexts]
    unit = reference.interfaces.context_unit(block_size, size, interleave)
    workspace = max(4 * unit, 64)
    chunks = ops.plan_context_chunks(integers(*contexts), workspace, block_size, size, interleave)
    if cut == "even":
        chunks = even_chunks(contexts, workspace, block_size, size, interleave)
    assert len(chunks) > 1 or size == 8

    def program(ranks):
        share = ranks.share
        columns = [-(-share.count(length) // block_size) for length in contexts]
        cache = torch.full((sum(columns) + 1, block_size, width), torch.nan)
        table = torch.full((len(contexts), max(columns) + 1), GARBAGE, dtype=torch.int32)
        blocks = itertools.count(1)
        for request, own in enumerate(entries):
            mine = [own[t] for t, owner in enumerate(owners(len(own), size, interleave)) if owner == ranks.rank]
            table[request, : columns[request]] = integers(*itertools.islice(blocks, columns[request]))
            for at, entry in enumerate(mine):
                cache[table[request, at // block_size], at % block_size] = entry
        plan = reference.interfaces.PrefillMetadata(table, offsets([1] * len(contexts)), 1, (), block_size)
        return [ops.dcp_gather_context(cache, plan, ops.share_chunk(chunk, share), ranks) for chunk in chunks]

    for gathered in ops.simulate(size, interleave, program):
        for found, chunk in zip(gathered, chunks, strict=True):
            lens = chunk.cu_seq_lens.diff().tolist()
            pieces = [own[s : s + n] for own, s, n in zip(entries, chunk.starts.tolist(), lens, strict=True)]
            assert_same_bits(found, torch.cat(pieces))


def test_gather_in_a_workspace():
    """Both what is handed in and what arrives lie in (D + 1) / D of the chunk's rows."""
    config = CONFIGS["direct"]
    cache = torch.randn(30, 16, config.head_size)
    table = torch.arange(12, dtype=torch.int32)[None]
    chunk = fast.plan_context_chunks(integers(700), 1024, 16, "packed", 4, 1)[0]
    prefill = reference.interfaces.PrefillMetadata(table, offsets([1]), 1, (), 16)

    def program(ranks):
        piece = fast.share_chunk(chunk, ranks.share)
        rows = 5 * piece.padded_tokens
        assert rows == 5 * 175 <= 1024 // 4 * 5
        workspace = torch.full((rows, config.head_size), torch.nan)
        inside = fast.dcp_gather_context(cache, prefill, piece, ranks, workspace=workspace)
        assert not workspace.isnan().any()
        with pytest.raises(ValueError, match=f"^workspace: expected at least {rows} rows without gaps, got"):
            fast.dcp_gather_context(cache, prefill, piece, ranks, workspace=workspace[1:])
        return inside.equal(fast.dcp_gather_context(cache, prefill, piece, ranks))

    assert fast.simulate(4, 1, program) == [True] * 4


# Merges over ranks.


def rank_states(size, tokens, heads, value, dtype):
    """A state for each rank; some ranks hold no key of some rows, and one row has none anywhere."""
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    states = []
    for rank in range(size):
        out, lse = torch.randn(tokens, heads, value, dtype=torch.float64), 9 * torch.randn(heads, tokens)
        empty = torch.rand(heads, tokens) < 0.3
        empty[1, 2] = True
        if rank == size - 1:
            empty[0] = True
        out = out.masked_fill(empty.T[..., None], 0)
        states.append(AttentionState(out.to(dtype), lse.masked_fill(empty, -torch.inf).to(lse_dtype)))
    return states


def over_ranks(ops, states, merge, interleave=1):
    """Each rank's heads of the merge, together again."""
    function = {"a2a": ops.cp_lse_a2a, "ag_rs": ops.cp_lse_ag_out_rs}[merge]
    homes = ops.simulate(len(states), interleave, lambda ranks: function(states[ranks.rank], ranks.cp_group))
    return AttentionState(torch.cat([home.out for home in homes], 1), torch.cat([home.lse for home in homes]))


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_merge_over_ranks(ops, size, merge):
    states = rank_states(size, 5, HEADS, 7, torch.float64)
    found = over_ranks(ops, states, merge)
    assert_states64(found, functools.reduce(reference.merge_attn_states, states))
    assert found.lse[1, 2] == -torch.inf and found.out[2, 1].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("merge", MERGES)
def test_merge_within_budget(merge, dtype):
    """Low is the reference's merge of the same kind in the dtype; LSE travels in float32 whatever the outputs are."""
    states = rank_states(4, 33, 8, 20, dtype)
    gold = [AttentionState(s.out.double(), s.lse.double()) for s in states]
    gold = functools.reduce(reference.merge_attn_states, gold)
    low, found = over_ranks(reference, states, merge), over_ranks(fast, states, merge)
    assert found.out.dtype == dtype and found.lse.dtype == torch.float32
    for parity in compare_states(merge, found, low, gold):
        assert parity.passed, parity


def test_merges_agree(ops):
    """Equal to rounding, both ways round."""
    states = rank_states(4, 5, 8, 6, torch.float64)
    assert_states64(over_ranks(ops, states, "a2a"), over_ranks(ops, states, "ag_rs"))


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_infinite_lse_is_nan(ops, merge, bad):
    states = rank_states(3, 4, 6, 5, torch.float64)
    states[1].lse[3, 2] = bad
    found = over_ranks(ops, states, merge)
    assert found.lse[3, 2].isnan() and found.out[2, 3].isnan().all()
    assert found.lse.isnan().sum() == 1 and found.out.isnan().sum() == 5


@pytest.mark.parametrize("merge", MERGES)
def test_a_rank_without_keys_counts_nothing(ops, merge):
    """Whatever its outputs hold."""
    states = rank_states(3, 4, 6, 5, torch.float64)
    wanted = over_ranks(ops, states, merge)
    for state in states:
        state.out[-torch.inf == state.lse.T] = torch.nan
    assert_states64(over_ranks(ops, states, merge), wanted)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("merge", MERGES)
def test_no_rows(ops, merge, size):
    states = [AttentionState(torch.zeros(0, 4, 5), torch.zeros(4, 0)) for _ in range(size)]
    found = over_ranks(ops, states, merge)
    assert found.out.shape == (0, 4, 5) and found.lse.shape == (4, 0)
    plan = reference.DecodeMetadata(
        torch.zeros(2, 3, dtype=torch.int32), integers(5, 0), offsets([0, 0]), 0, integers(), 5, 16
    )
    q, cache = torch.zeros(0, 2, 8), torch.full((4, 16, 8), torch.nan)

    def program(ranks):
        return ops.dcp_decode(q[..., :6], q[..., 6:], cache, plan, 0.1, ranks).out.shape

    assert ops.simulate(size, 1, program, merge=merge) == [(0, 2, 6)] * size


@pytest.mark.parametrize("merge", MERGES)
def test_one_rank_with_keys_comes_back_bitwise(ops, merge):
    states = rank_states(4, 3, 8, 5, torch.float32)
    for rank in (0, 2, 3):
        states[rank] = AttentionState(torch.zeros_like(states[rank].out), torch.full_like(states[rank].lse, -torch.inf))
    found = over_ranks(ops, states, merge)
    assert found.out.equal(states[1].out) and found.lse.equal(states[1].lse)


# Whole layers.


@functools.cache
def alone(config: str) -> tuple[torch.Tensor, ...]:
    """What one rank of the reference gets, in float64 and with no more than one chunk."""
    with torch.device("cpu"):
        return tuple(serve(reference, CONFIGS[config], Steps(GROWING, 64, 4096, 3)))


def check_ranks_are_one(ops, config, size, interleave, merge="a2a", units=40, total=None):
    """Every rank has the output of one that holds everything, step by step."""
    unit = reference.interfaces.context_unit(64, size, interleave)
    steps = Steps(GROWING, 64, units * unit, 3)
    program = functools.partial(serve, ops, CONFIGS[config], steps)
    for outputs in ops.simulate(size, interleave, lambda ranks: program(context_parallel=ranks), total, merge):
        for found, wanted in zip(outputs, alone(config), strict=True):
            assert_close64(found, wanted)


@pytest.mark.parametrize("units", [40, 1], ids=["whole", "chunked"])
@pytest.mark.parametrize("interleave", INTERLEAVES)
@pytest.mark.parametrize("size", SIZES)
def test_ranks_are_one(ops, size, interleave, units):
    """Prefills with context in several chunks, decodes of one to three tokens, requests shorter than a rank's turn."""
    check_ranks_are_one(ops, "low-rank", size, interleave, MERGES[size % 2], units)


@pytest.mark.parametrize("config", ["direct", "no-rope"])
@pytest.mark.parametrize("merge", MERGES)
def test_other_layers(ops, config, merge):
    check_ranks_are_one(ops, config, 4, 16, merge, 1)


@pytest.mark.parametrize(("size", "total"), [(2, 4), (1, 3), (4, 8)])
def test_fewer_ranks_share_sequences_than_heads(ops, size, total):
    """TP of several D: groups of D hold the same keys, every rank its own heads."""
    check_ranks_are_one(ops, "low-rank", size, 16, total=total)


def test_64_ranks(ops):
    config = replace(DIRECT, num_heads=64)
    steps = Steps((((70, 70), (3, 3)), ((1, 71), (2, 5)), ((9, 80), (1, 6))), 1, 640, 2)
    wanted = serve(reference, config, steps)
    for outputs in ops.simulate(64, 1, lambda ranks: serve(ops, config, steps, context_parallel=ranks)):
        for found, one in zip(outputs, wanted, strict=True):
            assert_close64(found, one)


@pytest.mark.parametrize("merge", MERGES)
def test_low_precision(merge):
    """The decode of four ranks in bfloat16, both wings' kernels for a CPU, on the budget of the reference's ranks."""
    config = CONFIGS["low-rank"]
    batch = make_batch([1, 2, 1, 0], [70, 130, 3, 0], 16)
    entries = [torch.randn(length, config.head_size).bfloat16() for length in batch.seq_lens]
    q = torch.randn(4, HEADS, config.head_size).bfloat16()

    def decoded(ops, dtype, size):
        def program(ranks):
            share, heads = ranks.share, slice(ranks.rank * HEADS // size, (ranks.rank + 1) * HEADS // size)
            plan = ops.build_mla_metadata(of_rank(batch.common, 16, share), 16, 4096, 2, share=share).decode
            cache = torch.full((batch.num_blocks, 16, config.head_size), torch.nan, dtype=dtype)
            for request, own in enumerate(entries):
                mine = [own[t] for t, owner in enumerate(owners(len(own), size, 4)) if owner == share.rank]
                for at, entry in enumerate(mine):
                    cache[batch.common.block_table[request, at // 16], at % 16] = entry.to(dtype)
            latent = config.kv_lora_rank
            return ops.dcp_decode(q[:, heads, :latent].to(dtype), q[:, heads, latent:].to(dtype), cache, plan,
                                  config.softmax_scale, ranks)  # fmt: skip

        homes = ops.simulate(size, 4, program, merge=merge)
        return AttentionState(torch.cat([home.out for home in homes], 1), torch.cat([home.lse for home in homes]))

    gold = decoded(reference, torch.float64, 1)
    for parity in compare_states("decode", decoded(fast, torch.bfloat16, 4), decoded(reference, torch.bfloat16, 4),
                                 gold):  # fmt: skip
        assert parity.passed, parity


def test_memory_profile_run(ops):
    """Without a plan every rank touches its largest buffers and gets zeros."""
    config = CONFIGS["direct"]

    def program(ranks):
        from ..support.factories import make_weights
        from ..support.ranks import make_rank_layer

        layer = make_rank_layer(ops, config, make_weights(config, torch.float64), torch.float64, ranks, "cpu")
        cache = torch.full((1, 16, config.head_size), torch.nan, dtype=torch.float64)
        hidden = torch.randn(3, config.hidden_size, dtype=torch.float64)
        return layer(hidden, torch.arange(3), cache, None)

    assert all(out.eq(0).all() for out in ops.simulate(2, 1, program))


@pytest.mark.parametrize("query_len", [1, 2])
def test_graphs(ops, query_len):
    """A decode graph with padding gives what the layer gives with a plan of the step."""
    config = CONFIGS["low-rank"]
    lens = (70, 9, 33)

    def program(ranks):
        from ..support.factories import make_weights
        from ..support.ranks import make_rank_layer

        torch.manual_seed(5)
        layer = make_rank_layer(ops, config, make_weights(config, torch.float64), torch.float64, ranks, "cpu")
        batch = make_batch([query_len] * 3, lens, 16)
        slots = ops.dcp_slot_mapping(batch.common.query_start_loc, batch.common.seq_lens, batch.common.block_table, 16,
                                     3 * query_len, ranks.size, ranks.rank, ranks.interleave)  # fmt: skip
        common = dataclasses.replace(batch.common, slot_mapping=slots)
        cache = torch.randn(batch.num_blocks, 16, config.head_size, dtype=torch.float64)
        hidden = torch.randn(3 * query_len, config.hidden_size, dtype=torch.float64)
        positions = torch.cat([torch.arange(s - query_len, s) for s in lens])
        plan = ops.build_mla_metadata(common, 16, 4096, query_len, share=ranks.share)
        wanted = layer(hidden, positions, cache.clone(), plan)
        graph = ops.DecodeGraph(
            lambda *step: layer(*step[:2], cache, step[2]), config, [1, 4], 16, 8, torch.float64, "cpu", query_len,
            num_programs=2, context_parallel=ranks,
        )  # fmt: skip
        return graph.run(hidden, positions, common), wanted

    for found, wanted in ops.simulate(2, 8, program):
        assert_close64(found, wanted)


# Traffic.


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_bytes_received(ops, size, dtype, merge):
    """What a decode exchanges is what the formula says (a message of the fast wing is padded to 16 bytes a part)."""
    tokens, latent, rope = 6, 32, 16
    batch = make_batch([1] * tokens, [40] * tokens, 16)
    cache = torch.zeros(batch.num_blocks, 16, latent + rope, dtype=dtype)

    def program(ranks):
        common = of_rank(batch.common, 16, ranks.share)
        plan = ops.build_mla_metadata(common, 16, 4096, share=ranks.share).decode
        own = HEADS // size
        q = torch.randn(tokens, own, latent + rope).to(dtype)
        ops.dcp_decode(q[..., :latent], q[..., latent:], cache, plan, 0.1, ranks)
        return ranks.cp_group.received

    wanted = ops.dcp_wire_bytes(tokens, HEADS, latent, rope, size, merge, dtype.itemsize, max(4, dtype.itemsize))
    for received in ops.simulate(size, 1, program, merge=merge):
        assert set(received) == set(wanted)
        for operation, count in wanted.items():
            slack = 16 * 2 * (size - 1) if operation == "all_to_all" and ops is fast else 0
            assert count <= received[operation] <= count + slack


def test_all_to_all_moves_less():
    """The LSE of all heads cross the wire in one variant, those of the own heads in the other."""
    sizes = (32, 128, 512, 64, 8)
    ag_rs, a2a = (reference.dcp_wire_bytes(*sizes, merge, 2) for merge in MERGES[::-1])
    assert sum(ag_rs.values()) - sum(a2a.values()) == 7 * 32 * (128 - 16) * 4


# The simulator.


def test_ranks_keep_the_callers_mode(ops):
    with torch.inference_mode():
        assert ops.simulate(2, 1, lambda ranks: torch.is_inference_mode_enabled()) == [True, True]
    with torch.no_grad():
        assert ops.simulate(2, 1, lambda ranks: torch.is_grad_enabled()) == [False, False]
    with torch.device("meta"):
        assert ops.simulate(1, 1, lambda ranks: torch.empty(1).device.type) == ["meta"]


def test_exchanges(ops):
    def program(ranks):
        cp, tp, x = ranks.cp_group, ranks.tp_group, torch.arange(4.0).view(2, 2) + 10 * ranks.tp_group.rank
        return cp.all_gather(x), cp.reduce_scatter(x), cp.all_to_all(x), tp.all_reduce(x), tp.all_gather_object(tp.rank)

    found = ops.simulate(2, 1, program, 4)
    x = [torch.arange(4.0).view(2, 2) + 10 * rank for rank in range(4)]
    for rank, (gathered, scattered, exchanged, reduced, objects) in enumerate(found):
        first = rank // 2 * 2
        assert gathered.equal(torch.stack(x[first : first + 2]))
        assert scattered.equal(x[first][rank % 2] + x[first + 1][rank % 2])
        assert exchanged.equal(torch.stack([x[first][rank % 2], x[first + 1][rank % 2]]))
        assert reduced.equal(sum(x)) and objects == [0, 1, 2, 3]


def test_ranks_that_wait_for_each_other(ops):
    def different(ranks):
        x = torch.ones(2)
        return ranks.cp_group.all_gather(x) if ranks.rank else ranks.cp_group.all_reduce(x)

    with pytest.raises(ops.GroupError, match="^cp_group: all_reduce on rank 0, but all_gather on rank 1$"):
        ops.simulate(2, 1, different)

    def missing(ranks):
        return ranks.rank == 1 or ranks.cp_group.all_reduce(torch.ones(2))

    wanted = r"^simulation: every rank waits for another: rank 0 in all_reduce of cp_group, ranks \[0, 1\]$"
    with pytest.raises(ops.GroupError, match=wanted):
        ops.simulate(2, 1, missing)

    def shapes(ranks):
        return ranks.cp_group.all_gather(torch.ones(2 + ranks.rank))

    with pytest.raises(ops.GroupError, match=r"^cp_group: all_gather of \[2\] torch.float32 on rank 0, but \[3\]"):
        ops.simulate(2, 1, shapes)


def test_the_first_error_is_the_callers(ops):
    def program(ranks):
        if ranks.rank == 2:
            raise ArithmeticError("of rank 2")
        return ranks.cp_group.all_reduce(torch.ones(2))

    with pytest.raises(ArithmeticError, match="^of rank 2$"):
        ops.simulate(4, 1, program)


# The serving loop.


def test_serving(ops):
    """The tokens of one rank, D times the tokens in a cache of as many bytes."""
    config = CONFIGS["low-rank"]
    wanted = [request.generated_ids for request in make_loop(ops, config, None, "cpu", torch.float64).run()]
    assert len({tuple(ids) for ids in wanted}) == 4 and all(len(set(ids)) > 3 for ids in wanted)

    def program(ranks):
        loop = make_loop(ops, config, ranks, "cpu", torch.float64)
        held = loop.allocator.num_blocks * loop.tokens_per_block
        return [request.generated_ids for request in loop.run()], held

    for size, total in ((2, 2), (4, 4), (2, 4)):
        assert ops.simulate(size, 4, program, total) == [(wanted, size * 40 * 16)] * total


def test_no_step_follows_a_lost_one(ops):
    """The others may stand in the middle of it."""

    def program(ranks):
        loop = make_loop(ops, CONFIGS["direct"], ranks, "cpu", torch.float64)
        layer = loop.model.layers[1]
        layer.forward = lambda *_: (_ for _ in ()).throw(MemoryError("of a test"))
        with pytest.raises(MemoryError):
            loop.step()
        for again in (loop.step, loop.run):
            with pytest.raises(
                ValueError, match="^ServingLoop: expected ranks that stand at the same step, got a step"
            ):
                again()
        return loop.allocator.num_free

    assert ops.simulate(2, 1, program) == [40, 40]


# Mistakes, planted: each turns the identity red.


def ranks_in_the_wrong_order(patch):
    group = reference.interfaces.simulation.SimulatedRanks
    tensors = group._tensors
    patch.setattr(group, "_tensors", lambda self, operation, x: tensors(self, operation, x)[::-1])


def causal_bound_of_the_local_position(patch):
    """The last token of a query sees all keys that lie here, the one before it one fewer (vLLM #50391)."""

    def wrong(common, *args, share, build=reference.build_mla_metadata, **kwargs):
        plan = build(common, *args, share=share, **kwargs)
        query_lens, lens = plan.decode.query_start_loc.diff().tolist(), plan.decode.seq_lens.tolist()
        seen = [max(0, s - q + i + 1) for q, s in zip(query_lens, lens, strict=True) for i in range(q)]
        return replace(plan, decode=replace(plan.decode, visible_lens=integers(*seen)))

    patch.setattr(reference, "build_mla_metadata", wrong)


def lse_in_bfloat16(patch):
    whole = reference.context_parallel._shares_of
    patch.setattr(reference.context_parallel, "_shares_of", lambda lses: whole(lses.bfloat16().to(lses.dtype)))


def lse_in_base_2(patch):
    whole = reference.context_parallel._shares_of
    patch.setattr(reference.context_parallel, "_shares_of", lambda lses: whole(lses * 1.4426950408889634))


def outputs_summed_without_their_shares(patch):
    whole = reference.context_parallel._shares_of
    patch.setattr(reference.context_parallel, "_shares_of", lambda lses: (torch.ones_like(lses), whole(lses)[1]))


def a_rank_is_left_out(patch):
    group = reference.interfaces.simulation.SimulatedRanks
    tensors = group._tensors

    def wrong(self, operation, x):
        found = tensors(self, operation, x)
        return [*found[:-1], torch.zeros_like(found[-1])] if operation == "all_gather" else found

    patch.setattr(group, "_tensors", wrong)


def context_left_in_the_order_of_ranks(patch):
    """Rank after rank: harmless to unmasked attention but for rope, which is in the entries; the bits differ."""

    def wrong(gathered, chunk):
        rows = []
        for request in range(chunk.starts.shape[0]):
            for rank in range(gathered.shape[0]):
                begin, end = chunk.local_cu_seq_lens[rank, request : request + 2].tolist()
                rows.append(gathered[rank, begin:end])
        return torch.cat(rows)

    patch.setattr(reference, "reorg_kvcache", wrong)


def padding_taken_for_tokens(patch):
    """Pieces read at one offset on all ranks, as if all held as much as the first (vLLM #28526)."""

    def wrong(gathered, chunk):
        rows, size, interleave = [], chunk.share.size, chunk.share.interleave
        for request, length in enumerate(chunk.cu_seq_lens.diff().tolist()):
            first = int(chunk.local_cu_seq_lens[0, request])
            for token in range(length):
                turn, within = divmod(token, size * interleave)
                row = first + turn * interleave + within % interleave
                rows.append(gathered[within // interleave, min(row, chunk.padded_tokens - 1)])
        return torch.stack(rows)

    patch.setattr(reference, "reorg_kvcache", wrong)


def owner_without_interleave(patch):
    """Masks as if tokens were dealt one by one, over a cache that holds runs of them."""

    def wrong(common, *args, share, build=reference.build_mla_metadata, **kwargs):
        plan = build(common, *args, share=share, **kwargs)
        other = SequenceShare(share.size, share.rank, 1)
        lens, starts = common.seq_lens.tolist(), plan.decode.query_start_loc.tolist()
        pairs = list(itertools.pairwise(starts))
        seen = [other.count(s - (b - a) + i + 1) for s, (a, b) in zip(lens, pairs, strict=False) for i in range(b - a)]
        held = torch.repeat_interleave(plan.decode.seq_lens, plan.decode.query_start_loc.diff())
        return replace(plan, decode=replace(plan.decode, visible_lens=torch.minimum(integers(*seen), held)))

    patch.setattr(reference, "build_mla_metadata", wrong)


LAYER_MISTAKES = (ranks_in_the_wrong_order, causal_bound_of_the_local_position, lse_in_bfloat16, lse_in_base_2,
                  outputs_summed_without_their_shares, a_rank_is_left_out, owner_without_interleave)  # fmt: skip


@pytest.mark.parametrize("mistake", LAYER_MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_of_a_layer(monkeypatch, mistake):
    alone("direct")
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        check_ranks_are_one(reference, "direct", 4, 16, "a2a")


@pytest.mark.parametrize("mistake", [context_left_in_the_order_of_ranks, padding_taken_for_tokens],
                         ids=lambda mistake: mistake.__name__)  # fmt: skip
def test_mistakes_of_a_gather(monkeypatch, mistake):
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        test_reorg(reference, 4, 3, torch.float64)


# Bad input.


@pytest.mark.usefixtures("plain_errors")
class TestBadInput:
    def test_numbers(self, ops):
        lens = integers(5)
        with pytest.raises(ValueError, match=r"^rank: expected an int in \[0, 4\), got 4$"):
            ops.get_dcp_local_seq_lens(lens, 4, 4)
        with pytest.raises(ValueError, match="^context_parallel_size: expected a positive int, got 0$"):
            ops.get_dcp_local_seq_lens(lens, 0)
        with pytest.raises(ValueError, match="^interleave: expected a positive int, got 0$"):
            ops.SequenceShare(2, 1, 0)
        with pytest.raises(ValueError, match="^interleave: expected a divisor of the block size 16, got 3$"):
            ops.dcp_slot_mapping(offsets([1]), lens, integers(0)[None], 16, 1, 2, 0, 3)
        with pytest.raises(ValueError, match="^block_table: expected at least 2 columns for request 0, got 1$"):
            ops.dcp_slot_mapping(offsets([1]), integers(33), integers(0)[None], 16, 1, 2, 0, 1)
        with pytest.raises(ValueError, match="^tensor_parallel_size: expected a multiple of 2, got 3$"):
            ops.simulate(2, 1, print, 3)
        with pytest.raises(ValueError, match="^tensor_parallel_size: expected at most 64 ranks in one process, got 65"):
            ops.simulate(65, 1, print)
        with pytest.raises(ValueError, match="^merge: expected one of ag_rs, a2a, got 'tree'$"):
            ops.simulate(2, 1, print, merge="tree")
        with pytest.raises(ValueError, match="^num_heads: expected a multiple of 3 ranks, got 16$"):
            ops.dcp_wire_bytes(1, 16, 512, 64, 3, "a2a", 2)

    def test_plans(self, ops):
        batch = make_batch([1, 20], [20, 40], 16)
        share = SequenceShare(2, 0, 8)
        build = functools.partial(ops.build_mla_metadata, of_rank(batch.common, 16, share), share=share)
        with pytest.raises(ValueError, match="^interleave: expected a divisor of the block size 4, got 8$"):
            build(4, 4096)
        with pytest.raises(ValueError, match="^workspace_tokens: expected at least one unit of 16 tokens, got 8$"):
            build(8, 8)
        chunk = ContextChunk(integers(8), offsets([5]), 5, 5)
        with pytest.raises(ValueError, match="^chunk.starts: expected multiples of 16, got 8 at request 0$"):
            ops.share_chunk(chunk, share)

    def test_groups(self, ops):
        with pytest.raises(TypeError, match="^cp_group: expected a process group or a device mesh, got NoneType$"):
            ops.ContextParallel(None, None)
        ranks = ops.simulate(2, 1, lambda ranks: ranks, 4)
        wanted = r"^cp_group: expected a subgroup of tp_group, ranks \[0, 1\], got \[2, 3\]$"
        with pytest.raises(ValueError, match=wanted):
            ops.ContextParallel(ranks[2].cp_group, ranks[0].cp_group)
        three = ops.simulate(3, 1, lambda ranks: ranks)[0].cp_group
        with pytest.raises(ValueError, match="^cp_group: expected a size that divides the 4 ranks of tp_group, got 3$"):
            ops.ContextParallel(three, ranks[0].tp_group)

    def test_merges(self, ops):
        state = AttentionState(torch.zeros(2, 4, 5), torch.zeros(4, 2))
        for merge in (ops.cp_lse_a2a, ops.cp_lse_ag_out_rs):
            with pytest.raises(ValueError, match="^state.out: expected heads in a multiple of 3 ranks, got 4$"):
                ops.simulate(3, 1, lambda ranks, merge=merge: merge(state, ranks.cp_group))
            narrow = AttentionState(state.out.bfloat16(), state.lse.bfloat16())
            with pytest.raises(ValueError, match="^state.lse: expected dtype torch.float32, got torch.bfloat16$"):
                ops.simulate(2, 1, lambda ranks, merge=merge, narrow=narrow: merge(narrow, ranks.cp_group))

    def test_batch_invariance(self, ops):
        """The sum of a reduce-scatter is in the engine's order."""
        ranks = ops.simulate(2, 1, lambda ranks: ranks, merge="ag_rs")[0]
        wanted = '^batch_invariant: expected False, or groups with merge "a2a", got True with "ag_rs"$'
        with pytest.raises(ValueError, match=wanted):
            ops.MLAMetadataBuilder(CONFIGS["direct"], 16, 64, 2, num_programs=1, batch_invariant=True,
                                   context_parallel=ranks)  # fmt: skip
        with pytest.raises(ValueError, match=wanted):
            ops.DecodeGraph(print, CONFIGS["direct"], [1], 16, 2, torch.float32, "cpu", num_programs=1,
                            batch_invariant=True, context_parallel=ranks)  # fmt: skip
        with pytest.raises(ValueError, match="^interleave: expected a divisor of the block size 16, got 3$"):
            ops.DecodeGraph(print, CONFIGS["direct"], [1], 16, 2, torch.float32, "cpu",
                            context_parallel=ops.simulate(2, 3, lambda ranks: ranks)[0])  # fmt: skip

    def test_gather(self, ops):
        """A piece of another share, or of none, before anything is exchanged."""
        plain = ContextChunk(integers(0), offsets([5]), 5, 5)
        plan = reference.interfaces.PrefillMetadata(integers(0)[None], offsets([1]), 1, (), 16)
        chunk = ops.share_chunk(plain, SequenceShare(2, 0))

        def program(ranks, chunk):
            with pytest.raises(ValueError) as error:
                ops.dcp_gather_context(torch.zeros(1, 16, 8), plan, chunk, ranks)
            return str(error.value), sum(ranks.cp_group.received.values())

        said = ops.simulate(2, 16, functools.partial(program, chunk=chunk))
        share = "SequenceShare(size=2, rank={}, interleave={})"
        assert said[1] == (f"chunk: expected one for {share.format(1, 16)}, got one for {share.format(0, 1)}", 0)
        said = ops.simulate(1, 1, functools.partial(program, chunk=plain))
        assert said == [("chunk: expected a ContextParallelChunk (`share_chunk`), got ContextChunk", 0)]

    def test_reorg(self, ops):
        chunk = ops.share_chunk(ContextChunk(integers(0), offsets([5]), 5, 5), SequenceShare(2, 0))
        with pytest.raises(ValueError, match=r"^gathered: expected shape \[2, 3, head_size\], got \[2, 4, 6\]$"):
            ops.reorg_kvcache(torch.zeros(2, 4, 6), chunk)
        falling = replace(chunk, local_cu_seq_lens=integers(0, 3, 0, -2).view(2, 2))
        wanted = "^chunk.local_cu_seq_lens: expected the prefix sums of each rank's tokens of the pieces, got"
        with pytest.raises(ValueError, match=wanted):
            ops.reorg_kvcache(torch.zeros(2, 3, 6), falling)
        two = ops.share_chunk(ContextChunk(integers(0, 0), offsets([5, 4]), 9, 5), SequenceShare(2, 0))
        for local in ([[0, 1, 5], [0, 1, 4]], [[0, 5, 5], [0, 4, 4]], [[1, 4, 6], [1, 3, 5]]):
            with pytest.raises(ValueError, match=wanted):
                ops.reorg_kvcache(torch.zeros(2, 5, 6), replace(two, local_cu_seq_lens=torch.tensor(local).int()))
        with pytest.raises(ValueError, match="^chunk: expected a ContextParallelChunk, got ContextChunk$"):
            ops.reorg_kvcache(torch.zeros(2, 3, 6), ContextChunk(integers(0), offsets([5]), 5, 5))

    def test_layers(self, ops):
        """A plan for another share, heads that do not divide, a bias that would be added on each rank."""
        config = CONFIGS["direct"]
        batch = make_batch([1, 20], [20, 40], 16)
        cache = torch.zeros(batch.num_blocks, 16, config.head_size, dtype=torch.float64)

        def program(ranks, config=config, bias=False, cascade=False):
            from ..support.factories import linear, make_weights
            from ..support.ranks import make_rank_layer

            layer = make_rank_layer(ops, config, make_weights(config, torch.float64), torch.float64, ranks, "cpu")
            if bias:
                biased = linear(torch.zeros(4, 4))
                biased.bias = torch.nn.Parameter(torch.zeros(4))
                modules = {name: module for name, module in layer.named_children() if name != "o_proj"}
                ops.MLAAttention(config, **modules, o_proj=biased, context_parallel=ranks)
            plan = ops.build_mla_metadata(batch.common, 16, 4096)
            if cascade:
                shared = ops.build_mla_metadata(of_rank(batch.common, 16, ranks.share), 16, 4096, share=ranks.share)
                plan = replace(shared, cascade=ops.split_shared_prefix(shared.decode, 16, 16))
            hidden = torch.zeros(21, config.hidden_size, dtype=torch.float64)
            layer(hidden, torch.arange(21), cache, plan)

        wanted = r"^metadata: expected a plan for SequenceShare\(size=2, rank=0, interleave=1\), got one for one rank"
        with pytest.raises(ValueError, match=wanted):
            ops.simulate(2, 1, program)
        with pytest.raises(ValueError, match="^num_heads: expected a multiple of the 5 ranks of tp_group, got 24$"):
            ops.simulate(5, 1, program)
        with pytest.raises(ValueError, match="^o_proj: expected no bias where heads are shared"):
            ops.simulate(2, 1, functools.partial(program, bias=True))
        with pytest.raises(
            ValueError, match="^metadata.cascade: expected None where ranks share sequences, got a cascade$"
        ):
            ops.simulate(2, 1, functools.partial(program, cascade=True))
        with pytest.raises(
            ValueError, match=r"^common.slot_mapping: expected slots for at most the \d+ new tokens of this"
        ):
            ops.build_mla_metadata(batch.common, 16, 4096, share=SequenceShare(2, 0))
        assert cache.eq(0).all()

    def test_shares_of_projections(self, ops):
        """What a view of the weight alone would lose is refused."""
        ranks = ops.simulate(2, 1, lambda ranks: ranks)[1]
        plain = torch.nn.Linear(8, 12, bias=False)
        assert ranks.shard_linear("q_proj", plain, 0, 4).weight.equal(plain.weight[6:])
        assert ranks.shard_linear("o_proj", plain, 1, 4).weight.equal(plain.weight[:, 4:])
        alone = ops.simulate(1, 1, lambda ranks: ranks)[0]
        assert alone.shard_linear("q_proj", plain, 0, 4) is plain
        for spoil, got in (
            (lambda x: x.register_forward_hook(print), "Linear with hooks"),
            (lambda x: setattr(x, "forward", print), "Linear with a forward of its own"),
            (lambda x: setattr(x, "bias", torch.nn.Parameter(torch.zeros(12))), "Linear with a bias"),
        ):
            spoilt = torch.nn.Linear(8, 12, bias=False)
            spoil(spoilt)
            with pytest.raises(ops.UnsupportedConfiguration, match=f"got {got}$"):
                ranks.shard_linear("q_proj", spoilt, 0, 4)
        with pytest.raises(ValueError, match=r"^q_proj: expected a weight of 10 heads in dimension 0, got \[12, 8\]$"):
            ranks.shard_linear("q_proj", plain, 0, 10)

    def test_verify_group(self, ops):
        def program(ranks, **facts):
            facts = {name: value[ranks.tp_group.rank] for name, value in facts.items()}
            ops.verify_group(ranks, **facts)

        ops.simulate(2, 1, functools.partial(program, block_size=[16] * 4), 4)
        wanted = "^block_size: expected 16 on every rank, got 32 on rank 2$"
        with pytest.raises(ValueError, match=wanted):
            ops.simulate(2, 1, functools.partial(program, block_size=[16, 16, 32, 16]), 4)
        with pytest.raises(ValueError, match="^seq_lens: expected .* got nothing on rank 1$"):
            ops.simulate(2, 1, lambda ranks: ops.verify_group(ranks, **{"seq_lens": [3]} if ranks.rank == 0 else {}))

        def other_interleave(ranks):
            ops.verify_group(dataclasses.replace(ranks, interleave=1 + ranks.rank))

        with pytest.raises(ValueError, match="^interleave: expected 1 on every rank, got 2 on rank 1$"):
            ops.simulate(2, 1, other_interleave)

    def test_serving(self, ops):
        def program(ranks):
            loop = make_loop(ops, CONFIGS["direct"], ranks, "cpu", torch.float64)
            if ranks.rank == 1:
                loop.add([1, 2, 3], 5)
            loop.run()

        with pytest.raises(ValueError, match=r"^seq_lens: expected .* on every rank, got .* on rank 1$"):
            ops.simulate(2, 1, program)
