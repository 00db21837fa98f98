"""Tests of the runs of chunks: only the query tokens of a chunk's run attend the chunk and are merged (`ChunkRun`)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fast
import reference
from reference.interfaces import MOST_PARTS, ChunkRun, ContextChunk, TokenOwnership

from ..support.allocations import Calls
from ..support.factories import (
    LOW_RANK,
    assert_close64,
    assert_same_bits,
    integers,
    last_rows,
    make_batch,
    make_cache,
    make_entries,
    make_up_projections,
    offsets,
)
from ..support.planning import expanding_plan, same, without_lens
from ..support.properties import given, st

# Query and context lengths. The first and last requests have no context, and two requests in the middle have none.
LENS = ([5, 2, 1, 4, 3, 2], [0, 40, 0, 0, 70, 0])
# As LENS, but with more parts than `MOST_PARTS`: forward_prefill then does not divide the requests.
MANY = ([2] * 11, [0, 9, 0, 33, 0, 50, 0, 1, 0, 16, 0])


def prefill_inputs(lens, dtype=torch.float64, workspace=32, parts=True):
    """Return the arguments of `forward_prefill` up to the softmax scale, with NaN in all free cache slots."""
    query_lens, context_lens = lens
    batch = make_batch(query_lens, [q + c for q, c in zip(query_lens, context_lens, strict=True)])
    entries = make_entries(batch, LOW_RANK.head_size, dtype)
    cache = make_cache(batch, entries, LOW_RANK.head_size, dtype, new_tokens=False)
    q = torch.randn(batch.num_tokens, LOW_RANK.num_heads, LOW_RANK.qk_head_dim).to(dtype)
    kv_c, k_pe = last_rows(batch, entries).split([LOW_RANK.kv_lora_rank, LOW_RANK.qk_rope_head_dim], -1)
    plan = expanding_plan(reference, batch, workspace, parts)
    return q, kv_c, k_pe, cache, plan, *make_up_projections(LOW_RANK, dtype), 0.3


def without_runs(plan):
    """Return a plan whose chunks have no runs, and which has no parts."""
    chunks = tuple(dataclasses.replace(chunk, run=None, run_query_start_loc=None) for chunk in plan.context_chunks)
    return dataclasses.replace(plan, context_chunks=chunks, parts=())


# Tests of the plan.


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 0, 1, 16, 40, 90])), min_size=1, max_size=9),
    st.sampled_from([16, 48, 512]),
)
def test_runs(lens, workspace):
    """A run is the smallest range with all tokens of its chunk; its finished tokens attend no later chunk."""
    query_lens, contexts = [q for q, _ in lens], integers(*[c for _, c in lens])
    starts = offsets(query_lens)
    plans = [ops.plan_chunk_runs(ops.plan_context_chunks(contexts, workspace, 16), starts) for ops in (reference, fast)]
    same(*plans)
    attended = [{r for r, n in enumerate(chunk.cu_seq_lens.diff().tolist()) if n} for chunk in plans[0]]
    for number, chunk in enumerate(plans[0]):
        run = chunk.run
        first, end = min(attended[number]), max(attended[number]) + 1
        assert (run.first_request, run.end_request) == (first, end)
        assert (run.first_token, run.end_token) == (int(starts[first]), int(starts[end]))
        assert run.max_query_len == max(query_lens[first:end])
        later = [request for requests in attended[number + 1 :] for request in requests]
        finished = end if not later or min(later) >= end else max(min(later), first)
        assert run.finished_token == int(starts[finished])
        if end - first == len(lens):
            assert chunk.run_query_start_loc is None and torch.equal(chunk.run_cu_seq_lens, chunk.cu_seq_lens)
        else:
            assert chunk.run_query_start_loc.tolist() == offsets(query_lens[first:end]).tolist()
            assert chunk.run_cu_seq_lens.tolist() == chunk.cu_seq_lens.tolist()[first : end + 1]
            assert int(chunk.run_cu_seq_lens[0]) == 0


def test_runs_of_chunks_in_any_order(ops):
    """A request whose later chunk comes after a chunk of a later request is finished in its last chunk only."""
    lens = [[4, 0, 0, 3], [0, 0, 0, 2], [0, 5, 0, 0], [0, 0, 0, 0]]
    chunks = tuple(ContextChunk(integers(0, 0, 0, 0), offsets(each), sum(each), max(each)) for each in lens)
    runs = [chunk.run for chunk in ops.plan_chunk_runs(chunks, offsets([2, 1, 3, 1]))]
    assert runs == [
        ChunkRun(0, 4, 0, 7, 2, 3), ChunkRun(3, 4, 6, 7, 6, 1), ChunkRun(1, 2, 2, 3, 3, 1), ChunkRun(0, 0, 0, 0, 0, 0)
    ]  # fmt: skip


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (1, 0, 3, 2), (0, "empty", 1, 2, 3), (0, 1, 2, 3, "empty")], ids=str)
def test_prefills_over_chunks_in_any_order(ops, order):
    """Attend the chunks of a plan in another order, or with an empty chunk -> the same state, with and without runs."""
    lens = [2, 1, 3, 2], [16, 33, 20, 16]
    args = list(prefill_inputs(lens, parts=False, workspace=32))
    wanted, plan = reference.forward_prefill(*args), args[4]
    empty = ContextChunk(integers(0, 0, 0, 0), offsets([0, 0, 0, 0]), 0, 0)
    chunks = [without_runs(plan).context_chunks[each] if each != "empty" else empty for each in order]
    for found in (tuple(chunks), ops.plan_chunk_runs(tuple(chunks), offsets(lens[0]))):
        args[4] = dataclasses.replace(plan, context_chunks=found)
        state = ops.forward_prefill(*args)
        assert_close64(state.out, wanted.out)
        assert_close64(state.lse, wanted.lse)


def test_run_over_final_tokens(ops):
    """A run over query tokens whose output an earlier chunk has written is refused before anything is computed."""
    args = list(prefill_inputs(([2, 1, 3, 2], [16, 33, 20, 16]), parts=False, workspace=32))
    first, second, *others = args[4].context_chunks
    second = dataclasses.replace(second, run=second.run._replace(first_token=1))
    args[4] = dataclasses.replace(args[4], context_chunks=(first, second, *others))
    message = r"no query tokens of \[0, 2\), whose output is final, got \[1, 3\)$"
    with pytest.raises(ValueError, match=rf"^metadata\.context_chunks\.run: expected {message}"):
        ops.forward_prefill(*args)


@pytest.mark.parametrize("ownership", [None, TokenOwnership(2, 1, 4)], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("host_lens", [True, False], ids=["host lengths", "upper bounds"])
@pytest.mark.parametrize("lens", [LENS, MANY], ids=["few parts", "many parts"])
def test_runs_of_a_step(ops, lens, host_lens, ownership):
    """Each chunk of a step's plan has its run; with upper bounds, the run has each request with a bound above 0."""
    batch = make_batch([1, *lens[0]], [20, *(q + c for q, c in zip(*lens, strict=True))])
    common = dataclasses.replace(batch.common, slot_mapping=torch.full_like(batch.common.slot_mapping, -1))
    common = common if host_lens else without_lens(common, slack=3)
    plan = ops.build_mla_metadata(common, 16, 64, require_order=False, ownership=ownership).prefill
    contexts = [context if host_lens else context + 3 for context in lens[1]]
    contexts = contexts[len(contexts) - plan.block_table.shape[0] :]  # the other requests are decodes
    bounds = ops.plan_context_chunks(integers(*contexts), 64, 16, *((2, 4) if ownership else ()))
    assert len(bounds) == len(plan.context_chunks)
    for bound, chunk in zip(bounds, plan.context_chunks, strict=True):
        having = bound.cu_seq_lens.diff().nonzero().flatten()
        assert (chunk.run.first_request, chunk.run.end_request) == (int(having[0]), int(having[-1]) + 1)
        assert chunk.bounded is not host_lens
    for part in plan.parts:
        assert all(chunk.run is not None for chunk in part.plan.context_chunks)
    assert len(plan.parts) == (5 if host_lens and lens is LENS else 0)


