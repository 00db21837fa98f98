"""Tests of `DecodeGraph`: it pads a batch to the next captured batch size and replays the CUDA graph of this size.

On a CPU, `DecodeGraph` captures nothing and runs the step eagerly over its buffers. With `--device cuda`, the tests
capture and replay CUDA graphs. The budget of a result is the largest error that docs/correctness.md allows.
"""

from __future__ import annotations

import pytest
import torch

import fast
import reference
from fast.parity import compare
from reference.interfaces import GraphSupport

from ..support.factories import CONFIGS, DIRECT, make_batch, make_layer, make_weights, moved, new_cache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS = ([20, 7, 40], [3], [1, 0, 64, 33], [90, 2, 5, 8, 13], [0], [17, 18])  # sequence lengths of each step
BLOCK, BLOCKS, WIDTH = 16, 40, 8


def steps(config, dtype, query_len):
    """Yield (batch, cache, hidden states, positions) for each step; all caches have the same size.

    A request of length 0 is a padding row.
    """
    for lengths in STEPS:
        with torch.device("cpu"):
            lengths = [length and max(length, query_len) for length in lengths]
            batch = make_batch([query_len] * len(lengths), lengths, BLOCK, spare_blocks=3)
            assert batch.num_blocks <= BLOCKS
            cache = torch.full((BLOCKS, BLOCK, config.head_size), torch.nan, dtype=dtype)
            cache[: batch.num_blocks] = new_cache(batch, config.head_size, dtype, new_tokens=False)
            hidden = torch.randn(batch.num_tokens, config.hidden_size, dtype=torch.float64).to(dtype)
            positions = batch.positions
        yield batch, cache, hidden, positions


def make_graph(ops, config, weights, dtype, device, query_len, **options):
    """Return a layer, its cache, and a decode graph over this layer."""
    layer = make_layer(ops, config, weights, dtype).to(device)
    held = torch.zeros(BLOCKS, BLOCK, config.head_size, dtype=dtype, device=device)

    def step(hidden_states, positions, metadata):
        return layer(hidden_states, positions, held, metadata)

    builder = make_builder(ops, config, query_len, **options)
    graph = ops.DecodeGraph(step, builder, [1, 2, 4, 6], WIDTH, config.hidden_size, dtype, device, query_len)
    return layer, held, graph


def make_builder(ops, config=DIRECT, query_len=1, **options):
    """Return a builder for 6 requests; each request can fill its row of a graph's block table."""
    sizes = {"max_model_len": BLOCK * WIDTH, "max_num_seqs": 6, "num_speculative_tokens": query_len - 1} | options
    return ops.MLAMetadataBuilder(config, BLOCK, **sizes)


def judged_steps(config, weights, dtype, query_len):
    """Yield each tuple of `steps`, and two outputs of the reference layer: in float64 (gold) and in `dtype` (low)."""
    with torch.device("cpu"):
        gold_layer = make_layer(reference, config, {n: w.double() for n, w in weights.items()}, torch.float64)
        low_layer = make_layer(reference, config, weights, dtype)
    for batch, cache, hidden, positions in steps(config, dtype, query_len):
        with torch.device("cpu"):
            plan = reference.build_mla_metadata(batch.common, BLOCK, 64, query_len)
            gold = gold_layer(hidden.double(), positions, cache.double(), plan)
            low = low_layer(hidden, positions, cache.clone(), plan)
        yield batch, cache, hidden, positions, gold, low


@pytest.mark.parametrize("programs, invariant", [(0, False), (3, False), (0, True), (5, True)])
@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_replays(config, query_len, programs, invariant):
    """The error of each replayed step is within the budget; `fast` and `reference` write the same cache slots."""
    dtype = torch.float32
    weights = {name: weight.cpu() for name, weight in make_weights(config, dtype).items()}
    options = {"num_programs": programs, "batch_invariant": invariant}
    with torch.device("cpu"):
        _, ref_held, ref_graph = make_graph(reference, config, weights, dtype, "cpu", query_len, **options)
    _, held, graph = make_graph(fast, config, weights, dtype, DEVICE, query_len, **options)
    for batch, cache, hidden, positions, gold, low in judged_steps(config, weights, dtype, query_len):
        with torch.device("cpu"):
            ref_held.copy_(cache)
            eager = ref_graph.run(hidden, positions, batch.common)
        held.copy_(cache)
        value = graph.run(hidden.to(DEVICE), positions.to(DEVICE), moved(batch.common, DEVICE)).cpu()
        for name, found in (("eager", eager), ("graph", value)):
            parity = compare(name, found, low, gold)
            assert parity.passed, parity
        size = next(size for size in graph.batch_sizes if size >= len(batch.query_lens))
        assert graph.replay(size)[batch.num_tokens :].eq(0).all(), "padding rows are not 0"
        padding = (batch.common.seq_lens == 0).repeat_interleave(query_len).cpu()
        assert value[padding].eq(0).all()
        assert held.cpu().isnan().equal(ref_held.isnan()), "fast and reference write different slots"


