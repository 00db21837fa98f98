"""The planners, integer by integer, against brute force over tokens; both wings, bit-exact with each other."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import fast
import reference
from reference.interfaces import CommonAttentionMetadata

from .factories import GARBAGE, assert_same_bits, integers, make_batch, offsets
from .properties import assume, given, st

WINGS = st.sampled_from(["reference", "fast"]).map({"reference": reference, "fast": fast}.get)
QUERY_LENS = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 17]), max_size=7)


@st.composite
def batches(draw):
    """Query and sequence lengths: padding rows, empty queries, pages that just fit."""
    query_lens = draw(QUERY_LENS)
    seq_lens = [
        draw(st.one_of(st.just(0), st.integers(q, q + 40), st.just(max(q, 16)), st.just(max(q, 17))))
        for q in query_lens
    ]
    return query_lens, seq_lens


def check_slots(ops, query_lens, seq_lens, block_size, padding=0):
    """Every new token's slot is the home that its own page gives it; padding gets -1."""
    batch = make_batch(query_lens, seq_lens, block_size, padding)
    common = batch.common
    got = ops.slot_mapping(
        common.query_start_loc, common.seq_lens, common.block_table, block_size, batch.num_tokens + padding
    )
    assert_same_bits(got, common.slot_mapping)
    owned = got[got >= 0].tolist()
    assert len(set(owned)) == len(owned)


@given(batches(), st.sampled_from([1, 2, 7, 16, 64]), st.integers(0, 3), WINGS)
def test_slot_mapping(lens, block_size, padding, ops):
    check_slots(ops, *lens, block_size, padding)


def test_slot_mapping_is_64_bit(ops):
    """Pitfall 8: block x block_size passes 2^31 without a cache behind it."""
    table = integers(2**31 - 2, 40_000_000).view(1, 2)
    slots = ops.slot_mapping(integers(0, 2), integers(65), table, 64, 3)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [(2**31 - 2) * 64 + 63, 40_000_000 * 64, -1]


def brute_split(query_lens, threshold, uniform):
    """The longest prefix all of whose members may decode, by trying every prefix."""

    def fits(prefix):
        lengths = {n for n in prefix if n > 0}
        return all(n <= threshold for n in prefix) and not (uniform and len(lengths) > 1)

    decodes = max(n for n in range(len(query_lens) + 1) if fits(query_lens[:n]))
    return decodes, len(query_lens) - decodes, sum(query_lens[:decodes]), sum(query_lens[decodes:])


def check_split(ops, query_lens, threshold, uniform):
    common = make_batch(query_lens, query_lens).common
    assert ops.split_decodes_and_prefills(common, threshold, uniform) == brute_split(query_lens, threshold, uniform)


@given(QUERY_LENS, st.sampled_from([1, 2, 3, 16, 17]), st.booleans(), WINGS)
def test_split(query_lens, threshold, uniform, ops):
    check_split(ops, query_lens, threshold, uniform)