# Tests of the results.


@pytest.mark.parametrize("parts", [True, False], ids=["parts", "one part"])
@pytest.mark.parametrize("lens", [LENS, MANY], ids=["few parts", "many parts"])
def test_runs_change_nothing(ops, lens, parts):
    """A prefill gives the same result with and without runs. `reference` gives the same bits."""
    arguments = prefill_inputs(lens, parts=parts)
    plan = arguments[4]
    assert any(chunk.run_query_start_loc is not None for chunk in plan.context_chunks)
    assert bool(plan.parts) == (parts and lens is LENS and len(plan.parts) <= MOST_PARTS)
    state = ops.forward_prefill(*arguments)
    whole = ops.forward_prefill(*arguments[:4], without_runs(plan), *arguments[5:])
    check = assert_same_bits if ops is reference else assert_close64
    check(state.out, whole.out)
    check(state.lse, whole.lse)
    check(ops.forward_prefill(*arguments, return_lse=False), whole.out)


@pytest.mark.parametrize("parts", [True, False], ids=["parts", "one part"])
@pytest.mark.parametrize("lens", [LENS, MANY], ids=["few parts", "many parts"])
def test_twins_agree(lens, parts):
    """Both packages agree; `fast` gives the same bits in an output with gaps; outputs in e4m3 agree too."""
    arguments = prefill_inputs(lens, parts=parts)
    ours, theirs = fast.forward_prefill(*arguments), reference.forward_prefill(*arguments)
    assert_close64(ours.out, theirs.out)
    assert_close64(ours.lse, theirs.lse)
    for dtype in (torch.float64, torch.bfloat16):
        arguments = prefill_inputs(lens, dtype, parts=parts)
        ours = fast.forward_prefill(*arguments)
        spread = torch.full((*ours.out.shape[:2], 2 * ours.out.shape[2]), 7.0, dtype=dtype)[..., ::2]
        assert_same_bits(fast.forward_prefill(*arguments, return_lse=False, out=spread), ours.out)
    arguments, scale = prefill_inputs(lens, parts=parts), torch.tensor(0.25)
    quantised = [ops.forward_prefill(*arguments, output_scale=scale).out.float() for ops in (fast, reference)]
    assert_same_bits(*quantised)


