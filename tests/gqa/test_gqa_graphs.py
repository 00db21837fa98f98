"""Tests of captured plans and of `DecodeGraph` with layers of grouped-query attention.

On a CPU, `DecodeGraph` captures nothing and runs the step eagerly over its buffers. With `--device cuda`, `fast`
captures and replays CUDA graphs. Blocks that a window or an attention chunk no longer reaches are freed: their table
entries are no blocks, and no slot of the cache has their keys.

Of the GPU backends of `fast`, only "torch" supports float64. On a GPU, `fast` therefore runs in float32 and bfloat16,
which the Triton kernels serve. `check_outputs` compares the outputs with the oracle in float64, within the budgets of
`fast.parity`.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast.parity import compare
from reference.interfaces import (
    CommonAttentionMetadata,
    GraphSupport,
    QueryLenSupport,
    TokenOwnership,
    UnsupportedConfiguration,
)
from reference.interfaces.gqa import GQAConfig

from ..support.context_parallel import of_rank
from ..support.factories import DIRECT, assert_close64, assert_same_bits, integers, make_batch, offsets
from ..support.gqa import CONFIGS as ORDINARY
from ..support.gqa import GROUPED, dtypes_of, gqa_batch, oracle_batch
from ..support.gqa_layers import GQAStep, common_of, hidden_of, token_positions, width_of
from ..support.gqa_plans import (
    CROSS,
    ENCODER,
    ENCODER_ONLY,
    LOCAL,
    PLAIN,
    WINDOW,
    held,
    wanted_ranges,
    wanted_scheduled,
)
from ..support.planning import batches, same, without_lens
from ..support.properties import given, st

BLOCK, WIDTH, BLOCKS = 16, 8, 40
CHUNKS = {
    "chunks of a page": replace(GROUPED, attention_chunk_size=16),
    "chunks of two pages": replace(GROUPED, attention_chunk_size=32, attention_sinks=True),
    "chunks and all of them": replace(ORDINARY["all of them"], attention_chunk_size=32),
}
CONFIGS = ORDINARY | CHUNKS
NAMES = ("grouped", "window 1", "window of a page + 1", "soft cap", "ALiBi", "sinks", "all of them", *CHUNKS)
STEPS = (  # (query length, length) of each request in each step; the largest query length of the graphs is 3
    ((3, 20), (1, 7), (2, 40)),
    ((1, 3),),
    ((2, 90), (3, 3), (1, 0), (1, 33)),
    ((1, 64), (1, 5), (0, 0), (0, 0)),
    ((3, 17), (3, 16), (3, 33), (3, 3), (3, 48), (3, 19)),
    ((0, 0), (2, 17), (0, 30), (1, 18)),
    ((2, 9), (1, 30), (1, 1), (3, 8), (0, 0), (0, 0), (0, 0)),
)
RANKS = (None, TokenOwnership(2, 1), TokenOwnership(3, 0, 4))


def make_graph(ops, config, dtype, query_len=3, sinks=None, **options):
    """Return a step and a decode graph over this step."""
    step = GQAStep.of(ops, config, BLOCKS, dtype, sinks, BLOCK)
    builder = ops.GQAMetadataBuilder(
        config, BLOCK, BLOCK * WIDTH, 6, num_speculative_tokens=query_len - 1, dtype=dtype, **options
    )
    device = torch.get_default_device()
    return step, ops.DecodeGraph(
        step, builder, [1, 2, 4, 6], WIDTH, width_of(config), dtype, device, query_len, layers=[step.layer]
    )


def graph_steps(config, dtype, steps=STEPS):
    """Yield the batches of the steps, whose caches have the context and not the new tokens; all have the same sinks."""
    sinks = torch.randn(config.num_heads, dtype=torch.float64).to(dtype) if config.attention_sinks else None
    for number, lens in enumerate(steps):
        batch = gqa_batch(config, lens, BLOCK, dtype, new_tokens=False, seed=number)
        yield replace(batch, sinks=sinks)


@functools.cache
def solved_steps(name, dtype):
    """Return the batches of the steps in a dtype, each with the outputs of the oracle; the oracle is slow."""
    return [(batch, oracle_batch(batch).out) for batch in graph_steps(CONFIGS[name], dtype)]


@functools.cache
def outputs_of_the_reference(name, dtype):
    """Return the outputs of `reference` in a dtype for each batch of `solved_steps`; None in float64."""
    if dtype == torch.float64:
        return None
    batches = [batch for batch, _ in solved_steps(name, dtype)]
    step, graph = make_graph(reference, CONFIGS[name], dtype, 3, batches[0].sinks)
    outputs = []
    for batch in batches:
        step.load(batch.kv_cache)
        out = graph.run(hidden_of(batch), token_positions(batch), common_of(batch))
        outputs.append(attention_of(out, batch))
    return outputs


def attention_of(out, batch):
    """Return the outputs [T, N, Dh] of the tokens of a batch, from the outputs of a `GQAStep`; copy them."""
    tokens, config = sum(query_len for query_len, _ in batch.lens), batch.config
    return out[:tokens, : config.num_heads * config.head_dim].unflatten(1, (config.num_heads, -1)).clone()


def check_outputs(found, low, gold):
    """Assert that outputs equal the oracle's: up to rounding in float64, within the budget of `low` in other dtypes.

    Args:
        found: outputs [T, N, Dh] of several steps.
        low: outputs of `reference` in the dtype of `found`; None in float64.
        gold: outputs of the oracle, in float64.
    """
    if low is None:
        for one, wanted in zip(found, gold, strict=True):
            assert one.dtype == torch.float64
            assert_close64(one, wanted)
        return
    # one comparison of all steps: in a step of few rows, the error of `low` can be small by chance
    parity = compare("steps", torch.cat(found), torch.cat(low), torch.cat(gold))
    assert parity.passed, parity


@pytest.mark.parametrize("programs, invariant", [(0, False), (3, False), (5, True)])
@pytest.mark.parametrize("name", NAMES)
def test_runs(ops, name, programs, invariant):
    """Runs of mixed query lengths give the oracle's results; padding tokens get 0 and write nothing."""
    config = CONFIGS[name]
    for dtype in dtypes_of(ops, name == "all of them"):
        solved, found = solved_steps(name, dtype), []
        sinks = solved[0][0].sinks
        step, graph = make_graph(ops, config, dtype, 3, sinks, num_programs=programs, batch_invariant=invariant)
        assert graph.graph_support is GraphSupport.ANY
        for batch, _ in solved:
            step.load(batch.kv_cache)
            common, tokens = common_of(batch), sum(query_len for query_len, _ in batch.lens)
            found.append(attention_of(graph.run(hidden_of(batch), token_positions(batch), common), batch))
            written = [slot for slot in batch.slot_mapping.tolist() if slot >= 0]
            rows = step.kv_cache[0].reshape(-1, config.num_kv_heads, config.head_dim)[written]
            assert_same_bits(rows, batch.new_k[:tokens][batch.slot_mapping[:tokens] >= 0])
            fresh = torch.full_like(step.kv_cache, torch.nan)
            fresh[:, : batch.kv_cache.shape[1]] = batch.kv_cache
            fresh = fresh.isnan().flatten(1, 2)
            fresh[:, written] = False
            assert step.kv_cache.isnan().flatten(1, 2).equal(fresh), "a slot of no new token was written"
            plan = step.plans[-1]
            assert plan.captured is not None and plan.num_decode_tokens == plan.num_actual_tokens
            if ops is fast:
                assert graph.replay(plan.num_decodes)[tokens:].eq(0).all(), "padding tokens are not 0"
        check_outputs(found, outputs_of_the_reference(name, dtype), [wanted for _, wanted in solved])