def check_chunks(ops, context_lens, workspace, block_size):
    """Every context token in exactly one chunk, pieces on block boundaries, chunks within the workspace."""
    chunks = ops.plan_context_chunks(integers(*context_lens).cpu(), workspace, block_size)
    seen = [[] for _ in context_lens]
    for chunk in chunks:
        pieces = chunk.cu_seq_lens.diff().tolist()
        assert chunk.starts.dtype == chunk.cu_seq_lens.dtype == torch.int32
        assert chunk.cu_seq_lens[0] == 0 and chunk.cu_seq_lens[-1] == chunk.num_tokens == sum(pieces)
        assert 0 < chunk.num_tokens <= workspace and chunk.max_seq_len == max(pieces)
        for request, (start, length) in enumerate(zip(chunk.starts.tolist(), pieces, strict=True)):
            assert start % block_size == 0 and length >= 0
            seen[request] += range(start, start + length)
    assert seen == [list(range(length)) for length in context_lens]
    busy = [n for n in context_lens if n]
    if busy:  # even: as many chunks as the longest context needs at an equal share
        blocks = workspace // (len(busy) * block_size)
        assert len(chunks) == -(-max(busy) // (blocks * block_size))
    else:
        assert chunks == ()


@given(
    st.lists(st.sampled_from([0, 1, 15, 16, 17, 31, 97, 200]), max_size=6),
    st.sampled_from([1, 3, 16]),
    st.integers(0, 90),
    WINGS,
)
def test_context_chunks(context_lens, block_size, extra, ops):
    """Property: whatever the partition, nothing is lost and nothing is read twice."""
    check_chunks(ops, context_lens, max(1, sum(n > 0 for n in context_lens)) * block_size + extra, block_size)


def test_one_request_takes_the_whole_workspace(ops):
    check_chunks(ops, [60_000], 8192, 64)
    check_chunks(ops, [0, 60_000, 0], 8192, 64)


def same(ours, theirs, name="metadata"):
    """Equal dataclasses, tensors bit by bit and in dtype."""
    if isinstance(ours, Tensor):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(ours, theirs), name
    elif dataclasses.is_dataclass(ours):
        assert type(ours) is type(theirs), name
        for field in dataclasses.fields(ours):
            same(getattr(ours, field.name), getattr(theirs, field.name), f"{name}.{field.name}")
    elif isinstance(ours, tuple):
        assert len(ours) == len(theirs), name
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            same(*pair, f"{name}[{index}]")
    else:
        assert ours == theirs and type(ours) is type(theirs), name


def check_plan(ops, query_lens, seq_lens, block_size, workspace, threshold):
    """Pitfall 12: row by row, a decode sees the keys up to and with itself, and never past its sequence."""
    batch = make_batch(query_lens, seq_lens, block_size, padding=2)
    plan = ops.build_mla_metadata(batch.common, block_size, workspace, threshold)
    decodes, prefills, decode_tokens, _ = brute_split(query_lens, threshold, False)
    assert (plan.num_decodes, plan.num_prefills, plan.num_decode_tokens) == (decodes, prefills, decode_tokens)
    assert plan.num_actual_tokens == batch.num_tokens and plan.slot_mapping is batch.common.slot_mapping
    visible = []
    for query_len, length in zip(query_lens[:decodes], seq_lens[:decodes], strict=True):
        positions = range(length)[length - query_len :] if length else [-1] * query_len
        visible += [position + 1 for position in positions]  # positions up to and with its own
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
    """Both wings against brute force, and every field of one against the other."""
    query_lens, seq_lens = lens
    workspace = max(1, len(query_lens)) * block_size + extra
    common = make_batch(query_lens, seq_lens, block_size).common
    decodes = reference.split_decodes_and_prefills(common, threshold)[0]
    if any(new > 0 and length == 0 for new, length in zip(query_lens[decodes:], seq_lens[decodes:], strict=True)):
        for ops in (reference, fast):  # padding computed as a prefill would not come out as zero
            with pytest.raises(ValueError, match="^seq_lens: expected padding rows among the decodes only"):
                ops.build_mla_metadata(common, block_size, workspace, threshold)
        return
    plans = []
    for ops in (reference, fast):
        torch.manual_seed(0)
        plans.append(check_plan(ops, query_lens, seq_lens, block_size, workspace, threshold))
    same(*plans)


@given(batches(), st.sampled_from([2, 16]), st.integers(0, 60), st.booleans())
def test_planners_agree(lens, block_size, extra, uniform):
    """Tier 1, the planners one by one."""
    query_lens, seq_lens = lens
    common = make_batch(query_lens, seq_lens, block_size).common
    for threshold in (1, 3):
        same(*(ops.split_decodes_and_prefills(common, threshold, uniform) for ops in (reference, fast)))
    context, workspace = common.num_computed_tokens_cpu, max(1, len(query_lens)) * block_size + extra
    same(*(ops.plan_context_chunks(context, workspace, block_size) for ops in (reference, fast)))
    arguments = (common.query_start_loc, common.seq_lens, common.block_table, block_size, sum(query_lens) + 2)
    same(*(ops.slot_mapping(*arguments) for ops in (reference, fast)))


def test_graph_padding_rows_are_inert(ops):
    """Pitfalls 6 and 16: rows added after planning began still get seq_len 0, slot -1 and see nothing."""
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
    """`make` and the plain constructor agree on the derived fields."""
    assume(sum(query_lens) < 30)
    common = make_batch(query_lens, [q + 3 for q in query_lens]).common
    again = CommonAttentionMetadata(
        common.seq_lens, common.query_start_loc, common.seq_lens_cpu, common.query_start_loc_cpu, common.block_table,
        common.slot_mapping, max(query_lens), sum(query_lens),
    )  # fmt: skip
    same(common, again)


@pytest.mark.parametrize("wing", ["reference", "fast"])
def test_planning_does_not_write_its_input(wing):
    ops = {"reference": reference, "fast": fast}[wing]
    common = make_batch((1, 4, 9), (17, 40, 9)).common
    before = [t.clone() for t in (common.seq_lens, common.query_start_loc, common.block_table, common.slot_mapping)]
    ops.build_mla_metadata(common, 16, 64)
    after = (common.seq_lens, common.query_start_loc, common.block_table, common.slot_mapping)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
