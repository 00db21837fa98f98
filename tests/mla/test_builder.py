"""Tests of the plan of a step: it must equal a slow computation token by token, and be the same in both packages.

A plan has all integers that the attention of a step needs. The first requests of a batch are decodes (absorbed path),
the other requests are prefills (expanded path). "Pitfall 12" is entry 12 of the list in `tests/__init__.py`.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace

import pytest
import torch

import fast
import reference
from reference.interfaces import (
    CommonAttentionMetadata,
    DecodeSchedule,
    GraphSupport,
    InvariantSplitRule,
    MLAConfig,
    PathCosts,
    QueryLenSupport,
    ScheduleCosts,
)

from ..planning.test_batch import brute_split
from ..support.factories import DIRECT, GARBAGE, assert_same_bits, integers, make_batch, moved, offsets
from ..support.planning import batches, same
from ..support.properties import assume, given, st
from ..support.synchronisation import no_synchronisation

V3 = MLAConfig.from_preset("deepseek-v3")
SINGLE, UNIFORM, VARLEN = QueryLenSupport.SINGLE_ONLY, QueryLenSupport.UNIFORM, QueryLenSupport.VARLEN


def check_plan(ops, query_lens, seq_lens, block_size, workspace, threshold):
    """Assert that the plan of a batch equals a slow computation token by token, and return the plan.

    Each query token of a decode sees the keys up to its own position and no key past the end of its sequence
    (pitfall 12).
    """
    batch = make_batch(query_lens, seq_lens, block_size, padding=2)
    plan = ops.build_mla_metadata(batch.common, block_size, workspace, threshold)
    decodes, prefills, decode_tokens, _ = brute_split(query_lens, threshold, False)
    assert (plan.num_decodes, plan.num_prefills, plan.num_decode_tokens) == (decodes, prefills, decode_tokens)
    assert plan.num_actual_tokens == batch.num_tokens and plan.slot_mapping is batch.common.slot_mapping
    visible = []
    for query_len, length in zip(query_lens[:decodes], seq_lens[:decodes], strict=True):
        positions = range(length)[length - query_len :] if length else [-1] * query_len
        visible += [position + 1 for position in positions]  # a query token sees the keys up to its own position
    assert plan.decode.visible_lens.dtype == torch.int32 and plan.decode.visible_lens.tolist() == visible
    assert plan.decode.seq_lens.tolist() == list(seq_lens[:decodes])
    assert plan.decode.query_start_loc.tolist() == offsets(query_lens[:decodes]).tolist()
    assert plan.decode.max_query_len == max(query_lens[:decodes], default=0)
    assert plan.prefill.query_start_loc.tolist() == offsets(query_lens[decodes:]).tolist()
    assert plan.prefill.max_query_len == max(query_lens[decodes:], default=0)
    for part, rows in ((plan.decode, slice(decodes)), (plan.prefill, slice(decodes, None))):
        assert_same_bits(part.block_table, batch.common.block_table[rows])
    context = list(batch.context_lens[decodes:])
    covered = [sum(c.cu_seq_lens.diff()[r].item() for c in plan.prefill.context_chunks) for r in range(prefills)]
    assert covered == context
    return plan


@given(batches(), st.sampled_from([2, 16]), st.integers(0, 60), st.sampled_from([1, 2, 3]))
def test_plan(lens, block_size, extra, threshold):
    """The plans of both packages are right (`check_plan`), and equal in every field."""
    query_lens, seq_lens = lens
    workspace = max(1, len(query_lens)) * block_size + extra
    common = make_batch(query_lens, seq_lens, block_size).common
    decodes = reference.split_decodes_and_prefills(common, threshold).num_decodes
    if any(new > 0 and length == 0 for new, length in zip(query_lens[decodes:], seq_lens[decodes:], strict=True)):
        for ops in (reference, fast):  # a padding row must be a decode, because a prefill would not give output 0
            with pytest.raises(ValueError, match="^seq_lens: expected padding rows among the decodes only"):
                ops.build_mla_metadata(common, block_size, workspace, threshold)
        return
    plans = []
    for ops in (reference, fast):
        torch.manual_seed(0)
        plans.append(check_plan(ops, query_lens, seq_lens, block_size, workspace, threshold))
    same(*plans)


@given(batches(), st.sampled_from([2, 16]), st.booleans())
def test_parts_agree(lens, block_size, uniform):
    """The functions that split a batch and compute its slots give the same bits in both packages."""
    query_lens, seq_lens = lens
    common = make_batch(query_lens, seq_lens, block_size).common
    for threshold in (1, 3):
        same(*(ops.split_decodes_and_prefills(common, threshold, uniform) for ops in (reference, fast)))
    same(common.num_computed_tokens.cpu(), common.num_computed_tokens_cpu)
    arguments = (common.query_start_loc, common.seq_lens, common.block_table, block_size, sum(query_lens) + 2)
    same(*(ops.slot_mapping(*arguments) for ops in (reference, fast)))


def test_graph_padding_rows_are_inert(ops):
    """Padding rows of a graph get length 0 and slot -1, and see no key (pitfalls 6 and 16)."""
    batch = make_batch((1, 1, 1, 1), (20, 7, 0, 0))
    plan = ops.build_mla_metadata(batch.common, 16, 64)
    assert plan.num_decodes == 4
    assert plan.decode.visible_lens.tolist() == [20, 7, 0, 0]
    assert batch.common.slot_mapping[2:].tolist() == [-1, -1]
    assert (batch.common.block_table[2:] == GARBAGE).all()
    padded_queries = make_batch((2, 2), (9, 0))
    assert ops.build_mla_metadata(padded_queries.common, 16, 64, 2).decode.visible_lens.tolist() == [8, 9, 0, 0]


def test_empty_batch(ops):
    plan = ops.build_mla_metadata(make_batch((), ()).common, 16, 64)
    assert (plan.num_decodes, plan.num_prefills, plan.num_actual_tokens) == (0, 0, 0)
    assert plan.prefill.context_chunks == ()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_make_accepts_what_it_derives(query_lens):
    """`CommonAttentionMetadata.make` computes the maxima and the number of tokens that the constructor needs."""
    assume(sum(query_lens) < 30)
    common = make_batch(query_lens, [q + 3 for q in query_lens]).common
    again = CommonAttentionMetadata(
        common.seq_lens, common.query_start_loc, common.seq_lens_cpu, common.query_start_loc_cpu, common.block_table,
        common.slot_mapping, max(query_lens), sum(query_lens), max(query_lens) + 3,
    )  # fmt: skip
    same(common, again)


@pytest.mark.parametrize("package", ["reference", "fast"])
def test_planning_does_not_write_its_input(package):
    ops = {"reference": reference, "fast": fast}[package]
    common = make_batch((1, 4, 9), (17, 40, 9)).common
    before = [t.clone() for t in (common.seq_lens, common.query_start_loc, common.block_table, common.slot_mapping)]
    ops.build_mla_metadata(common, 16, 64)
    after = (common.seq_lens, common.query_start_loc, common.block_table, common.slot_mapping)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# Tests of which requests are decodes. Three things decide: `decode_threshold` (up to this query length a request always
# decodes), the query lengths that the decode kernel supports, and the cheaper path of each request (`choose_path`).


def decodes_of(ops, query_lens, seq_lens, **options):
    return ops.build_mla_metadata(make_batch(query_lens, seq_lens).common, 16, 1024, **options).num_decodes


@given(batches(), st.sampled_from([1, 2, 5]), st.sampled_from([UNIFORM, VARLEN]), st.booleans(), st.booleans())
def test_choices_agree(lens, threshold, support, asked, ordered):
    """Both packages give the same plan or the same error, for all options that decide which requests are decodes."""
    query_lens, seq_lens = lens
    common, found = make_batch(query_lens, seq_lens).common, []
    costs = PathCosts(expanded_request=2e6)  # gives short queries the absorbed path even without context
    for ops in (reference, fast):
        try:
            found.append(
                ops.build_mla_metadata(common, 16, 256, threshold, DIRECT if asked else None, costs, support, ordered,
                                       num_programs=5 if asked else None)
            )  # fmt: skip
        except ValueError as error:
            found.append(str(error))
    same(*found)


def test_path_choice_makes_decodes(ops):
    """All requests before the first request with the expanded path are decodes, whatever their query lengths are."""
    lens = [8, 1, 20, 600, 1], [5000, 30, 4000, 900, 77]
    assert decodes_of(ops, *lens) == 0
    assert decodes_of(ops, *lens, config=V3) == 3
    assert decodes_of(ops, *lens, config=V3, costs=PathCosts(absorbed_request=1e15)) == 0
    assert decodes_of(ops, *lens, config=V3, costs=PathCosts(expanded_request=1e15)) == 5
    assert decodes_of(ops, [1, 8, 3], [40, 9000, 7], config=V3, query_len_support=SINGLE) == 1
    assert decodes_of(ops, [1, 8, 3], [40, 9000, 700], config=V3, query_len_support=UNIFORM, decode_threshold=8) == 1
    plan = ops.build_mla_metadata(make_batch(*lens).common, 16, 8192, config=V3)
    assert plan.num_decode_tokens == 29 and plan.decode.max_query_len == 20
    assert plan.decode.visible_lens[:8].tolist() == list(range(4993, 5001))


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([2, 0], [9000, 4]), ([0, 3, 1, 0], [4, 9000, 30, 7]), ([2, 0, 600], [9000, 4, 900])]
)
def test_as_many_tokens_as_decodes_are_not_one_each(ops, query_lens, seq_lens):
    """The plan is right if there are as many decode tokens as decodes, although not every decode has one token."""
    plan = ops.build_mla_metadata(make_batch(query_lens, seq_lens).common, 16, 8192, config=V3)
    decodes = sum(query_len < 600 for query_len in query_lens)
    assert plan.num_decodes == plan.num_decode_tokens == decodes
    visible = [s - q + i + 1 for q, s in zip(query_lens[:decodes], seq_lens, strict=False) for i in range(q)]
    assert plan.decode.visible_lens.tolist() == visible
    assert plan.decode.max_query_len == max(query_lens[:decodes])


def test_order_required(ops, plain_errors):
    """With `require_order`, an absorbed request behind an expanded request raises an error that names both requests."""
    common = make_batch([1, 30, 2, 1], [40, 90, 9, 8]).common
    wanted = "^common: expected every absorbed request before the first expanded request, number 1, got the absorbed"
    with pytest.raises(ValueError, match=f"{wanted} request 3 behind it$"):
        ops.build_mla_metadata(common, 16, 256, require_order=True)
    with pytest.raises(ValueError, match=f"{wanted} request 2 behind it$"):
        ops.build_mla_metadata(common, 16, 256, 2, require_order=True)
    assert ops.build_mla_metadata(common, 16, 256).num_decodes == 1


def test_thresholds(ops, plain_errors):
    assert [ops.reorder_batch_threshold(support) for support in QueryLenSupport] == [1, 1, 1]
    assert [ops.reorder_batch_threshold(support, 3) for support in (SINGLE, UNIFORM, VARLEN)] == [1, 4, 4]
    with pytest.raises(ValueError, match="^num_speculative_tokens: expected an int >= 0, got -1$"):
        ops.reorder_batch_threshold(VARLEN, -1)
    common = make_batch([1], [4]).common
    with pytest.raises(ValueError, match="^decode_threshold: expected 1 with SINGLE_ONLY, got 2$"):
        ops.build_mla_metadata(common, 16, 64, 2, query_len_support=SINGLE)
    with pytest.raises(ValueError, match="^decode_threshold: expected at least 1, got 0$"):
        ops.build_mla_metadata(common, 16, 64, 0)


def test_narrow_block_table(ops, plain_errors):
    common = make_batch([1, 1, 1], [20, 33, 50]).common
    narrow = CommonAttentionMetadata.make(
        common.query_start_loc_cpu, common.seq_lens_cpu, common.block_table[:, :2], common.slot_mapping
    )
    with pytest.raises(ValueError, match="^block_table: expected at least 3 columns for request 1, got 2$"):
        ops.build_mla_metadata(narrow, 16, 64)
    with pytest.raises(ValueError, match="^block_size: expected a positive int, got 0$"):
        ops.build_mla_metadata(narrow, 0, 64)


def test_slots_past_the_tokens(plain_errors):
    table = torch.zeros(1, 1, dtype=torch.int32)
    slots = torch.tensor([3, -1, 5])
    if slots.device.type == "cpu":
        with pytest.raises(ValueError, match="^slot_mapping: expected -1 after 1 tokens, got 5 at index 2$"):
            CommonAttentionMetadata.make(offsets([1]).cpu(), integers(4).cpu(), table, slots)


# Tests of `MLAMetadataBuilder`, the builder that engines use.


def make_builder(ops, **options):
    sizes = {"block_size": 16, "max_model_len": 512, "max_num_seqs": 8, "workspace_tokens": 64}
    given = sizes | {"schedule_costs": ScheduleCosts()} | options  # both packages get the same costs on every device
    return ops.MLAMetadataBuilder(given.pop("config", DIRECT), **given)


MANY_HEADS = replace(DIRECT, num_heads=80)
OPTIONS = {  # options of a builder, besides the numbers that hypothesis draws
    "plain": {},
    "costs": {"costs": PathCosts(absorbed_request=1e15)},
    "other costs": {"costs": PathCosts(expanded_request=1e15)},
    "one token": {"query_len_support": SINGLE},
    "uniform": {"query_len_support": UNIFORM},
    "invariant": {"num_programs": 5, "batch_invariant": True},
    "many heads": {"config": MANY_HEADS, "num_programs": 3, "batch_invariant": True},
    "unplanned": {"num_programs": 0, "batch_invariant": True},
}


def uniform_length(query_lens, threshold):
    """Return the most frequent query length from 1 to the threshold, or 0 if no query has such a length.

    If several lengths are equally frequent, return the longest of these lengths.
    """
    lens = [q for q in query_lens if 0 < q <= threshold]
    return max(set(lens), key=lambda q: (lens.count(q), q), default=0)


def schedule_pays(lens, programs, overhead):
    """Return whether a schedule saves more tiles than it costs.

    A tile is 64 keys. For each request, a schedule saves the difference between the longest request and this request,
    in tiles. A schedule costs `overhead` tiles for each request and each program.
    """
    tiles = [-(-length // 64) for length in lens if length > 0]
    return sum(max(tiles) - count for count in tiles) > overhead * (len(tiles) + programs) if tiles else False


@given(batches(), st.sampled_from(sorted(OPTIONS)), st.sampled_from([0, 3]), st.booleans(), st.sampled_from([0, 5]))
def test_builders_agree(lens, name, drafted, fast_build, programs):
    """A builder accepts every batch in the order of `reorder_batch`, and both packages give the same plan."""
    options = {"num_programs": programs, "num_speculative_tokens": drafted, "max_model_len": 50_000} | OPTIONS[name]
    support, threshold = options.get("query_len_support", VARLEN), 1 if name == "one token" else 1 + drafted
    query_lens, seq_lens = list(lens[0]), [length and length + 20_000 * (name == "many heads") for length in lens[1]]
    config, costs = options.get("config", DIRECT), options.get("costs")
    uniform = uniform_length(query_lens, threshold)

    def decodes(q, s):
        if support is UNIFORM:
            return q in (0, uniform)
        asked = support is VARLEN and not options.get("batch_invariant")
        return q <= threshold or (asked and fast.choose_path(q, max(0, s - q), config, costs) == "absorbed")

    assume(all(s > 0 or decodes(q, s) for q, s in zip(query_lens, seq_lens, strict=True)))
    builders = [make_builder(ops, **options) for ops in (reference, fast)]
    contexts = [max(0, s - q) for q, s in zip(query_lens, seq_lens, strict=True)]
    swaps = [b.reorder_batch(integers(*query_lens).cpu(), integers(*contexts).cpu()) for b in builders]
    same(*swaps)
    for i, j in swaps[0]:
        for values in (query_lens, seq_lens):
            values[i], values[j] = values[j], values[i]
    common = make_batch(query_lens, seq_lens, 16).common
    plans = [b.build(0, common, fast_build) for b in builders]
    same(*plans)
    own = "cpu" if common.block_table.device.type == "cpu" else "triton"
    assert plans[1].prefill.backend == (own if plans[1].num_prefills else None)
    same(*(b.can_run_in_cudagraph(common) for b in builders))
    assert plans[0].num_decodes == sum(decodes(q, s) for q, s in zip(query_lens, seq_lens, strict=True))
    schedule, invariant = plans[0].schedule, options.get("batch_invariant", False)
    short = plans[0].num_decode_tokens > 0 and plans[0].decode.max_query_len <= threshold
    planned = options["num_programs"] > 0 and short and (invariant or not fast_build)
    neutral = ScheduleCosts()
    start = neutral.request_cost * (neutral.invariant_starts if invariant else 1)
    planned = planned and schedule_pays(plans[0].decode.seq_lens.tolist(), options["num_programs"], start)
    assert plans[0].schedule_choice.planned == planned
    assert (schedule is not None) == (planned or (invariant and plans[0].num_decode_tokens > 0))
    if invariant and not planned and schedule is not None:
        assert vars(schedule) == vars(DecodeSchedule(batch_invariant=True))
    elif schedule is not None:
        same(schedule, reference.plan_decode(plans[0].decode.seq_lens, options["num_programs"],
                                             batch_invariant=invariant))  # fmt: skip


def test_builder_for_graphs(ops, plain_errors):
    """A batch can be captured in a CUDA graph if no query is longer than the threshold, here 2.

    With graph support ANY, the query lengths can differ. With ONE_QUERY_LEN all query lengths must be equal, but
    requests without tokens are allowed at the end of the batch. `kinds` maps a batch (query lengths, sequence lengths)
    to two results, for the builder with ANY and for the builder with ONE_QUERY_LEN. A result is one of these:

    - the graph support of the plan
    - `none` (`GraphSupport.NONE`): the batch is refused
    - Python's None: the batch has too few slots for padding tokens
    """
    one_length = make_builder(ops, num_speculative_tokens=1, num_programs=3, graph_support=GraphSupport.ONE_QUERY_LEN)
    never = make_builder(ops, num_speculative_tokens=1, num_programs=3, graph_support=GraphSupport.NONE)
    builder = make_builder(ops, num_speculative_tokens=1, num_programs=3)
    assert builder.reorder_batch_threshold == 2
    one, mixed, none = GraphSupport.ONE_QUERY_LEN, GraphSupport.ANY, GraphSupport.NONE
    kinds = {((2, 2, 2), (9, 40, 0)): (mixed, one), ((1, 1), (9, 3)): (one, one), ((1, 2), (9, 9)): (mixed, none),
             ((), ()): (none, none), ((3, 3), (9, 9)): (none, none), ((2, 0), (9, 9)): (mixed, None),
             ((1, 0, 1), (9, 3, 7)): (mixed, none), ((2, 2, 0), (9, 3, 0)): (mixed, None),
             ((1, 0), (9, 0)): (None, None), ((0, 0), (0, 0)): (none, none)}  # fmt: skip
    for lens, wanted in kinds.items():
        common = make_batch(*lens).common
        assert not never.can_run_in_cudagraph(common)
        for made, kind in zip((builder, one_length), wanted, strict=True):
            assert made.can_run_in_cudagraph(common) == (kind is not none)
            if kind is none:
                text = "one query length up to 2" if made is one_length else "up to 2"
                with pytest.raises(ValueError, match=f"^common: expected decodes of {text} tokens, got"):
                    made.build_for_cudagraph_capture(common)
            elif kind is None:  # in a graph for one query length, a request without tokens needs padding tokens
                with pytest.raises(ValueError, match="^common.slot_mapping: expected at least [246] slots, got"):
                    made.build_for_cudagraph_capture(common)
            else:
                plan = made.build_for_cudagraph_capture(common)
                assert plan.num_decodes == common.num_reqs and plan.schedule.tile_ranges.shape == (3, 5)
                assert plan.decode.graph is kind and plan.num_actual_tokens == common.num_actual_tokens
    with pytest.raises(ValueError, match="^graph_support: expected NONE or ONE_QUERY_LEN with a decode kernel for UNI"):
        make_builder(ops, query_len_support=UNIFORM, graph_support=mixed)
    assert make_builder(ops, query_len_support=UNIFORM).graph_support is one


def test_programs_by_query_length(ops):
    """If `num_programs` is a number, decodes with a query length above the threshold get no schedule.

    If `num_programs` is a function, the builder calls the function with the longest query length of the decodes.
    """
    common = make_batch([1, 6], [40, 4000]).common
    costs = PathCosts(expanded_request=1e15)
    sizes = {"costs": costs, "max_model_len": 4096}
    assert make_builder(ops, num_programs=9, **sizes).build(0, common).schedule is None
    for number in (0, 2, 5):
        plan = make_builder(ops, num_programs=lambda q, n=number: n * (q == 6), **sizes).build(0, common)
        assert (0 if plan.schedule is None else plan.schedule.tile_ranges.shape[0]) == number


def test_captured_plans_are_updated_in_place(ops, plain_errors):
    """`update_captured` writes another batch into the tensors of the captured plan (pitfalls 16 and 17).

    A plan from `build` and the captured plan have different memory for the schedule.
    """
    builder = make_builder(ops, num_speculative_tokens=1, num_programs=3, max_model_len=2000)
    captured = builder.build_for_cudagraph_capture(make_batch([2] * 3, [0, 2000, 0]).common)
    tensors = captured.decode.visible_lens, captured.schedule.tile_ranges, captured.schedule.split_offsets
    places = [tensor.data_ptr() for tensor in tensors]
    for lens in ([20, 70, 0], [2, 1500, 9], [500, 500, 500]):
        common = make_batch([2] * 3, lens).common
        builder.update_captured(captured, common)
        fresh = builder.build(0, common)
        planned = ops.plan_decode(common.seq_lens, 3)  # a captured plan has a schedule for any lengths
        same(tensors, (fresh.decode.visible_lens, planned.tile_ranges, planned.split_offsets))
        assert [tensor.data_ptr() for tensor in tensors] == places
        assert fresh.schedule is None or fresh.schedule.tile_ranges.data_ptr() not in places
    wanted = "^common: expected 3 requests of at most 2 tokens, 6 in all, as captured, got"
    for query_lens in ([2, 2], [1, 1, 3], [2, 2, 2, 0]):
        with pytest.raises(ValueError, match=wanted):
            builder.update_captured(captured, make_batch(query_lens, [9] * len(query_lens)).common)
    unplanned = make_builder(ops, num_speculative_tokens=1, num_programs=0, batch_invariant=True, max_model_len=2000)
    captured = unplanned.build_for_cudagraph_capture(make_batch([2] * 3, [0, 2000, 0]).common)
    unplanned.update_captured(captured, common)  # a captured plan without tile ranges can also be updated
    assert vars(captured.schedule) == vars(DecodeSchedule(batch_invariant=True))
    same(captured.decode.visible_lens, fresh.decode.visible_lens)


def test_captured_plans_of_another_builder_are_refused(ops, plain_errors):
    """`update_captured` refuses the captured plan of a builder with other schedule options, and writes nothing."""
    common = make_batch([1] * 3, [20, 70, 5]).common
    kinds = {
        "planned": {"num_programs": 3},
        "kernel": {"num_programs": 0},
        "invariant": {"num_programs": 3, "batch_invariant": True},
        "other rule": {"num_programs": 3, "batch_invariant": True,
                      "schedule_costs": ScheduleCosts(split_rule=InvariantSplitRule(2, 8, 4, 16))},
    }  # fmt: skip
    wanted = {
        ("planned", "invariant"): "batch_invariant: expected False as in the plan of the batch, got True",
        ("invariant", "planned"): "batch_invariant: expected True as in the plan of the batch, got False",
        ("invariant", "other rule"): "split_rule: expected InvariantSplitRule(",
        ("kernel", "planned"): ": expected None as in the plan of the batch, got a schedule",
        ("planned", "kernel"): ": expected a schedule as in the plan of the batch, got None",
    }
    builders = {name: make_builder(ops, max_model_len=2000, **given) for name, given in kinds.items()}
    for (updating, capturing), message in wanted.items():
        captured = builders[capturing].build_for_cudagraph_capture(common)
        held = captured.decode.seq_lens.clone(), captured.schedule and captured.schedule.tile_ranges.clone()
        with pytest.raises(ValueError, match="^captured.schedule" + re.escape("." * (message[0] != ":") + message)):
            builders[updating].update_captured(captured, make_batch([1] * 3, [9, 9, 9]).common)
        same(held, (captured.decode.seq_lens, captured.schedule and captured.schedule.tile_ranges))


def test_requests_without_new_tokens_take_no_path(ops):
    """A request without new tokens is accepted behind the prefills, because some engines pad a batch at its end."""
    plan = make_builder(ops).build(0, make_batch([1, 50, 0], [10, 50, 0]).common)
    assert (plan.num_decodes, plan.num_prefills) == (1, 2)


def test_uniform_batches_keep_their_drafts_together(ops, plain_errors):
    """If the decode kernel supports one query length only, requests with 3 draft tokens decode; all others prefill."""
    builder = make_builder(ops, num_speculative_tokens=3, query_len_support=UNIFORM)
    swaps = builder.reorder_batch(integers(1, 4, 4, 4).cpu(), integers(49, 56, 0, 76).cpu())
    assert swaps == ((0, 3),)
    assert builder.build(0, make_batch([4, 4, 4, 1], [80, 60, 0, 50]).common).num_decodes == 3
    with pytest.raises(
        ValueError, match="^common: expected every absorbed request before the first expanded request, number 1, got "
    ):
        builder.build(0, make_batch([4, 1, 4], [80, 50, 60]).common)


def test_the_most_frequent_length_decodes(ops):
    """If the decode kernel supports one query length only, `reorder_batch` puts the most frequent length first."""
    builder = make_builder(ops, num_speculative_tokens=5, query_len_support=UNIFORM)
    for most in range(1, 7):
        query_lens = [6, 1, most, most, most, 5]
        swaps = builder.reorder_batch(integers(*query_lens).cpu(), integers(*[50] * 6).cpu())
        for i, j in swaps:
            query_lens[i], query_lens[j] = query_lens[j], query_lens[i]
        assert query_lens[:3] == [most] * 3, (most, swaps)


def test_a_loose_bound_changes_nothing(ops):
    """A `max_query_len` that exceeds the longest query of the batch does not change the plan."""
    for lens in (([1, 1], [9, 30]), ([1, 0, 9], [9, 4, 30]), ([2, 2], [9, 0])):
        exact = make_batch(*lens).common
        loose = replace(exact, max_query_len=exact.max_query_len + 30)
        for threshold in (1, 2):
            if threshold < 2 and lens[0] == [2, 2]:
                continue
            same(*(ops.build_mla_metadata(common, 16, 64, threshold) for common in (exact, loose)))
        builder = make_builder(ops, num_speculative_tokens=1)
        assert builder.can_run_in_cudagraph(loose) == builder.can_run_in_cudagraph(exact)


def test_early_refusals(ops, plain_errors):
    """A workspace below one block is refused even for a batch without prefills."""
    common = make_batch([1], [4]).common
    with pytest.raises(ValueError, match="^workspace_tokens: expected at least one unit of 16 tokens, got 15$"):
        ops.build_mla_metadata(common, 16, 15)


def test_builder_refuses(ops, plain_errors):
    with pytest.raises(ValueError, match="^num_programs: expected an int >= 0, a function or None, got -1$"):
        make_builder(ops, num_programs=-1)
    with pytest.raises(ValueError, match="^workspace_tokens: expected at least one unit of 16 tokens, got 15$"):
        make_builder(ops, workspace_tokens=15)
    with pytest.raises(ValueError, match="^max_num_seqs: expected a positive int, got 0$"):
        make_builder(ops, max_num_seqs=0)
    with pytest.raises(ValueError, match="^common: expected at most 2 requests, got 3$"):
        make_builder(ops, max_num_seqs=2).build(0, make_batch([1] * 3, [4] * 3).common)
    with pytest.raises(ValueError, match="^common: expected at most 32 tokens a request, got 40 at request 1$"):
        make_builder(ops, max_model_len=32).build(0, make_batch([1] * 3, [4, 40, 33]).common)
    with pytest.raises(ValueError, match="^common: expected every absorbed request .* request, number 0, got "):
        make_builder(ops).build(0, make_batch([9, 1], [9, 30]).common)


# Tests on a GPU: planning must not wait for the GPU, and must not write pinned memory from which a copy still reads.


def test_planning_does_not_wait():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    builders = [
        make_builder(fast, num_programs=7, num_speculative_tokens=2, batch_invariant=own) for own in (False, True)
    ]
    twins = [
        make_builder(reference, num_programs=7, num_speculative_tokens=2, batch_invariant=own) for own in (False, True)
    ]
    lens = [([1] * 4, [20, 7, 0, 40]), ([3, 1, 9, 30], [50, 0, 40, 100]), ([9], [200]), ([1] * 8, [400] * 8)]
    batches = [make_batch(*own).common for own in lens]
    prefixes = [0, 0, 0, 320]
    expected = [twin.build(prefix, own) for twin in twins for prefix, own in zip(prefixes, batches, strict=True)]
    assert expected[3].cascade is not None and expected[7].schedule.batch_invariant
    there = [moved(own, "cuda") for own in batches]
    for builder in builders:  # the first builds compile kernels and allocate memory; only later builds must not wait
        builder.build(0, there[0])
    with no_synchronisation():
        plans = [
            builder.build(prefix, own) for _ in range(5) for builder in builders
            for prefix, own in zip(prefixes, there, strict=True)
        ]  # fmt: skip
    for number, plan in enumerate(plans):
        assert plan.prefill.query_start_loc.is_cuda and plan.decode.visible_lens.is_cuda
        same(to_cpu(plan), to_cpu(expected[number % 8]))


def to_cpu(value):
    """Return a plan with its tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, tuple):
        made = tuple(map(to_cpu, value))
        return type(value)(*made) if hasattr(value, "_fields") else made
    if dataclasses.is_dataclass(value):
        fields = {field.name: to_cpu(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def test_staging_survives_many_plans():
    """All 300 plans reach the GPU unchanged, although the host sends plans faster than the busy GPU copies them."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from fast.mla.builder import StagingBuffer

    staging, busy, sent = StagingBuffer(), torch.randn(2048, 2048, device="cuda"), []
    for number in range(300):
        if number % 10 == 0:
            busy = (busy @ busy).clamp_(-1, 1)
        pieces = [torch.full((3 + number % 7,), number, dtype=torch.int32, device="cpu"), integers(number).cpu()]
        sent.append(staging.send(pieces, torch.device("cuda")))
    for number, found in enumerate(sent):
        assert found.tolist() == [number] * (4 + number % 7)
