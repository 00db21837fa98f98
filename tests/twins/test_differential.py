"""Tiers 3 and 4 of docs/correctness.md: the errors of `fast` are within budgets, and a NaN stays in its row.

An error is the difference from `reference` in float64 ("gold"). The budget is computed from the error of `reference` in
the dtype of the inputs ("low"). In float64, the two packages must agree to about 1e-12. "Pitfall 8" is entry 8 of the
list of faults in tests/__init__.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast.parity import compare, compare_states
from reference.interfaces import AttentionState, MLAConfig

from ..support.factories import (
    CONFIGS,
    DIRECT,
    GARBAGE,
    HEADS,
    LOW_RANK,
    NO_ROPE,
    assert_same_bits,
    assert_states64,
    last_rows,
    make_batch,
    make_cache,
    make_entries,
    make_layer,
    make_up_projections,
    make_weights,
    offsets,
    preset,
    softmax_scale,
)
from ..support.planning import expanding_plan
from ..support.properties import given, st

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LOW = DTYPES[1:]


@pytest.fixture(params=["whole", "pieces"])
def pieces(request, monkeypatch):
    """Run a test twice: with the normal block sizes of the CPU kernels, and with very small block sizes.

    With small blocks, the loops of the kernels have many iterations even for short inputs.
    """
    if request.param == "pieces":
        shrink(monkeypatch)


def shrink(monkeypatch):
    """Make the blocks of the CPU kernels very small."""
    monkeypatch.setattr("fast.kernels.cpu.attention.KEY_BLOCK", 5)
    monkeypatch.setattr("fast.kernels.cpu.attention.QUERY_BLOCK", 3)
    monkeypatch.setattr("fast.kernels.cpu.decode.CHUNK_BYTES", 1)
    monkeypatch.setattr("fast.kernels.cpu.cache.CHUNK_TOKENS", 5)


def verdict(op: str, value: AttentionState, low: AttentionState, gold: AttentionState):
    """Assert that the errors of output and LSE are within their budgets, with infinities at the same elements."""
    assert value.out.dtype == low.out.dtype and value.lse.dtype == low.lse.dtype
    if value.out.dtype == torch.float64:
        return assert_states64(value, gold)
    for parity in compare_states(op, value, low, gold):
        assert parity.passed, parity


def double(*tensors):
    return [t.double() for t in tensors]


# Attention and merge.


def check_attention_parity(ops, query_lens, key_lens, heads, dtype, causal, width=24, value=16):
    """Attend packed requests -> output and LSE of every row within the budget (pitfalls 1, 3, 4 and 5)."""
    shapes = ((sum(query_lens), heads, width), (sum(key_lens), heads, width), (sum(key_lens), heads, value))
    tensors = [torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in shapes]
    rest = (offsets(query_lens), offsets(key_lens), max(query_lens), max(key_lens), width**-0.5, causal)
    gold = reference.flash_attn_varlen(*double(*tensors), *rest)
    low = reference.flash_attn_varlen(*tensors, *rest)
    verdict("flash_attn_varlen", ops.flash_attn_varlen(*tensors, *rest), low, gold)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
def test_attention(dtype, causal, pieces):
    """Attend requests, some without queries or without keys -> results within the budget (pitfalls 1, 3 and 5)."""
    check_attention_parity(fast, [1, 17, 0, 5, 7], [1, 17, 4, 0, 31], 3, dtype, causal)


@pytest.mark.parametrize("heads", HEADS)
def test_attention_heads(heads):
    check_attention_parity(fast, [2, 9], [13, 9], heads, torch.bfloat16, True)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_across_blocks(causal):
    """Attend requests that are longer than the kernel's blocks of queries and keys -> results within the budget."""
    check_attention_parity(fast, [300, 3], [809, 700], 2, torch.float32, causal)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), min_size=1, max_size=4), st.booleans())
