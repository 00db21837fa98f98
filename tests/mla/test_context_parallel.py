"""Tests of layers and serving loops on ranks that share sequences, compared with one rank that holds all tokens.

D ranks share each sequence: each rank in turn holds I consecutive tokens. The ranks of these tests are simulated;
`test_process_groups` runs the same tasks in real processes. The last test plants mistakes and asserts that the
comparison fails for each mistake.
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
from reference.distributed import simulation
from reference.interfaces import AttentionState, TokenOwnership

from ..support.context_parallel import CONFIGS, HEADS, INTERLEAVES, MERGES, SIZES, of_rank
from ..support.factories import DIRECT, assert_close64, integers, make_batch, make_weights
from ..support.ranks import Steps, make_loop, make_rank_layer, owners, serve

# (new tokens, tokens after the step) of each request in four steps. The first step has prompts. The later steps have
# decodes of one to three tokens, and prefills with context. Some ranks own no token of a request.
GROWING = (((40, 40), (5, 5), (7, 7)), ((1, 41), (3, 8), (90, 97)), ((2, 43), (1, 9), (1, 98)),
           ((3, 46), (60, 69), (50, 148)))  # fmt: skip


# Tests of whole layers.


@functools.cache
def alone(config: str) -> tuple[torch.Tensor, ...]:
    """Return the outputs of the reference on one rank, in float64 and with one chunk of context."""
    with torch.device("cpu"):
        return tuple(serve(reference, CONFIGS[config], Steps(GROWING, 64, 4096, 3)))


def check_ranks_are_one(ops, config, size, interleave, merge="a2a", units=40, total=None):
    """Assert that a layer on each of `size` ranks gives the outputs of a single rank that holds all tokens.

    The workspace is `units` x the smallest possible workspace. With `units` = 1, a context has several chunks.
    """
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
    """Every rank gives the output of a single rank, with the context in one chunk (`whole`) or in several chunks.

    Some requests have fewer than I = `interleave` tokens.
    """
    check_ranks_are_one(ops, "low-rank", size, interleave, MERGES[size % 2], units)


@pytest.mark.parametrize("config", ["direct", "no-rope"])
@pytest.mark.parametrize("merge", MERGES)
def test_other_layers(ops, config, merge):
    check_ranks_are_one(ops, config, 4, 16, merge, 1)


@pytest.mark.parametrize(("size", "total"), [(2, 4), (1, 3), (4, 8)])
def test_fewer_ranks_share_sequences_than_heads(ops, size, total):
    """Every rank gives the output of a single rank if fewer ranks share a sequence than share the heads.

    All `total` ranks share the heads. They form groups of `size` ranks, and the ranks of a group divide the tokens of
    every sequence.
    """
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
    """The error of a bfloat16 decode of `fast` on four ranks is within its budget.

    The budget is computed from the error of a bfloat16 decode of `reference` on four ranks (docs/correctness.md).
    """
    config = CONFIGS["low-rank"]
    batch = make_batch([1, 2, 1, 0], [70, 130, 3, 0], 16)
    entries = [torch.randn(length, config.head_size).bfloat16() for length in batch.seq_lens]
    q = torch.randn(4, HEADS, config.head_size).bfloat16()

    def decoded(ops, dtype, size):
        def program(ranks):
            ownership, heads = ranks.ownership, slice(ranks.rank * HEADS // size, (ranks.rank + 1) * HEADS // size)
            plan = ops.build_mla_metadata(of_rank(batch.common, 16, ownership), 16, 4096, 2, ownership=ownership).decode
            cache = torch.full((batch.num_blocks, 16, config.head_size), torch.nan, dtype=dtype)
            for request, own in enumerate(entries):
                mine = [own[t] for t, owner in enumerate(owners(len(own), size, 4)) if owner == ownership.rank]
                for at, entry in enumerate(mine):
                    cache[batch.common.block_table[request, at // 16], at % 16] = entry.to(dtype)
            latent = config.kv_lora_rank
            return ops.dcp_decode(q[:, heads, :latent].to(dtype), q[:, heads, latent:].to(dtype), cache, plan,
                                  config.softmax_scale, ranks)  # fmt: skip

        merged = ops.simulate(size, 4, program, merge=merge)
        return AttentionState(torch.cat([own.out for own in merged], 1), torch.cat([own.lse for own in merged]))

    gold = decoded(reference, torch.float64, 1)
    for parity in compare_states("decode", decoded(fast, torch.bfloat16, 4), decoded(reference, torch.bfloat16, 4),
                                 gold):  # fmt: skip
        assert parity.passed, parity


def test_memory_profile_run(ops):
    """Without a plan, as in a memory-profile run, the layer of every rank returns zeros."""
    config = CONFIGS["direct"]

    def program(ranks):
        layer = make_rank_layer(ops, config, make_weights(config, torch.float64), torch.float64, ranks, "cpu")
        cache = torch.full((1, 16, config.head_size), torch.nan, dtype=torch.float64)
        hidden = torch.randn(3, config.hidden_size, dtype=torch.float64)
        return layer(hidden, torch.arange(3), cache, None)

    assert all(out.eq(0).all() for out in ops.simulate(2, 1, program))


@pytest.mark.parametrize("query_len", [1, 2])
def test_graphs(ops, query_len):
    """A `DecodeGraph` that pads three requests to four gives the outputs that the layer gives without a graph."""
    config = CONFIGS["low-rank"]
    lens = (70, 9, 33)

    def program(ranks):
        torch.manual_seed(5)
        layer = make_rank_layer(ops, config, make_weights(config, torch.float64), torch.float64, ranks, "cpu")
        batch = make_batch([query_len] * 3, lens, 16)
        slots = ops.dcp_slot_mapping(batch.common.query_start_loc, batch.common.seq_lens, batch.common.block_table, 16,
                                     3 * query_len, ranks.size, ranks.rank, ranks.interleave)  # fmt: skip
        common = dataclasses.replace(batch.common, slot_mapping=slots)
        cache = torch.randn(batch.num_blocks, 16, config.head_size, dtype=torch.float64)
        hidden = torch.randn(3 * query_len, config.hidden_size, dtype=torch.float64)
        positions = batch.positions
        plan = ops.build_mla_metadata(common, 16, 4096, query_len, ownership=ranks.ownership)
        wanted = layer(hidden, positions, cache.clone(), plan)
        builder = ops.MLAMetadataBuilder(
            config, 16, 4096, 4, num_speculative_tokens=query_len - 1, num_programs=2, context_parallel=ranks
        )
        graph = ops.DecodeGraph(
            lambda *step: layer(*step[:2], cache, step[2]), builder, [1, 4], 8, config.hidden_size, torch.float64,
            "cpu", query_len,
        )  # fmt: skip
        return graph.run(hidden, positions, common), wanted

    for found, wanted in ops.simulate(2, 8, program):
        assert_close64(found, wanted)


# Tests of the serving loop.


def test_serving(ops):
    """A serving loop on D ranks generates the tokens of a single rank, and has room for D times as many tokens."""
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
    """After a failed step, a serving loop refuses all further steps: other ranks could still be in the failed step."""

    def program(ranks):
        loop = make_loop(ops, CONFIGS["direct"], ranks, "cpu", torch.float64)
        layer = loop.model.layers[1]
        layer.forward = lambda *_: (_ for _ in ()).throw(MemoryError("of a test"))
        with pytest.raises(MemoryError):
            loop.step()
        for again in (loop.step, loop.run):
            with pytest.raises(ValueError, match="^ServingLoop: expected ranks at the same step, got a step"):
                again()
        return loop.allocator.num_free

    assert ops.simulate(2, 1, program) == [40, 40]


# Functions that plant a mistake. Each of them replaces a function of `reference` by a wrong function, and
# `check_ranks_are_one` must then fail.


def ranks_in_the_wrong_order(patch):
    group = simulation.SimulatedRanks
    tensors = group._tensors
    patch.setattr(group, "_tensors", lambda self, operation, x: tensors(self, operation, x)[::-1])


def causal_bound_of_the_local_position(patch):
    """Plant a mask in which each query token sees one rank-local key more than the token before it.

    vLLM had this mistake: https://github.com/vllm-project/vllm/issues/50391
    """

    def wrong(common, *args, ownership, build=reference.build_mla_metadata, **kwargs):
        plan = build(common, *args, ownership=ownership, **kwargs)
        query_lens, lens = plan.decode.query_start_loc.diff().tolist(), plan.decode.seq_lens.tolist()
        seen = [max(0, s - q + i + 1) for q, s in zip(query_lens, lens, strict=True) for i in range(q)]
        return replace(plan, decode=replace(plan.decode, visible_lens=integers(*seen)))

    patch.setattr(reference, "build_mla_metadata", wrong)


def lse_in_bfloat16(patch):
    whole = reference.distributed.merge._merge_weights
    patch.setattr(reference.distributed.merge, "_merge_weights", lambda lses: whole(lses.bfloat16().to(lses.dtype)))


def lse_in_base_2(patch):
    whole = reference.distributed.merge._merge_weights
    patch.setattr(reference.distributed.merge, "_merge_weights", lambda lses: whole(lses * 1.4426950408889634))


def outputs_summed_without_weights(patch):
    whole = reference.distributed.merge._merge_weights
    patch.setattr(reference.distributed.merge, "_merge_weights", lambda lses: (torch.ones_like(lses), whole(lses)[1]))


def a_rank_is_left_out(patch):
    group = simulation.SimulatedRanks
    tensors = group._tensors

    def wrong(self, operation, x):
        found = tensors(self, operation, x)
        return [*found[:-1], torch.zeros_like(found[-1])] if operation == "all_gather" else found

    patch.setattr(group, "_tensors", wrong)


def owner_without_interleave(patch):
    """Plant masks that assume an interleave of 1, although the cache has a larger interleave."""

    def wrong(common, *args, ownership, build=reference.build_mla_metadata, **kwargs):
        plan = build(common, *args, ownership=ownership, **kwargs)
        other = TokenOwnership(ownership.size, ownership.rank, 1)
        lens, starts = common.seq_lens.tolist(), plan.decode.query_start_loc.tolist()
        pairs = list(itertools.pairwise(starts))
        seen = [other.count(s - (b - a) + i + 1) for s, (a, b) in zip(lens, pairs, strict=False) for i in range(b - a)]
        held = torch.repeat_interleave(plan.decode.seq_lens, plan.decode.query_start_loc.diff())
        return replace(plan, decode=replace(plan.decode, visible_lens=torch.minimum(integers(*seen), held)))

    patch.setattr(reference, "build_mla_metadata", wrong)


LAYER_MISTAKES = (ranks_in_the_wrong_order, causal_bound_of_the_local_position, lse_in_bfloat16, lse_in_base_2,
                  outputs_summed_without_weights, a_rank_is_left_out, owner_without_interleave)  # fmt: skip


@pytest.mark.parametrize("mistake", LAYER_MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_of_a_layer(monkeypatch, mistake):
    alone("direct")
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        check_ranks_are_one(reference, "direct", 4, 16, "a2a")
