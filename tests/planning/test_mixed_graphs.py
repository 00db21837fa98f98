"""Tests of `DecodeGraph`: batches of different query lengths, and batches that end with requests without tokens.

On a CPU, `DecodeGraph` captures nothing and runs the step eagerly over its buffers. With `--device cuda`, the tests
capture and replay CUDA graphs. Padding tokens fill a batch up to the number of tokens of a captured size. The budget
of a result is the largest error that docs/correctness.md allows.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast import backends
from fast.backends import Backend, OpSupport
from fast.parity import compare
from reference.interfaces import GraphMemory, GraphSupport, UnsupportedConfiguration

from ..support.backends import registered
from ..support.factories import CONFIGS, DIRECT, assert_close64, make_batch, make_layer, make_weights, moved, new_cache
from ..support.ranks import make_rank_layer
from .test_graphs import BLOCK, BLOCKS, DEVICE, WIDTH, make_builder, make_graph

STEPS = (  # query lengths and sequence lengths of each step; the largest query length of the graphs is 3
    ([3, 1, 2], [20, 7, 40]),
    ([1], [3]),
    ([2, 3, 1, 1], [90, 3, 0, 33]),
    ([1, 1, 0, 0], [64, 5, 0, 0]),
    ([3, 3, 3, 3, 3, 3], [17, 16, 33, 3, 48, 19]),
    ([0, 2, 0, 1], [0, 17, 0, 18]),
    ([2, 1, 1, 3, 0, 0, 0, 0], [9, 30, 1, 8, 0, 0, 0, 0]),  # more than the 6 requests of a graph; only four have tokens
    ([1, 2], [70, 41]),
)


def mixed_steps(config, dtype, steps=STEPS):
    """Yield (batch, cache, hidden states, positions) for each step; all caches have the same size."""
    for query_lens, seq_lens in steps:
        with torch.device("cpu"):
            batch = make_batch(query_lens, seq_lens, BLOCK)
            cache = torch.full((BLOCKS, BLOCK, config.head_size), torch.nan, dtype=dtype)
            cache[: batch.num_blocks] = new_cache(batch, config.head_size, dtype, new_tokens=False)
            hidden = torch.randn(batch.num_tokens, config.hidden_size, dtype=torch.float64).to(dtype)
            positions = batch.positions
        yield batch, cache, hidden, positions


@pytest.mark.parametrize("programs, invariant", [(0, False), (3, False), (0, True), (5, True)])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_replays(config, programs, invariant):
    """The errors are within the budget, `fast` and `reference` write the same slots, and padding tokens get 0."""
    dtype, options = torch.float32, {"num_programs": programs, "batch_invariant": invariant}
    weights = {name: weight.cpu() for name, weight in make_weights(config, dtype).items()}
    with torch.device("cpu"):
        gold_layer = make_layer(reference, config, {n: w.double() for n, w in weights.items()}, torch.float64)
        low_layer, ref_held, ref_graph = make_graph(reference, config, weights, dtype, "cpu", 3, **options)
    _, held, graph = make_graph(fast, config, weights, dtype, DEVICE, 3, **options)
    assert graph.graph_support is ref_graph.graph_support is GraphSupport.ANY
    results = {"gold": [], "low": [], "eager": [], "graph": []}
    for batch, cache, hidden, positions in mixed_steps(config, dtype):
        with torch.device("cpu"):
            plan = reference.build_mla_metadata(batch.common, BLOCK, 64, 3)
            results["gold"].append(gold_layer(hidden.double(), positions, cache.double(), plan))
            results["low"].append(low_layer(hidden, positions, cache.clone(), plan))
            ref_held.copy_(cache)
            results["eager"].append(ref_graph.run(hidden, positions, batch.common).clone())
        held.copy_(cache)
        results["graph"].append(graph.run(hidden.to(DEVICE), positions.to(DEVICE), moved(batch.common, DEVICE)).cpu())
        used = max(request + 1 for request, query_len in enumerate(batch.query_lens) if query_len)
        size = next(size for size in graph.batch_sizes if size >= used)
        assert graph.replay(size).shape[0] == 3 * size
        assert graph.replay(size)[batch.num_tokens :].eq(0).all(), "padding tokens are not 0"
        assert held.cpu().isnan().equal(ref_held.isnan()), "fast and reference write different slots"
    found = {name: torch.cat(outputs) for name, outputs in results.items()}  # one step has too few values for a budget
    for name in ("eager", "graph"):
        parity = compare(name, found[name], found["low"], found["gold"])
        assert parity.passed, parity


def test_graph_is_the_plan_of_the_step(ops):
    """In float64, `DecodeGraph.run` gives the output and the cache that the layer gives with the plan of the step."""
    config = CONFIGS["low-rank"]
    with torch.device("cpu"):
        weights = make_weights(config, torch.float64)
        layer, held, graph = make_graph(ops, config, weights, torch.float64, "cpu", 3, num_programs=2)
        for batch, cache, hidden, positions in mixed_steps(config, torch.float64):
            wanted_cache = cache.clone()
            plan = ops.build_mla_metadata(batch.common, BLOCK, 64, 3)
            wanted = layer(hidden, positions, wanted_cache, plan)
            held.copy_(cache)
            assert_close64(graph.run(hidden, positions, batch.common), wanted)
            assert held.nan_to_num(7).sub(wanted_cache.nan_to_num(7)).abs().max() < 1e-12


def test_padding_of_one_query_length(ops):
    """A graph for one query length accepts requests without tokens only at the end of a batch."""
    config, options = DIRECT, {"num_programs": 2, "graph_support": GraphSupport.ONE_QUERY_LEN}
    with torch.device("cpu"):
        weights = make_weights(config, torch.float64)
        for query_len in (1, 2):
            layer, held, graph = make_graph(ops, config, weights, torch.float64, "cpu", query_len, **options)
            assert graph.graph_support is GraphSupport.ONE_QUERY_LEN
            steps = [([query_len] * 3 + [0] * 4, [40, 7, 0] + [0] * 4), ([query_len], [9])]
            for batch, cache, hidden, positions in mixed_steps(config, torch.float64, steps):
                plan = ops.build_mla_metadata(batch.common, BLOCK, 64, query_len)
                wanted = layer(hidden, positions, cache.clone(), plan)
                held.copy_(cache)
                assert_close64(graph.run(hidden, positions, batch.common), wanted)
            wrong = make_batch([query_len, 0, query_len], [9, 0, 8], BLOCK).common
            hidden, positions = torch.zeros(2 * query_len, config.hidden_size).double(), torch.arange(2 * query_len)
            with pytest.raises(ValueError, match=f"^common: expected {query_len} tokens of each request, as captured"):
                graph.run(hidden, positions, wrong)


def test_buffers_of_a_run(ops):
    """If a small batch follows a large batch, the padding of the small batch has no values of the large batch."""
    seen = []

    def step(hidden_states, positions, plan):
        seen.append((hidden_states.clone(), positions.clone(), plan))
        return hidden_states

    builder = make_builder(ops, query_len=3, num_programs=2)
    with torch.device("cpu"):
        graph = ops.DecodeGraph(step, builder, [2, 4], WIDTH, DIRECT.hidden_size, torch.float32, "cpu", 3)
        for query_lens, seq_lens in (([3, 3, 3, 3], [20, 7, 40, 9]), ([2, 1], [5, 30])):
            common = make_batch(query_lens, seq_lens, BLOCK).common
            tokens = sum(query_lens)
            hidden = torch.full((tokens, DIRECT.hidden_size), torch.nan)
            graph.run(hidden, torch.ones(tokens, dtype=torch.int64), common)
    hidden, positions, plan = seen[-1]
    assert hidden.shape[0] == 6 and hidden[3:].eq(0).all() and positions.tolist() == [1, 1, 1, 0, 0, 0]
    assert plan.decode.query_start_loc.tolist() == [0, 2, 3] and plan.decode.seq_lens.tolist() == [5, 30]
    assert plan.decode.visible_lens.tolist() == [4, 5, 30, 0, 0, 0]
    assert plan.slot_mapping.tolist() == [*common.slot_mapping.tolist(), -1, -1, -1]
    assert (plan.num_decodes, plan.num_decode_tokens, plan.num_actual_tokens) == (2, 6, 6)
    assert plan.decode.graph is GraphSupport.ANY and plan.decode.max_query_len == 3
    assert plan.schedule.split_offsets.tolist() == ops.plan_decode(common.seq_lens, 2).split_offsets.tolist()


def test_batch_invariance():
    """With a batch-invariant builder, the decode of a request has the same bits alone and in mixed batches."""
    heads, latent, rope = DIRECT.num_heads, DIRECT.kv_lora_rank, DIRECT.qk_rope_head_dim
    with torch.device("cpu"):
        cache = torch.randn(BLOCKS, BLOCK, latent + rope)
        batch = make_batch([2, 1, 3], [50, 90, 20], BLOCK).common
        hidden, positions = torch.randn(6, heads * (latent + rope)), torch.zeros(6, dtype=torch.int64)
    cache = cache.to(DEVICE)

    # the step runs no whole layer, because the projections of a layer are not batch-invariant
    def step(hidden_states, positions, plan):
        q = hidden_states.view(-1, heads, latent + rope)
        state = fast.mla_decode(q[..., :latent], q[..., latent:], cache, plan.decode, 0.3, plan.schedule)
        return torch.nn.functional.pad(state.out, (0, rope)).flatten(1)

    builder = make_builder(fast, query_len=3, num_programs=3, batch_invariant=True)
    graph = fast.DecodeGraph(step, builder, [1, 2, 4], WIDTH, hidden.shape[1], torch.float32, DEVICE, 3)
    found = []
    for requests in (1, 2, 3):
        with torch.device("cpu"):
            part = reference.CommonAttentionMetadata.make(
                batch.query_start_loc_cpu[: requests + 1], batch.seq_lens_cpu[:requests], batch.block_table[:requests],
                batch.slot_mapping[: [2, 3, 6][requests - 1]],
            )  # fmt: skip
        tokens = part.num_actual_tokens
        run = graph.run(hidden[:tokens].to(DEVICE), positions[:tokens].to(DEVICE), moved(part, DEVICE))
        found.append(run[:2].clone())
    assert found[0].equal(found[1]) and found[0].equal(found[2])


@pytest.mark.parametrize("merge", ["ag_rs", "a2a"])
def test_context_parallelism(ops, merge):
    """On ranks that share sequences, `DecodeGraph.run` gives the output of the layer with the plan of the step.

    `update_captured` writes the visible lengths of this rank: how many keys of this rank each query token sees.
    """
    config = CONFIGS["low-rank"]
    query_lens, seq_lens = [3, 1, 2], [70, 9, 33]

    def program(ranks):
        torch.manual_seed(5)
        layer = make_rank_layer(ops, config, make_weights(config, torch.float64), torch.float64, ranks, "cpu")
        batch = make_batch(query_lens, seq_lens, BLOCK)
        slots = ops.dcp_slot_mapping(batch.common.query_start_loc, batch.common.seq_lens, batch.common.block_table,
                                     BLOCK, 6, ranks.size, ranks.rank, ranks.interleave)  # fmt: skip
        common = replace(batch.common, slot_mapping=slots)
        cache = torch.randn(batch.num_blocks, BLOCK, config.head_size, dtype=torch.float64)
        hidden = torch.randn(6, config.hidden_size, dtype=torch.float64)
        positions = batch.positions
        plan = ops.build_mla_metadata(common, BLOCK, 4096, 3, ownership=ranks.ownership)
        wanted = layer(hidden, positions, cache.clone(), plan)
        builder = ops.MLAMetadataBuilder(
            config, BLOCK, 4096, 4, num_speculative_tokens=2, num_programs=2, context_parallel=ranks
        )
        graph = ops.DecodeGraph(
            lambda *step: layer(*step[:2], cache, step[2]), builder, [1, 4], WIDTH, config.hidden_size, torch.float64,
            "cpu", 3,
        )  # fmt: skip
        found = graph.run(hidden, positions, common).clone()
        captured = builder.build_for_cudagraph_capture(replace(common, slot_mapping=slots.clone()))
        held = captured.decode.visible_lens.clone()
        other = replace(common, slot_mapping=slots[:5], **host(ops, [1, 3, 1], [70, 9, 33]))
        builder.update_captured(captured, other)
        fresh = ops.compute_visible_lens(other.query_start_loc, other.seq_lens, 6, ranks.ownership)
        assert captured.decode.visible_lens.equal(fresh) and not held.equal(fresh)
        return found, wanted

    for found, wanted in ops.simulate(2, 8, program, merge=merge):
        assert_close64(found, wanted)


def host(ops, query_lens, seq_lens):
    """Return the lengths of a batch as the fields of a `CommonAttentionMetadata`."""
    table = torch.zeros(len(seq_lens), WIDTH, dtype=torch.int32)
    common = ops.CommonAttentionMetadata.from_lens(query_lens, seq_lens, table, BLOCK)
    names = ("seq_lens", "seq_lens_cpu", "query_start_loc", "query_start_loc_cpu", "max_query_len",
             "num_actual_tokens", "max_seq_len")  # fmt: skip
    return {name: getattr(common, name) for name in names}


def test_update_captured(ops, plain_errors):
    """`update_captured` writes visible lengths and schedules of mixed batches into the tensors of a captured plan.

    If the caller replaced a tensor of the plan, the call is refused. A refused call does not change the captured plan.
    """
    with torch.device("cpu"):
        builder = make_builder(ops, query_len=3, num_programs=3)
        first = make_batch([3] * 4, [128, 7, 9, 33], BLOCK).common
        captured = builder.build_for_cudagraph_capture(first)
        held = captured.decode.visible_lens, captured.schedule.tile_ranges, captured.schedule.split_offsets
        places = [tensor.data_ptr() for tensor in held]
        batches = [([1, 3, 2, 1], [64, 9, 2, 1]), ([3, 0, 2, 0], [99, 0, 12, 0]), ([1, 1, 0, 0], [5, 80, 0, 0])]
        for lens in batches:
            common = make_batch(*lens, BLOCK).common
            builder.update_captured(captured, common)
            planned = ops.plan_decode(common.seq_lens, 3)
            wanted = (ops.compute_visible_lens(common.query_start_loc, common.seq_lens, 12), planned.tile_ranges,
                      planned.split_offsets)  # fmt: skip
            assert all(tensor.equal(fresh) for tensor, fresh in zip(held, wanted, strict=True))
            assert [tensor.data_ptr() for tensor in held] == places
        wrong = {
            "common: expected 4 requests of at most 3 tokens, 12 in all, as captured, got 3 tokens in 3": (
                [1] * 3, [4] * 3),
            "common: expected 4 requests of at most 3 tokens, 12 in all, as captured, got 7 tokens in 4": (
                [4, 1, 1, 1], [9] * 4),
            "common: expected at most 128 tokens a request, got 129 at request 2": ([1] * 4, [4, 4, 129, 4]),
        }  # fmt: skip
        for message, lens in wrong.items():
            with pytest.raises(ValueError, match=f"^{message}"):
                builder.update_captured(captured, make_batch(*lens, BLOCK).common)
            assert all(tensor.equal(fresh) for tensor, fresh in zip(held, wanted, strict=True))
        short = make_batch([3] * 4, [9, 7, 9, 16], BLOCK).common  # a block table of 3 columns
        narrow = builder.build_for_cudagraph_capture(short)
        with pytest.raises(ValueError, match="^common: expected at most 48 keys a request, as captured, got 64$"):
            builder.update_captured(narrow, make_batch([1] * 4, [64, 4, 4, 4], BLOCK).common)
        for name in ("seq_lens", "query_start_loc", "visible_lens", "block_table"):
            decode = replace(captured.decode, **{name: getattr(captured.decode, name).clone()})
            with pytest.raises(ValueError, match=rf"^captured.decode.{name}: expected the tensor of the capture"):
                builder.update_captured(replace(captured, decode=decode), first)
        schedule = replace(captured.schedule, tile_ranges=captured.schedule.tile_ranges.clone())
        with pytest.raises(ValueError, match=r"^captured.schedule.tile_ranges: expected the tensor of the capture"):
            builder.update_captured(replace(captured, schedule=schedule), first)
        with pytest.raises(ValueError, match="^captured: expected a plan of build_for_cudagraph_capture, got the"):
            builder.update_captured(replace(captured, captured=None), first)
        assert all(tensor.equal(fresh) for tensor, fresh in zip(held, wanted, strict=True))
        decode = replace(captured.decode, seq_lens=captured.decode.seq_lens.view(-1))  # the same memory
        builder.update_captured(replace(captured, decode=decode), first)
        assert held[0].equal(ops.compute_visible_lens(first.query_start_loc, first.seq_lens, 12))


def test_refused_batches(ops, plain_errors):
    """A batch that fits no captured graph raises before the step runs, and the next run works."""
    steps_run = []

    def step(hidden_states, positions, plan):
        steps_run.append(plan)
        return hidden_states + 1

    with torch.device("cpu"):
        builder = make_builder(ops, query_len=2, max_model_len=40)
        graph = ops.DecodeGraph(step, builder, (1, 2), WIDTH, DIRECT.hidden_size, torch.float32, "cpu", 2)

        def run(query_lens, seq_lens):
            tokens = sum(query_lens)
            hidden = torch.zeros(tokens, DIRECT.hidden_size)
            return graph.run(hidden, torch.zeros(tokens, dtype=torch.int64), make_batch(query_lens, seq_lens).common)

        wrong = {
            "common: expected at most 2 requests, the largest of batch_sizes, got 3": ([1, 2, 1, 0], [4, 4, 4, 0]),
            "common: expected at most 2 tokens of each request, as captured, got 3 at request 1": ([1, 3], [4, 4]),
            "common: expected at most 40 tokens a request, as captured, got 41 at request 0": ([1, 2], [41, 4]),
        }
        for message, lens in wrong.items():
            with pytest.raises(ValueError, match=f"^{message}$"):
                run(*lens)
            assert not steps_run
        assert run([1, 2], [4, 4]).eq(1).all() and len(steps_run) == 1
        assert run([0, 0], [0, 0]).shape == (0, DIRECT.hidden_size) and len(steps_run) == 1


def test_a_captured_graph_after_refused_batches(plain_errors):
    """Batches that fit no captured graph raise, on a GPU too; the next run of the CUDA graph gives the same bits."""
    config, dtype = DIRECT, torch.float32
    weights = {name: weight.cpu() for name, weight in make_weights(config, dtype).items()}
    _, held, graph = make_graph(fast, config, weights, dtype, DEVICE, 3)
    batch, _, hidden, positions = next(mixed_steps(config, dtype))
    run = hidden.to(DEVICE), positions.to(DEVICE), moved(batch.common, DEVICE)
    held.zero_()
    wanted = graph.run(*run).clone()
    for query_lens, message in (([1] * 7, "at most 6 requests"), ([4, 1], "at most 3 tokens of each request")):
        tokens = sum(query_lens)
        common = moved(make_batch(query_lens, [9] * len(query_lens)).common, DEVICE)
        inputs = (
            torch.zeros(tokens, config.hidden_size, dtype=dtype, device=DEVICE),
            torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
        )
        with pytest.raises(ValueError, match=f"^common: expected {message}"):
            graph.run(*inputs, common)
        held.zero_()
        assert graph.run(*run).equal(wanted)


def test_replaced_buffers(plain_errors):
    """If the caller replaced a buffer of a graph, a run raises; with the captured buffer, the graph works again."""
    config, dtype = DIRECT, torch.float32
    weights = {name: weight.cpu() for name, weight in make_weights(config, dtype).items()}
    _, held, graph = make_graph(fast, config, weights, dtype, DEVICE, 3)
    held.zero_()
    batch, _, hidden, positions = next(mixed_steps(config, dtype))
    run = hidden.to(DEVICE), positions.to(DEVICE), moved(batch.common, DEVICE)
    wanted = graph.run(*run).clone()
    for name in ("hidden_states", "positions", "seq_lens", "query_start_loc", "block_table", "slot_mapping"):
        kept = getattr(graph.buffers, name)
        setattr(graph.buffers, name, kept.clone())
        for call in (lambda: graph.run(*run), lambda: graph.replay(4)):
            with pytest.raises(ValueError, match=rf"^buffers.{name}: expected the tensor of the capture "):
                call()
        setattr(graph.buffers, name, kept)
        held.zero_()
        assert graph.run(*run).equal(wanted)


def test_memory():
    """`DecodeGraph.memory` reports the bytes of the buffers, which all batch sizes share, and of the memory pool."""
    config, dtype = DIRECT, torch.float32
    weights = {name: weight.cpu() for name, weight in make_weights(config, dtype).items()}
    tokens, requests = 6 * 3, 6
    wanted = 4 * tokens * config.hidden_size + 16 * tokens + 4 * (requests + requests + 1 + requests * WIDTH)
    found = {}
    for ops, device in ((reference, "cpu"), (fast, DEVICE)):
        with torch.device("cpu"):
            found[ops] = make_graph(ops, config, weights, dtype, device, 3)[2].memory
        assert isinstance(found[ops], GraphMemory) and found[ops].buffer_bytes == wanted
    assert found[reference].pool_bytes == 0
    assert (found[fast].pool_bytes > 0) == (DEVICE.type == "cuda")


def leaves_padding(*given):
    """Compute `mla_decode` as a GPU kernel does: the outputs of padding tokens stay undefined, here NaN."""
    out, lse = backends.kernel("cpu", "mla_decode")(*given)
    used = int(given[5][-1])
    out[used:], lse[:, used:] = torch.nan, torch.nan
    return out, lse


def test_undefined_rows_become_zeros():
    """The decode kernel leaves the outputs of padding tokens undefined -> the layer returns 0 for these tokens.

    The same holds for a call of `forward_attention`.
    """
    config = DIRECT
    with registered(Backend("gpu_like", 50, "cpu", {"mla_decode": OpSupport(leaves_padding)})), torch.device("cpu"):
        layer = make_layer(fast, config, make_weights(config, torch.float64), torch.float64)
        batch, cache, _, _ = next(mixed_steps(config, torch.float64))
        cache.nan_to_num_(0)
        builder = make_builder(fast, query_len=3)
        slots = torch.cat((batch.common.slot_mapping, torch.full((3,), -1)))
        plan = builder.build_for_cudagraph_capture(
            replace(batch.common, slot_mapping=slots, num_actual_tokens=9, max_query_len=3)
        )
        assert plan.num_actual_tokens == 9
        hidden, positions = torch.randn(9, config.hidden_size).double(), torch.zeros(9, dtype=torch.int64)
        found = layer(hidden, positions, cache, plan)
        assert found[:6].abs().min() > 0 and found[6:].eq(0).all()
        projected = layer.project(hidden, positions)
        output = torch.full((9, config.num_heads, config.v_head_dim), torch.nan, dtype=torch.float64)
        layer.forward_attention(*projected, cache, plan, output)
        assert output[:6].isfinite().all() and output[6:].eq(0).all()


@pytest.mark.parametrize("op", ["mla_decode", "rope_norm_and_cache", "compute_visible_lens", "zero_padding_tokens"])
def test_backends_for_one_query_length(op):
    """A backend whose graphs need one query length serves captures of one query length, but not of mixed lengths.

    If the caller names this backend, a capture of mixed query lengths raises.
    """
    launched = set()

    def noted(*given):
        launched.add(op)
        return backends.kernel("cpu", op)(*given)

    with (
        registered(Backend("uniform", 50, "cpu", {op: OpSupport(noted, graph=GraphSupport.ONE_QUERY_LEN)})),
        torch.device("cpu"),
    ):
        weights, config = make_weights(DIRECT, torch.float32), DIRECT
        for named in (None, "uniform"):
            planning, layers = ({"backend": named}, {}) if op == "compute_visible_lens" else ({}, {"backend": named})
            layer = make_layer(fast, config, weights, torch.float32, **layers)
            cache = torch.zeros(BLOCKS, BLOCK, config.head_size)
            for support in (GraphSupport.ONE_QUERY_LEN, GraphSupport.ANY):
                launched.clear()
                builder = make_builder(
                    fast, query_len=2, dtype=torch.float32, graph_support=support, num_programs=2, **planning
                )
                graph = fast.DecodeGraph(
                    lambda h, p, plan, layer=layer, cache=cache: layer(h, p, cache, plan), builder, [2], WIDTH,
                    config.hidden_size, torch.float32, "cpu", 2,
                )  # fmt: skip
                run = torch.randn(4, config.hidden_size), torch.arange(4), make_batch([2, 2], [9, 8], BLOCK).common
                if support is GraphSupport.ANY and named is not None:
                    with pytest.raises(UnsupportedConfiguration, match="uniform: has graph support 'one', got"):
                        graph.run(*run)
                else:
                    graph.run(*run)
                serves = support is GraphSupport.ONE_QUERY_LEN and op != "zero_padding_tokens"
                assert launched == ({op} if serves else set())


def test_a_builder_that_captures_nothing(ops, plain_errors):
    builder = make_builder(ops, graph_support=GraphSupport.NONE)
    with pytest.raises(ValueError, match="^query_len: expected a query length that the builder can plan for a"):
        ops.DecodeGraph(lambda h, *_: h, builder, [2], WIDTH, DIRECT.hidden_size, torch.float32, "cpu")


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_mixed_replays_stand_still():
    """Hundreds of replays of mixed batches give the same bits again and allocate no more memory."""
    config, dtype = DIRECT, torch.bfloat16
    weights = {name: weight.cpu() for name, weight in make_weights(config, dtype).items()}
    _, held, graph = make_graph(fast, config, weights, dtype, DEVICE, 3, num_programs=4)
    runs = [(h.to(DEVICE), p.to(DEVICE), moved(b.common, DEVICE)) for b, _, h, p in mixed_steps(config, dtype)]
    held.zero_()
    for _ in range(2):  # all runs use the same blocks, so the second round reads a cache that the first round wrote
        first = [graph.run(*run).clone() for run in runs]
    torch.cuda.synchronize()
    before, memory = torch.cuda.memory_allocated(), graph.memory
    for _ in range(50):
        for run, wanted in zip(runs, first, strict=True):
            assert graph.run(*run).equal(wanted)
    assert torch.cuda.memory_allocated() == before and graph.memory == memory


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_more_sizes_share_one_pool():
    """Four captured batch sizes need at most 2 x the memory pool that the largest size alone needs."""
    weights = {name: weight.cpu() for name, weight in make_weights(DIRECT, torch.bfloat16).items()}
    layer = make_layer(fast, DIRECT, weights, torch.bfloat16).to(DEVICE)
    held = torch.zeros(BLOCKS, BLOCK, DIRECT.head_size, dtype=torch.bfloat16, device=DEVICE)
    builder = make_builder(fast, query_len=3)
    pools = [
        fast.DecodeGraph(
            lambda h, p, plan: layer(h, p, held, plan), builder, sizes, WIDTH, DIRECT.hidden_size, torch.bfloat16,
            DEVICE, 3,
        ).memory.pool_bytes
        for sizes in ([6], [1, 2, 4, 6])
    ]  # fmt: skip
    assert 0 < pools[0] <= pools[1] <= 2 * pools[0]


def test_requests_without_tokens_between_others(ops, plain_errors):
    """A graph of query length 1 refuses requests without tokens between other requests.

    A captured plan for mixed query lengths accepts such requests. The test runs with and without lengths on the host.
    """
    with torch.device("cpu"):
        batch = make_batch([1, 0, 1], [20, 0, 9], BLOCK)
        bare = replace(batch.common, seq_lens_cpu=None, query_start_loc_cpu=None)
        layer, held, graph = make_graph(ops, DIRECT, make_weights(DIRECT, torch.float64), torch.float64, "cpu", 1)
        hidden = torch.randn(2, DIRECT.hidden_size, dtype=torch.float64)
        held[: batch.num_blocks] = new_cache(batch, DIRECT.head_size, torch.float64, new_tokens=False)
        before = held.clone()
        for common in (batch.common, bare):
            with pytest.raises(ValueError, match="^common: expected 1 tokens of each request, as captured, got "):
                graph.run(hidden, batch.positions, common)
        assert held.nan_to_num(7).equal(before.nan_to_num(7))
        builder = make_builder(ops, query_len=1)
        wanted = layer(hidden, batch.positions, held.clone(), ops.build_mla_metadata(batch.common, BLOCK, 64))
        for common in (batch.common, bare):
            assert builder.can_run_in_cudagraph(common)
            plan = builder.build_for_cudagraph_capture(common)
            assert plan.decode.graph is GraphSupport.ANY
            assert_close64(layer(hidden, batch.positions, held.clone(), plan), wanted)
        message = "^common: expected decodes of one query length, 1, got (lengths .1, 0, 1.|2 tokens in 3 requests)$"
        for common in (batch.common, bare):
            with pytest.raises(ValueError, match=message):
                ops.plan_captured_decodes(common, BLOCK, 0, graph=GraphSupport.ONE_QUERY_LEN)
        one_length = make_builder(ops, query_len=1, graph_support=GraphSupport.ONE_QUERY_LEN)
        assert not any(one_length.can_run_in_cudagraph(common) for common in (batch.common, bare))


def test_numbers_of_tokens_that_contradict_the_offsets(ops, plain_errors):
    """`DecodeGraph` and `update_captured` refuse a batch whose `num_actual_tokens` contradicts its offsets."""
    with torch.device("cpu"):
        batch = make_batch([2, 2], [9, 20], BLOCK)
        wrong = replace(batch.common, num_actual_tokens=3)
        message = "^common.num_actual_tokens: expected {}4, the last of the offsets, got 3$"
        _, held, graph = make_graph(ops, DIRECT, make_weights(DIRECT, torch.float64), torch.float64, "cpu", 2)
        hidden = torch.zeros(3, DIRECT.hidden_size, dtype=torch.float64)
        with pytest.raises(ValueError, match=message.format("")):
            graph.run(hidden, batch.positions[:3], wrong)
        assert not held.any()
        builder = make_builder(ops, query_len=2)
        captured = builder.build_for_cudagraph_capture(batch.common)
        with pytest.raises(ValueError, match=message.format("at least ")):
            builder.update_captured(captured, wrong)
        padded = make_batch([2, 0], [9, 0], BLOCK).common  # two of the four tokens are padding
        builder.update_captured(captured, replace(padded, num_actual_tokens=4))
        assert captured.decode.visible_lens.tolist() == [8, 9, 0, 0]