def test_a_run_leaves_nothing_behind():
    """If a small batch follows a large batch, the padding rows of the small batch have no values of the large batch."""
    config, dtype = DIRECT, torch.float32
    seen = []

    def step(hidden_states, positions, metadata):
        seen.append((hidden_states.clone(), positions.clone(), metadata))
        return hidden_states

    for ops in (reference, fast):
        for programs, invariant in ((0, False), (0, True), (2, True)):
            seen.clear()
            options = {"num_programs": programs, "batch_invariant": invariant}
            builder = make_builder(ops, **options)
            graph = ops.DecodeGraph(step, builder, [2, 4], WIDTH, config.hidden_size, dtype, "cpu")
            with torch.device("cpu"):
                common = make_batch([1], [5], BLOCK).common
                graph.run(torch.ones(1, config.hidden_size), torch.ones(1, dtype=torch.int64), common)
            schedule = seen[-1][2].schedule
            assert (schedule is not None) == (programs > 0 or invariant)
            if schedule is not None:
                assert schedule.batch_invariant and (schedule.tile_ranges is not None) == (programs > 0)
        seen.clear()
        builder = make_builder(ops, num_programs=2)
        graph = ops.DecodeGraph(step, builder, [2, 4], WIDTH, config.hidden_size, dtype, "cpu")
        for lengths in ([20, 7, 40, 9], [5]):
            with torch.device("cpu"):
                common = make_batch([1] * len(lengths), lengths, BLOCK).common
                hidden = torch.full((len(lengths), config.hidden_size), torch.nan, dtype=dtype)
                graph.run(hidden, torch.ones(len(lengths), dtype=torch.int64), common)
        hidden, positions, plan = seen[-1]
        assert hidden.shape[0] == 2 and hidden[1].eq(0).all() and positions.tolist() == [1, 0]
        assert plan.decode.seq_lens.tolist() == [5, 0] and plan.decode.visible_lens.tolist() == [5, 0]
        assert plan.decode.block_table[1].eq(0).all() and plan.slot_mapping.tolist()[1] == -1
        assert plan.slot_mapping[0] == common.slot_mapping[0]
        assert plan.schedule.split_offsets.tolist() == [0, 1, 1]
        assert (plan.num_decodes, plan.num_prefills, plan.num_actual_tokens) == (2, 0, 2)


def test_in_any_grad_mode():
    """A graph that is made in inference mode also runs outside of this mode, and vice versa."""
    for make_mode, run_mode in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
        with torch.device("cpu"):
            with make_mode():
                graph = fast.DecodeGraph(
                    lambda h, *_: h + 1, make_builder(fast), [2], WIDTH, DIRECT.hidden_size, torch.float32, "cpu"
                )
            with run_mode():
                hidden = torch.randn(1, DIRECT.hidden_size)
                assert graph.run(hidden, torch.tensor([4]), make_batch([1], [5]).common).equal(hidden + 1)
    with pytest.raises(ValueError, match=r"^size: expected one of \(2,\), got 3$"):
        graph.replay(3)


def test_nothing_to_do(ops):
    graph = ops.DecodeGraph(lambda h, *_: h, make_builder(ops), [2], WIDTH, DIRECT.hidden_size, torch.float32, "cpu")
    with torch.device("cpu"):
        empty = torch.empty(0, DIRECT.hidden_size)
        assert graph.run(empty, torch.empty(0, dtype=torch.int64), make_batch([], []).common).shape == empty.shape