def test_attention_any_lengths(lens, causal):
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        check_attention_parity(fast, [q for q, _ in lens], [k for _, k in lens], 2, torch.float64, causal, 6, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_dtype(dtype):
    """Attend with `out_dtype`, as a prefill does -> output and LSE in float32, or in float64 for float64 inputs."""
    tensors = [torch.randn(6, 2, 8).to(dtype) for _ in range(3)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rest = (offsets([6]), offsets([6]), 6, 6, 0.4, True, wide)
    value, low = fast.flash_attn_varlen(*tensors, *rest), reference.flash_attn_varlen(*tensors, *rest)
    assert value.out.dtype == value.lse.dtype == wide
    verdict("flash_attn_varlen", value, low, reference.flash_attn_varlen(*double(*tensors), *rest[:-1], torch.float64))


def check_merge_parity(ops, dtype):
    """Merge two attention states -> results within the budget (pitfalls 2 and 4).

    A row that has no keys in one or both of the states must be exact. The LSEs are float64 if `out` is float64, and
    otherwise float32.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    states = []
    for empty in (slice(0, 4), slice(2, 6)):
        out, lse = torch.randn(40, 3, 8).to(dtype), (12 + 4 * torch.randn(3, 40)).to(wide)
        out[empty], lse[:, empty] = 0, -torch.inf
        states.append(AttentionState(out, lse))
    gold = reference.merge_attn_states(*(AttentionState(*double(s.out, s.lse)) for s in states))
    value = ops.merge_attn_states(*states)
    verdict("merge_attn_states", value, reference.merge_attn_states(*states), gold)
    assert_same_bits(value.out[:2], states[1].out[:2])
    assert_same_bits(value.out[4:6], states[0].out[4:6])
    assert value.out[2:4].eq(0).all() and value.lse[:, 2:4].eq(-torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge(dtype):
    """Merge two attention states -> results within the budget, exact for rows without keys (pitfalls 2 and 4)."""
    check_merge_parity(fast, dtype)


# Decode.

DECODES = {
    "one": ([1] * 6, [1, 15, 16, 17, 97, 0]),
    "uniform": ([3] * 4, [3, 16, 18, 0]),
    "ragged": ([4, 1, 2, 1], [4, 33, 17, 5]),
    "empty queries": ([1, 0, 2, 0], [20, 7, 3, 0]),
    "all padding": ([1, 1], [0, 0]),
    "no requests": ([], []),
}


def decode_inputs(config: MLAConfig, query_lens, seq_lens, dtype, block_size=16):
    batch = make_batch(query_lens, seq_lens, block_size)
    entries = make_entries(batch, config.head_size, dtype)
    cache = make_cache(batch, entries, config.head_size, dtype)
    plan = reference.build_mla_metadata(batch.common, block_size, 4096, max([1, *query_lens])).decode
    shape = (batch.num_tokens, config.num_heads)
    ql = torch.randn(*shape, config.kv_lora_rank, dtype=torch.float64).to(dtype)
    q_pe = torch.randn(*shape, config.qk_rope_head_dim, dtype=torch.float64).to(dtype)
    # scale the absorbed queries to the variance of a real layer; the scores then have the variance of a real layer
    return batch, entries, cache, plan, ql * (config.qk_nope_head_dim / config.kv_lora_rank) ** 0.5, q_pe


def check_decode_parity(ops, config, query_lens, seq_lens, dtype, block_size=16):
    """Decode a batch -> results within the budget; output 0 and LSE -inf for padding rows (pitfalls 6, 7 and 12).

    Cache entries after the end of a sequence are NaN. Block-table entries after the last block are out of range.
    `visible_lens` has the number of keys that each query token attends, which is 0 for padding rows.
    """
    _, _, cache, plan, ql, q_pe = decode_inputs(config, query_lens, seq_lens, dtype, block_size)
    scale = softmax_scale(config)
    gold = reference.mla_decode(*double(ql, q_pe, cache), plan, scale)
    low = reference.mla_decode(ql, q_pe, cache, plan, scale)
    value = ops.mla_decode(ql, q_pe, cache, plan, config.softmax_scale)
    verdict("mla_decode", value, low, gold)
    empty = plan.visible_lens == 0
    assert value.out[empty].eq(0).all() and value.lse[:, empty].eq(-torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", DECODES.values(), ids=DECODES)
def test_decode(lens, dtype, pieces):
    """Decode batches, some with padding rows or without queries -> within the budget (pitfalls 5, 6, 7 and 12)."""
    check_decode_parity(fast, LOW_RANK, *lens, dtype)


@pytest.mark.parametrize("heads", HEADS)
def test_decode_heads(heads):
    check_decode_parity(fast, replace(DIRECT, num_heads=heads), [1, 2], [31, 9], torch.float16)


@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_decode_block_sizes(block_size, pieces):
    check_decode_parity(fast, NO_ROPE, [1, 1, 3], [63, 64, 65], torch.float32, block_size)


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "minicpm3", "glm-5"])
def test_decode_preset_dims(name):
    check_decode_parity(fast, preset(name), [1, 1], [130, 67], torch.bfloat16, 64)


def test_decode_pages_side_by_side():
    """Decode with scattered blocks, and with consecutive blocks of each request -> the same bits."""
    batch, _entries, cache, plan, ql, q_pe = decode_inputs(DIRECT, [1, 2], [40, 50], torch.float32)
    scattered = fast.mla_decode(ql, q_pe, cache, plan, 0.3)
    ordered = torch.full((9, 16, DIRECT.head_size), torch.nan)
    table = torch.full_like(plan.block_table, GARBAGE)
    table[0, :3], table[1, :4] = torch.arange(1, 4), torch.arange(4, 8)
    for request in range(2):
        for column in range(-(-batch.seq_lens[request] // 16)):
            ordered[table[request, column]] = cache[plan.block_table[request, column]]
    in_order = fast.mla_decode(ql, q_pe, ordered, replace(plan, block_table=table), 0.3)
    assert_same_bits(in_order.out, scattered.out)
    assert_same_bits(in_order.lse, scattered.lse)


def check_visible_lens(ops, dtype=torch.float64):
    """Decode with any `visible_lens`, also 0 -> a row attends exactly the first `visible_lens` keys of its request."""
    batch, _entries, cache, plan, ql, q_pe = decode_inputs(DIRECT, [3, 2, 1], [33, 18, 20], dtype)
    plan = replace(plan, visible_lens=torch.tensor([0, 33, 7, 16, 1, 0], dtype=torch.int32), mask="visible_lens")
    state = ops.mla_decode(ql, q_pe, cache, plan, 0.3)
    verdict("mla_decode", state, *(reference.mla_decode(ql, q_pe, cache, plan, 0.3) for _ in range(2)))
    assert state.lse[:, [0, 5]].eq(-torch.inf).all() and state.out[[0, 5]].eq(0).all()
    hidden = cache.clone()
    for block, at in batch.slots[1][16:]:
        hidden[block, at] = 1e3
    again = ops.mla_decode(ql, q_pe, hidden, plan, 0.3)
    assert_same_bits(again.out, state.out)


def test_visible_lens(pieces):
    check_visible_lens(fast)


# Prefill.


def check_prefill_parity(ops, config, query_lens, context_lens, workspace, dtype, block_size=16):
    """Prefill with a context in chunks -> results within the budget; return the number of chunks (pitfall 1)."""
    seq_lens = [q + c for q, c in zip(query_lens, context_lens, strict=True)]
    batch = make_batch(query_lens, seq_lens, block_size)
    entries = make_entries(batch, config.head_size, dtype)
    cache = make_cache(batch, entries, config.head_size, dtype, new_tokens=False)
    q = torch.randn(batch.num_tokens, config.num_heads, config.qk_head_dim).to(dtype)
    kv_c, k_pe = last_rows(batch, entries).split([config.kv_lora_rank, config.qk_rope_head_dim], -1)
    weights = make_up_projections(config, dtype)
    plan, scale = expanding_plan(ops, batch, workspace), softmax_scale(config)
    gold = reference.forward_prefill(*double(q, kv_c, k_pe, cache), plan, *double(*weights), scale)
    low = reference.forward_prefill(q, kv_c, k_pe, cache, plan, *weights, scale)
    verdict("forward_prefill", ops.forward_prefill(q, kv_c, k_pe, cache, plan, *weights, scale), low, gold)
    return len(plan.context_chunks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_prefill(config, dtype, pieces):
    assert check_prefill_parity(fast, config, [5, 1, 17], [31, 0, 16], 32, dtype) == 2


def test_prefill_in_many_chunks():
    """Prefill with contexts of unequal lengths, so that later chunks lack some requests -> within the budget."""
    assert check_prefill_parity(fast, LOW_RANK, [2, 3, 1], [200, 1, 0], 32, torch.bfloat16) == 7


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("contexts", [(0, 40, 0, 0, 70, 0), (0, 9, 0, 33, 0, 50)], ids=str)
def test_prefill_in_runs(contexts, dtype):
    """Prefill requests without context at both ends and in the middle -> within the budget."""
    assert check_prefill_parity(fast, LOW_RANK, [5, 2, 1, 4, 3, 2], contexts, 32, dtype) == 4


def test_prefill_through_a_gather_of_ones_own(ops):
    """Pass a function `gather` to a prefill, as context parallelism does -> only `gather` reads the context."""
    seen = []

    def gather(kv_cache, metadata, chunk, cache_format, out_dtype):
        seen.append(chunk.num_tokens)
        assert out_dtype == torch.float64
        return torch.ones(chunk.num_tokens, DIRECT.head_size, dtype=out_dtype)

    batch = make_batch([2, 1], [40, 10])
    plan = expanding_plan(ops, batch, 32)
    q = torch.randn(3, 3, DIRECT.qk_head_dim, dtype=torch.float64)
    new = torch.ones(3, DIRECT.head_size, dtype=torch.float64)
    poisoned = torch.full((batch.num_blocks, 16, DIRECT.head_size), torch.nan, dtype=torch.float64)
    weights = make_up_projections(DIRECT, torch.float64)
    state = ops.forward_prefill(q, new[:, :24], new[:, 24:], poisoned, plan, *weights, 0.3, gather)
    assert seen == [chunk.num_tokens for chunk in plan.context_chunks] and len(seen) == 2
    assert state.out.isfinite().all()


# The layer.


def layer_step(ops, config, weights, dtype, inputs, batch, threshold=1):
    """Run one mixed step in a dtype; return the outputs and the cache after the step."""
    hidden, positions, cache = inputs[0].to(dtype), inputs[1], inputs[2].to(dtype, copy=True)
    layer = make_layer(ops, config, weights, dtype)
    plan = ops.build_mla_metadata(batch.common, batch.block_size, 64, threshold)
    with torch.no_grad():
        return layer(hidden, positions, cache, plan), cache


def layer_inputs(config, batch, dtype, padding):
    entries = make_entries(batch, config.head_size, dtype)
    cache = make_cache(batch, entries, config.head_size, dtype, new_tokens=False)
    positions = [
        p for q, s in zip(batch.query_lens, batch.seq_lens, strict=True) for p in range(max(s - q, 0), max(s, q))
    ]
    hidden = torch.randn(batch.num_tokens + padding, config.hidden_size).to(dtype)
    return hidden, torch.tensor(positions + [0] * padding), cache


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_layer(config, dtype):
    """Run a layer on a mixed step -> outputs and cache within the budget.

    The step has decodes, a padding row, prefills with and without context, and padding tokens.
    """
    batch = make_batch([1, 1, 1, 20, 9], [97, 1, 0, 20, 50], padding=3)
    weights = make_weights(config, dtype)
    inputs = layer_inputs(config, batch, dtype, 3)
    gold, gold_cache = layer_step(reference, config, weights, torch.float64, inputs, batch)
    low, low_cache = layer_step(reference, config, weights, dtype, inputs, batch)
    value, cache = layer_step(fast, config, weights, dtype, inputs, batch)
    for parity in (compare("forward", value, low, gold), compare("kv_cache", cache, low_cache, gold_cache)):
        assert parity.passed, parity
    assert value[2].eq(0).all() and value[-3:].eq(0).all()


# Equal bits, and NaN.


@pytest.mark.parametrize("dtype", LOW)
def test_same_bits_again(dtype):
    """Repeat a step after another computation -> the same bits (tier 1)."""
    batch = make_batch([1, 1, 40], [97, 33, 80])
    weights = make_weights(LOW_RANK, dtype)
    inputs = layer_inputs(LOW_RANK, batch, dtype, 0)
    first, first_cache = layer_step(fast, LOW_RANK, weights, dtype, inputs, batch)
    torch.randn(1000, 1000) @ torch.randn(1000, 1000)
    second, second_cache = layer_step(fast, LOW_RANK, weights, dtype, inputs, batch)
    assert_same_bits(first, second)
    assert_same_bits(first_cache, second_cache)


def check_unowned_bytes(ops, dtype=torch.float32):
    """Put NaN, infinity or 3e4 into cache entries that belong to no token -> the same outputs (pitfalls 6 and 7)."""
    config = LOW_RANK
    batch = make_batch([1, 1, 1, 9, 2], [17, 33, 0, 40, 2], padding=2)
    weights = make_weights(config, dtype)
    hidden, positions, cache = layer_inputs(config, batch, dtype, 2)
    outputs = []
    for poison in (torch.nan, torch.inf, 3e4):
        filled = torch.where(cache.isnan(), torch.tensor(poison, dtype=dtype), cache)
        outputs.append(layer_step(ops, config, weights, dtype, (hidden, positions, filled), batch)[0])
        assert outputs[-1].isfinite().all()
    assert_same_bits(outputs[0], outputs[1])
    assert_same_bits(outputs[0], outputs[2])


@pytest.mark.parametrize("dtype", LOW)
def test_unowned_bytes_reach_nothing(ops, dtype):
    """Change cache entries that belong to no token -> the same outputs (pitfalls 6 and 7)."""
    check_unowned_bytes(ops, dtype)


def check_nan_query(ops):
    """Put a NaN into the query of one row (query token, head) of a decode -> only this row of the result is NaN."""
    _, _, cache, plan, ql, q_pe = decode_inputs(DIRECT, [3, 1, 1], [20, 17, 0], torch.float32)
    clean = ops.mla_decode(ql, q_pe, cache, plan, 0.3)
    for bad in (ql, q_pe):
        was = bad[1, 2, 3].item()
        bad[1, 2, 3] = torch.nan
        state = ops.mla_decode(ql, q_pe, cache, plan, 0.3)
        bad[1, 2, 3] = was
        assert state.out[1, 2].isnan().all() and state.lse[2, 1].isnan()
        state.out[1, 2], state.lse[2, 1] = clean.out[1, 2], clean.lse[2, 1]
        assert_same_bits(state.out, clean.out)
        assert_same_bits(state.lse, clean.lse)


def test_nan_query_row(ops, pieces):
    check_nan_query(ops)


def test_nan_query_row_prefill(ops, pieces):
    q, k, v = (torch.randn(12, 2, 8) for _ in range(3))
    call = (offsets([5, 7]), offsets([5, 7]), 7, 7, 0.3, True)
    clean = ops.flash_attn_varlen(q, k, v, *call)
    q[6, 1, 0] = torch.nan
    state = ops.flash_attn_varlen(q, k, v, *call)
    assert state.out[6, 1].isnan().all() and state.lse[1, 6].isnan()
    state.out[6, 1], state.lse[1, 6] = clean.out[6, 1], clean.lse[1, 6]
    assert_same_bits(state.out, clean.out)
    assert_same_bits(state.lse, clean.lse)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_bad_keys_stay_with_their_request(ops, bad, pieces):
    """Put NaN or infinity into keys or values of one request -> the outputs of the other requests do not change."""
    batch, _, cache, plan, ql, q_pe = decode_inputs(DIRECT, [2, 1, 1], [20, 33, 17], torch.float32)
    clean = ops.mla_decode(ql, q_pe, cache, plan, 0.3)
    block, at = batch.slots[1][5]
    cache[block, at, 3] = bad
    state = ops.mla_decode(ql, q_pe, cache, plan, 0.3)
    others = [0, 1, 3]
    assert not state.out[2].isfinite().all()
    assert_same_bits(state.out[others], clean.out[others])
    assert_same_bits(state.lse[:, others], clean.lse[:, others])

    tensors = [torch.randn(12, 2, 8) for _ in range(3)]
    call = (offsets([5, 7]), offsets([5, 7]), 7, 7, 0.3, True)
    clean = ops.flash_attn_varlen(*tensors, *call)
    for which in (1, 2):
        poisoned = [t.clone() for t in tensors]
        poisoned[which][8] = bad
        assert_same_bits(ops.flash_attn_varlen(*poisoned, *call).out[:5], clean.out[:5])


def test_bad_keys_in_context_stay_with_their_request(ops):
    """Put a NaN into the context of one request -> other requests in the same chunk keep their outputs."""
    config = DIRECT
    batch = make_batch([3, 2, 4], [35, 18, 36])
    weights, inputs = make_weights(config, torch.float32), layer_inputs(config, batch, torch.float32, 0)
    clean, _ = layer_step(ops, config, weights, torch.float32, inputs, batch)
    block, at = batch.slots[1][2]
    inputs[2][block, at] = torch.nan
    out, _ = layer_step(ops, config, weights, torch.float32, inputs, batch)
    assert out[3:5].isnan().any()
    assert_same_bits(out[:3], clean[:3])
    assert_same_bits(out[5:], clean[5:])


def test_padding_rows_are_zero_whatever_they_hold(ops):
    """Put NaN into padding rows and padding tokens -> their output is 0, and no cache entry is written (pitfall 6)."""
    config = LOW_RANK
    batch = make_batch([1, 1, 5], [17, 0, 5], padding=2)
    weights = make_weights(config, torch.float32)
    hidden, positions, cache = layer_inputs(config, batch, torch.float32, 2)
    clean, clean_cache = layer_step(ops, config, weights, torch.float32, (hidden, positions, cache), batch)
    hidden[1] = hidden[-2:] = torch.nan
    out, left = layer_step(ops, config, weights, torch.float32, (hidden, positions, cache), batch)
    assert out[1].eq(0).all() and out[-2:].eq(0).all()
    assert_same_bits(out, clean)
    assert_same_bits(left, clean_cache)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_current():
    """Call ops on tensors of a GPU that is not the current device -> the kernels run on the GPU of the tensors."""
    assert torch.cuda.current_device() == 0
    with torch.device("cuda:1"):
        check_decode_parity(fast, LOW_RANK, [1, 2, 1], [17, 40, 0], torch.bfloat16)
        check_attention_parity(fast, [3, 17], [9, 17], 3, torch.bfloat16, True)
        check_merge_parity(fast, torch.float32)
        batch = make_batch([1, 1, 20, 9], [97, 1, 20, 50])
        weights = make_weights(LOW_RANK, torch.float32)
        inputs = layer_inputs(LOW_RANK, batch, torch.float32, 0)
        outs = [layer_step(ops, LOW_RANK, weights, torch.float32, inputs, batch)[0] for ops in (fast, reference)]
        gold, _ = layer_step(reference, LOW_RANK, weights, torch.float64, inputs, batch)
    assert outs[0].device == torch.device("cuda:1")
    assert compare("forward", *outs, gold).passed
