"""Tests of bad input with context parallelism: an error of one line names the argument, and no rank sends data."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import replace

import pytest
import torch

import reference
from reference.interfaces import AttentionState, ContextChunk, TokenOwnership

from ..support.context_parallel import CONFIGS, of_rank
from ..support.factories import integers, linear, make_batch, make_weights, offsets
from ..support.ranks import make_loop, make_rank_layer


@pytest.mark.usefixtures("plain_errors")
class TestBadInput:
    def test_numbers(self, ops):
        lens = integers(5)
        with pytest.raises(ValueError, match=r"^rank: expected an int in \[0, 4\), got 4$"):
            ops.get_dcp_local_seq_lens(lens, 4, 4)
        with pytest.raises(ValueError, match="^context_parallel_size: expected a positive int, got 0$"):
            ops.get_dcp_local_seq_lens(lens, 0)
        with pytest.raises(ValueError, match="^interleave: expected a positive int, got 0$"):
            ops.TokenOwnership(2, 1, 0)
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
        ownership = TokenOwnership(2, 0, 8)
        build = functools.partial(ops.build_mla_metadata, of_rank(batch.common, 16, ownership), ownership=ownership)
        with pytest.raises(ValueError, match="^interleave: expected a divisor of the block size 4, got 8$"):
            build(4, 4096)
        with pytest.raises(ValueError, match="^workspace_tokens: expected at least one unit of 16 tokens, got 8$"):
            build(8, 8)
        chunk = ContextChunk(integers(8), offsets([5]), 5, 5)
        with pytest.raises(ValueError, match="^chunk.starts: expected multiples of 16, got 8 at request 0$"):
            ops.rank_local_chunk(chunk, ownership)

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
            with pytest.raises(ValueError, match="^state.out: expected a number of heads that 3 divides, got 4$"):
                ops.simulate(3, 1, lambda ranks, merge=merge: merge(state, ranks.cp_group))
            narrow = AttentionState(state.out.bfloat16(), state.lse.bfloat16())
            with pytest.raises(ValueError, match="^state.lse: expected dtype torch.float32, got torch.bfloat16$"):
                ops.simulate(2, 1, lambda ranks, merge=merge, narrow=narrow: merge(narrow, ranks.cp_group))

    def test_batch_invariance(self, ops):
        """A batch-invariant builder refuses the merge `ag_rs`, whose reduce-scatter has no fixed order of additions."""
        ranks = ops.simulate(2, 1, lambda ranks: ranks, merge="ag_rs")[0]
        wanted = '^batch_invariant: expected False, or groups with merge "a2a", got True with "ag_rs"$'
        with pytest.raises(ValueError, match=wanted):
            ops.MLAMetadataBuilder(CONFIGS["direct"], 16, 64, 2, num_programs=1, batch_invariant=True,
                                   context_parallel=ranks)  # fmt: skip
        with pytest.raises(ValueError, match="^interleave: expected a divisor of the block size 16, got 3$"):
            ops.MLAMetadataBuilder(CONFIGS["direct"], 16, 64, 2,
                                   context_parallel=ops.simulate(2, 3, lambda ranks: ranks)[0])  # fmt: skip

    def test_gather(self, ops):
        """`dcp_gather_context` refuses the chunk of another rank and the chunk of a single rank; no bytes are sent."""
        plain = ContextChunk(integers(0), offsets([5]), 5, 5)
        plan = reference.interfaces.PrefillMetadata(integers(0)[None], offsets([1]), 1, (), 16)
        chunk = ops.rank_local_chunk(plain, TokenOwnership(2, 0))

        def program(ranks, chunk):
            with pytest.raises(ValueError) as error:
                ops.dcp_gather_context(torch.zeros(1, 16, 8), plan, chunk, ranks)
            return str(error.value), sum(ranks.cp_group.received.values())

        said = ops.simulate(2, 16, functools.partial(program, chunk=chunk))
        ownership = "TokenOwnership(size=2, rank={}, interleave={})"
        assert said[1] == (
            f"chunk: expected a chunk for {ownership.format(1, 16)}, got a chunk for {ownership.format(0, 1)}",
            0,
        )
        said = ops.simulate(1, 1, functools.partial(program, chunk=plain))
        assert said == [("chunk: expected a ContextParallelChunk, from `rank_local_chunk`, got ContextChunk", 0)]

    def test_reorg(self, ops):
        chunk = ops.rank_local_chunk(ContextChunk(integers(0), offsets([5]), 5, 5), TokenOwnership(2, 0))
        with pytest.raises(ValueError, match=r"^gathered: expected shape \[2, 3, head_size\], got \[2, 4, 6\]$"):
            ops.reorg_kvcache(torch.zeros(2, 4, 6), chunk)
        falling = replace(chunk, local_cu_seq_lens=integers(0, 3, 0, -2).view(2, 2))
        wanted = "^chunk.local_cu_seq_lens: expected the prefix sums of each rank's tokens in the chunk, got"
        with pytest.raises(ValueError, match=wanted):
            ops.reorg_kvcache(torch.zeros(2, 3, 6), falling)
        two = ops.rank_local_chunk(ContextChunk(integers(0, 0), offsets([5, 4]), 9, 5), TokenOwnership(2, 0))
        for local in ([[0, 1, 5], [0, 1, 4]], [[0, 5, 5], [0, 4, 4]], [[1, 4, 6], [1, 3, 5]]):
            with pytest.raises(ValueError, match=wanted):
                ops.reorg_kvcache(torch.zeros(2, 5, 6), replace(two, local_cu_seq_lens=torch.tensor(local).int()))
        with pytest.raises(ValueError, match="^chunk: expected a ContextParallelChunk, got ContextChunk$"):
            ops.reorg_kvcache(torch.zeros(2, 3, 6), ContextChunk(integers(0), offsets([5]), 5, 5))
        with pytest.raises(TypeError, match="^chunk: expected a ContextParallelChunk, got NoneType$"):
            ops.reorg_kvcache(torch.zeros(2, 3, 6), None)

    def test_layers(self, ops):
        """A layer on several ranks refuses the following input and does not write the cache.

        - a plan for a single rank;
        - a number of heads that the number of ranks does not divide;
        - an output projection with a bias, which every rank would add;
        - a plan with a cascade.

        `build_mla_metadata` for one of two ranks refuses a batch with slots for the tokens of both ranks.
        """
        config = CONFIGS["direct"]
        batch = make_batch([1, 20], [20, 40], 16)
        cache = torch.zeros(batch.num_blocks, 16, config.head_size, dtype=torch.float64)

        def program(ranks, config=config, bias=False, cascade=False):
            layer = make_rank_layer(ops, config, make_weights(config, torch.float64), torch.float64, ranks, "cpu")
            if bias:
                biased = linear(torch.zeros(4, 4))
                biased.bias = torch.nn.Parameter(torch.zeros(4))
                modules = {name: module for name, module in layer.named_children() if name != "o_proj"}
                ops.MLAAttention(config, **modules, o_proj=biased, context_parallel=ranks)
            plan = ops.build_mla_metadata(batch.common, 16, 4096)
            if cascade:
                shared = ops.build_mla_metadata(
                    of_rank(batch.common, 16, ranks.ownership), 16, 4096, ownership=ranks.ownership
                )
                plan = replace(shared, cascade=ops.split_shared_prefix(shared.decode, 16, 16))
            hidden = torch.zeros(21, config.hidden_size, dtype=torch.float64)
            layer(hidden, torch.arange(21), cache, plan)

        wanted = r"^metadata: expected a plan for TokenOwnership\(size=2, rank=0, interleave=1\), got a plan for one"
        with pytest.raises(ValueError, match=wanted):
            ops.simulate(2, 1, program)
        with pytest.raises(ValueError, match="^num_heads: expected a multiple of the 5 ranks of tp_group, got 24$"):
            ops.simulate(5, 1, program)
        with pytest.raises(ValueError, match="^o_proj: expected no bias if ranks share the heads"):
            ops.simulate(2, 1, functools.partial(program, bias=True))
        with pytest.raises(
            ValueError, match="^metadata.cascade: expected None if ranks share sequences, got a cascade$"
        ):
            ops.simulate(2, 1, functools.partial(program, cascade=True))
        with pytest.raises(
            ValueError, match=r"^common.slot_mapping: expected slots for at most the \d+ new tokens of this"
        ):
            ops.build_mla_metadata(batch.common, 16, 4096, ownership=TokenOwnership(2, 0))
        assert cache.eq(0).all()

    def test_shares_of_projections(self, ops):
        """`shard_linear` slices only a weight, so it refuses a projection with a hook, a replaced forward or a bias."""
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
