"""Tests of plans for engines that know the lengths of requests on the GPU, but not on the host.

On the host, a batch of such an engine has upper bounds of the lengths (`seq_lens_cpu_upper_bound`). A batch of decodes
does not even need these bounds. `without_lens` makes such a batch: it replaces each length on the host by an upper
bound: length + `slack`. With `offsets_too`, it removes the upper bounds and the query offsets from the host too.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import pytest
import torch

import fast
import reference
from fast.backends import Backend, OpSupport
from reference.interfaces import GraphSupport, PathCosts, QueryLenSupport, TokenOwnership

from ..support.backends import registered
from ..support.factories import (
    CONFIGS,
    DIRECT,
    assert_close64,
    integers,
    make_batch,
    make_layer,
    make_weights,
    moved,
    new_cache,
)
from ..support.planning import batches, same, without_lens
from ..support.properties import assume, given, st
from ..support.ranks import make_rank_layer
from ..support.synchronisation import no_synchronisation

BLOCK = 16
DECODES = {  # query lengths and sequence lengths of steps that have only decodes
    "one each": ([1, 1, 1], [9, 3000, 40]),
    "padding rows": ([1, 1, 1, 1], [9, 70, 0, 0]),
    "mixed": ([2, 1, 3], [9, 1, 40]),
    "requests without tokens": ([3, 1, 0, 0], [30, 7, 0, 0]),
}
MIXED = ([1, 2, 20, 9, 40], [33, 17, 90, 9, 41])  # two decodes, and three prefills of which two have context


def make_builder(ops, **options):
    sizes = {"max_model_len": 4096, "max_num_seqs": 8, "num_speculative_tokens": 2, "num_programs": 3} | options
    return ops.MLAMetadataBuilder(DIRECT, BLOCK, **sizes)


@pytest.mark.parametrize("offsets_too", [False, True])
@pytest.mark.parametrize("lens", DECODES.values(), ids=DECODES)
def test_decodes(ops, lens, offsets_too):
    """For a batch of decodes, the plan without lengths on the host has the same tensors as the plan with lengths."""
    common = make_batch(*lens, BLOCK).common
    builder = make_builder(ops)
    wanted = builder.build(0, common)
    found = builder.build(0, without_lens(common, 500, offsets_too, bounds=False))
    assert (found.num_decodes, found.num_decode_tokens) == (wanted.num_decodes, wanted.num_decode_tokens)
    assert found.num_prefills == 0 and found.num_actual_tokens == wanted.num_actual_tokens
    for name in ("seq_lens", "visible_lens", "query_start_loc", "block_table"):
        same(getattr(found.decode, name), getattr(wanted.decode, name))
    assert found.decode.max_query_len == wanted.decode.max_query_len and found.decode.graph is GraphSupport.NONE
    width = common.block_table.shape[1] * BLOCK
    assert max(lens[1]) <= found.decode.max_seq_len <= min(common.max_seq_len + 500, width)
    assert found.schedule_choice.longest_tiles == -(-found.decode.max_seq_len // 64)


@given(batches(), st.sampled_from([0, 1, 40]), st.sampled_from([1, 3]), st.sampled_from([None, (2, 0, 4), (3, 2, 1)]))
def test_twins(lens, slack, threshold, ranks):
    """Both packages give the same plan. If the bounds equal the lengths, this plan equals the plan with lengths."""
    query_lens, seq_lens = lens
    common = make_batch(query_lens, seq_lens, BLOCK).common
    ownership = None if ranks is None else TokenOwnership(*ranks)
    if ownership is not None:
        common = replace(common, slot_mapping=torch.full_like(common.slot_mapping, -1))
    first = next((i for i, q in enumerate(query_lens) if q > threshold), len(query_lens))
    assume(all(s > 0 or q == 0 for q, s in zip(query_lens[first:], seq_lens[first:], strict=True)))
    workspace = max(1, len(query_lens)) * 64
    given_batch = without_lens(common, slack)
    plans = [
        ops.build_mla_metadata(given_batch, BLOCK, workspace, threshold, ownership=ownership)
        for ops in (reference, fast)
    ]
    same(*plans)
    wanted = fast.build_mla_metadata(common, BLOCK, workspace, threshold, ownership=ownership)
    if slack == 0:
        exact = tuple(replace(chunk, bounded=False) for chunk in plans[1].prefill.context_chunks)
        undivided = replace(wanted, prefill=replace(wanted.prefill, parts=()))  # `parts` needs the lengths on the host
        same(replace(plans[1], prefill=replace(plans[1].prefill, context_chunks=exact)), undivided)
    for chunk in plans[0].prefill.context_chunks:
        assert chunk.bounded and int(chunk.cu_seq_lens[-1]) <= chunk.num_tokens <= workspace
    tokens = [sum(int(chunk.cu_seq_lens[-1]) for chunk in plan.prefill.context_chunks) for plan in (plans[0], wanted)]
    assert tokens[0] == tokens[1], "the chunks of the two plans have different numbers of context tokens"


@pytest.mark.parametrize("slack", [0, 7, 1000])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_layers(ops, config, slack):
    """A layer gives the same output with a plan from upper bounds as with the plan from lengths, for any slack."""
    with torch.device("cpu"):
        batch = make_batch(*MIXED, BLOCK)
        layer = make_layer(ops, config, make_weights(config, torch.float64), torch.float64)
        cache = new_cache(batch, config.head_size, torch.float64, new_tokens=False)
        hidden = torch.randn(batch.num_tokens, config.hidden_size, dtype=torch.float64)
        positions = batch.positions
        options = (BLOCK, 32, 2)  # a workspace of two blocks: several chunks
        wanted = layer(hidden, positions, cache.clone(), ops.build_mla_metadata(batch.common, *options))
        plan = ops.build_mla_metadata(without_lens(batch.common, slack), *options)
        assert plan.num_decodes == 2 and len(plan.prefill.context_chunks) > 2
        assert_close64(layer(hidden, positions, cache, plan), wanted)


@pytest.mark.parametrize("merge", ["ag_rs", "a2a"])
def test_layers_on_ranks(ops, merge):
    """On ranks that share sequences, a plan from upper bounds gives the output of the plan with lengths."""
    config = CONFIGS["low-rank"]

    def program(ranks):
        torch.manual_seed(5)
        layer = make_rank_layer(ops, config, make_weights(config, torch.float64), torch.float64, ranks, "cpu")
        batch = make_batch(*MIXED, BLOCK)
        slots = ops.dcp_slot_mapping(batch.common.query_start_loc, batch.common.seq_lens, batch.common.block_table,
                                     BLOCK, batch.num_tokens, ranks.size, ranks.rank, ranks.interleave)  # fmt: skip
        common = replace(batch.common, slot_mapping=slots)
        cache = torch.randn(batch.num_blocks, BLOCK, config.head_size, dtype=torch.float64)
        hidden = torch.randn(batch.num_tokens, config.hidden_size, dtype=torch.float64)
        positions = batch.positions
        builder = ops.MLAMetadataBuilder(
            config, BLOCK, 4096, 8, num_speculative_tokens=1, num_programs=2, context_parallel=ranks,
            workspace_tokens=128, batch_invariant=merge == "a2a", costs=PathCosts(absorbed_request=1e15),
        )  # fmt: skip
        outputs = []
        for given_batch in (common, without_lens(common, 50)):
            plan = builder.build(0, given_batch)
            assert plan.num_decodes == 2 and plan.prefill.context_chunks and plan.ownership == ranks.ownership
            outputs.append(layer(hidden, positions, cache.clone(), plan))
        return outputs

    for wanted, found in ops.simulate(2, 8, program, merge=merge):
        assert_close64(found, wanted)


def test_schedules(ops):
    """Without lengths on the host, a decode gets a schedule if some possible lengths make a schedule worthwhile."""
    builder = make_builder(ops, num_programs=8)
    long, short = make_batch([1] * 4, [4000, 9, 9, 9], BLOCK).common, make_batch([1] * 4, [60, 9, 9, 9], BLOCK).common
    assert builder.build(0, without_lens(long, 0, True)).schedule_choice.planned
    same(builder.build(0, without_lens(long, 0, True)).schedule, ops.plan_decode(long.seq_lens, 8))
    plan = builder.build(0, without_lens(short, 0, True))
    assert plan.schedule is None and not plan.schedule_choice.planned
    alone = builder.build(0, without_lens(make_batch([1], [4000], BLOCK).common, 0, True))
    assert alone.schedule is None
    assert builder.build(0, without_lens(long, 0, True), fast_build=True).schedule is None
    invariant = make_builder(ops, num_programs=8, batch_invariant=True).build(0, without_lens(short, 0, True))
    assert invariant.schedule.batch_invariant and invariant.schedule.tile_ranges is None
    prefix = builder.build(16, without_lens(make_batch([1] * 4, [4000] * 4, BLOCK).common, 0, True))
    assert prefix.cascade is None  # `use_cascade_attention` needs the lengths


def test_refusals(ops, plain_errors):
    common = make_batch(*MIXED, BLOCK).common
    builder = make_builder(ops)
    with pytest.raises(
        ValueError, match="^common.query_start_loc_cpu: expected offsets on the CPU for queries of more"
    ):
        builder.build(0, without_lens(common, 0, True))
    with pytest.raises(ValueError, match="^common.seq_lens_cpu_upper_bound: expected bounds on the CPU for queries of"):
        builder.build(0, without_lens(common, bounds=False))
    with pytest.raises(
        ValueError, match="^common.query_start_loc_cpu: expected offsets on the CPU beside seq_lens_cpu,"
    ):
        builder.build(0, replace(common, query_start_loc_cpu=None))
    bounds = integers(33, 17, 90, -1, 41).cpu()
    with pytest.raises(
        ValueError, match="^common.seq_lens_cpu_upper_bound: expected bounds >= 0, got -1 at request 3$"
    ):
        builder.build(0, replace(without_lens(common), seq_lens_cpu_upper_bound=bounds))
    with pytest.raises(
        ValueError, match="^common.seq_lens_cpu_upper_bound: expected at most 4096 tokens a request, got"
    ):
        builder.build(0, without_lens(common, 5000))
    with pytest.raises(ValueError, match=r"^common.seq_lens_cpu_upper_bound: expected shape \[5\], got \[4\]$"):
        builder.build(0, replace(without_lens(common), seq_lens_cpu_upper_bound=bounds[:4]))
    uneven = without_lens(make_batch([2, 1], [9, 9], BLOCK).common, 0, True)
    with pytest.raises(ValueError, match="^common.query_start_loc_cpu: expected offsets on the CPU, because UNIFORM"):
        make_builder(ops, query_len_support=QueryLenSupport.UNIFORM).build(0, uneven)
    with pytest.raises(ValueError, match="^common.num_actual_tokens: expected at most 4 for 2 requests of at most 2"):
        builder.build(0, replace(uneven, num_actual_tokens=5))
    for call in (
        lambda: ops.split_decodes_and_prefills(without_lens(common), 1),
        lambda: ops.common_prefix_len(without_lens(common), BLOCK),
        lambda: ops.make_local_attention_virtual_batches(without_lens(common), 32, BLOCK),
    ):
        with pytest.raises(ValueError, match="^common.seq_lens_cpu: expected a tensor on the CPU, got None$"):
            call()
    with pytest.raises(ValueError, match="^seq_lens_cpu: expected a tensor on the CPU, got None$"):
        without_lens(common).num_computed_tokens_cpu  # noqa: B018  the property raises


@pytest.mark.parametrize("query_len", [1, 3])
def test_graphs(ops, query_len, plain_errors):
    """`DecodeGraph` and `update_captured` accept batches without lengths on the CPU, with the same results."""
    config = DIRECT
    lens = ([1, 1], [40, 9]) if query_len == 1 else ([3, 1], [40, 9])
    with torch.device("cpu"):
        builder = ops.MLAMetadataBuilder(config, BLOCK, 128, 4, num_speculative_tokens=query_len - 1, num_programs=2)
        layer = make_layer(ops, config, make_weights(config, torch.float64), torch.float64)
        batch = make_batch(*lens, BLOCK)
        cache = torch.randn(batch.num_blocks, BLOCK, config.head_size, dtype=torch.float64)
        graph = ops.DecodeGraph(
            lambda h, p, plan: layer(h, p, cache, plan), builder, [2, 4], 8, config.hidden_size, torch.float64, "cpu",
            query_len,
        )  # fmt: skip
        hidden = torch.randn(batch.num_tokens, config.hidden_size, dtype=torch.float64)
        positions = batch.positions
        wanted = graph.run(hidden, positions, batch.common).clone()
        bare = replace(without_lens(batch.common, 0, True), max_query_len=query_len)
        assert_close64(graph.run(hidden, positions, bare), wanted)
        assert builder.can_run_in_cudagraph(bare)
        slots = torch.full((2 * query_len,), -1)
        captured = builder.build_for_cudagraph_capture(
            replace(bare, slot_mapping=slots, num_actual_tokens=2 * query_len)
        )
        other = make_batch([query_len, 1], [17, 33], BLOCK).common
        builder.update_captured(captured, without_lens(other, 0, True))
        fresh = ops.compute_visible_lens(other.query_start_loc, other.seq_lens, 2 * query_len)
        assert captured.decode.visible_lens.equal(fresh)
        same(captured.schedule, ops.plan_decode(other.seq_lens, 2))
        with pytest.raises(ValueError, match="^common: expected at most 80 keys a request, as captured, got 81$"):
            builder.update_captured(captured, replace(without_lens(other, 0, True), max_seq_len=81))
        with pytest.raises(ValueError, match="^common: expected 2 requests of "):
            builder.update_captured(captured, replace(bare, max_query_len=4, num_actual_tokens=7))
        with pytest.raises(ValueError, match="^common.max_seq_len: expected at most 128, as captured, got 129$"):
            graph.run(hidden, positions, replace(bare, max_seq_len=129))
        with pytest.raises(ValueError, match="^common: expected .*tokens of each request, as captured, got "):
            graph.run(hidden, positions, replace(bare, max_query_len=query_len + 1))
        assert_close64(graph.run(hidden, positions, bare), wanted)


# Tests that planning reads no value from a device. Tensors on the device "meta" have no values: reading one raises.


@pytest.fixture
def meta_backend(monkeypatch):
    """Register a backend for the device "meta", and copy plans to this device by `Tensor.to`.

    The kernels of the backend must not be launched: an op on a meta tensor only computes the shapes of its results.
    """

    def never(*_):
        raise AssertionError("a kernel of the device meta was launched")

    ops = {name: OpSupport(never) for name in ("compute_visible_lens", "flash_attn_varlen", "plan_decode")}
    monkeypatch.setattr(
        "fast.mla.metadata.to_device",
        lambda tensors, device, _: {name: tensor.to(device) for name, tensor in tensors.items()},
    )
    with registered(Backend("nowhere", 50, "meta", ops)):
        yield


def devices_of(value):
    """Return the device types of all tensors of a plan."""
    if isinstance(value, torch.Tensor):
        return {value.device.type}
    parts = [getattr(value, field.name) for field in fields(value)] if is_dataclass(value) else value
    return set().union(*map(devices_of, parts)) if isinstance(parts, list | tuple) else set()


@pytest.mark.parametrize("ranks", [None, (2, 1, 4)])
def test_no_value_is_read(meta_backend, ranks):
    """No method of the builder reads a value of a tensor on the device, with or without lengths on the host."""
    ownership = None if ranks is None else TokenOwnership(*ranks)
    with torch.device("cpu"):
        for invariant in (False, True):
            builder = make_builder(fast, batch_invariant=invariant, schedule_costs=fast.ScheduleCosts())
            builder.ownership = ownership
            for lens in DECODES.values():
                common = moved(make_batch(*lens, BLOCK).common, "meta")
                for given_batch in (common, without_lens(common, 9), without_lens(common, 9, True)):
                    plan = builder.build(0, given_batch)
                    assert plan.num_decodes == len(lens[0]) and devices_of(plan) == {"meta"}
                    if builder.can_run_in_cudagraph(given_batch):
                        slots = torch.empty(3 * len(lens[0]), dtype=torch.int64, device="meta")
                        captured = builder.build_for_cudagraph_capture(replace(given_batch, slot_mapping=slots))
                        builder.update_captured(captured, given_batch)
                        assert devices_of(captured) == {"meta"}
            common = moved(make_batch(*MIXED, BLOCK).common, "meta")
            plan = builder.build(0, without_lens(common, 9))
            assert plan.prefill.context_chunks and devices_of(plan) == {"meta"}
    with pytest.raises((RuntimeError, NotImplementedError)):
        common.seq_lens.tolist()  # reading a value raises, so the test would detect it


# Tests on a GPU.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("invariant", [False, True])
def test_no_synchronisation(invariant):
    """Neither the builder nor the ops of a step wait for the GPU, with or without lengths on the host."""
    config = replace(DIRECT, kv_lora_rank=64, qk_rope_head_dim=32)
    dtype, device = torch.bfloat16, "cuda"
    with torch.device("cpu"):
        weights = make_weights(config, dtype)
        steps = [make_batch(*lens, BLOCK) for lens in (*DECODES.values(), MIXED)]
    layer = make_layer(fast, config, weights, dtype).to(device)
    builder = fast.MLAMetadataBuilder(
        config, BLOCK, 4096, 8, num_speculative_tokens=2, num_programs=3, batch_invariant=invariant,
        workspace_tokens=32 * BLOCK, dtype=dtype,
    )  # fmt: skip
    cache = torch.zeros(max(step.num_blocks for step in steps), BLOCK, config.head_size, dtype=dtype, device=device)
    graph = fast.DecodeGraph(
        lambda h, p, plan: layer(h, p, cache, plan), builder, [4], 256, config.hidden_size, dtype, device, 3
    )
    runs = []
    for step in steps:
        common = moved(step.common, device)
        hidden = torch.randn(step.num_tokens, config.hidden_size, dtype=dtype, device=device)
        positions = torch.zeros(step.num_tokens, dtype=torch.int64, device=device)
        given_batches = [common, without_lens(common, 9)]
        if max(step.query_lens) <= 3:
            given_batches.append(without_lens(common, 9, True))
        runs += [(hidden, positions, one) for one in given_batches]
    slots = torch.full((12,), -1, dtype=torch.int64, device=device)

    def all_calls():
        outputs = []
        for hidden, positions, common in runs:
            plan = builder.build(0, common)
            outputs.append(layer(hidden, positions, cache, plan))
            if common.max_query_len <= 3:
                outputs.append(graph.run(hidden, positions, common).clone())
                capture = builder.build_for_cudagraph_capture(
                    replace(common, slot_mapping=slots, num_actual_tokens=common.num_actual_tokens)
                )
                builder.update_captured(capture, common)
        return outputs

    all_calls()  # the first calls compile kernels and allocate memory; only the later calls must not wait
    torch.cuda.synchronize()
    with no_synchronisation():
        outputs = all_calls()
    assert all(output.isfinite().all() for output in outputs)


def test_bounds_that_are_too_small(ops, plain_errors):
    """An upper bound below the query length is refused; on a CPU, an upper bound below the length is refused too."""
    with torch.device("cpu"):
        common = make_batch([1, 10], [9, 30], BLOCK).common
        for bounds, message in (([9, 5], "at least the 10 query tokens of the request, got 5 at request 1"),
                                ([9, 20], "at least the 30 keys of the request, got 20 at request 1"),
                                ([0, 30], "at least the 9 keys of the request, got 0 at request 0"),
                                ([9, -1], "bounds >= 0, got -1 at request 1")):  # fmt: skip
            wrong = replace(without_lens(common), seq_lens_cpu_upper_bound=integers(*bounds))
            with pytest.raises(ValueError, match=f"^common.seq_lens_cpu_upper_bound: expected {message}$"):
                make_builder(ops).build(0, wrong)