def test_replays_of_both_packages():
    """In float32, the errors of runs of `fast` are within the budget that `reference` gives."""
    config, dtype = CONFIGS["all of them"], torch.float32
    wide, sinks = torch.float64, next(graph_steps(config, dtype)).sinks
    runs = {
        "gold": (wide, *make_graph(reference, config, wide, 3, sinks.float())),
        "low": (dtype, *make_graph(reference, config, dtype, 3, sinks)),
        "graph": (dtype, *make_graph(fast, config, dtype, 3, sinks)),
    }
    results = {name: [] for name in runs}
    for batch in graph_steps(config, dtype):
        for name, (kind, step, graph) in runs.items():
            step.load(batch.kv_cache.to(kind))
            value = graph.run(hidden_of(batch).to(kind), token_positions(batch), common_of(batch))
            results[name].append(value.clone())
    found = {name: torch.cat(outputs) for name, outputs in results.items()}
    parity = compare("graph", found["graph"], found["low"], found["gold"])
    assert parity.passed, parity


@pytest.mark.parametrize("query_len", [1, 2])
def test_runs_of_one_query_length(ops, query_len):
    """A graph for one query length accepts requests without tokens only at the end of a batch."""
    config = CONFIGS["window of a page + 1"]
    steps = [[(query_len, 40), (query_len, 7), (query_len, 0), (0, 0)], [(query_len, 95)]]
    for dtype in dtypes_of(ops):
        batches, outputs = list(graph_steps(config, dtype, steps)), {}
        for package in {ops, reference} if dtype != torch.float64 else {ops}:
            step, graph = make_graph(package, config, dtype, query_len, graph_support=GraphSupport.ONE_QUERY_LEN)
            outputs[package] = []
            for batch in batches:
                step.load(batch.kv_cache)
                out = graph.run(hidden_of(batch), token_positions(batch), common_of(batch))
                outputs[package].append(attention_of(out, batch))
        low = None if dtype == torch.float64 else outputs[reference]
        check_outputs(outputs[ops], low, [oracle_batch(batch).out for batch in batches])
    step, graph = make_graph(ops, config, dtype, query_len, graph_support=GraphSupport.ONE_QUERY_LEN)
    wrong = gqa_batch(config, [(query_len, 9), (0, 0), (query_len, 8)], BLOCK, dtype)
    with pytest.raises(ValueError, match=f"^common: expected {query_len} tokens of each request, as captured"):
        graph.run(hidden_of(wrong), token_positions(wrong), common_of(wrong))


