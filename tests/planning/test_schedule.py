"""Tests of context chunks and decode schedules, which must be right, and equal in both packages.

A decode schedule assigns the keys of all requests, in tiles of 64 keys, to the programs of the decode kernel. The
planner places the requests one after another on a *time line*. One unit of the line is the time of one tile. The line
is divided into *segments* of equal length, one for each program. Without batch invariance there are two kinds of
schedules:

- *Balanced*: a program gets the tiles that start in its segment. The start of a request takes `overhead`
  further units.
- *Whole parts*: a program gets the parts that start in its segment. A part is a whole request, or one of the equal
  parts of a long request. The start of a part takes `overhead` further units.

The tiles that a program gets of one request are a *split*. A combine kernel adds the partial outputs of the splits. In
a *batch-invariant* schedule, the splits of a request depend on its own length only (`InvariantSplitRule`).
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast.kernels.schedule_costs import measured_schedule_costs
from reference.interfaces import InvariantSplitRule, ScheduleCosts, invariant_split_tiles, most_invariant_splits

from ..support.even_chunks import even_chunks
from ..support.factories import integers
from ..support.planning import PACKAGES, same
from ..support.properties import given, st

CONTEXTS = st.lists(st.sampled_from([0, 1, 15, 16, 17, 31, 97, 200]), max_size=6)


def check_chunks(ops, context_lens, workspace, block_size, ranks=1, interleave=1):
    """Plan context chunks, assert their properties, and return the chunks.

    Contexts are divided at multiples of a *chunk unit*. With one rank, the chunk unit is `block_size` tokens. With
    several ranks, it is the least common multiple of `block_size` and `ranks` x `interleave`.

    - Every context token is in exactly one chunk.
    - The tokens of a request in a chunk start at a multiple of the chunk unit.
    - No chunk exceeds the workspace.
    - All chunks except the last chunk are full.
    """
    unit = block_size if ranks == 1 else math.lcm(block_size, ranks * interleave)
    chunks = ops.plan_context_chunks(integers(*context_lens).cpu(), workspace, block_size, ranks, interleave)
    seen = [[] for _ in context_lens]
    for number, chunk in enumerate(chunks):
        lengths = chunk.cu_seq_lens.diff().tolist()
        assert chunk.starts.dtype == chunk.cu_seq_lens.dtype == torch.int32
        assert chunk.cu_seq_lens[0] == 0 and chunk.cu_seq_lens[-1] == chunk.num_tokens == sum(lengths)
        assert 0 < chunk.num_tokens <= workspace and chunk.max_seq_len == max(lengths)
        assert sum(-(-length // unit) for length in lengths) <= workspace // unit, "the units exceed the workspace"
        present = [request for request, length in enumerate(lengths) if length]
        for request, (start, length) in enumerate(zip(chunk.starts.tolist(), lengths, strict=True)):
            assert start % unit == 0 and length >= 0 and (length or start == 0)
            if start:
                assert request == present[0] and seen[request], "only the first request of a chunk may continue"
            seen[request] += range(start, start + length)
        if number + 1 < len(chunks):
            assert sum(-(-length // unit) for length in lengths) == workspace // unit, (
                "a chunk before the last chunk is not full"
            )
    assert seen == [list(range(length)) for length in context_lens]
    assert len(chunks) == -(-sum(-(-length // unit) for length in context_lens) // (workspace // unit))
    return chunks


@given(CONTEXTS, st.sampled_from([1, 3, 16]), st.integers(0, 90), PACKAGES)
def test_context_chunks(context_lens, block_size, extra, ops):
    """For any block size and any workspace, each context token is in exactly one chunk."""
    check_chunks(ops, context_lens, block_size + extra, block_size)


@given(
    CONTEXTS, st.sampled_from([1, 3, 16]), st.sampled_from([2, 3, 4]), st.sampled_from([1, 2, 16, 64]),
    st.integers(0, 90), PACKAGES,
)  # fmt: skip
def test_context_chunks_of_ranks(context_lens, block_size, ranks, interleave, extra, ops):
    """For any block size, any number of ranks D and any interleave I, chunks start at multiples of D x I tokens.

    This is pitfall 10 of the list in `tests/__init__.py`.
    """
    unit = math.lcm(block_size, ranks * interleave)
    check_chunks(ops, context_lens, unit + extra, block_size, ranks, interleave)


@given(CONTEXTS, st.sampled_from([1, 3, 16]), st.integers(0, 90), st.sampled_from([(1, 1), (1, 64), (3, 16), (4, 1)]))
def test_chunk_planners_agree(context_lens, block_size, extra, ranks):
    """Both packages give the same chunks, and never more chunks than the simpler `even_chunks`."""
    unit = block_size if ranks[0] == 1 else math.lcm(block_size, math.prod(ranks))
    workspace = max(1, sum(n > 0 for n in context_lens)) * unit + extra
    ours, theirs = (
        ops.plan_context_chunks(integers(*context_lens).cpu(), workspace, block_size, *ranks)
        for ops in (reference, fast)
    )
    same(ours, theirs)
    assert len(ours) <= len(even_chunks(context_lens, workspace, block_size, *ranks))


def test_one_request_takes_the_whole_workspace(ops):
    check_chunks(ops, [60_000], 8192, 64)
    check_chunks(ops, [0, 60_000, 0], 8192, 64)


def test_one_long_context_among_short_ones(ops):
    """A long context among short contexts fits into one chunk if the workspace is large enough (pitfall 11).

    `even_chunks` gives all requests the same part of the workspace, so it needs 30 chunks of 2048 tokens for the long
    context.
    """
    contexts = [60_000] + 31 * [16]
    assert len(even_chunks(contexts, 65536, 16)) == 30
    assert len(check_chunks(ops, contexts, 65536, 16)) == 1
    assert len(check_chunks(ops, contexts, 65536, 128)) == 1
    assert len(check_chunks(ops, contexts, 60_000, 16)) == 2


def test_chunk_refusals(ops, plain_errors):
    """A workspace of 2^31 tokens, a workspace below one chunk unit and a negative length are refused.

    The largest int32 length is planned without overflow.
    """
    with pytest.raises(ValueError, match="^workspace_tokens: expected less than 2.31, got 2147483648$"):
        ops.plan_context_chunks(integers(5).cpu(), 2**31, 64)
    with pytest.raises(ValueError, match="^context_lens: expected lengths >= 0, got -1 at request 1$"):
        ops.plan_context_chunks(integers(3, -1, -5).cpu(), 640, 64)
    with pytest.raises(ValueError, match="^workspace_tokens: expected at least one unit of 128 tokens, got 127$"):
        ops.plan_context_chunks(integers(3).cpu(), 127, 64, 2, 64)
    largest = ops.plan_context_chunks(integers(2**31 - 1).cpu(), 2**31 - 1, 64)
    assert [chunk.num_tokens for chunk in largest] == [2**31 - 64, 63]


# Tests of decode schedules.

RAGGED = st.lists(st.sampled_from([0, 0, 1, 63, 64, 65, 130, 700, 1500, 9000, 20_000, 70_000]), max_size=8)
SIMILAR = st.integers(1, 9000).flatmap(lambda most: st.lists(st.integers(most - most // 10, most), max_size=40))
EQUAL = st.builds(lambda length, requests: [length] * requests, st.integers(1, 9000), st.integers(1, 40))
LENS = st.one_of(RAGGED, SIMILAR, EQUAL)
PROGRAMS = st.sampled_from([1, 2, 3, 7, 33, 132])


def tiles_of(lens):
    return [-(-length // 64) for length in lens]


def taken_by(schedule, lens):
    """Return, for each program, its tiles as [(request, tile), ...] and the number of its first split."""
    tiles, found = tiles_of(lens), []
    for first, last, first_tile, last_tile, split in schedule.tile_ranges.tolist():
        if last < first:
            assert (first, last, first_tile, last_tile, split) == (len(lens), len(lens) - 1, 0, 0, 0)
        own = []
        for request in range(first, last + 1):
            start = first_tile if request == first else 0
            end = last_tile if request == last else tiles[request]
            own += [(request, tile) for tile in range(start, end)]
        assert bool(own) == (last >= first), "a program with a range of requests has no tile"
        found.append((own, split))
    return found


def check_schedule(ops, lens, programs, overhead, per_tile=8):
    """Assert the properties of a schedule.

    - Each tile occurs once and in order.
    - No program takes longer than the bound of a balanced schedule. The bound is the sum of three times: one segment,
      the start of one request, and the combination of the largest number of splits that a request has. `per_tile`
      splits are combined in one unit.
    - The programs of a request have the split numbers 0, 1, 2 and so on.
    - There are fewer splits than (number of programs + number of requests). Decode launchers rely on this limit when
      they allocate partial outputs.
    - Each program has the tiles that `line_of_units` gives.
    """
    costs = ScheduleCosts(request_cost=overhead, splits_per_tile=per_tile)
    schedule = ops.plan_decode(integers(*lens), programs, costs)
    assert schedule.tile_ranges.dtype == schedule.split_offsets.dtype == torch.int32
    assert schedule.tile_ranges.shape == (programs, 5) and not schedule.batch_invariant
    tiles, ranges = tiles_of(lens), taken_by(schedule, lens)
    everything = [(request, tile) for request, count in enumerate(tiles) for tile in range(count)]
    assert [item for own, _ in ranges for item in own] == everything
    assert [own for own, _ in ranges] == line_of_units(tiles, programs, overhead, per_tile)[0]
    length = sum(count + overhead for count in tiles if count)
    per_program = max(1, -(-length // programs))
    parts = [0] * len(lens)
    most_splits = -(-max(max(tiles, default=0) - 1, 0) // per_program) + 1
    for own, split in ranges:
        requests = list(dict.fromkeys(request for request, _ in own))
        assert (len(own) + overhead * len(requests)) * per_tile <= (per_program + overhead) * per_tile + most_splits
        if own:
            assert split == parts[requests[0]]
        for request in requests:
            parts[request] += 1
    assert schedule.split_offsets.tolist() == [sum(parts[:request]) for request in range(len(lens) + 1)]
    assert all((count == 0) == (length == 0) for count, length in zip(parts, lens, strict=True))
    assert schedule.split_offsets[-1] <= max(0, programs + len(lens) - 1)
    return schedule


def line_of_units(tiles, programs, overhead, per_tile=8):
    """Return the tiles [(request, tile), ...] of each program, and whether the schedule consists of whole parts.

    The time lines are lists with one entry for each unit. In `balanced`, an entry is one tile, or None for the start of
    a request. In `whole`, the first entry of a part has all tiles of the part, and the other entries of the part are
    None. A program takes the entries of its segment.
    """
    total = sum(tiles)
    balanced, whole, part_lengths, most_parts = [], [], [], 0
    for request, count in enumerate(tiles):
        if count == 0:
            continue
        balanced += [None] * overhead + [[(request, tile)] for tile in range(count)]
        least = next(size for size in itertools.count(1) if size * size * per_tile >= count)
        size = max(least + (least % 2 if least > 1 else 0), math.ceil(count / max(1, programs * count // total)))
        most_parts = max(most_parts, math.ceil(count / size))
        part_lengths.append(size + overhead)
        for first in range(0, count, size):
            whole.append([(request, tile) for tile in range(first, min(first + size, count))])
            whole += [None] * (size + overhead - 1)
    per_program, whole_per_program = (max(1, math.ceil(len(line) / programs)) for line in (balanced, whole))
    shortest, longest = min(part_lengths, default=1), max(part_lengths, default=0)
    bound = min(whole_per_program - 1 + longest, longest * math.ceil(whole_per_program / shortest))
    most_splits = math.ceil(max(max(tiles, default=0) - 1, 0) / per_program) + 1
    takes_whole = bound * per_tile + most_parts <= (per_program + overhead) * per_tile + most_splits
    line, size = (whole, whole_per_program) if takes_whole else (balanced, per_program)
    segments = [line[program * size : (program + 1) * size] for program in range(programs)]
    return [[tile for entry in segment if entry for tile in entry] for segment in segments], takes_whole


@given(LENS, PROGRAMS, st.sampled_from([0, 1, 5, 20]), st.sampled_from([1, 3, 10, 1000]), PACKAGES)
def test_schedule(lens, programs, overhead, per_tile, ops):
    check_schedule(ops, lens, programs, overhead, per_tile)


@given(st.integers(1, 200), st.integers(2, 60), st.integers(1, 59), st.sampled_from([0, 1, 5, 8, 20]), PACKAGES)
def test_equal_lengths_of_many_requests(tiles, requests, programs, overhead, ops):
    """If there are more requests of one length than programs, a schedule of whole parts splits no request."""
    programs = min(programs, requests - 1)
    schedule = check_schedule(ops, requests * [64 * tiles], programs, overhead)
    if line_of_units(requests * [tiles], programs, overhead)[1]:
        assert schedule.split_offsets.tolist() == list(range(requests + 1))
        counts = [last - first + 1 for first, last, *_ in schedule.tile_ranges.tolist()]
        assert max(counts) == -(-requests // programs)


@given(LENS, PROGRAMS, st.sampled_from([0, 1, 5]), st.sampled_from([1, 64, 128]), st.booleans())
def test_decode_planners_agree(lens, programs, overhead, heads, batch_invariant):
    costs = replace(measured_schedule_costs(heads), request_cost=overhead)
    same(*(ops.plan_decode(integers(*lens), programs, costs, batch_invariant) for ops in (reference, fast)))


@pytest.mark.parametrize("heads", [16, 17])
def test_planners_agree_on_long_requests(heads):
    """Both packages give the same batch-invariant schedule for lengths that take every branch of the split rule."""
    lens = integers(8193, 17_000, 70_000, 140_000)
    same(*(ops.plan_decode(lens, 33, measured_schedule_costs(heads), True) for ops in (reference, fast)))


def test_costs_decide_where_programs_begin():
    """By default, `plan_decode` uses `ScheduleCosts()`; with another `request_cost`, programs begin at other tiles."""
    lens = integers(700, 64, 3000, 129)
    for ops in (reference, fast):
        neutral, given_them, none = (
            ops.plan_decode(lens, 7, costs) for costs in (None, ScheduleCosts(), ScheduleCosts(request_cost=0))
        )
        same(neutral, given_them)
        assert neutral.tile_ranges.tolist() != none.tile_ranges.tolist()


def test_measured_schedule_costs_by_heads():
    """The measured costs of `fast` have the expected constants for each number of heads."""
    few, some, many = (
        InvariantSplitRule(4, 32, 16, 128),
        InvariantSplitRule(16, 8, 32, 64),
        InvariantSplitRule(16, 8, 32, 64),
    )
    wanted = {1: (5, 1, few), 16: (5, 1, few), 17: (5, 4, some), 32: (5, 4, some), 33: (8, 4, many), 128: (8, 4, many)}
    for heads, (request_cost, split_cost, cut) in wanted.items():
        per_tile = 64 if heads <= 32 else 10
        assert measured_schedule_costs(heads) == ScheduleCosts(request_cost, split_cost, cut, 4, per_tile)
        if heads <= 16:  # over a cache in e4m3, a further split costs more, so the rule gives fewer splits
            split_cost, cut = 6, InvariantSplitRule(8, 16, 16, 128)
        assert measured_schedule_costs(heads, True) == ScheduleCosts(request_cost, split_cost, cut, 4, per_tile)


@pytest.mark.parametrize("heads, each, sizes", [(16, 1, (10, 4, 4)), (17, 4, (32, 16, 16))])
def test_splits_cost_a_part_of_a_request(heads, each, sizes, ops):
    """In a batch-invariant schedule, the measured costs decide at which split each program begins.

    A split takes `each` units and one unit for each tile. The first split of a request takes 5 - `each` more units.
    For each of the three requests, `sizes` has the number of tiles of a split.
    """
    tiles, starts, place = (300, 40, 100), [], 0
    for request, (count, size) in enumerate(zip(tiles, sizes, strict=True)):
        place += 5 - each
        for tile in range(0, count, size):
            starts.append((place, request, tile))
            place += each + min(size, count - tile)
    for programs in range(1, 12):
        per_program = -(-place // programs)
        firsts = [next(s for s in starts if s[0] // per_program == p)[1:] for p in range(programs)]
        lens = integers(*(64 * count for count in tiles))
        ranges = ops.plan_decode(lens, programs, measured_schedule_costs(heads), True).tile_ranges
        assert [(first, tile) for first, _, tile, _, _ in ranges.tolist()] == firsts


@pytest.mark.parametrize("heads, tiles, size", [
    (128, 17, 16), (128, 128, 16), (128, 200, 26), (128, 256, 32), (128, 1024, 32), (128, 2048, 32), (17, 4096, 64),
    (1, 3, 4), (16, 128, 4), (16, 200, 8), (16, 512, 16), (16, 2048, 16), (16, 4096, 32), (16, 4097, 34),
])  # fmt: skip
def test_batch_invariant_split_rule(heads, tiles, size):
    assert invariant_split_tiles(tiles, measured_schedule_costs(heads).split_rule) == size


@pytest.mark.parametrize("tiles, size", [(3, 8), (64, 8), (128, 8), (200, 14), (256, 16), (512, 16), (2048, 16)])
def test_batch_invariant_split_rule_of_few_heads_in_e4m3(tiles, size):
    assert invariant_split_tiles(tiles, measured_schedule_costs(16, True).split_rule) == size
    larger = measured_schedule_costs(17).split_rule  # with more heads, the format does not change the rule
    assert measured_schedule_costs(17, True).split_rule == larger


@pytest.mark.parametrize("heads, e4m3", [(16, False), (16, True), (17, False)])
def test_most_batch_invariant_splits(heads, e4m3):
    """`most_invariant_splits(tiles)` is the largest number of splits of any request with at most `tiles` tiles."""
    most, split_rule = 1, measured_schedule_costs(heads, e4m3).split_rule
    for tiles in range(1, 4200):
        most = max(most, -(-tiles // invariant_split_tiles(tiles, split_rule)))
        assert most_invariant_splits(tiles, split_rule) == most
    assert most == split_rule.max_splits


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 20), st.integers(0, 60), st.integers(0, 3000))
def test_buffers_hold_the_splits_of_any_cut(small_pairs, small_splits, more_pairs, more_splits, tiles):
    """For any `InvariantSplitRule`, no request of at most `tiles` tiles has more than `most_invariant_splits` splits.

    Launchers allocate buffers for `most_invariant_splits(tiles)` splits of a request.
    """
    cut = InvariantSplitRule(2 * small_pairs, small_splits, 2 * (small_pairs + more_pairs), small_splits + more_splits)
    ScheduleCosts(split_rule=cut)  # the constructor accepts the rule
    bound = most_invariant_splits(tiles, cut)
    for count in {*range(max(0, tiles - 40), tiles + 1), *range(0, tiles, 7)}:
        assert -(-count // invariant_split_tiles(count, cut)) <= bound


@given(LENS, PROGRAMS, st.sampled_from([0, 5]), st.sampled_from([16, 128]), PACKAGES)
def test_batch_invariant_schedule(lens, programs, overhead, heads, ops):
    """In a batch-invariant schedule, the splits of a request depend only on the length of this request.

    Each tile occurs once, and every program processes whole splits.
    """
    costs = replace(measured_schedule_costs(heads), request_cost=overhead)
    schedule = ops.plan_decode(integers(*lens), programs, costs, True)
    assert schedule.split_rule == costs.split_rule  # the kernel reads the rule from the schedule
    tiles, ranges = tiles_of(lens), taken_by(schedule, lens)
    everything = [(request, tile) for request, count in enumerate(tiles) for tile in range(count)]
    assert [item for own, _ in ranges for item in own] == everything and schedule.batch_invariant
    least, even, size, most = (4, 32, 16, 128) if heads <= 16 else (16, 8, 32, 64)
    sizes = [max(least, min(size, math.ceil(count / even)), math.ceil(count / most)) for count in tiles]
    sizes = [size + size % 2 for size in sizes]
    parts = [math.ceil(count / size) for count, size in zip(tiles, sizes, strict=True)]
    assert max(parts, default=0) <= most
    assert schedule.split_offsets.tolist() == [sum(parts[:request]) for request in range(len(lens) + 1)]
    each = min(overhead, 1 if heads <= 16 else 4)
    length = sum(count + each * own + (overhead - each) * (own > 0) for count, own in zip(tiles, parts, strict=True))
    per_program = max(1, -(-length // programs))
    for own, split in ranges:
        if own:
            (request, tile), (last, last_tile) = own[0], own[-1]
            assert tile % sizes[request] == 0 and split == tile // sizes[request]
            assert (last_tile + 1) % sizes[last] == 0 or last_tile + 1 == tiles[last]
            # a program's splits start in its segment; the last split can end behind the segment
            last_split = last_tile - last_tile // sizes[last] * sizes[last] + 1
            splits = {(request, tile // sizes[request]) for request, tile in own}
            begun = {request for request, tile in own[1:] if tile == 0}
            carried = len(own) + each * len(splits) + (overhead - each) * len(begun)
            assert carried <= per_program - 1 + each + last_split
    for request, length in enumerate(lens):
        alone = ops.plan_decode(integers(length), 3, costs, True)
        assert alone.split_offsets.tolist() == [0, parts[request]]


def test_schedule_of_nothing(ops):
    for lens in ((), (0,), (0, 0, 0)):
        for batch_invariant in (False, True):
            schedule = ops.plan_decode(integers(*lens), 3, batch_invariant=batch_invariant)
            assert schedule.tile_ranges.tolist() == [[len(lens), len(lens) - 1, 0, 0, 0]] * 3
            assert schedule.split_offsets.tolist() == [0] * (len(lens) + 1)


@pytest.mark.parametrize("lens", [(64 * 10, 64 * 10), (64 * 25,), (64 * 3, 64 * 3, 64 * 30)])
def test_schedule_by_hand(lens, ops):
    """With two programs, and 2 units for the start of a request, schedules equal those that were computed by hand.

    1. 10 and 10 tiles: each request is a whole part of 12 units, and each program gets one request.
    2. 25 tiles: the request has two parts of at most 13 tiles. A program takes at most 15 units. In a balanced schedule
       it could take 16 units: a segment of ceil((25 + 2) / 2) = 14 units, and one start. So the schedule has whole
       parts.
    3. 3, 3 and 30 tiles: the whole parts have 5, 5 and 32 units, and a segment has 21 units. With whole parts, a
       program could take 21 - 1 + 32 units. A balanced schedule takes at most 21 + 2, so the schedule is balanced.
    """
    expected = {
        (640, 640): [[0, 0, 0, 10, 0], [1, 1, 0, 10, 0]],
        (1600,): [[0, 0, 0, 13, 0], [0, 0, 13, 25, 1]],
        (192, 192, 1920): [[0, 2, 0, 9, 0], [2, 2, 9, 30, 1]],
    }
    schedule = ops.plan_decode(integers(*lens), 2, ScheduleCosts(request_cost=2))
    assert schedule.tile_ranges.tolist() == expected[lens]


@pytest.mark.parametrize(
    "tiles, requests, overhead, segment, counts", [(16, 256, 8, 94, {3, 4}), (64, 128, 8, 140, {1, 2})]
)
def test_whole_requests_by_hand(tiles, requests, overhead, segment, counts, ops):
    """If there are more requests of one length than programs, a program gets the requests that start in its segment.

    With 66 programs and 8 units for each start, a segment has ceil(256 * (16 + 8) / 66) = 94 units, or
    ceil(128 * (64 + 8) / 66) = 140 units.
    """
    schedule = check_schedule(ops, requests * [64 * tiles], 66, overhead)
    starts = [min(-(-program * segment // (tiles + overhead)), requests) for program in range(67)]
    expected = [
        [first, end - 1, 0, tiles, 0] if first < end else [requests, requests - 1, 0, 0, 0]
        for first, end in itertools.pairwise(starts)
    ]
    assert schedule.tile_ranges.tolist() == expected
    assert {end - first for first, end in itertools.pairwise(starts[:-1])} == counts  # the last program can get fewer
    assert schedule.split_offsets.tolist() == list(range(requests + 1))


@pytest.mark.parametrize(
    "tiles, requests, programs, overhead, size",
    [(64, 16, 66, 8, 16), (128, 1, 66, 8, 4), (64, 16, 132, 5, 8), (64, 1, 66, 5, 4), (1, 1, 9, 5, 1)],
)
def test_equal_parts_by_hand(tiles, requests, programs, overhead, size, ops):
    """If there are fewer requests of one length than programs, all parts are equal; a program gets at most one part.

    The combine kernel adds 8 splits in one unit. For a request of t tiles, parts of less than sqrt(t / 8) tiles would
    save less time than their combination takes. So a part of a request of 128 tiles has at least sqrt(128 / 8) = 4
    tiles. A part of a request of 64 tiles has at least sqrt(64 / 8) tiles, rounded up to an even number: 4 tiles.
    """
    schedule = check_schedule(ops, requests * [64 * tiles], programs, overhead)
    parts = math.ceil(tiles / size)
    expected = [
        [r, r, size * part, min(size * (part + 1), tiles), part] for r in range(requests) for part in range(parts)
    ]
    assert [row for row in schedule.tile_ranges.tolist() if row[0] < requests] == expected
    assert schedule.split_offsets.tolist() == list(range(0, requests * parts + 1, parts))


@pytest.mark.parametrize(
    "tiles, requests, programs, overhead", [(16, 256, 66, 8), (64, 128, 66, 8), (256, 8, 66, 8), (64, 16, 132, 5)]
)
def test_similar_lengths_take_whole_parts(tiles, requests, programs, overhead, ops):
    """For lengths that differ by at most 2 %, the schedule has whole parts, and as many splits as for equal lengths."""
    draw = random.Random(tiles)
    lens = [draw.randint(64 * tiles * 98 // 100, 64 * tiles) for _ in range(requests)]
    schedule = check_schedule(ops, lens, programs, overhead)
    equal = ops.plan_decode(integers(*(requests * [64 * tiles])), programs, ScheduleCosts(request_cost=overhead))
    assert line_of_units(tiles_of(lens), programs, overhead)[1]
    assert schedule.split_offsets.equal(equal.split_offsets)


@pytest.mark.parametrize("tiles, splits", [(16, 16), (128, 32)])
def test_combination_decides(tiles, splits, ops):
    """The time to combine the splits decides between a balanced schedule and whole parts.

    There are 66 programs, the start of a request takes 8 units, and the combine kernel adds 10 splits in one unit. The
    planner compares upper bounds of the times of both schedules, in tenths of a unit: 10 for each unit, and 1 for each
    split.

    - 16 tiles: with 8 whole parts of 2 tiles, a program takes 2 + 8 units, and 8 splits are combined: 108 tenths. In a
      balanced schedule, it takes 1 + 8 units, and 16 splits are combined: 106 tenths. So the schedule is balanced.
    - 128 tiles: with 32 whole parts of 4 tiles, a program takes 4 + 8 units, and 32 splits are combined: 152 tenths. In
      a balanced schedule, it takes 3 + 8 units, and at most 44 splits are combined: 154 tenths. So the schedule
      consists of whole parts.
    """
    assert check_schedule(ops, [64 * tiles], 66, 8, 10).split_offsets.tolist() == [0, splits]


def test_consecutive_parts_are_one_split(ops):
    """A program that gets several consecutive parts of a request has one split of this request.

    There are 10 programs, the start of a request takes 20 units, and all requests except the first have 1 tile.

    - A request of 5 tiles and 17 other requests: the parts of the first request have 3 and 2 tiles and start at the
      units 0 and 23. A segment has ceil((2 * 23 + 17 * 21) / 10) = 41 units, so program 0 gets both parts.
    - A request of 7 tiles and 15 other requests: the parts of the first request start at the units 0, 23 and 46. A
      segment has ceil((3 * 23 + 15 * 21) / 10) = 39 units, so program 0 gets two parts, and program 1 the third part.
    """
    for first_tiles, others, ranges in (
        (5, 17, [[0, 0, 0, 5, 0], [1, 2, 0, 1, 0]]), (7, 15, [[0, 0, 0, 6, 0], [0, 1, 6, 1, 1]])
    ):  # fmt: skip
        schedule = check_schedule(ops, [64 * first_tiles] + others * [64], 10, 20)
        assert schedule.tile_ranges[:2].tolist() == ranges
        assert schedule.split_offsets[1] == ranges[1][4] + 1
        assert schedule.split_offsets.diff()[1:].eq(1).all()


def test_huge_lengths():
    """`plan_decode` of `fast` is right if programs x tiles exceeds 32 bits.

    The expected ranges are written by hand, because `reference` would make lists of 2^26 entries.
    """
    programs = 4096
    schedule = fast.plan_decode(integers(2**31 - 1, 2**31 - 1), programs)
    size = 2**26 // programs
    expected = [[r, r, size * part, size * (part + 1), part] for r in range(2) for part in range(programs // 2)]
    assert schedule.tile_ranges.tolist() == expected