def test_only_the_run_attends_and_is_merged():
    """Attention and merges of a chunk get the rows of its run alone, and each output row is written once."""
    arguments = prefill_inputs(MANY, torch.bfloat16)
    plan, tokens = arguments[4], 2 * len(MANY[0])
    out = torch.full((tokens, LOW_RANK.num_heads, LOW_RANK.v_head_dim), torch.nan, dtype=torch.bfloat16)
    with Calls() as calls:
        fast.forward_prefill(*arguments, return_lse=False, out=out)
    assert out.isfinite().all()
    runs = [chunk.run for chunk in plan.context_chunks]
    rows = [run.end_token - run.first_token for run in runs]
    assert [each[0].shape[0] for each in calls.named("flash_attn_varlen")] == [tokens, *rows]
    assert sum(each[0].shape[0] for each in calls.named("merge_attn_states_out")) == sum(rows)
    row = LOW_RANK.num_heads * LOW_RANK.v_head_dim
    assert sum(size for _, size in calls.writes(out)) == tokens * row
    merged = sum(size for name, size in calls.writes(out) if name == "merge_attn_states_out")
    assert merged == row * sum(run.finished_token - run.first_token for run in runs)


def test_nan_outside_the_run(ops):
    """NaN in rows of a chunk outside the run, and in the queries of other requests, reaches no row of the run."""
    arguments = prefill_inputs(LENS, parts=False)
    q, plan = arguments[0], arguments[4]
    wanted = ops.forward_prefill(*arguments)
    run = plan.context_chunks[0].run
    assert 0 < run.first_token < run.end_token < q.shape[0]
    poisoned = torch.full_like(q, torch.nan)
    poisoned[run.first_token : run.end_token] = q[run.first_token : run.end_token]

    def gather(*given, workspace, **options):
        """Gather a chunk into memory whose other rows are NaN."""
        workspace.fill_(torch.nan)
        return ops.gather_context(*given, workspace=workspace, **options)

    workspace = ops.ContextWorkspace()
    state = ops.forward_prefill(poisoned, *arguments[1:], gather=gather, workspace=workspace)
    own = slice(run.first_token, run.end_token)
    assert_close64(state.out[own], wanted.out[own])
    assert_close64(state.lse[:, own], wanted.lse[:, own])
    assert state.out[: run.first_token].isnan().all()