def test_refusals(ops, plain_errors):
    """A batch that fits no captured size raises before the step runs; invalid sizes raise in the constructor."""
    steps_run = []

    def step(hidden_states, positions, metadata):
        steps_run.append(metadata)
        return hidden_states

    def make(sizes=(1, 2), width=WIDTH, query_len=1, hidden=DIRECT.hidden_size, **options):
        builder = make_builder(ops, **options)
        return ops.DecodeGraph(step, builder, sizes, width, hidden, torch.float32, "cpu", query_len)

    with torch.device("cpu"):

        def run(graph, query_lens, seq_lens, width=DIRECT.hidden_size, dtype=torch.float32):
            tokens = sum(query_lens)
            hidden = torch.zeros(tokens, width, dtype=dtype)
            return graph.run(hidden, torch.zeros(tokens, dtype=torch.int64), make_batch(query_lens, seq_lens).common)

        with pytest.raises(
            ValueError, match="^common: expected at most 2 requests, the largest of batch_sizes, got 3$"
        ):
            run(make(), [1] * 3, [4] * 3)
        with pytest.raises(
            ValueError, match="^common: expected 1 tokens of each request, as captured, got 2 at request 1$"
        ):
            run(make(), [1, 2], [4, 4])
        with pytest.raises(ValueError, match="^common.block_table: expected at most 8 columns, as captured, got 9$"):
            run(make(), [1], [7 * BLOCK])
        with pytest.raises(
            ValueError, match="^common: expected at most 40 tokens a request, as captured, got 41 at request 1$"
        ):
            run(make(max_model_len=40), [1, 1], [40, 41])
        with pytest.raises(ValueError, match=r"^hidden_states: expected shape \[1, 48\], got \[1, 47\]$"):
            run(make(), [1], [4], width=47)
        with pytest.raises(ValueError, match="^hidden_states: expected dtype torch.float32, got torch.float64$"):
            run(make(), [1], [4], dtype=torch.float64)
    assert not steps_run
    for sizes in ((), (0,), (1, -2)):
        with pytest.raises(ValueError, match="^batch_sizes: expected at least one positive int, got"):
            make(sizes)
    with pytest.raises(ValueError, match="^max_blocks: expected a positive int, got 0$"):
        make(width=0)
    with pytest.raises(ValueError, match="^query_len: expected a positive int, got 0$"):
        make(query_len=0)
    with pytest.raises(ValueError, match="^hidden_size: expected a positive int, got 0$"):
        make(hidden=0)
    with pytest.raises(ValueError, match="^batch_sizes: expected at most 6, the builder's max_num_seqs, got 8$"):
        make((1, 8))
    with pytest.raises(
        ValueError, match="^query_len: expected a query length that the builder can plan for a CUDA graph, got 2$"
    ):
        make(query_len=2)
    with pytest.raises(TypeError, match="^builder: expected an AttentionMetadataBuilder, got MLAConfig$"):
        ops.DecodeGraph(step, DIRECT, [1], WIDTH, DIRECT.hidden_size, torch.float32, "cpu")


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_captured_memory_stands_still():
    """Hundreds of replays give the same bits again and allocate no memory (entry 17 in `tests/__init__.py`)."""
    config, dtype = DIRECT, torch.bfloat16
    weights = {name: weight.cpu() for name, weight in make_weights(config, dtype).items()}
    _, held, graph = make_graph(fast, config, weights, dtype, DEVICE, 1, num_programs=4)
    runs = [(h.to(DEVICE), p.to(DEVICE), moved(b.common, DEVICE)) for b, _, h, p in steps(config, dtype, 1)]
    held.zero_()
    for _ in range(2):  # all runs use the same blocks, so the second round reads a cache that the first round wrote
        first = [graph.run(*run).clone() for run in runs]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        for run, wanted in zip(runs, first, strict=True):
            assert graph.run(*run).equal(wanted)
    assert torch.cuda.memory_allocated() == before


def query_starts_of(common):
    """Return `query_start_loc` of a captured plan of a batch in which all requests have the same number of tokens."""
    return fast.plan_captured_decodes(common, BLOCK, 0, graph=GraphSupport.ONE_QUERY_LEN).decode.query_start_loc


def test_equal_query_lengths_share_one_tensor():
    """With one query length, all plans of the same sizes share `query_start_loc`, so that no replay computes it."""
    common = moved(make_batch([2, 2, 2, 2, 2], [5, 2, 9, 3, 4], BLOCK).common, DEVICE)
    with torch.inference_mode():
        first = query_starts_of(common)
    assert first.tolist() == [0, 2, 4, 6, 8, 10] and query_starts_of(common) is first and not first.is_inference()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_equal_query_lengths_in_a_capture():
    """A capture uses the tensor of an earlier plan of its stream; without such a tensor, the graph computes one."""
    common = moved(make_batch([2, 2, 2], [5, 2, 9], BLOCK).common, DEVICE)
    known, new = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(known):
        first = query_starts_of(common)
    for stream, shared in ((known, True), (new, False)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = query_starts_of(common)
        assert (found is first) == shared
        if not shared:
            found.zero_()
        graph.replay()
        assert found.tolist() == [0, 2, 4, 6]
    with torch.cuda.stream(new):
        assert query_starts_of(common) is not found  # the memory of `found` belongs to the graph
