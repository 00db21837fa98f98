"""Tests of the Triton decode with a schedule: partial outputs, the combine kernel, and batch invariance.

A schedule divides the keys of each request into splits and assigns them to programs. Each split gives a partial output
and its LSE. The combine kernel adds the partial outputs of a request with softmax weights. In a batch-invariant decode,
the other requests of the batch change no bit of a request. A decode is *planned* if its schedule has the work items of
each program (`tile_ranges`).

On a GPU the kernels are compiled and have the widths of real models. Without a GPU, one test runs this file again in
Triton's interpreter, with small widths. "Pitfall 19" is entry 19 of the list in `tests/__init__.py`. `verdict` asserts
that a result is within the budget, the largest error that docs/correctness.md allows.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast.kernels.schedule_costs import measured_schedule_costs
from reference.interfaces import DecodeSchedule, InvariantSplitRule, ScheduleCosts

from ...support.decode_inputs import rising_inputs, schedule_of, verdict
from ...support.factories import assert_same_bits, integers, offsets
from ...support.triton_decode_inputs import DTYPES, NARROW, WIDTH, WIDTHS, launch, make_inputs
from ...support.triton_mode import DEVICE, INTERPRETED, ON_GPU, run_in_interpreter, runs, starts_interpreter

if ON_GPU or INTERPRETED:
    from fast.kernels.combine import launch as combine_launch
    from fast.kernels.triton import decode


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


def combined_in_float64(largest, totals, values):
    """Combine partial outputs in float64; return output, LSE, error bound of the output, and error bound of the LSE.

    An error bound is the largest error that rounding in float32 can cause.

    Args:
        largest: [splits, rows], largest score of a row in a split, in base 2.
        totals: [splits, rows], sum of exp2(score - largest).
        values: [splits, rows, latent], sum of exp2(score - largest) x latent.
    """
    splits = largest.shape[0]
    if splits == 0:
        empty = torch.zeros(values.shape[1:], dtype=torch.float64)
        return empty, torch.full_like(empty[:, 0], -torch.inf), empty, empty[:, 0]
    highest = largest.double().amax(0)
    weights = torch.exp2(largest.double() - highest)
    total = (totals * weights).sum(0)
    out, most = (((part.double() * weights[:, :, None]).sum(0) / total[:, None]) for part in (values, values.abs()))
    lse = (highest + total.log2()) * math.log(2)
    rounded = (splits + 16) * 2.0**-24  # upper bound of the relative rounding error, with exp2 and division
    return out, lse, rounded * most, rounded * (1 + lse.abs())


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "requests, heads, splits",
    [
        (1, 4, 3),
        (1, 4, 20),
        (1, 4, 140),
        (2, 4, 3),
        (2, 4, 7),
        (2, 4, 16),
        (2, 4, 20),
        (2, 4, 140),
        (1, 128, 3),
        (1, 128, 20),
        (1, 128, 70),
        (2, 64, 4),
    ],
)
def test_many_parts(requests, heads, splits, dtype):
    """The combine kernel agrees with float64 for few and many rows, even if it cannot load all splits at once.

    `dtype` is the dtype of the partial outputs. The sums are in float32 in both cases.
    """
    latent, rows = 40, requests * heads
    values = torch.randn(splits, rows, latent).to(dtype)
    largest, totals = 5 * torch.randn(splits, rows), torch.rand(splits, rows) + 0.5
    values[1], largest[1], totals[1] = 0, -torch.inf, 0  # a split without keys
    out, lse = torch.empty(requests, heads, latent, device=DEVICE), torch.empty(heads, requests, device=DEVICE)
    parts = values.flatten().to(DEVICE), torch.stack((largest, totals)).flatten().to(DEVICE)
    combine_launch.combine_partial_outputs(*parts, offsets([1] * requests).to(DEVICE), 1, None, None, False, out, lse)
    wanted, wanted_lse, bound, lse_bound = combined_in_float64(largest, totals, values)
    assert ((out.flatten(0, 1).cpu() - wanted).abs() <= bound).all()
    assert ((lse.T.flatten().cpu() - wanted_lse).abs() <= lse_bound).all()


MANY = [1] * 1100  # splits of each request; the combine kernel reads 256 of these counts at a time
MANY[3], MANY[255], MANY[256], MANY[700], MANY[1099] = 2, 3, 0, 2, 4  # requests with several splits, or with none
PLANNED_SPLITS = {  # heads, splits of each request
    "none is split": (3, [1] * 5), "one is split": (64, [1, 1, 3, 1]), "all are split": (3, [2, 5, 3, 2, 4, 2, 2]),
    "some have no keys": (3, [0, 2, 1, 0, 0, 3, 0]), "none has keys": (3, [0, 0, 0]), "one request": (3, [20]),
    "many rows": (64, [1, 0, 3, 0, 1, 1, 0, 2]), "some splits": (3, [15, 1, 9]), "many splits": (3, [40, 1, 90]),
    "the first and the last": (2, [2, 1, 1, 1, 1, 2]), "more than a chunk": (3, MANY),
}  # fmt: skip


@runs
@pytest.mark.parametrize("processors", [1, 3, None])
@pytest.mark.parametrize("heads, splits", PLANNED_SPLITS.values(), ids=PLANNED_SPLITS)
def test_what_a_schedule_splits_is_combined(heads, splits, processors, monkeypatch):
    """The combine kernel writes the rows of requests that have several splits or no split, and writes no other row.

    Some requests have no query tokens, and the last tokens belong to no request. Partial outputs that the kernel must
    not read are NaN. `processors` limits the number of programs. The results are compared with float64.
    """
    if processors is not None:  # fewer programs than tiles of the output
        facts = combine_launch.device_facts(DEVICE)._replace(processors=processors)
        monkeypatch.setattr(combine_launch, "device_facts", lambda _: facts)
        monkeypatch.setattr(combine_launch, "WARPS_OF_A_PROCESSOR", (4, 4))
    requests, latent = len(splits), 24
    query_lens = [(1, 2, 1, 0)[request % 4] for request in range(requests)]
    if requests > 100:
        query_lens = [1] * requests
        query_lens[700] = 0
    starts, split_offsets = offsets(query_lens), offsets(splits)
    tokens, most_queries, indices = int(starts[-1]) + 2, max(query_lens), int(split_offsets[-1]) + 2
    rows = most_queries * heads
    partial_out = torch.full((indices, rows, latent), torch.nan)
    partial_lse = torch.full((2, indices, rows), torch.nan)
    out, lse = torch.full((tokens, heads, latent), 7.0), torch.full((heads, tokens), 7.0)
    wanted, wanted_lse = out.double(), lse.double()
    bound, lse_bound = torch.zeros_like(wanted), torch.zeros_like(wanted_lse)
    for request, (count, queries) in enumerate(zip(splits, query_lens, strict=True)):
        if count == 1:
            continue
        begin, token, own = int(split_offsets[request]), int(starts[request]), queries * heads
        values, largest = torch.randn(count, own, latent), 9 * torch.randn(count, own)
        totals = torch.rand(count, own) + 0.5
        partial_out[begin : begin + count, :own] = values
        partial_lse[:, begin : begin + count, :own] = torch.stack((largest, totals))
        found = combined_in_float64(largest, totals, values)
        for tensor, part in zip((wanted, bound), found[::2], strict=True):
            tensor[token : token + queries] = part.view(queries, heads, latent)
        for tensor, part in zip((wanted_lse, lse_bound), found[1::2], strict=True):
            tensor[:, token : token + queries] = part.view(queries, heads).T
    out, lse = out.to(DEVICE), lse.to(DEVICE)
    combine_launch.combine_partial_outputs(
        partial_out.flatten().to(DEVICE), partial_lse.flatten().to(DEVICE), starts.to(DEVICE), most_queries,
        torch.zeros(max(1, sum(splits)), 5, dtype=torch.int32, device=DEVICE), split_offsets.to(DEVICE), False,
        out, lse,
    )  # fmt: skip
    assert ((out.cpu() - wanted).abs() <= bound).all()
    empty = wanted_lse == -torch.inf
    assert torch.equal(lse.cpu() == -torch.inf, empty)
    assert ((lse.cpu() - wanted_lse)[~empty].abs() <= lse_bound[~empty]).all()


@runs
@pytest.mark.parametrize("requests, heads, programs, tile, launched", [
    (1, 2, 4, "FOR_PLANNED", 2), (1, 64, 16, "FOR_PLANNED", 64), (1, 64, 17, "FOR_ONE_WITH_MANY_SPLITS", 64 * 2),
    (1, 128, 17, "FOR_ONE_WITH_MANY_SPLITS", 128 * 2), (2, 128, 33, "FOR_PLANNED", 256),
    (2, 128, 200, "FOR_PLANNED", 256),
    (2, 128, 12, "FOR_FEW_SPLITS", 256), (2, 128, 13, "FOR_SOME_PLANNED_SPLITS", 256),
    (2, 128, 24, "FOR_SOME_PLANNED_SPLITS", 256), (2, 128, 25, "FOR_PLANNED", 256),
    (40, 128, 132, "FOR_FEW_SPLITS", 132 * 16),
    (300, 128, 132, "FOR_ONE_PLANNED_SPLIT", 132 * 4), (132, 128, 132, "FOR_ONE_PLANNED_SPLIT", 132 * 4),
    (3, 128, 2, "FOR_ONE_PLANNED_SPLIT", 3 * 32), (300, 64, 132, "FOR_FEW_SPLITS", 132 * 8),
    (600, 3, 132, "FOR_FEW_SPLITS", 132 * 4),
    (16, 16, 96, "FOR_PLANNED", 256), (16, 16, 132, "FOR_SOME_PLANNED_SPLITS", 256),
    (40, 16, 132, "FOR_FEW_SPLITS", 320), (2, 2, 96, "FOR_PLANNED", 4),
    (2, 2, 98, "FOR_MANY_SPLITS", 8), (33, 63, 165, "FOR_PLANNED", 33 * 63), (17, 128, 34, "FOR_FEW_SPLITS", 132 * 16),
])  # fmt: skip
def test_launch_after_a_schedule(requests, heads, programs, tile, launched, monkeypatch):
    """After a planned decode, the combine kernel has one program for each tile, but at most as many as can run at once.

    A tile here is the rows and columns of the output that a program computes at once. On 132 multiprocessors, the test
    expects tiles of the shape `tile`, and `launched` programs. `ONE_TILE` tells the kernel that these are all tiles. It
    is never set for the tile `FOR_ONE_PLANNED_SPLIT`, so that warm-up compiles one variant for it. The number of tiles
    of the shape `FOR_PLANNED` has no limit.
    """
    launches = []
    monkeypatch.setattr(combine_launch, "launch", lambda _, grid, *__, **constants: launches.append((grid, constants)))
    facts = combine_launch.device_facts(DEVICE)._replace(processors=132)
    monkeypatch.setattr(combine_launch, "device_facts", lambda _: facts)
    latent, indices = 64, requests + programs
    combine_launch.combine_partial_outputs(
        torch.empty(indices * heads * latent, device=DEVICE), torch.empty(2 * indices * heads, device=DEVICE),
        offsets([1] * requests).to(DEVICE), 1, torch.zeros(programs, 5, dtype=torch.int32, device=DEVICE),
        offsets([1] * requests).to(DEVICE), False, torch.empty(requests, heads, latent, device=DEVICE),
        torch.empty(heads, requests, device=DEVICE),
    )  # fmt: skip
    ((grid, constants),) = launches
    chosen = getattr(combine_launch, tile)
    if tile == "FOR_FEW_SPLITS":
        chosen = chosen[heads >= 64]
    sizes = constants["ROWS"], constants["COLUMNS"], constants["SPLITS"], constants["num_warps"]
    assert sizes == chosen._replace(columns=min(chosen.columns, latent))
    assert grid == (launched,)
    all_tiles = launched == requests * -(-heads // chosen.rows) * -(-latent // sizes[1])
    assert constants["ONE_TILE"] == (all_tiles and tile != "FOR_ONE_PLANNED_SPLIT")


@runs
def test_combined_splits_are_the_same_bits_however_many_at_a_time(monkeypatch):
    """The number of splits that the combine kernel loads at a time changes no bit of a batch-invariant decode.

    In some rows the largest score rises, and the kernel must rescale its sums. Some rows have no keys in the first, the
    last or an inner split, and some values are 0.0 or -0.0.
    """
    latent, heads, splits = 40, 8, 21
    values = torch.randn(splits, heads, latent)
    largest, totals = 20 * torch.randn(splits, heads), torch.rand(splits, heads) + 0.5
    largest[splits // 2 :, 3:] += 200
    for split, row in ((0, 0), (-1, 0), (0, 4), (7, 4), (slice(None), 5)):
        values[split, row], largest[split, row], totals[split, row] = 0, -torch.inf, 0
    values[:, 1, ::2], values[:, 2, ::2] = -0.0, 0.0
    parts = torch.cat((largest.flatten(), totals.flatten(), integers(1, splits).cpu().view(torch.float32)))
    found = []
    for at_once in (1, 4, 16, 32):
        monkeypatch.setattr(combine_launch, "FOR_ONE_INVARIANT", (combine_launch.CombineTile(1, 32, at_once, 1),) * 2)
        out, lse = torch.empty(1, heads, latent, device=DEVICE), torch.empty(heads, 1, device=DEVICE)
        tensors = values.flatten().to(DEVICE), parts.to(DEVICE), offsets([1]).to(DEVICE)
        combine_launch.combine_partial_outputs(*tensors, 1, None, None, True, out, lse)
        found.append((out, lse))
    for out, lse in found[1:]:
        assert_same_bits(out, found[0][0])
        assert_same_bits(lse, found[0][1])


@runs
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("requests, heads, splits, folded", [
    (1, 4, 3, 1), (1, 4, 70, 7), (1, 4, 5, 5), (2, 4, 20, 19),
    *(() if INTERPRETED else ((1, 4, 12, 5), (2, 4, 20, 3), (3, 3, 5, 5))),
])  # fmt: skip
def test_folded_parts(requests, heads, splits, folded, planned):
    """In a batch-invariant decode, the combine kernel continues the addition that the decode kernel began.

    The decode kernel has combined the first `folded` splits of a request in the partial output at partial index 0. The
    combine kernel adds the remaining splits. If no split remains, the combine kernel must not write the output. Partial
    outputs that no program writes are NaN. The results are compared with float64.
    """
    latent, slots = 160, splits + 2
    values = torch.randn(splits, requests, heads, latent)
    largest, totals = 60 * torch.randn(splits, requests, heads), torch.rand(splits, requests, heads) + 0.5
    largest[splits // 2 :] += 200  # the largest score rises at the middle split, and again at the last split
    largest[-1] += 200
    values[-2], largest[-2], totals[-2] = 0, -torch.inf, 0  # a split without keys

    def summed(begin, end):
        highest = largest[begin:end].double().amax(0)
        weights = torch.exp2(largest[begin:end].double() - highest)
        return (values[begin:end] * weights[..., None]).sum(0), highest, (totals[begin:end] * weights).sum(0)

    partial_out = torch.full((requests, slots, heads, latent), torch.nan)
    partial_lse = torch.full((2, requests, slots, heads), torch.nan)
    first, *rest = summed(0, folded)
    partial_out[:, 0], partial_lse[0, :, 0], partial_lse[1, :, 0] = first.float(), rest[0].float(), rest[1].float()
    for split in range(folded, splits):
        partial_out[:, split], partial_lse[0, :, split] = values[split], largest[split]
        partial_lse[1, :, split] = totals[split]
    progress = integers(*(folded, splits) * requests).cpu().view(torch.float32)
    out = torch.full((requests, heads, latent), torch.nan, device=DEVICE)
    lse = torch.full((heads, requests), torch.nan, device=DEVICE)
    cut = (torch.zeros(1, 5, dtype=torch.int32, device=DEVICE), offsets([splits] * requests).to(DEVICE))
    combine_launch.combine_partial_outputs(
        partial_out.flatten().to(DEVICE), torch.cat((partial_lse.flatten(), progress)).to(DEVICE),
        offsets([1] * requests).to(DEVICE), 1, *(cut if planned else (None, None)), True, out, lse,
    )  # fmt: skip
    if folded == splits:
        assert out.isnan().all() and lse.isnan().all()
        return
    summed_values, highest, total = summed(0, splits)
    most = (values.abs() * torch.exp2(largest.double() - highest)[..., None]).sum(0) / total[..., None]
    rounded = (splits + 16) * 2.0**-24  # relative error; doubled below, because partial output 0 is rounded to float32
    assert ((out.cpu() - summed_values / total[..., None]).abs() <= 2 * rounded * most).all()
    wanted_lse = (highest + total.log2()) * math.log(2)
    assert ((lse.T.cpu() - wanted_lse).abs() <= 2 * rounded * (1 + wanted_lse.abs())).all()


@runs
@pytest.mark.parametrize("programs, num_runs", [(1, 0), (3, 0), (0, 1), (0, 3)])
def test_rising_scores_of_combined_splits(programs, num_runs, monkeypatch):
    """A batch-invariant decode is within the budget if the largest score rises from one split to the next."""
    inputs = rising_inputs(4, DTYPES[-1], WIDTH)  # with 4 heads the longest request has three splits
    monkeypatch.setattr(decode, "_num_splits", lambda *_: num_runs)
    verdict(launch(*inputs, schedule=schedule_of(inputs[3], 4, programs, True)), *inputs)


@runs
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    "programs, dtype", [(0, DTYPES[-1]), (1, DTYPES[-1]), (40, DTYPES[-1]), *((3, dtype) for dtype in DTYPES)], ids=str
)
def test_scheduled(programs, batch_invariant, dtype):
    """A decode with a schedule is within the budget.

    The batch has requests with one and with several splits, rows without keys, and requests without queries. With 40
    programs, some programs are idle. With 0 programs, the schedule is batch-invariant and has no `tile_ranges`.
    """
    if programs == 0 and not batch_invariant:
        pytest.skip("neither scheduled nor batch-invariant")
    lens = [0, 1100, 70, 9, 0, 300, 64, 33, 0], [1, 1, 2, 3, 2, 1, 0, 1, 1]
    for heads, request_cost in ((4, 0), (40, 5)):
        inputs = make_inputs(lens[1], lens[0], heads, dtype)
        schedule = schedule_of(inputs[3], heads, programs, batch_invariant, request_cost)
        verdict(launch(*inputs, schedule=schedule), *inputs)


@runs
@pytest.mark.parametrize("block_size", [16, 48, 128])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
def test_scheduled_shapes(widths, block_size):
    inputs = make_inputs([1, 2], [300, 131], 4, DTYPES[-1], widths, block_size=block_size)
    verdict(launch(*inputs, schedule=schedule_of(inputs[3], 4, 3, request_cost=1)), *inputs)


@runs
@pytest.mark.parametrize("cut", [InvariantSplitRule(2, 3, 6, 7), InvariantSplitRule(8, 1, 8, 1)], ids=str)
def test_any_invariant_cut(cut, monkeypatch):
    """For any `InvariantSplitRule`, a batch-invariant decode gives the same bits with and without `tile_ranges`."""
    inputs = make_inputs([1, 2, 0, 1], [2950, 70, 20, 700], 4, DTYPES[-1], next(iter(NARROW.values())))
    planned = reference.plan_decode(inputs[3].seq_lens, 3, ScheduleCosts(split_rule=cut), True)
    states = [launch(*inputs, schedule=planned)]
    for num_runs in (1, 3):
        monkeypatch.setattr(decode, "_num_splits", lambda *_, num_runs=num_runs: num_runs)
        states.append(launch(*inputs, schedule=DecodeSchedule(batch_invariant=True, split_rule=cut)))
    verdict(states[0], *inputs)
    for state in states[1:]:
        assert_same_bits(state.out, states[0].out)
        assert_same_bits(state.lse, states[0].lse)


@runs
def test_nothing_but_padding_is_scheduled():
    inputs = make_inputs([1, 2], [0, 0], 4, DTYPES[-1])
    for batch_invariant in (False, True):
        verdict(launch(*inputs, schedule=schedule_of(inputs[3], 4, 3, batch_invariant)), *inputs)


# numbers of programs with and without `tile_ranges`; the interpreter is slow
COUNTS = ((3, 0), (0, 2)) if INTERPRETED else ((3, 0), (40, 0), (0, 1), (0, 2), (0, 4))


@runs
def test_batch_invariance(monkeypatch):
    """With a batch-invariant schedule the other requests of a batch change no bit of a request's result (pitfall 19).

    Each request is decoded alone and in the batch, with and without `tile_ranges`, for several numbers of programs.
    """
    lens, query_lens = [1100, 70, 5200, 64, 0, 20], [1, 1, 1, 2, 1, 0]
    ql, q_pe, cache, plan = make_inputs(query_lens, lens, 16, DTYPES[-1], next(iter(NARROW.values())))
    beside = {}
    for request in range(5):
        first, last = plan.query_start_loc[request], plan.query_start_loc[request + 1]
        one = replace(
            plan, block_table=plan.block_table[request : request + 1], seq_lens=plan.seq_lens[request : request + 1],
            query_start_loc=integers(0, last - first), max_query_len=query_lens[request],
            visible_lens=plan.visible_lens[first:last],
        )  # fmt: skip
        wanted = launch(ql[first:last], q_pe[first:last], cache, one, schedule=schedule_of(one, 16, 1, True))
        for programs, num_runs in COUNTS:
            monkeypatch.setattr(decode, "_num_splits", lambda *_, num_runs=num_runs: num_runs)
            alone = launch(ql[first:last], q_pe[first:last], cache, one, schedule=schedule_of(one, 16, programs, True))
            assert_same_bits(alone.out, wanted.out)
            assert_same_bits(alone.lse, wanted.lse)
            if request == 0:
                beside[programs, num_runs] = launch(
                    ql, q_pe, cache, plan, schedule=schedule_of(plan, 16, programs, True)
                )
                verdict(beside[programs, num_runs], ql, q_pe, cache, plan)
            assert_same_bits(beside[programs, num_runs].out[first:last], wanted.out)
            assert_same_bits(beside[programs, num_runs].lse[:, first:last], wanted.lse)


@runs
@pytest.mark.parametrize("length", [5000, 2**31 - 1])
@pytest.mark.parametrize("programs, batch_invariant", [(5, False), (5, True), (0, True)])
def test_lengths_beyond_the_table(programs, batch_invariant, length, monkeypatch):
    """A length beyond the block table is clamped to the table and changes no other request."""
    monkeypatch.setattr(decode, "_num_splits", lambda *_: 3)
    for readable in (64, 1152):  # keys of request 1: one block, and the whole table, which is several splits
        ql, q_pe, cache, plan = make_inputs([1, 1, 1], [1100, readable, 70], 4, DTYPES[-1], next(iter(NARROW.values())))
        far = replace(plan, seq_lens=integers(1100, length, 70))
        # Call `plan_decode` of `fast`, because `plan_decode` of `reference` would loop over 2^25 tiles.
        schedule = schedule_of(far, 4, 0, True)
        if programs > 0:
            costs = measured_schedule_costs(4)
            schedule = fast.plan_decode(far.seq_lens, programs, costs, batch_invariant=batch_invariant)
        state = launch(ql, q_pe, cache, far, schedule=schedule)
        verdict(state, ql, q_pe, cache, plan)  # same result as `plan`: `visible_lens` is unchanged


@runs
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("splits", [0, 2])
@pytest.mark.parametrize("starts", [(2, -536870913), (1, -(2**31)), (-(2**31), 8), (0, 2**31 - 1), (2, 1)], ids=str)
def test_merge_of_query_offsets_out_of_range(starts, splits, batch_invariant):
    """If `query_start_loc` is out of range, the combine kernel writes no memory behind `out` and `lse`.

    The batch has one request, without keys (`splits` = 0) or with two splits.
    """
    tokens, latent, spare = 2, 24, 64
    for heads in (1, 4):
        whole = torch.full(((tokens + spare) * heads * latent,), torch.nan, device=DEVICE)
        own_lse = torch.full(((tokens + spare) * heads,), torch.nan, device=DEVICE)
        out, lse = whole[: tokens * heads * latent].view(tokens, heads, latent), own_lse[: tokens * heads]
        progress = integers(1, 2).cpu().view(torch.float32) if batch_invariant else torch.empty(0)
        parts = (
            torch.ones(3 * tokens * heads * latent),
            torch.cat((torch.ones(2 * 3 * tokens * heads), progress)),
        )
        cut = torch.zeros(1, 5, dtype=torch.int32), integers(0, splits)
        arguments = [
            x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in (*parts, integers(*starts), tokens, *cut)
        ]
        combine_launch.combine_partial_outputs(*arguments, batch_invariant, out, lse.view(heads, tokens))
        assert whole[out.numel() :].isnan().all() and own_lse[lse.numel() :].isnan().all()