def test_direct_calls_attend_with_all_queries(ops):
    """`run_prefill_context_chunk` takes all query tokens; rows outside the run get output 0 and LSE -inf."""
    q, kv_c, k_pe, cache, plan, w_uk, w_uv, scale = prefill_inputs(LENS, parts=False)
    chunk = plan.context_chunks[0]
    entries = ops.gather_context(cache, plan, chunk)
    latent, rope = entries.split([kv_c.shape[1], k_pe.shape[1]], -1)
    k_nope, v = ops.expand_kv(latent.contiguous(), w_uk, w_uv)
    state = ops.run_prefill_context_chunk(q, k_nope, rope, v, plan, chunk, scale)
    assert state.out.shape[0] == q.shape[0] and chunk.run_query_start_loc is not None
    outside = torch.ones(q.shape[0], dtype=torch.bool)
    outside[chunk.run.first_token : chunk.run.end_token] = False
    assert (state.out[outside] == 0).all() and (state.lse[:, outside] == -torch.inf).all()
    assert state.lse.isfinite().any()


# Tests of refusals.


def test_refused_runs(ops, plain_errors):
    """`forward_prefill` refuses runs that do not match the plan."""
    arguments = prefill_inputs(LENS, parts=False)
    plan = arguments[4]
    first, *others = plan.context_chunks

    def refused(message, **fields):
        chunks = (dataclasses.replace(first, **fields), *others)
        wrong = dataclasses.replace(plan, context_chunks=chunks)
        with pytest.raises((ValueError, TypeError), match=f"^{message}"):
            ops.forward_prefill(*arguments[:4], wrong, *arguments[5:])

    name = "metadata.context_chunks"
    refused(f"{name}.run: expected a run of every chunk, or of no chunk", run=None, run_query_start_loc=None)
    refused(f"{name}.run: expected a ChunkRun or None, got list", run=[1])
    refused(f"{name}.run: expected requests within 6, got", run=first.run._replace(end_request=7))
    refused(f"{name}.run: expected first_token <= finished_token", run=first.run._replace(finished_token=0))
    refused(f"{name}.run: expected at most 17 query tokens, got 99$", run=first.run._replace(end_token=99))
    refused(f"{name}.run_query_start_loc: ", run_query_start_loc=offsets([1, 1, 1, 1, 1, 1]))
    refused(f"{name}.run_query_start_loc: expected None without a run, and for a run with all requests",
            run=first.run._replace(first_request=0, end_request=6))  # fmt: skip


def test_refused_offsets(ops, plain_errors):
    chunks = ops.plan_context_chunks(integers(20, 0, 33), 64, 16)
    for starts, message in (
        (offsets([1, 2]), "chunks.starts: expected shape"),
        (integers(1, 2, 3, 4), "query_start_loc: expected a first element of 0"),
        (integers(0, 2, 1, 4), "query_start_loc: expected values that never decrease"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            ops.plan_chunk_runs(chunks, starts)
