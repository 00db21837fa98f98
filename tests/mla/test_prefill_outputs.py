"""Tests of the outputs of a prefill: outputs without LSE, parts, and outputs in a tensor of the caller (`out=`).

A *part* of a prefill is consecutive requests that all have context, or that all have no context. Requests without
context need no LSE and no merge, so their outputs can be written directly.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import fast
import reference
from reference.interfaces import MOST_PARTS, AttentionState, ChunkRows, PrefillMetadata

from ..support.allocations import Calls
from ..support.factories import (
    CONFIGS,
    DIRECT,
    LOW_RANK,
    assert_close64,
    assert_same_bits,
    last_rows,
    make_batch,
    make_cache,
    make_entries,
    make_layer,
    make_up_projections,
    make_weights,
    new_cache,
    offsets,
)
from ..support.planning import expanding_plan
from ..support.properties import given, st

MIXED = ([5, 2, 1, 4, 3], [0, 40, 9, 0, 0])  # query and context lengths; three parts: without, with, without context


def prefill_inputs(config, query_lens, context_lens, dtype, workspace=32):
    """Return the arguments of `forward_prefill` up to the softmax scale."""
    batch = make_batch(query_lens, [q + c for q, c in zip(query_lens, context_lens, strict=True)])
    entries = make_entries(batch, config.head_size, dtype)
    cache = make_cache(batch, entries, config.head_size, dtype, new_tokens=False)
    q = torch.randn(batch.num_tokens, config.num_heads, config.qk_head_dim).to(dtype)
    kv_c, k_pe = last_rows(batch, entries).split([config.kv_lora_rank, config.qk_rope_head_dim], -1)
    plan = expanding_plan(reference, batch, workspace, parts=True)
    return q, kv_c, k_pe, cache, plan, *make_up_projections(config, dtype), 0.3


# Tests of the parts of a prefill.


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0, 0, 1, 16, 40])), min_size=1, max_size=8))
def test_parts(lens):
    """Together, the parts contain each token and each context key once. Both packages give the same parts."""
    query_lens, context_lens = [q for q, _ in lens], [c for _, c in lens]
    batch = make_batch(query_lens, [q + c for q, c in lens])
    plans = [expanding_plan(ops, batch, 32, parts=True) for ops in (reference, fast)]
    kinds = [kind for kind, _ in itertools.groupby(context > 0 for context in context_lens)]
    for plan in plans:
        assert len(plan.parts) == (len(kinds) if len(kinds) > 1 else 0)
    tokens, requests = 0, 0
    for part, twin in zip(plans[0].parts, plans[1].parts, strict=True):
        assert (part.first_token, part.end_token, part.rows) == (twin.first_token, twin.end_token, twin.rows)
        assert part.plan.max_query_len == twin.plan.max_query_len
        ours, theirs = part.tensors(), twin.tensors()
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        count = part.plan.block_table.shape[0]
        own = slice(requests, requests + count)
        assert torch.equal(part.plan.block_table, batch.common.block_table[own])
        assert part.plan.query_start_loc.tolist() == offsets(query_lens[own]).tolist()
        assert part.first_token == tokens and part.end_token == tokens + sum(query_lens[own])
        assert len({context > 0 for context in context_lens[own]}) == 1
        assert sum(chunk.num_tokens for chunk in part.plan.context_chunks) == sum(context_lens[own])
        for rows, chunk in zip(part.rows, part.plan.context_chunks, strict=True):
            whole = plans[0].context_chunks[rows.chunk]
            assert torch.equal(chunk.starts, whole.starts[own])
            assert torch.equal(chunk.cu_seq_lens + rows.first, whole.cu_seq_lens[requests : requests + count + 1])
            assert rows.end == rows.first + chunk.num_tokens
        tokens, requests = part.end_token, requests + count
    if plans[0].parts:
        assert (tokens, requests) == (batch.num_tokens, len(lens))


def test_planned_parts(ops):
    """The plan of a step has parts if some prefills have context and others do not. Decodes belong to no part."""
    batch = make_batch([1, 1, 5, 2, 4], [20, 1, 5, 42, 4])
    plan = ops.build_mla_metadata(batch.common, 16, 32)
    assert plan.num_decodes == 2
    assert [(part.first_token, part.end_token, len(part.rows)) for part in plan.prefill.parts] == [
        (0, 5, 0), (5, 7, 2), (7, 11, 0)]  # fmt: skip
    for lens in (([5, 4], [5, 4]), ([5, 4], [25, 14])):
        assert ops.build_mla_metadata(make_batch(*lens).common, 16, 32).prefill.parts == ()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lens", [MIXED, ([3, 2], [33, 0]), ([2, 3], [0, 100])], ids=str)
def test_parts_change_nothing(ops, lens, dtype):
    """A prefill gives the same result with parts and without parts, with the LSE and without the LSE.

    `reference` gives the same bits. `fast` gives the same values up to rounding: on a CPU, the order of the additions
    in a matrix product can depend on the addresses of its inputs.
    """

    def check_same(actual, expected):
        if ops is reference:
            return assert_same_bits(actual, expected)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}[actual.dtype]
        return torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

    arguments = prefill_inputs(LOW_RANK, *lens, dtype)
    plan = arguments[4]
    whole = ops.forward_prefill(*arguments[:4], replace(plan, parts=()), *arguments[5:])
    state = ops.forward_prefill(*arguments)
    assert plan.parts and state.out.dtype == dtype
    check_same(state.out, whole.out)
    check_same(state.lse, whole.lse)
    alone = ops.forward_prefill(*arguments, return_lse=False)
    assert type(alone) is torch.Tensor
    check_same(alone, whole.out)
    inside = ops.forward_prefill(*arguments, return_lse=False, workspace=ops.ContextWorkspace())
    check_same(inside, whole.out)


def test_twins_agree_in_float64():
    arguments = prefill_inputs(LOW_RANK, *MIXED, torch.float64)
    ours, theirs = (ops.forward_prefill(*arguments) for ops in (fast, reference))
    assert_close64(ours.out, theirs.out)
    assert_close64(ours.lse, theirs.lse)


# Tests of outputs without LSE.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_new_tokens_without_lse(ops, dtype):
    """Without the LSE, `run_prefill_new_tokens` rounds its output to the dtype of the queries."""
    q, k, k_pe, v = (torch.randn(7, *shape).to(dtype) for shape in ((3, 20), (3, 12), (8,), (3, 10)))
    plan = PrefillMetadata(torch.zeros(2, 1, dtype=torch.int32), offsets([5, 2]), 5, (), 16)
    state = ops.run_prefill_new_tokens(q, k, k_pe, v, plan, 0.3)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert isinstance(state, AttentionState) and state.out.dtype == state.lse.dtype == wide
    out = ops.run_prefill_new_tokens(q, k, k_pe, v, plan, 0.3, return_lse=False)
    assert type(out) is torch.Tensor
    assert_same_bits(out, state.out.to(dtype))
    if ops is fast:
        given_out = torch.full((7, 3, 20), 7.0, dtype=dtype)[..., ::2]
        assert fast.run_prefill_new_tokens(q, k, k_pe, v, plan, 0.3, False, out=given_out) is given_out
        assert_same_bits(given_out, out)


def layer_inputs(config, batch, dtype, padding=0):
    cache = new_cache(batch, config.head_size, dtype, new_tokens=False)
    tokens = batch.num_tokens + padding
    return torch.randn(tokens, config.hidden_size).to(dtype), torch.arange(tokens), cache


def record(layer, inputs, plan):
    """Run `forward_attention` of a layer; return the recorded ops and the output."""
    q, kv_c, k_pe = layer.project(*inputs[:2])
    output = torch.full((q.shape[0], layer.config.num_heads, layer.config.v_head_dim), torch.nan, dtype=q.dtype)
    with Calls() as calls:
        layer.forward_attention(q, kv_c, k_pe, inputs[2], plan, output)
    assert output.isfinite().all()
    return calls, output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_take_one_kernel(dtype):
    """For prompts without context, one call of `flash_attn_varlen` writes the output, and no LSE is stored."""
    layer = make_layer(fast, DIRECT, make_weights(DIRECT, dtype), dtype)
    batch = make_batch([5, 9], [5, 9])
    calls, output = record(layer, layer_inputs(DIRECT, batch, dtype), fast.build_mla_metadata(batch.common, 16, 32))
    assert calls.writes(output) == [("flash_attn_varlen_out", output.numel())]
    (arguments,) = calls.named("flash_attn_varlen_out")
    assert arguments[-2] is None, "an LSE was stored"
    names = {name for name, _, _ in calls.made}
    assert not names & {"flash_attn_varlen", "merge_attn_states", "merge_attn_states_out", "_to_copy", "copy_", "cat"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_is_written_once(dtype):
    """A step writes the output of each token once; only prefills with context have attention states."""
    config = LOW_RANK
    layer = make_layer(fast, config, make_weights(config, dtype), dtype)
    batch = make_batch([1, 1, 5, 2, 1, 4], [20, 1, 5, 82, 41, 4], padding=3)
    plan = fast.build_mla_metadata(batch.common, 16, 48, 1)
    plan_of_tail = plan.prefill
    assert plan.num_decode_tokens == 2 and len(plan_of_tail.parts) == 3 and len(plan_of_tail.context_chunks) > 1
    calls, output = record(layer, layer_inputs(config, batch, dtype, 3), plan)
    row = config.num_heads * config.v_head_dim
    writes = calls.writes(output)
    assert sorted(writes) == sorted(
        [
            ("bmm", 2 * row),
            ("flash_attn_varlen_out", 5 * row),
            ("flash_attn_varlen_out", 4 * row),
            ("fill_", 3 * row),
            ("merge_attn_states_out", 2 * row),  # the first request with context ends in the second chunk
            ("merge_attn_states_out", 1 * row),
        ]
    )
    assert sum(size for _, size in writes) == output.numel()
    states = calls.named("flash_attn_varlen")
    assert [arguments[0].shape[0] for arguments in states] == [3, 2, 3, 1]  # the new tokens, then the run of each chunk
    assert {"_to_copy", "copy_"}.isdisjoint(name for name, _, _ in calls.made)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_layer_with_strided_output(ops, config):
    """A layer writes the same bits into strided and contiguous outputs."""
    layer = make_layer(ops, config, make_weights(config, torch.float32), torch.float32)
    batch = make_batch([1, 3, 4], [20, 40, 4], padding=1)
    inputs = layer_inputs(config, batch, torch.float32, 1)
    q, kv_c, k_pe = layer.project(*inputs[:2])
    shape = (q.shape[0], config.num_heads, config.v_head_dim)
    spread = torch.empty(*shape[:2], 2 * shape[2])[..., ::2]
    outputs = [torch.empty(shape), spread, torch.empty(shape).mT.contiguous().mT]
    for output in outputs:
        plan = ops.build_mla_metadata(batch.common, 16, 32)
        layer.forward_attention(q, kv_c, k_pe, inputs[2].clone(), plan, output)
        assert_same_bits(output, outputs[0])


# Tests of `out=`.


def test_out_of_forward_prefill():
    arguments = prefill_inputs(LOW_RANK, *MIXED, torch.bfloat16)
    wanted = fast.forward_prefill(*arguments)
    spread = torch.empty(*wanted.out.shape[:2], 50, dtype=torch.bfloat16)[..., 1:49:2]
    for out in (torch.empty_like(wanted.out), spread):
        state = fast.forward_prefill(*arguments, out=out)
        assert state.out is out
        assert_same_bits(out, wanted.out)
        assert_same_bits(state.lse, wanted.lse)
        assert fast.forward_prefill(*arguments, return_lse=False, out=out.zero_()) is out
        assert_same_bits(out, wanted.out)


def decode_call():
    batch = make_batch([1, 2], [20, 33])
    cache = new_cache(batch, DIRECT.head_size, torch.bfloat16)
    plan = fast.build_mla_metadata(batch.common, 16, 64, 2).decode
    return torch.randn(3, 3, 24).bfloat16(), torch.randn(3, 3, 8).bfloat16(), cache, plan, 0.3


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_out_of_mla_decode(out_dtype):
    arguments = decode_call()
    wanted = fast.mla_decode(*arguments, out_dtype=out_dtype)
    out = torch.empty(4, 3, 24, dtype=out_dtype)
    state = fast.mla_decode(*arguments, out_dtype=out_dtype, out=out[:3])
    assert state.out.data_ptr() == out.data_ptr()
    assert_same_bits(out[:3], wanted.out)
    assert_same_bits(state.lse, wanted.lse)


def test_out_of_latent_to_value():
    latent, w_uv = torch.randn(6, 3, 24), torch.randn(3, 24, 10)
    wanted = fast.latent_to_value(latent, w_uv)
    for out in (torch.empty(8, 3, 10)[1:7], torch.empty(6, 3, 20)[..., ::2], torch.empty(3, 6, 10).transpose(0, 1)):
        assert fast.latent_to_value(latent, w_uv, out=out) is out
        torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)


def test_out_of_a_merge():
    """A merge can write into one of its two input states, or into an output of another dtype."""
    states = [AttentionState(torch.randn(9, 3, 8), torch.randn(3, 9)) for _ in range(2)]
    wanted = fast.merge_attn_states(*states)
    rounded = AttentionState(torch.empty(9, 3, 8, dtype=torch.bfloat16), torch.empty(3, 9))
    assert fast.merge_attn_states(*states, out=rounded) is rounded
    assert_same_bits(rounded.out, wanted.out.bfloat16())
    assert_same_bits(rounded.lse, wanted.lse)
    for number in range(2):
        copies = [AttentionState(state.out.clone(), state.lse.clone()) for state in states]
        assert fast.merge_attn_states(*copies, out=copies[number]) is copies[number]
        assert_same_bits(copies[number].out, wanted.out)
        assert_same_bits(copies[number].lse, wanted.lse)


def refused(call, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        call()


def test_refusals_of_out(plain_errors):
    latent, w_uv = torch.randn(6, 3, 24), torch.randn(3, 24, 10)
    own = torch.randn(6 * 3 * 24)
    for out, message in (
        (torch.empty(6, 3, 9), r"out: expected shape \[6, 3, 10\], got \[6, 3, 9\]$"),
        (torch.empty(6, 3, 10).double(), "out: expected dtype torch.float32, got torch.float64$"),
        (torch.empty(6, 3, 10, device="meta"), "out: expected device cpu, got meta$"),
        (torch.empty(1, 3, 10).expand(6, 3, 10), "out: expected a tensor whose elements have different addresses, got"),
        (own[:180].view(6, 3, 10), "out: expected memory that no input has, got a tensor that overlaps an input$"),
        ([1], "out: expected a tensor, got list$"),
    ):
        refused(lambda out=out: fast.latent_to_value(own.view(6, 3, 24), w_uv, out=out), message)
    free = own[:180].view(6, 3, 10)
    assert fast.latent_to_value(latent, w_uv, out=free) is free
    arguments = decode_call()
    refused(lambda: fast.mla_decode(*arguments, out=torch.empty(3, 3, 48).bfloat16()[..., ::2]),
            "out: expected a contiguous tensor, got strides")  # fmt: skip
    refused(lambda: fast.mla_decode(*arguments, out=arguments[0]), "out: expected memory that no input has")
    prefill = prefill_inputs(DIRECT, *MIXED, torch.float32)
    q = prefill[0]
    refused(lambda: fast.forward_prefill(*prefill, out=q[..., :10]), "out: expected memory that no input has")
    refused(lambda: fast.forward_prefill(*prefill, out=torch.empty(15, 3, 10).double()), "out: expected dtype")
    state = AttentionState(torch.randn(6, 4, 5), torch.randn(4, 6))
    shifted = torch.randn(7, 4, 5)
    first = AttentionState(shifted[:6], torch.randn(4, 6))
    refused(lambda: fast.merge_attn_states(first, state, out=AttentionState(shifted[1:], torch.empty(4, 6))),
            "out.out: expected memory that no input has")  # fmt: skip
    for package in (fast, reference):
        refused(lambda package=package: package.forward_prefill(*prefill, return_lse=1),
                "return_lse: expected True or False, got int$")  # fmt: skip


def test_refused_parts(ops, plain_errors):
    """`forward_prefill` refuses parts that do not cover all tokens and all keys of the prefill."""
    arguments = prefill_inputs(DIRECT, *MIXED, torch.float32)
    plan = arguments[4]
    first, second, third = plan.parts
    rows = second.rows[0]
    for parts, message in (
        ((first, second), "metadata.parts: expected 15 query tokens in all, got 8$"),
        ((first, third), "metadata.parts: expected a first token of 5, and an end not below it, got 8 and 15$"),
        ((first, replace(second, rows=second.rows[:-1]), third), "metadata.parts.rows: expected one entry for each"),
        ((first, replace(second, rows=(ChunkRows(9, *rows[1:]), *second.rows[1:])), third),
         "metadata.parts.rows: expected the index of a chunk, got 9$"),
        ((first, replace(second, rows=(ChunkRows(0, 1, rows.end), *second.rows[1:])), third),
         r"metadata.parts.rows: expected 32 rows of a chunk with 32 rows, got rows \[1, 32\)$"),
        ((first, second, replace(third, plan=replace(third.plan, block_size=4))), "metadata.parts.plan.block_size: "),
        ((first, second, replace(third, plan=plan)), "metadata.parts.plan.parts: expected an empty tuple, got 3 parts"),
        (5, "metadata.parts: expected a tuple of parts, got int$"),
    ):  # fmt: skip
        wrong = replace(plan, parts=parts)
        refused(lambda wrong=wrong: ops.forward_prefill(*arguments[:4], wrong, *arguments[5:]), message)


def test_many_parts(ops):
    """A prefill that would have more than `MOST_PARTS` parts is not divided: `parts` is empty."""
    for requests in (MOST_PARTS, MOST_PARTS + 1):
        lens = [2] * requests, [2 + 9 * (request % 2) for request in range(requests)]
        plan = ops.build_mla_metadata(make_batch(*lens).common, 16, 512).prefill
        assert len(plan.parts) == (requests if requests == MOST_PARTS else 0)
        (whole,) = replace(plan, parts=()).all_parts(2 * requests)
        assert (whole.first_token, whole.end_token, whole.plan.parts) == (0, 2 * requests, ())