@pytest.mark.parametrize("programs", [0, 3])
@pytest.mark.parametrize("name", CHUNKS)
def test_captured_plans_of_chunks(ops, name, programs):
    """With attention chunks, captured and updated plans give the results of the plan of a step, and of the oracle."""
    for dtype in dtypes_of(ops, name == "chunks and all of them"):
        batch, outputs = outputs_of_plans(ops, name, programs, dtype)
        low = None
        if dtype != torch.float64:
            low = [outputs_of_plans(reference, name, programs, dtype)[1]["of a step"]]
        for out in outputs.values():
            check_outputs([out], low, [oracle_batch(batch).out])


def outputs_of_plans(ops, name, programs, dtype):
    """Return a batch, and the outputs of its tokens with each kind of plan."""
    config, lens = CONFIGS[name], ((3, 34), (1, 33), (0, 20), (2, 64), (1, 0), (3, 66), (1, 16), (2, 17))
    batch = gqa_batch(config, lens, BLOCK, dtype, new_tokens=False, seed=9)
    step = GQAStep.of(ops, config, batch.kv_cache.shape[1], dtype, batch.sinks, BLOCK)
    builder = ops.GQAMetadataBuilder(config, BLOCK, 200, 8, num_speculative_tokens=2, num_programs=programs,
                                     dtype=dtype)  # fmt: skip
    common, tokens = common_of(batch), sum(query_len for query_len, _ in lens)
    table = torch.zeros(len(lens), common.block_table.shape[1], dtype=torch.int32)
    other = CommonAttentionMetadata.from_lens([3] * 8, [3, 40, 90, 64, 0, 3, 17, 33], table, BLOCK)
    updated = builder.build_for_cudagraph_capture(replace(other, max_seq_len=90, block_table=common.block_table))
    builder.update_captured(updated, common)
    shared = ("block_table", "seq_lens", "query_start_loc")  # the caller of `update_captured` writes these tensors
    updated = replace(
        updated, decode=replace(updated.decode, **{field: getattr(common, field) for field in shared}),
        slot_mapping=torch.nn.functional.pad(common.slot_mapping[:tokens], (0, 24 - tokens), value=-1),
    )  # fmt: skip
    plans = {
        "of a step": builder.build(0, common),
        "captured": builder.build_for_cudagraph_capture(common),
        "captured without lengths": builder.build_for_cudagraph_capture(without_lens(common, 9)),
        "updated": updated,
    }
    assert plans["of a step"].num_decodes > len(lens) - 1 and plans["of a step"].decode.block_table.shape[1] <= 2
    outputs = {}
    for kind, plan in plans.items():
        hidden, positions = hidden_of(batch), token_positions(batch)
        padding = plan.num_actual_tokens - tokens  # tokens of an updated plan that belong to no request
        step.load(batch.kv_cache)
        out = step(torch.nn.functional.pad(hidden, (0, 0, 0, padding)),
                   torch.nn.functional.pad(positions, (0, padding)), plan)  # fmt: skip
        outputs[kind] = attention_of(out, batch)
        assert (out[tokens:] == 0).all() and padding == (24 - tokens if kind == "updated" else 0)
        if kind != "of a step":
            assert plan.num_decodes == len(lens) and plan.decode.block_table.shape == common.block_table.shape
    whole, wanted = replace(config, attention_chunk_size=None), oracle_batch(batch).out
    assert (oracle_batch(replace(batch, config=whole)).out - wanted).abs().max() > 0.1  # chunks change the result
    return batch, outputs


