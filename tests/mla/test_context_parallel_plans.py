"""Tests of the plans of ranks that share sequences.

The expected numbers are counted in a list that has, for each token, the rank that holds the token.
"""

from __future__ import annotations

import pytest

import fast
import reference
from reference.interfaces import TokenOwnership

from ..support.context_parallel import CONFIGS, MERGES, of_rank
from ..support.factories import make_batch
from ..support.planning import batches, same
from ..support.properties import given, st
from ..support.ranks import owners


@given(batch=batches(), size=st.sampled_from([1, 2, 3, 8]), interleave=st.sampled_from([1, 4, 16]),
       units=st.integers(7, 9), threshold=st.integers(1, 4))  # fmt: skip
def test_plans(batch, size, interleave, units, threshold):
    """Both packages give the same plan for each rank.

    Lengths and visible lengths count the tokens of this rank. The chunks cover the whole context of every prefill.
    """
    query_lens, seq_lens = batch
    # a padding row is legal only among the decodes
    if any(q > 0 and s == 0 for q, s in zip(query_lens, seq_lens, strict=True)):
        query_lens = [min(q, 1) for q in query_lens]
    batch, block_size = make_batch(query_lens, seq_lens, 16), 16
    workspace = units * reference.interfaces.context_unit(block_size, size, interleave)
    for rank in range(size):
        ownership = TokenOwnership(size, rank, interleave)
        common = of_rank(batch.common, block_size, ownership)
        plans = [
            ops.build_mla_metadata(common, block_size, workspace, threshold, ownership=ownership)
            for ops in (reference, fast)
        ]
        same(*plans)
        check_rank_plan(batch, plans[0], ownership, workspace)


def check_rank_plan(batch, plan, ownership, workspace):
    def held(length):
        return owners(length, ownership.size, ownership.interleave).count(ownership.rank)

    decodes = plan.num_decodes
    assert plan.ownership == ownership and plan.decode.seq_lens.tolist() == [held(s) for s in batch.seq_lens[:decodes]]
    seen = [
        held(max(0, length - query_len + i + 1)) if length else 0
        for query_len, length in zip(batch.query_lens[:decodes], batch.seq_lens[:decodes], strict=True)
        for i in range(query_len)
    ]
    assert plan.decode.visible_lens.tolist() == seen
    assert plan.decode.total_seq_lens.tolist() == list(batch.seq_lens[:decodes]) and plan.decode.ownership == ownership
    over_ranks = ownership.size > 1 and plan.decode.max_query_len > 1
    wanted = "causal_over_ranks" if ownership.interleave == 1 else "visible_lens"
    assert plan.decode.mask == (wanted if over_ranks else "causal")
    covered = [0] * (len(batch.seq_lens) - decodes)
    for chunk in plan.prefill.context_chunks:
        assert (ownership.size + 1) * chunk.padded_tokens <= workspace + workspace // ownership.size
        assert chunk.padded_tokens >= chunk.local_tokens == int(chunk.held[1][-1])
        for request, length in enumerate(chunk.cu_seq_lens.diff().tolist()):
            start = int(chunk.starts[request])
            dealt = owners(start + length, ownership.size, ownership.interleave)
            for rank in range(ownership.size):
                pieces = chunk.local_cu_seq_lens[rank].diff()
                assert int(pieces[request]) == dealt[start:].count(rank)
                assert length == 0 or dealt[:start].count(rank) == int(chunk.local_starts[request])
            assert length == 0 or start == covered[request]
            covered[request] += length
    assert covered == list(batch.context_lens[decodes:])


@pytest.mark.parametrize("merge", MERGES)
def test_builder(ops, merge):
    """The builder of a rank makes a schedule for the lengths on this rank, and never chooses a cascade."""
    batch, config = make_batch([1, 1, 40], [7000, 9, 100], 16), CONFIGS["direct"]

    def program(ranks):
        options = dict(block_size=16, max_model_len=8192, max_num_seqs=4, num_programs=3, context_parallel=ranks)
        builder = ops.MLAMetadataBuilder(config, **options)
        assert builder.workspace_tokens % (16 * ranks.size) == 0
        return builder.build(64, of_rank(batch.common, 16, ranks.ownership))

    for rank, plan in enumerate(ops.simulate(2, 4, program, 4, merge)):
        assert plan.ownership == TokenOwnership(2, rank % 2, 4) and plan.cascade is None
        same(plan.schedule, ops.plan_decode(plan.decode.seq_lens, 3))
        assert plan.prefill.context_chunks[0].ownership == plan.ownership


@pytest.mark.parametrize("query_len", [1, 3])
def test_captured_plans(ops, query_len):
    """`update_captured` writes the lengths, visible lengths and schedule of this rank into the captured plan."""
    first, second = ([(query_len, s) for s in lens] for lens in ((70, 9, 33), (17, 64, 65)))

    def program(ranks):
        builder = ops.MLAMetadataBuilder(CONFIGS["direct"], 16, 256, 4, num_speculative_tokens=query_len - 1,
                                         num_programs=3, context_parallel=ranks)  # fmt: skip
        batches = [
            of_rank(make_batch(*zip(*lens, strict=True), 16).common, 16, ranks.ownership) for lens in (first, second)
        ]
        captured = builder.build_for_cudagraph_capture(batches[0])
        held = captured.decode.seq_lens, captured.decode.visible_lens, captured.schedule.tile_ranges
        builder.update_captured(captured, batches[1])
        wanted = builder.build(0, batches[1])
        planned = ops.plan_decode(wanted.decode.seq_lens, 3)
        fresh = wanted.decode.seq_lens, wanted.decode.visible_lens, planned.tile_ranges
        return [x.equal(y) for x, y in zip(held, fresh, strict=True)]

    assert ops.simulate(4, 8, program) == [[True] * 3] * 4
