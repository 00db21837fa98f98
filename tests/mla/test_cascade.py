"""Tests of cascade decode: the common prefix, the decision for a cascade, and the equality with one decode.

In a cascade, all requests share a prefix. One call attends this prefix for all requests together, and another call
attends the rest of each request. The two attention states of each request are then merged.
"""

from __future__ import annotations

import sys

import pytest
import torch

import fast
import reference
from fast.kernels.schedule_costs import GPU_CASCADE_COSTS
from fast.parity import compare_states
from reference.interfaces import CacheFormat, CascadeCosts, CommonAttentionMetadata, MLAConfig

from ..support.factories import DIRECT, GARBAGE, assert_states64, integers, make_batch
from ..support.planning import same
from ..support.properties import given, st

V3 = MLAConfig.from_preset("deepseek-v3")
SMALL = MLAConfig.from_preset("deepseek-v2-lite")


def shared_batch(query_lens, seq_lens, shared_blocks, block_size=4):
    """Return the number of cache blocks, and a batch whose requests have the same first blocks, up to `shared_blocks`.

    The block table has GARBAGE after the last block of each request. A padding row (S = 0) has GARBAGE only.
    """
    batch = make_batch(query_lens, seq_lens, block_size)
    common = batch.common
    table = common.block_table.clone()
    real = [request for request, length in enumerate(seq_lens) if length]
    for request in real:
        blocks = min(shared_blocks, *(-(-seq_lens[owner] // block_size) for owner in (request, real[0])))
        table[request, :blocks] = table[real[0], :blocks]
    for request in range(len(seq_lens)):
        table[request, -(-seq_lens[request] // block_size) :] = GARBAGE
    return batch.num_blocks, CommonAttentionMetadata.make(
        common.query_start_loc_cpu, common.seq_lens_cpu, table, common.slot_mapping
    )


LENS = st.lists(st.tuples(st.sampled_from([1, 1, 2, 3]), st.integers(0, 40)), min_size=1, max_size=5)


def legal(pairs):
    return [query_len for query_len, _ in pairs], [length and max(length, query_len) for query_len, length in pairs]


@given(LENS, st.integers(0, 6))
def test_common_prefix(pairs, shared):
    """The common prefix is the longest sequence of blocks with which all contexts begin.

    The test finds this sequence by trying every length.
    """
    query_lens, seq_lens = legal(pairs)
    _, common = shared_batch(query_lens, seq_lens, shared)
    contexts = [s - q for q, s in zip(query_lens, seq_lens, strict=True) if s]
    rows = [row for row, length in zip(common.block_table.tolist(), seq_lens, strict=True) if length]
    fits = [
        n for n in range(12)
        if rows and n * 4 <= min(contexts) and len({tuple(row[:n]) for row in rows}) == 1
    ]  # fmt: skip
    for ops in (reference, fast):
        assert ops.common_prefix_len(common, 4) == 4 * max(fits, default=0)


def decode_inputs(common, num_blocks, dtype=torch.float64, heads=3):
    tokens, width = common.num_actual_tokens, DIRECT.kv_lora_rank + DIRECT.qk_rope_head_dim
    cache = torch.randn(num_blocks, 4, width, dtype=torch.float64).to(dtype)
    queries = (torch.randn(tokens, heads, n, dtype=torch.float64).to(dtype) for n in (DIRECT.kv_lora_rank,
               DIRECT.qk_rope_head_dim))  # fmt: skip
    return *queries, cache


def check_cascade(ops, pairs, shared):
    query_lens, seq_lens = legal(pairs)
    num_blocks, common = shared_batch(query_lens, seq_lens, shared)
    prefix = ops.common_prefix_len(common, 4)
    plan = ops.build_mla_metadata(common, 4, 64, 3).decode
    if prefix == 0:
        return None
    row = next(request for request, length in enumerate(seq_lens) if length)
    cascade = ops.split_shared_prefix(plan, prefix, 4, row)
    ql, q_pe, cache = decode_inputs(common, num_blocks)
    whole = ops.mla_decode(ql, q_pe, cache, plan, 0.3)
    assert_states64(ops.cascade_attention(ql, q_pe, cache, cascade, 0.3), whole)
    return cascade


@given(LENS, st.integers(1, 6))
def test_cascade_is_the_whole(pairs, shared):
    """In float64 a cascade gives the result of one decode, also with padding rows and several query tokens.

    Both packages give the same plan for the cascade.
    """
    found = []
    for ops in (reference, fast):
        torch.manual_seed(0)
        found.append(check_cascade(ops, pairs, shared))
    if found[0] is not None:
        same(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parity(dtype):
    """The error of a cascade is within the budget of one decode (docs/correctness.md).

    For this the attention states must stay in float32 until they are merged.
    """
    num_blocks, common = shared_batch([1, 2, 1], [33, 40, 21], 5)
    plan = reference.build_mla_metadata(common, 4, 64, 2).decode
    cascade = fast.split_shared_prefix(plan, 20, 4)
    ql, q_pe, cache = decode_inputs(common, num_blocks, dtype)
    value = fast.cascade_attention(ql, q_pe, cache, cascade, 0.3)
    gold = reference.mla_decode(ql.double(), q_pe.double(), cache.double(), plan, 0.3)
    low = reference.mla_decode(ql, q_pe, cache, plan, 0.3)
    for parity in compare_states("cascade_attention", value, low, gold):
        assert parity.passed, parity


def counted(prefix, query_lens, seq_lens, config, stored=2, state=4, byte=200):
    """Count bytes and FLOPs request by request, and return whether a cascade is faster than one decode.

    `stored` is the number of bytes of a cache element, and `state` the number of bytes of an element of an attention
    state. `byte` is the number of FLOPs in the time of moving a byte.
    """
    read = shared_read = flops = tokens = 0
    for q, s in zip(query_lens, seq_lens, strict=True):
        if s:
            read += s * config.head_size * stored
            shared_read += (s - prefix) * config.head_size * stored
            flops += config.num_heads * q * s * 2 * (config.head_size + config.kv_lora_rank)
            tokens += q
    shared_read += prefix * config.head_size * stored
    states = 4 * state * tokens * config.num_heads * (config.kv_lora_rank + 1)
    return max(flops, byte * shared_read) + byte * states < max(flops, byte * read)


@given(
    st.lists(st.tuples(st.sampled_from([1, 1, 4]), st.sampled_from([0, 30, 500, 5000])), min_size=1, max_size=30),
    st.sampled_from([0, 16, 256, 4096]), st.sampled_from([SMALL, V3, DIRECT]),
    st.sampled_from([(torch.bfloat16, 2, 4), (torch.float16, 2, 4), (torch.float32, 4, 4), (torch.float64, 8, 8)]),
    st.sampled_from([200, 1, 20, 1000]),
)  # fmt: skip
def test_decision(pairs, prefix, config, sizes, flops_per_byte):
    query_lens, seq_lens = [q for q, _ in pairs], [s and s + prefix for _, s in pairs]
    lens = integers(*query_lens).cpu(), integers(*seq_lens).cpu()
    dtype, *sizes = sizes
    options = dict(dtype=dtype, costs=CascadeCosts(flops_per_byte))
    found = {ops.use_cascade_attention(prefix, *lens, config, **options) for ops in (reference, fast)}
    if dtype == torch.bfloat16 and flops_per_byte == 200:  # these are the defaults
        found |= {ops.use_cascade_attention(prefix, *lens, config) for ops in (reference, fast)}
    wanted = counted(prefix, query_lens, seq_lens, config, *sizes, flops_per_byte)
    assert found == {prefix > 0 and any(seq_lens) and wanted}


def test_bytes_come_from_the_format(ops, monkeypatch):
    """The decision for a cascade counts the bytes of the cache format, which has 1 byte for each element in this test.

    The test fails if the decision always counts 2 bytes for an element.
    """
    stored = CacheFormat("stored", torch.float8_e4m3fn, (torch.bfloat16,))
    monkeypatch.setattr(sys.modules["reference.interfaces.cache_format"], "CACHE_FORMATS", {"stored": stored})
    query_lens, lengths, differ = [1] * 8, [4096] * 8, 0
    lens = integers(*query_lens).cpu(), integers(*lengths).cpu()
    for prefix in range(16, 1024, 16):
        wanted = counted(prefix, query_lens, lengths, SMALL, 1)
        assert ops.use_cascade_attention(prefix, *lens, SMALL, stored) == wanted
        differ += wanted != counted(prefix, query_lens, lengths, SMALL)
    assert differ


def test_when_it_pays(ops):
    """A cascade is chosen for a model with few heads and a long prefix that many requests share.

    A cascade is not chosen for one request, for a short prefix, or for the 128 heads of DeepSeek-V3. With 128 heads,
    matrix products limit the speed of a decode, and a cascade saves only bytes.
    """
    many, one = (integers(*[1] * n).cpu() for n in (64, 1))
    lens = integers(*[8192] * 64).cpu()
    assert ops.use_cascade_attention(4096, many, lens, SMALL)
    assert not ops.use_cascade_attention(4096, one, lens[:1], SMALL)
    assert not ops.use_cascade_attention(0, many, lens, SMALL)
    assert not ops.use_cascade_attention(16, many, lens, SMALL)
    assert not ops.use_cascade_attention(4096, many, lens, V3)
    assert not ops.use_cascade_attention(4096, many, lens, SMALL, costs=CascadeCosts(flops_per_byte=1))


def test_costs_of_a_builder(ops, plain_errors):
    """A builder decides with the given costs; without costs, a builder of `fast` takes those of its device."""
    lens = integers(*[1] * 64).cpu(), integers(*[8192] * 64).cpu()
    sizes = SMALL, 16, 16384, 64
    assert ops.MLAMetadataBuilder(*sizes, cascade_costs=CascadeCosts()).use_cascade_attention(4096, *lens)
    builder = ops.MLAMetadataBuilder(*sizes, cascade_costs=CascadeCosts(flops_per_byte=1))
    assert not builder.use_cascade_attention(4096, *lens)
    with pytest.raises(TypeError, match="^cascade_costs: expected a CascadeCosts or None, got int$"):
        ops.MLAMetadataBuilder(*sizes, cascade_costs=3)
    with torch.device("cpu"):
        assert ops.MLAMetadataBuilder(*sizes).cascade_costs == CascadeCosts()
    if ops is fast:
        assert fast.MLAMetadataBuilder(*sizes, device="cuda:3").cascade_costs == GPU_CASCADE_COSTS != CascadeCosts()


def test_layer_takes_the_cascade(ops):
    """A layer gives the same output for a plan with a cascade as for a plan without a cascade.

    With the option `batch_invariant` or `fast_build`, the plan has no cascade.
    """
    from ..support.factories import make_layer, make_weights

    torch.manual_seed(0)
    layer = make_layer(ops, DIRECT, make_weights(DIRECT, torch.float64), torch.float64)
    num_blocks, common = shared_batch([1] * 6, [0, 170, 181, 190, 175, 163], 40)
    builder = ops.MLAMetadataBuilder(DIRECT, 4, 512, 8)
    plans = [builder.build(prefix, common) for prefix in (0, ops.common_prefix_len(common, 4))]
    assert plans[0].cascade is None and plans[1].cascade is not None
    assert builder.build(160, common, fast_build=True).cascade is None
    invariant = ops.MLAMetadataBuilder(DIRECT, 4, 512, 8, num_programs=3, batch_invariant=True)
    assert invariant.build(160, common).cascade is None and invariant.build(160, common).schedule is not None
    hidden = torch.randn(6, DIRECT.hidden_size, dtype=torch.float64)
    cache = torch.randn(num_blocks, 4, DIRECT.head_size, dtype=torch.float64)
    positions = (common.seq_lens - 1).clamp(min=0).long()
    outputs = [layer(hidden, positions, cache.clone(), plan) for plan in plans]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)


def test_refusals(ops, plain_errors):
    plan = ops.build_mla_metadata(make_batch([1, 1], [20, 30], 4).common, 4, 64).decode
    for wrong in (0, 6, -4):
        with pytest.raises(
            ValueError, match="^common_prefix_len: expected a positive multiple of the block size 4, got"
        ):
            ops.split_shared_prefix(plan, wrong, 4)
    with pytest.raises(ValueError, match="^common_prefix_len: expected at most the 10 blocks of the table, got 11 "):
        ops.split_shared_prefix(plan, 44, 4)
    with pytest.raises(ValueError, match=r"^row: expected a request in \[0, 2\), got 2$"):
        ops.split_shared_prefix(plan, 4, 4, 2)
    with pytest.raises(ValueError, match="^common_prefix_len: expected an int >= 0, got -1$"):
        ops.use_cascade_attention(-1, integers(1).cpu(), integers(9).cpu(), V3)
    with pytest.raises(ValueError, match="^block_size: expected a positive int, got 0$"):
        ops.common_prefix_len(make_batch([1], [4]).common, 0)
    narrow = make_batch([1, 1], [20, 60], 4).common
    with pytest.raises(ValueError, match="^block_table: expected at least 30 columns for request 1, got 17$"):
        ops.common_prefix_len(narrow, 2)
    builder = ops.MLAMetadataBuilder(DIRECT, 4, 512, 8)
    with pytest.raises(ValueError, match="^common_prefix_len: expected at most the context 19 of request 0, got 20$"):
        builder.build(20, make_batch([1, 0, 1], [20, 0, 60], 4).common)