def test_schedules_of_chunks(ops):
    """The schedule of a captured plan counts the keys from the tile with the begin of the attention chunk on."""
    config = replace(PLAIN, attention_chunk_size=4096)
    builder = ops.GQAMetadataBuilder(config, 16, 50_000, 8, num_programs=4)
    lens = [8000, 9, 8193, 40, 0, 4096]
    plan = builder.build_for_cudagraph_capture(make_batch([1] * 6, lens).common)
    same(plan.schedule, ops.plan_decode(integers(8000 - 4096, 9, 1, 40, 0, 4096), 4))
    window = ops.GQAMetadataBuilder(replace(config, sliding_window=1000), 16, 50_000, 8, num_programs=4)
    plan = window.build_for_cudagraph_capture(make_batch([1] * 6, lens).common)
    # the window of the first request begins at key 7000, in tile 109; the one of the last request at key 3096
    same(plan.schedule, ops.plan_decode(integers(8000 - 109 * 64, 9, 1, 40, 0, 4096 - 48 * 64), 4))
    small = ops.GQAMetadataBuilder(replace(PLAIN, attention_chunk_size=48), 16, 500, 8, num_programs=4)
    plan = small.build_for_cudagraph_capture(make_batch([1] * 3, [97, 100, 48]).common)
    # attention chunks that begin at key 96 are in the tile of the keys 64 to 127
    same(plan.schedule, ops.plan_decode(integers(97 - 64, 100 - 64, 48), 4))


# Tests of captured plans: the same integers as the plan of a step, in both packages.


@given(batches(), st.sampled_from([None, 1, 16, 30]), st.sampled_from([None, 16, 32, 48]), st.sampled_from(RANKS),
       st.sampled_from([0, 3]), st.booleans(), st.integers(0, 3))  # fmt: skip
