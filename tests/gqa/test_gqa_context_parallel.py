"""Tests of context parallelism of grouped-query attention, in which D ranks divide the tokens of every sequence.

The ranks gather their queries, attend the keys that they own, and merge the attention states. Each rank in turn keeps I
consecutive tokens; I is the interleave. TP ranks divide the query heads.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast.parity import compare
from reference.interfaces import FP8_E4M3, TokenOwnership, UnsupportedConfiguration
from reference.interfaces.gqa import GQAConfig, gathered_config, kv_heads_of_ranks, rank_config

from ..support.factories import GARBAGE, assert_close64, assert_same_bits, assert_states64, integers, make_batch
from ..support.gqa_layers import GQAStep, width_of
from ..support.gqa_plans import LOCAL
from ..support.gqa_ranks import (
    BLOCK,
    STEPS,
    free_blocks,
    rank_batch,
    replay_gqa_decodes,
    serve_gqa,
    serve_over_groups,
)
from ..support.processes import run_ranks, values_of
from ..support.properties import given, st

PLAIN = GQAConfig(24, 2, 32)  # 2, 3, 4 and 8 ranks divide the query heads
CONFIGS = {
    "plain": PLAIN,
    "one KV head": replace(PLAIN, num_kv_heads=1),
    "window 1": replace(PLAIN, sliding_window=1),
    "window of a block + 1": replace(PLAIN, sliding_window=17),
    "sinks": replace(PLAIN, attention_sinks=True),
    "soft cap": replace(PLAIN, logits_soft_cap=0.7, scale=0.4),
    "all of them": replace(PLAIN, sliding_window=37, attention_sinks=True, logits_soft_cap=1.3),
}
on_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
FP8 = dict(cache_format=FP8_E4M3, k_scale=0.01, v_scale=0.02)
RANKS = ((2, 2, 1), (3, 3, 4), (4, 4, 16), (4, 8, 16), (2, 4, 16), (1, 2, 1))  # D, TP, I; some ranks own no token


@functools.cache
def one_rank(ops, name):
    """Return the outputs of one rank that owns all tokens and heads."""
    return serve_gqa(ops, CONFIGS[name])


def joined(outputs):
    """Return the outputs of all heads in each step, from the outputs of the heads of each rank."""
    return [torch.cat(step, dim=1) for step in zip(*outputs, strict=True)]


CASES = [("all of them", *case, merge) for case in RANKS for merge in ("a2a", "ag_rs")]
CASES += [("plain", *case, ("a2a", "ag_rs")[number % 2]) for number, case in enumerate(RANKS)]
CASES += [(name, *case) for name in CONFIGS.keys() - {"plain", "all of them", "one KV head"}
          for case in ((2, 2, 1, "ag_rs"), (3, 3, 4, "a2a"), (4, 8, 16, "ag_rs"))]  # fmt: skip
CASES += [("one KV head", 3, 3, 4, "a2a"), ("one KV head", 8, 8, 1, "ag_rs")]


@pytest.mark.parametrize(("name", "size", "total", "interleave", "merge"), sorted(CASES))
def test_ranks_equal_one_rank(ops, name, size, total, interleave, merge):
    """In float64, D ranks give the outputs of one rank: prefills, decodes, freed blocks, ranks without tokens."""
    config = CONFIGS[name]
    outputs = ops.simulate(size, interleave, lambda ranks: serve_gqa(ops, config, ranks), total, merge)
    for found, wanted in zip(joined(outputs), one_rank(ops, name), strict=True):
        assert_close64(found, wanted)


def test_fp8_caches(ops):
    """Each rank stores its tokens in e4m3 with the same scales, so D ranks read the numbers that one rank reads."""
    config = replace(PLAIN, sliding_window=37, attention_sinks=True)
    options = dict(FP8, q_scale=0.015)
    wanted = serve_gqa(ops, config, **options)
    outputs = ops.simulate(3, 4, lambda ranks: serve_gqa(ops, config, ranks, **options))
    for found, one in zip(joined(outputs), wanted, strict=True):
        assert_close64(found, one)


def direct_call(ops, config, lens, ranks, sinks=None, **options):
    """Return the state of `gqa_dcp_attention` of a rank, or of `gqa_paged_attention` if `ranks` is None.

    The cache has random keys and values; they are drawn from a fixed seed for all tokens of all requests.
    """
    torch.manual_seed(3)
    keys = [torch.randn(2, length, config.num_kv_heads, config.head_dim, dtype=torch.float64) for _, length in lens]
    tokens = sum(query_len for query_len, _ in lens)
    q = torch.randn(tokens, config.num_heads, config.head_dim, dtype=torch.float64)
    ownership, local = (None, config) if ranks is None else (ranks.ownership, ranks.local_gqa_config(config))
    owned = TokenOwnership(1, 0) if ownership is None else ownership
    used = [-(-owned.most(length) // BLOCK) for _, length in lens]
    table = torch.full((len(lens), max(used) + 1), GARBAGE, dtype=torch.int32)
    order = torch.randperm(sum(used)).tolist()
    cache = torch.full((2, sum(used), BLOCK, local.num_kv_heads, config.head_dim), torch.nan, dtype=torch.float64)
    kv_heads = list(range(config.num_kv_heads)) if ranks is None else list(ranks.kv_heads(config))
    for request, (_, length) in enumerate(lens):
        table[request, : used[request]] = integers(*(order.pop() for _ in range(used[request])))
        mine = [token for token in range(length) if owned.count(token + 1) > owned.count(token)]
        for place, token in enumerate(mine):
            block = int(table[request, place // BLOCK])
            cache[:, block, place % BLOCK] = keys[request][:, token, kv_heads]
    common = free_blocks(rank_batch(lens, table, ranks), cache, config, ownership)
    plan = ops.build_gqa_metadata(common, BLOCK, config, 100, ownership=ownership).decode
    if ranks is None:
        return ops.gqa_paged_attention(q, cache, plan, config, sinks, **options)
    first = ranks.tp_group.rank * local.num_heads
    q = q[:, first : first + local.num_heads]
    gathered = None if sinks is None else ranks.heads_of_group(sinks)
    return ops.gqa_dcp_attention(q, cache, plan, local, ranks, gathered, **options)


@pytest.mark.parametrize("name", ["plain", "window of a block + 1", "sinks", "all of them"])
def test_states(ops, name):
    """The merged LSE is that of one rank too; it counts the attention sink once. A row without keys has the sink."""
    config, lens = CONFIGS[name], [(3, 40), (1, 5), (20, 70), (1, 33), (0, 9)]
    sinks = torch.randn(24, dtype=torch.float64) if config.attention_sinks else None
    wanted = direct_call(ops, config, lens, None, sinks)
    for size, total, interleave, merge in ((2, 2, 16, "a2a"), (4, 8, 1, "ag_rs"), (3, 3, 4, "a2a")):
        states = ops.simulate(
            size, interleave, lambda ranks: direct_call(ops, config, lens, ranks, sinks), total, merge
        )  # fmt: skip
        found = type(wanted)(torch.cat([s.out for s in states], 1), torch.cat([s.lse for s in states]))
        assert_states64(found, wanted)


def test_only_one_rank_counts_the_sinks(monkeypatch):
    """A rank other than rank 0 attends without sinks; if every rank counted them, the LSE would be wrong."""
    config, lens = CONFIGS["sinks"], [(2, 40), (1, 17)]
    sinks = torch.full((24,), 3.0, dtype=torch.float64)
    calls, attend = [], reference.gqa.context_parallel.gqa_paged_attention

    def noted(q, kv_cache, plan, own, given_sinks, *rest):
        calls.append((own.attention_sinks, given_sinks is not None, own.num_heads, own.num_kv_heads))
        return attend(q, kv_cache, plan, own, given_sinks, *rest)

    monkeypatch.setattr(reference.gqa.context_parallel, "gqa_paged_attention", noted)
    found = reference.simulate(3, 1, lambda ranks: direct_call(reference, config, lens, ranks, sinks).lse)
    assert sorted(calls) == [(False, False, 24, 2)] * 2 + [(True, True, 24, 2)]
    monkeypatch.setattr(
        reference.gqa.context_parallel, "gathered_config", lambda own, size, has_sinks=True: gathered_config(own, size)
    )
    monkeypatch.setattr(reference.gqa.context_parallel, "gqa_paged_attention",
                        lambda q, kv_cache, plan, own, given_sinks, *rest: attend(q, kv_cache, plan, own, sinks, *rest),
                        )  # fmt: skip
    wrong = reference.simulate(3, 1, lambda ranks: direct_call(reference, config, lens, ranks, sinks).lse)
    assert (torch.cat(wrong) - torch.cat(found)).min() > 0.01


def test_processes_equal_the_simulator():
    """Over gloo, both packages give the float64 outputs of simulated ranks, with both merges."""
    config = CONFIGS["all of them"]
    found = values_of(run_ranks(4, serve_over_groups, 2, 4, config))
    for ops in (reference, fast):
        for merge in ("a2a", "ag_rs"):
            wanted = ops.simulate(2, 4, lambda ranks, ops=ops: serve_gqa(ops, config, ranks), 4, merge)
            for rank in range(4):
                for number, output in enumerate(wanted[rank]):
                    assert_close64(found[rank][f"{ops.__name__} {merge} step {number}"], output)
    assert len(found[0]) == 4 * len(STEPS)


def test_fp8_caches_of_processes():
    """Over gloo, ranks with caches in e4m3 give the outputs of one rank over e4m3, with both packages and merges."""
    config = CONFIGS["window of a block + 1"]
    found = values_of(run_ranks(2, serve_over_groups, 2, 4, config, "cpu", torch.float64, FP8))
    for ops in (reference, fast):
        wanted = serve_gqa(ops, config, **FP8)
        for merge in ("a2a", "ag_rs"):
            for number, one in enumerate(wanted):
                name = f"{ops.__name__} {merge} step {number}"
                assert_close64(torch.cat([outputs[name] for outputs in found], dim=1), one)


@pytest.mark.parametrize("merge", ["a2a", "ag_rs"])
def test_graphs_of_processes(merge):
    """Over gloo, a `DecodeGraph` of every rank gives the outputs of steps without a graph."""
    outcomes = run_ranks(2, replay_gqa_decodes, 2, merge, CONFIGS["all of them"], "cpu", torch.float64)
    for found in values_of(outcomes):
        for eager, replayed in found:
            assert_close64(replayed, eager)


@on_gpus
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "options"), [("plain", {}), ("all of them", {}), ("all of them", FP8)],
                         ids=["plain", "all of them", "all of them over fp8_e4m3"])  # fmt: skip
def test_nccl(name, options, dtype):
    """Over NCCL, the errors of `fast` against float64 on simulated ranks are within the budgets, with both merges."""
    config = CONFIGS[name]
    outcomes = run_ranks(2, serve_over_groups, 2, 4, config, "cuda", dtype, options, backend="nccl", limit_s=180.0)
    for merge in ("a2a", "ag_rs"):
        gold = reference.simulate(2, 4, lambda ranks: serve_gqa(reference, config, ranks, **options), 2, merge)
        for rank, found in enumerate(values_of(outcomes)):
            for number, wanted in enumerate(gold[rank]):
                low, value = (found[f"{ops} {merge} step {number}"] for ops in ("reference", "fast"))
                parity = compare(f"GQAAttention, {merge}, step {number}", value, low, wanted)
                assert parity.passed, parity


@on_gpus
@pytest.mark.parametrize("merge", ["a2a", "ag_rs"])
def test_nccl_graphs(merge):
    """Capture a step with exchanges over NCCL, replay it with other lengths and blocks -> errors within the budget."""
    config = CONFIGS["all of them"]
    gold = values_of(run_ranks(2, replay_gqa_decodes, 2, merge, config, "cpu", torch.float64))
    outcomes = run_ranks(2, replay_gqa_decodes, 2, merge, config, "cuda", torch.float32, backend="nccl", limit_s=180.0)
    for found, wanted in zip(values_of(outcomes), gold, strict=True):
        for (eager, replayed), (whole, _) in zip(found, wanted, strict=True):
            parity = compare("graph", replayed, eager, whole)
            assert parity.passed, parity


def test_decode_graphs(ops):
    """A `DecodeGraph` of every rank gives the outputs of steps without a graph."""
    config = CONFIGS["all of them"]
    sinks = torch.randn(24, dtype=torch.float64)

    def program(ranks):
        torch.manual_seed(ranks.rank)
        local = ranks.local_gqa_config(config)
        step = GQAStep(
            local, ops.GQAAttention(config, context_parallel=ranks, sinks=sinks),
            torch.randn(2, 40, BLOCK, local.num_kv_heads, 32, dtype=torch.float64), [],
        )  # fmt: skip
        builder = ops.GQAMetadataBuilder(config, BLOCK, 512, 4, num_speculative_tokens=1, context_parallel=ranks)
        device, width = torch.get_default_device(), width_of(local)
        graph = ops.DecodeGraph(step, builder, [2, 4], 10, width, torch.float64, device, 2, layers=[step.layer])
        torch.manual_seed(9)
        table = torch.randperm(40).view(4, 10).int()
        for lens in (((2, 90), (1, 33), (2, 17)), ((1, 200), (2, 3)), ((1, 64), (1, 65), (2, 66), (0, 160))):
            common = rank_batch(lens, table[: len(lens)], ranks)
            hidden = torch.randn(common.num_actual_tokens, width, dtype=torch.float64)
            positions = torch.zeros(common.num_actual_tokens, dtype=torch.int64)
            eager = step(hidden, positions, builder.build(0, common))
            assert_close64(graph.run(hidden, positions, common), eager)
        return len(step.plans)

    assert ops.simulate(2, 4, program) == [6, 6]


# Tests of the heads of a rank.


@given(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 3, 4, 8]),
       st.sampled_from([1, 2, 4, 8]), st.booleans())  # fmt: skip
def test_heads_of_ranks(group_size, num_kv_heads, local_groups, size, strided):
    """The KV heads of a cache are those of the gathered query heads, and every gathered head uses its own KV head."""
    heads = group_size * num_kv_heads
    total = size * local_groups
    if heads % total:
        return
    config, local = GQAConfig(heads, num_kv_heads, 32), heads // total
    members = tuple(range(0, total, local_groups)) if strided else tuple(range(size))
    gathered = [head for member in members for head in range(member * local, (member + 1) * local)]
    used = [head // group_size for head in gathered]
    equal = len(gathered) // max(1, len(set(used)))
    possible = used == [kv for kv in dict.fromkeys(used) for _ in range(equal)]
    if not possible:
        with pytest.raises(UnsupportedConfiguration, match="^num_kv_heads: expected KV heads that divide the"):
            kv_heads_of_ranks(config, total, members)
        return
    kv_heads = kv_heads_of_ranks(config, total, members)
    assert [kv_heads[place // (len(gathered) // len(kv_heads))] for place in range(len(gathered))] == used
    if local % len(kv_heads):
        with pytest.raises(UnsupportedConfiguration, match="^num_kv_heads: expected KV heads that divide the"):
            rank_config(config, total, members, 0)
        return
    own = rank_config(config, total, members, 0)
    assert (own.num_heads, own.num_kv_heads) == (local, len(kv_heads))
    assert gathered_config(own, size) == replace(own, num_heads=len(gathered))


def test_slopes_of_a_rank():
    """Without context parallelism, ALiBi is legal: each rank has the slopes of its heads."""
    config = GQAConfig(4, 2, 32, alibi_slopes=(0.5, 0.25, 0.125, 1.0))
    found = reference.simulate(1, 1, lambda ranks: ranks.local_gqa_config(config), 2)
    assert [own.alibi_slopes for own in found] == [(0.5, 0.25), (0.125, 1.0)]
    assert reference.simulate(1, 1, lambda ranks: ranks.kv_heads(config), 2) == [(0,), (1,)]


# Tests of refusals.


def test_refused_layers(ops, plain_errors):
    """ALiBi, chunked local attention and heads that ranks cannot share are refused by name."""
    refused = {
        "config.alibi_slopes: expected None if 2 ranks": replace(PLAIN, alibi_slopes=(0.5,) * 24),
        "config.attention_chunk_size: expected None if 2 ranks": replace(PLAIN, attention_chunk_size=32),
        "num_kv_heads: expected KV heads that divide the 3 query heads of a rank, got 6": GQAConfig(6, 6, 32),
    }
    for message, config in refused.items():

        def program(ranks, config=config):
            return ops.GQAMetadataBuilder(config, 16, 64, 4, context_parallel=ranks)

        with pytest.raises(UnsupportedConfiguration) as caught:
            ops.simulate(2, 1, program)
        assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="^num_heads: expected a multiple of 5 ranks, got 24$"):
        ops.simulate(5, 1, lambda ranks: ops.GQAMetadataBuilder(PLAIN, 16, 64, 4, context_parallel=ranks))
    with pytest.raises(UnsupportedConfiguration, match="^num_kv_heads: expected KV heads that divide the 12 query"):
        kv_heads_of_ranks(GQAConfig(24, 3, 32), 4, (0, 1))
    with pytest.raises(ValueError, match="^batch_invariant: expected False, or groups with merge"):
        ops.simulate(2, 1, lambda ranks: ops.GQAMetadataBuilder(PLAIN, 16, 64, 4, batch_invariant=True,
                                                                context_parallel=ranks), merge="ag_rs")  # fmt: skip


BAD = {
    "ranks": (lambda given, ranks: given | {"context_parallel": 3}, TypeError,
              "context_parallel: expected a ContextParallel, got int"),
    "config": (lambda given, ranks: given | {"config": 3}, TypeError, "config: expected a GQAConfig, got int"),
    "heads": (lambda given, ranks: given | {"q": given["q"][:, :3]}, ValueError, "q: expected shape ["),
    "missing sinks": (lambda given, ranks: given | {"sinks": None}, ValueError,
                      "sinks: expected a tensor [24] for a config with attention_sinks, got None"),
    "sinks": (lambda given, ranks: given | {"sinks": torch.zeros(12).double()}, ValueError,
              "sinks: expected shape [24], got [12]"),
    "scale": (lambda given, ranks: given | {"k_scale": torch.tensor(1.0)}, ValueError,
              "k_scale: expected None for format compute_dtype, got a tensor"),
    "ALiBi": (lambda given, ranks: given | {"config": replace(given["config"], alibi_slopes=(0.5,) * 12)},
              UnsupportedConfiguration, "config.alibi_slopes: expected None if 2 ranks share sequences, got"),
    "local": (lambda given, ranks: given | {"config": replace(LOCAL, num_heads=12)}, UnsupportedConfiguration,
              "config.attention_chunk_size: expected None if 2 ranks share sequences, got 32"),
    "plan": (lambda given, ranks: given | {"metadata": given["metadata"].seq_lens}, TypeError,
             "metadata: expected a PagedAttentionMetadata, got Tensor"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "message"), BAD.values(), ids=BAD)
def test_refused_calls(ops, change, kind, message, plain_errors):
    """A wrong argument is refused before anything is exchanged."""
    config = CONFIGS["sinks"]

    def program(ranks):
        common = rank_batch([(1, 20), (1, 5)], integers(0, 1).view(2, 1), ranks)
        given_ones = {
            "q": torch.randn(2, 12, 32, dtype=torch.float64),
            "kv_cache": torch.randn(2, 2, BLOCK, 2, 32, dtype=torch.float64),
            "metadata": ops.build_gqa_metadata(common, BLOCK, config, ownership=ranks.ownership).decode,
            "config": ranks.local_gqa_config(config),
            "context_parallel": ranks,
            "sinks": torch.zeros(24, dtype=torch.float64),
        }
        with pytest.raises(kind) as caught:
            ops.gqa_dcp_attention(**change(given_ones, ranks))
        assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
        assert not ranks.cp_group.received
        return ops.gqa_dcp_attention(**given_ones).out

    outs = ops.simulate(2, 1, program)
    assert outs[0].shape == (2, 12, 32) and all(out.isfinite().all() for out in outs)


def test_exchanged_bytes(ops):
    """The ranks exchange the queries once, and the attention states once."""

    def program(ranks):
        direct_call(ops, PLAIN, [(1, 40), (1, 17)], ranks)
        return dict(ranks.cp_group.received)

    for received in ops.simulate(2, 1, program):
        assert received["all_gather"] == 2 * 12 * 32 * 8 and set(received) == {"all_gather", "all_to_all"}


def test_layer_of_another_plan(ops, plain_errors):
    """A layer refuses a plan of another rank, and an ordinary layer refuses the plan of a rank."""
    batch = make_batch([1, 1], [20, 9])

    def program(ranks):
        layer = ops.GQAAttention(PLAIN, context_parallel=ranks)
        plan = ops.build_gqa_metadata(batch.common, BLOCK, PLAIN)
        q, k = torch.randn(2, 12, 32), torch.randn(2, 2, 32)
        cache = torch.zeros(2, batch.num_blocks, BLOCK, 2, 32)
        with pytest.raises(ValueError, match="^metadata.ownership: expected TokenOwnership"):
            layer(q, k, k, cache, plan)
        assert not cache.any()
        return cache

    assert_same_bits(*ops.simulate(2, 1, program))