def test_captured_plans(lens, window, chunk, ownership, programs, invariant, padding):
    """A captured plan has the lengths on the device, whatever the lengths on the CPU are."""
    query_lens, seq_lens = lens
    if not sum(query_lens):
        return
    if ownership is not None:
        chunk = None  # ranks cannot share the sequences of layers with attention chunks
    config = replace(PLAIN, sliding_window=window, attention_chunk_size=chunk)
    batch = make_batch(*lens, padding=padding)
    common = batch.common if ownership is None else of_rank(batch.common, 16, ownership)
    tokens = min(batch.num_tokens + padding, len(query_lens) * max(query_lens))
    loose = replace(without_lens(common, 9), num_actual_tokens=tokens, query_start_loc_cpu=None)
    plans = [
        ops.plan_captured_gqa_decodes(loose, 16, config, programs, batch_invariant=invariant, ownership=ownership)
        for ops in (reference, fast)
    ]
    same(*plans)
    ranges = wanted_ranges(config, query_lens, seq_lens, ownership) + [(0, 0)] * (tokens - batch.num_tokens)
    plan = plans[0]
    assert plan.decode.visible_lens.tolist() == [end for _, end in ranges]
    if window is None and chunk is None:
        assert plan.decode.first_visible is None
    else:
        assert plan.decode.first_visible.tolist() == [first for first, _ in ranges]
    assert plan.decode.seq_lens.tolist() == [held(length, ownership) for length in seq_lens]
    assert plan.num_actual_tokens == plan.num_decode_tokens == tokens and plan.prefill.visible_lens.numel() == 0
    if programs:
        counted = integers(*wanted_scheduled(config, query_lens, seq_lens, ownership))
        same(plan.schedule, reference.plan_decode(counted, programs, batch_invariant=invariant))


@pytest.mark.parametrize("config", [WINDOW, LOCAL, replace(LOCAL, sliding_window=20)], ids=["window", "chunks", "both"])
@pytest.mark.parametrize("support", [GraphSupport.ANY, GraphSupport.ONE_QUERY_LEN])
def test_updates(ops, support, config):
    """`update_captured` gives a captured plan the integers of another batch, without replacing its tensors."""
    first, second = (make_batch([2] * 4, lens) for lens in ([40, 100, 7, 2], [0, 33, 128, 5]))
    builder = ops.GQAMetadataBuilder(
        config, 16, 200, 8, num_speculative_tokens=1, num_programs=3, graph_support=support
    )
    captured = builder.build_for_cudagraph_capture(first.common)
    names = [name for name, _ in captured.captured]
    assert "captured.decode.first_visible" in names and captured.decode.graph is support
    before = captured.decode.first_visible
    builder.update_captured(captured, second.common)
    fresh = builder.build_for_cudagraph_capture(second.common)
    assert captured.decode.first_visible is before
    assert before.tolist() == [first for first, _ in wanted_ranges(config, second.query_lens, second.seq_lens)]
    for name in ("visible_lens", "first_visible"):
        same(getattr(captured.decode, name), getattr(fresh.decode, name))
    same(captured.schedule, fresh.schedule)
    if support is GraphSupport.ANY:
        mixed = [1, 2, 0, 1], [9, 20, 0, 33]
        builder.update_captured(captured, make_batch(*mixed, padding=4).common)
        wanted = [first for first, _ in wanted_ranges(config, *mixed)]
        assert captured.decode.first_visible.tolist() == wanted + [0] * 4
        assert config is not WINDOW or wanted == [4, 14, 15, 28]


def test_refused_updates(ops, plain_errors):
    """A captured plan of another builder or with replaced tensors is refused before anything is written."""
    common = make_batch([1, 1], [40, 9]).common
    builder = ops.GQAMetadataBuilder(WINDOW, 16, 64, 4, num_programs=3)
    captured = builder.build_for_cudagraph_capture(common)
    other = ops.MLAMetadataBuilder(DIRECT, 16, 64, 4).build_for_cudagraph_capture(common)
    later = make_batch([1, 1], [50, 10]).common

    def refused(wanted, plan, kind=ValueError):
        held_tensors = [x for _, x in plan.captured or () if x is not None]
        values = [x.clone() for x in held_tensors]
        with pytest.raises(kind, match=wanted):
            builder.update_captured(plan, later)
        assert all(x.equal(y) for x, y in zip(values, held_tensors, strict=True))

    refused("^captured: expected a GQAMetadata, got MLAMetadata$", other, TypeError)
    refused("^captured: expected a plan of build_for_cudagraph_capture, got the plan of one step$",
            replace(captured, captured=None))  # fmt: skip
    moved = replace(captured.decode, first_visible=captured.decode.first_visible.clone())
    refused("^captured.decode.first_visible: expected the tensor of the capture", replace(captured, decode=moved))
    refused("^captured.config: expected the builder's config, got another config$", replace(captured, config=PLAIN))
    none = replace(captured.decode, first_visible=None)
    refused(
        "^captured.decode.first_visible: expected a tensor, got NoneType$", replace(captured, decode=none), TypeError
    )
    with pytest.raises(TypeError, match="^captured: expected an MLAMetadata, got GQAMetadata$"):
        ops.MLAMetadataBuilder(DIRECT, 16, 64, 4).update_captured(captured, later)


# Tests of layers that no graph can serve.

REFUSED = {
    "cross": (CROSS, "config.attention_type: expected decoder for a CUDA graph, got cross (the buffers of a graph "
              "have no blocks and lengths of an encoder)"),
    "encoder": (ENCODER, "config.attention_type: expected decoder for a CUDA graph, got encoder (a graph has"),
    "encoder only": (ENCODER_ONLY, "config.attention_type: expected decoder for a CUDA graph, got encoder_only (a"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_layers(ops, config, message):
    common = make_batch([1, 1], [1, 1]).common
    builder = ops.GQAMetadataBuilder(config, 16, 64, 4)
    assert builder.graph_support is GraphSupport.NONE and not builder.can_run_in_cudagraph(common)
    calls = (
        lambda: builder.build_for_cudagraph_capture(common),
        lambda: ops.plan_captured_gqa_decodes(common, 16, config, 0),
        lambda: ops.DecodeGraph(lambda hidden, *_: hidden, builder, [2], 4, 8, torch.float32, "cpu"),
    )
    for call in calls:
        with pytest.raises(UnsupportedConfiguration) as caught:
            call()
        assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_refused_batches(ops, plain_errors):
    builder = ops.GQAMetadataBuilder(PLAIN, 16, 64, 4, QueryLenSupport.UNIFORM, 1)
    assert builder.graph_support is GraphSupport.ONE_QUERY_LEN
    with pytest.raises(ValueError, match="^common: expected decodes of one query length up to 2 tokens, got 3 tok"):
        builder.build_for_cudagraph_capture(make_batch([1, 2], [5, 9]).common)
    with pytest.raises(ValueError, match="^common: expected at most 64 tokens a request, got 65 at request 1$"):
        builder.build_for_cudagraph_capture(make_batch([1, 1], [5, 65]).common)
    with pytest.raises(ValueError, match="^num_programs: expected an int >= 0, got -1$"):
        ops.plan_captured_gqa_decodes(make_batch([1], [5]).common, 16, PLAIN, -1)
    nothing = ops.GQAMetadataBuilder(PLAIN, 16, 64, 4, graph_support=GraphSupport.NONE)
    with pytest.raises(ValueError, match="^query_len: expected a query length that the builder can plan for a CUDA gr"):
        ops.DecodeGraph(lambda hidden, *_: hidden, nothing, [2], 4, 8, torch.float32, "cpu")


def test_graphs_of_ranks(ops):
    """Under context parallelism, a captured plan counts the keys of its rank, and `update_captured` writes them."""
    config = GQAConfig(4, 1, 32, sliding_window=20)
    first, second = ([(2, s) for s in lens] for lens in ((70, 9, 33), (17, 64, 65)))

    def program(ranks):
        builder = ops.GQAMetadataBuilder(config, 16, 256, 4, num_speculative_tokens=1, num_programs=3,
                                         context_parallel=ranks)  # fmt: skip
        both = [of_rank(make_batch(*zip(*lens, strict=True)).common, 16, ranks.ownership) for lens in (first, second)]
        captured = builder.build_for_cudagraph_capture(both[0])
        builder.update_captured(captured, both[1])
        wanted = builder.build(0, both[1])
        for name in ("seq_lens", "visible_lens", "first_visible"):
            same(getattr(captured.decode, name), getattr(wanted.decode, name))
        assert captured.ownership == ranks.ownership
        lens = offsets([2] * 3), integers(17, 64, 65), 20, ranks.ownership
        same(captured.schedule, ops.plan_decode(ops.planning.visible_lens.scheduled_lens(*lens), 3))
        return True

    assert ops.simulate(4, 8, program) == [True] * 4
