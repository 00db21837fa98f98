"""Tests of the kernels of grouped-query attention: errors within budgets, NaN, invalid plans, and both kernel sets.

The backend "cpu" serves the calls of most tests. The backend "torch" is declared for GPUs alone; its functions also run
on CPU tensors, and the fixture `padded` registers them under the name "padded". The budgets are those of
`fast.parity`. The letters of shapes: T query tokens, N heads, Nkv key/value heads, Dh head dim.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import fast
import reference
from fast import backends
from fast.backends import Backend
from fast.backends.own import CPU as CPU_BACKEND
from fast.backends.own import TORCH as TORCH_BACKEND
from fast.kernels.cpu import gqa as cpu_kernels
from fast.parity import compare_states
from reference.interfaces import (
    COMPUTE_FORMAT,
    FP8_E4M3,
    NEUTRAL_SPLIT_RULE,
    DecodeSchedule,
    GraphSupport,
    UnsupportedConfiguration,
)
from reference.interfaces.gqa import AttentionType, GQAConfig
from reference.interfaces.gqa.dims import HEAD_DIMS

from ..support.backends import registered
from ..support.factories import assert_same_bits, assert_states64, offsets
from ..support.gqa import CONFIGS, GROUPED, LENS, MHA, MQA, SLOPES, gqa_batch, oracle_batch, rows_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BLOCK_SIZES = (16, 32, 64, 48)
LAYOUTS = ("NHD", "HND")
GRID_LENS = ((1, 1), (1, 17), (0, 20), (1, 0), (3, 16), (13, 15), (1, 67))
SINKS_AND_CAP = replace(GROUPED, attention_sinks=True, logits_soft_cap=0.9)


@pytest.fixture
def padded():
    """Register the kernels of the backend "torch" for the device of the run; return the name of the new backend."""
    with registered(Backend("padded", -1, torch.get_default_device().type, TORCH_BACKEND.ops)):
        yield "padded"


def shrink(monkeypatch) -> None:
    """Make tiles and blocks of queries very small, so that the loops of the kernels have many iterations."""
    for name in ("cpu.gqa", "torch.attention"):
        monkeypatch.setattr(f"fast.kernels.{name}.TILE_BYTES", 1)
        monkeypatch.setattr(f"fast.kernels.{name}.SCORE_BYTES", 1)
    monkeypatch.setattr("fast.kernels.cpu.gqa.LEAST_QUERIES", 3)


def attend(ops, batch, q=None, **options):
    """Attend the cache of a batch."""
    q = batch.q if q is None else q
    return ops.gqa_paged_attention(
        q, batch.kv_cache, batch.metadata, batch.config, batch.sinks, **batch.scales, **options
    )


def in_float64(batch):
    """Return a batch whose numbers are in float64; a cache in e4m3 stays as it is."""
    cache = batch.kv_cache if batch.cache_format.scaled else batch.kv_cache.double()
    sinks = None if batch.sinks is None else batch.sinks.double()
    return replace(batch, q=batch.q.double(), kv_cache=cache, sinks=sinks)


def verdict(op, value, low, gold, lse_relative=None) -> None:
    """Assert that the errors of output and LSE are within their budgets, with infinities at the same elements.

    `lse_relative` is the additional relative error of the LSE; None takes the one of the backends "cpu" and "torch".
    """
    assert value.out.dtype == low.out.dtype and value.lse.dtype == low.lse.dtype
    if value.out.dtype == torch.float64:
        return assert_states64(value, gold)
    # The kernels of the backends "cpu" and "torch" compute with exp and log, not with base 2. They may add the head_dim
    # terms of a score in another order than the reference: the rounding error grows with the root of their number.
    rounding = value.out.shape[-1] ** 0.5 * torch.finfo(value.lse.dtype).eps if lse_relative is None else lse_relative
    for parity in compare_states(op, value, low, gold, lse_relative=rounding):
        assert parity.passed, parity


def check_parity(batch, lse_relative=None, **options) -> None:
    """Attend the cache of a batch -> the errors against the reference in float64 are within the budgets."""
    given = {name: options[name] for name in ("q_scale",) if name in options}
    gold, low = attend(reference, in_float64(batch), **given), attend(reference, batch, **given)
    verdict("gqa_paged_attention", attend(fast, batch, **options), low, gold, lse_relative)


# Errors of paged attention.


@pytest.mark.parametrize("head_dim", [32, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_grid(kv_heads, group, head_dim):
    """Attend with every combination of heads; dtypes, block sizes and layouts alternate."""
    number = kv_heads + group + head_dim // 16
    config = GQAConfig(kv_heads * group, kv_heads, head_dim, sliding_window=(None, 16, 5)[number % 3])
    batch = gqa_batch(config, GRID_LENS, BLOCK_SIZES[number % 4], DTYPES[(number // 2) % 4], LAYOUTS[number % 2])
    check_parity(batch)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim, padded):
    """Attend with every head dim that the family supports -> both kernel sets are within the budgets."""
    batch = gqa_batch(GQAConfig(4, 2, head_dim, sliding_window=20), ((1, 1), (2, 40)), dtype=torch.float32)
    for backend in (None, padded):
        check_parity(batch, backend=backend)


def test_grid_has_every_value():
    """Repeat the formulas of `test_grid` -> every dtype, block size, layout and window occurs."""
    numbers = {kv + group + dim // 16 for kv in (1, 2, 8) for group in (1, 3, 4, 8) for dim in (32, 80, 96, 128, 256)}
    assert {number % 12 for number in numbers} == set(range(12)) and {number // 2 % 4 for number in numbers} == {
        0,
        1,
        2,
        3,
    }


@pytest.mark.parametrize("cache_format", [COMPUTE_FORMAT, FP8_E4M3], ids=lambda each: each.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_features(name, dtype, cache_format, padded):
    """Attend with windows, caps, ALiBi, sinks and e4m3 caches -> both kernel sets are within the budgets."""
    batch = gqa_batch(CONFIGS[name], LENS, dtype=dtype, cache_format=cache_format, padding=2)
    for backend in (None, padded):
        check_parity(batch, backend=backend)


@pytest.mark.parametrize("cache_format", [COMPUTE_FORMAT, FP8_E4M3], ids=lambda each: each.name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["grouped", "window of a page + 1", "all of them"])
def test_small_tiles(name, layout, cache_format, padded, monkeypatch):
    """Attend in tiles of one block and blocks of few queries -> the oracle's states, by both kernel sets."""
    shrink(monkeypatch)
    batch = gqa_batch(CONFIGS[name], LENS, 16, torch.float64, layout, cache_format, padding=2)
    for backend in (None, padded):
        assert_states64(attend(fast, batch, backend=backend), oracle_batch(batch))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_in_order(dtype, layout):
    """Attend a request whose blocks follow each other in the cache -> the bits of the same blocks in another order."""
    config = replace(GROUPED, sliding_window=70)
    batch = gqa_batch(config, [(2, 100), (1, 33)], 16, dtype, layout, free_behind_window=False)
    used = batch.metadata.block_table[0, :7].long()
    cache = batch.kv_cache.clone()
    ordered = torch.empty_like(torch.cat((cache, cache), 1)[:, :20]).fill_(torch.nan)
    ordered[:, 5:12] = cache[:, used]
    table = torch.arange(5, 12, dtype=torch.int32)[None]
    plan = replace(rows_of(batch.metadata, slice(0, 1)), block_table=table)
    moved = replace(batch, lens=batch.lens[:1], q=batch.q[:2], kv_cache=ordered, metadata=plan)
    state, alone = attend(fast, moved), attend(fast, batch)
    if cache.device.type == "cpu":  # the backend "cpu" is batch-invariant, the backend "torch" is not
        assert_same_bits(state.out, alone.out[:2])
        assert_same_bits(state.lse, alone.lse[:, :2])
    check_parity(moved)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_in_e4m3(dtype, padded):
    """Round the queries to e4m3 first -> within the budgets of the reference with the same scale."""
    batch = gqa_batch(SINKS_AND_CAP, LENS, dtype=dtype, cache_format=FP8_E4M3)
    for backend in (None, padded):
        check_parity(batch, q_scale=torch.tensor(0.013), backend=backend)


def test_every_e4m3_number():
    """Convert all 256 e4m3 numbers in a cache -> the numbers of `torch.float8_e4m3fn`, NaN included."""
    convert, factor = cpu_kernels._from_e4m3, cpu_kernels.E4M3_FACTOR
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    finite = ~numbers.isnan()
    assert_same_bits(convert(codes[finite]).float() * factor, numbers[finite])
    assert convert(codes).isnan().equal(~finite) and torch.equal(
        convert(codes)[finite].float() * factor, numbers[finite]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_budget_of_the_lse_is_small(dtype):
    """Change the LSE by a factor 1 + 2^-16, an error that `LSE_RELATIVE` allows -> the verdict fails."""
    batch = gqa_batch(GROUPED, LENS, dtype=dtype)
    gold, low = attend(reference, in_float64(batch)), attend(reference, batch)
    verdict("gqa_paged_attention", low, low, gold)
    with pytest.raises(AssertionError):
        verdict("gqa_paged_attention", replace(low, lse=low.lse * (1 + 2.0**-16)), low, gold)


def test_out_dtype():
    """Attend 16-bit queries with an output in float32 -> within the budgets; the LSE is float32."""
    batch = gqa_batch(GROUPED, LENS, dtype=torch.bfloat16)
    gold = attend(reference, in_float64(batch))
    value, low = (attend(ops, batch, out_dtype=torch.float32) for ops in (fast, reference))
    verdict("gqa_paged_attention", value, low, gold)
    assert value.out.dtype == value.lse.dtype == torch.float32


def test_empty_batches(padded):
    """Attend no request, no query token, and a cache without blocks -> empty states, or rows without keys."""
    batch = gqa_batch(SINKS_AND_CAP, LENS, dtype=torch.float32)
    for backend in (None, padded):
        nobody = replace(batch, q=batch.q[:0], metadata=rows_of(batch.metadata, slice(0, 0)))
        state = attend(fast, nobody, backend=backend)
        assert state.out.shape == (0, 6, 80) and state.lse.shape == (6, 0)
        silent = replace(batch, q=batch.q[:0], metadata=rows_of(batch.metadata, slice(3, 4)))
        assert attend(fast, silent, backend=backend).out.shape == (0, 6, 80)
        row = rows_of(batch.metadata, slice(4, 5))  # the padding row has one query token
        state = attend(
            fast, replace(batch, q=batch.q[3:4], kv_cache=batch.kv_cache[:, :0], metadata=row), backend=backend
        )
        assert state.out.eq(0).all()
        rounding = 2 * torch.finfo(torch.float32).eps  # kernels compute an LSE in base 2
        torch.testing.assert_close(state.lse[:, 0], batch.sinks, rtol=rounding, atol=0)


# What reaches a result.


def check_nan_stays(batch, requests, backend):
    """Make all keys and values of one request NaN -> its output is NaN, and the other requests keep their bits."""
    starts, block_size = batch.metadata.query_start_loc.tolist(), batch.kv_cache.shape[2]
    before = attend(fast, batch, backend=backend)
    assert before.out.isfinite().all()
    for request in requests:
        cache = batch.kv_cache.clone()
        cache[:, sorted({slot // block_size for slot in batch.slots[request] if slot >= 0})] = torch.nan
        state = attend(fast, replace(batch, kv_cache=cache), backend=backend)
        rows = slice(starts[request], starts[request + 1])
        assert state.out[rows].isnan().all()
        state.out[rows], state.lse[:, rows] = before.out[rows], before.lse[:, rows]
        assert_same_bits(state.out, before.out)
        assert_same_bits(state.lse, before.lse)


@pytest.mark.parametrize("config", [MHA, CONFIGS["all of them"]], ids=["plain", "all"])
def test_nan_stays_in_its_request(config, padded):
    for backend in (None, padded):
        check_nan_stays(gqa_batch(config, LENS, 16, torch.float32, padding=1), (2, 7), backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["grouped", "all of them"])
def test_batch_invariance(name, dtype):
    """Attend each request alone -> its bits in the batch; the backend "torch" refuses to."""
    batch, schedule = gqa_batch(CONFIGS[name], LENS, dtype=dtype), DecodeSchedule(None, None, True)
    whole, starts = attend(fast, batch, schedule=schedule), batch.metadata.query_start_loc.tolist()
    if batch.q.device.type != "cpu":
        with pytest.raises(UnsupportedConfiguration, match="torch: is not batch-invariant"):
            attend(fast, batch, schedule=schedule, backend="torch")
    for request in range(len(LENS)):
        rows = slice(starts[request], starts[request + 1])
        plan = rows_of(batch.metadata, slice(request, request + 1))
        alone = attend(fast, replace(batch, metadata=plan), batch.q[rows], schedule=schedule)
        assert_same_bits(alone.out, whole.out[rows])
        assert_same_bits(alone.lse, whole.lse[:, rows])


def test_out(padded):
    """Attend into a tensor with any strides -> the same bits, and the tensor itself is returned."""
    batch = gqa_batch(SINKS_AND_CAP, LENS, dtype=torch.float32, padding=2)
    for backend in (None, padded):
        wanted = attend(fast, batch, backend=backend)
        for out in (torch.empty_like(batch.q), torch.empty(6, len(batch.q), 160)[..., ::2].transpose(0, 1)):
            state = attend(fast, batch, out=out, backend=backend)
            assert state.out is out
            assert_same_bits(out, wanted.out)
            assert_same_bits(state.lse, wanted.lse)
    with pytest.raises(ValueError, match="^out: expected memory that no input has"):
        attend(fast, batch, out=batch.q)


@pytest.mark.parametrize(
    "dtype, out_dtype", [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)], ids=str
)
def test_out_of_a_cascade(dtype, out_dtype, plain_errors):
    """Attend as a cascade into a tensor with any strides -> the same bits; a wrong tensor is refused, and stays."""
    batch = gqa_batch(SINKS_AND_CAP, [(1, 33), (2, 50), (1, 49)], dtype=dtype)
    table = batch.metadata.block_table.clone()
    table[:, :2] = table[0, :2]
    plan = replace(batch.metadata, block_table=table)
    cascade = fast.split_shared_prefix(plan, 32, 16, 0)
    given = batch.q, batch.kv_cache, cascade, batch.config, batch.sinks, out_dtype
    wanted = fast.gqa_cascade_attention(*given)
    for out in (torch.empty_like(wanted.out), torch.empty(6, 4, 160, dtype=wanted.out.dtype)[..., ::2].transpose(0, 1)):
        state = fast.gqa_cascade_attention(*given, out=out)
        assert state.out is out
        assert_same_bits(out, wanted.out)
        assert_same_bits(state.lse, wanted.lse)
    out = torch.full_like(wanted.out, 7)
    for wrong, message in (
        (out[:-1], r"^out: expected shape \[4, 6, 80\]"),
        (out.double(), "^out: expected dtype torch"),
        (out[:1].expand(4, 6, 80), "^out: expected a tensor whose elements have different addresses"),
    ):
        with pytest.raises(ValueError, match=message):
            fast.gqa_cascade_attention(*given, out=wrong)
    with pytest.raises(ValueError, match="^out: expected memory that no input has"):
        fast.gqa_cascade_attention(*given[:-1], out=batch.q)
    assert out.eq(7).all()


def test_invalid_plans_write_nothing(plain_errors):
    """Attend plans on the CPU with one invalid value -> a one-line error that names it, and `out` keeps its bits."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("on a GPU the host does not know the values")
    batch = gqa_batch(CONFIGS["window of a page"], ((1, 33), (2, 20)), dtype=torch.float32)
    plan, out = batch.metadata, torch.full_like(batch.q, 7)
    table, blocks = plan.block_table, batch.kv_cache.shape[1]

    def changed(tensor, index, value):
        return tensor.index_put([torch.tensor([each]) for each in index], torch.tensor(value, dtype=tensor.dtype))

    wrong = [
        ("block_table", changed(table, (0, 2), blocks), rf"blocks in \[0, {blocks}\) at request 0, got {blocks}"),
        ("block_table", changed(table, (1, 0), -1), rf"blocks in \[0, {blocks}\) at request 1, got -1"),
        ("visible_lens", changed(plan.visible_lens, (2,), 21), r"a value in \[0, 20\] at row 2, got 21"),
        ("first_visible", changed(plan.first_visible, (0,), -1), r"a value in \[0, 33\] at row 0, got -1"),
        ("first_visible", changed(plan.first_visible, (0,), 34), r"a value in \[0, 33\] at row 0, got 34"),
        ("seq_lens", changed(plan.seq_lens, (0,), 34), "lengths up to max_seq_len 33, got 34"),
        ("seq_lens", changed(plan.seq_lens, (0,), -1), "lengths >= 0, got -1"),
        ("query_start_loc", changed(plan.query_start_loc, (1,), 4), "values that never decrease, got 4 then 3"),
    ]
    for field, value, message in wrong:
        with pytest.raises(ValueError, match=rf"^metadata.{field}: expected {message}") as error:
            attend(fast, replace(batch, metadata=replace(plan, **{field: value})), out=out)
        assert "\n" not in str(error.value) and out.eq(7).all()


def test_invalid_values_on_a_gpu_are_masked():
    """Run the kernels of the backend "torch" with invalid blocks and lengths -> these keys are masked, nothing raises.

    On a GPU the host does not know the values, so that the kernels must mask them.
    """
    batch = gqa_batch(MQA, ((1, 33), (2, 20)), dtype=torch.float64)
    plan, launch = batch.metadata, backends.imported("fast.kernels.torch:gqa_paged_attention")

    def run(plan):
        return launch(
            batch.q, batch.kv_cache, plan.block_table, plan.seq_lens, plan.query_start_loc, plan.visible_lens, None, 2,
            plan.max_seq_len, plan.max_seq_len, 0.1, None, None, None, torch.float64, None, None, False,
            NEUTRAL_SPLIT_RULE,
        )  # fmt: skip

    right = run(plan)
    table = plan.block_table.clone()
    table[0, 1], table[1, 1] = 2**31 - 1, -7
    out, lse = run(replace(plan, block_table=table))
    seen = attend(reference, replace(batch, config=replace(MQA, scale=0.1)))
    assert_states64(fast.AttentionState(*right), seen)
    assert out.isfinite().all() and lse.lt(right[1]).all()  # fewer keys: a smaller sum of exponentials
    longer = replace(plan, seq_lens=plan.seq_lens + 10**6, visible_lens=plan.visible_lens + 10**6)
    out, lse = run(replace(longer, max_seq_len=10**9, block_table=plan.block_table))
    assert out.shape == right[0].shape
    out, lse = run(replace(plan, query_start_loc=torch.tensor([0, -5, 10**6], dtype=torch.int32)))
    assert out.shape == right[0].shape


# Packed keys without a cache.

PACKED = CONFIGS | {
    "attention chunks": replace(GROUPED, attention_chunk_size=5),
    "chunks and a window": replace(GROUPED, attention_chunk_size=16, sliding_window=4),
    "encoder": replace(GROUPED, attention_type=AttentionType.ENCODER),
    "encoder with a window": replace(GROUPED, attention_type=AttentionType.ENCODER, sliding_window=4),
    "encoder, all": replace(CONFIGS["all of them"], attention_type=AttentionType.ENCODER_ONLY),
    "cross": replace(SINKS_AND_CAP, attention_type=AttentionType.CROSS),
}


def packed_inputs(config, dtype):
    """Return the arguments of `gqa_varlen_attention` for requests of several lengths, also without keys or queries."""
    query_lens, key_lens = (1, 17, 0, 5, 9), (1, 17, 4, 0, 33)
    if config.attention_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
        key_lens = query_lens
    shapes = ((sum(query_lens), config.num_heads), *((sum(key_lens), config.num_kv_heads),) * 2)
    tensors = [torch.randn(*shape, config.head_dim, dtype=torch.float64).to(dtype) for shape in shapes]
    sinks = torch.randn(config.num_heads).to(dtype) if config.attention_sinks else None
    return (*tensors, offsets(query_lens), offsets(key_lens), max(query_lens), max(key_lens), config, sinks)


def doubled(arguments):
    return [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in arguments]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_packed(name, dtype, padded):
    """Attend packed keys with every mask -> both kernel sets are within the budgets."""
    arguments = packed_inputs(PACKED[name], dtype)
    gold, low = reference.gqa_varlen_attention(*doubled(arguments)), reference.gqa_varlen_attention(*arguments)
    for backend in (None, padded):
        verdict("gqa_varlen_attention", fast.gqa_varlen_attention(*arguments, backend=backend), low, gold)


@pytest.mark.parametrize("name", ["chunks and a window", "encoder, all", "cross"])
def test_packed_in_small_tiles(name, padded, monkeypatch):
    """Attend packed keys in tiles of one key and blocks of few queries -> the reference's states in float64."""
    shrink(monkeypatch)
    arguments = packed_inputs(PACKED[name], torch.float64)
    for backend in (None, padded):
        assert_states64(
            fast.gqa_varlen_attention(*arguments, backend=backend), reference.gqa_varlen_attention(*arguments)
        )


def test_packed_out(padded):
    """Attend packed keys into a given tensor -> the same bits; invalid offsets leave the tensor as it was."""
    arguments = packed_inputs(PACKED["cross"], torch.float32)
    for backend in (None, padded):
        wanted, out = fast.gqa_varlen_attention(*arguments, backend=backend), torch.empty(6, 32, 80).transpose(0, 1)
        state = fast.gqa_varlen_attention(*arguments, out=out, backend=backend)
        assert state.out is out
        assert_same_bits(out, wanted.out)
        assert_same_bits(state.lse, wanted.lse)
    before = out.clone()
    if out.device.type != "cpu":
        return  # the host does not know the values of offsets on a GPU
    for place, lengths in ((3, (1, 17, 0, 5, 8)), (4, (1, 17, 4, 0, 34))):
        wrong = list(arguments)
        wrong[place] = offsets(lengths)
        with pytest.raises(ValueError, match="^cu_seqlens_[qk]: expected a last element of"):
            fast.gqa_varlen_attention(*wrong, out=out)
        assert_same_bits(out, before)


# The choice of a backend.


def test_the_host_never_waits():
    """Run the kernels on fake tensors, which have no values -> the backend "torch" asks for none, and "cpu" does."""
    batch = gqa_batch(CONFIGS["all of them"], LENS, dtype=torch.float32, cache_format=FP8_E4M3, padding=1)
    plan, c = batch.metadata, batch.config
    given = (
        batch.q, batch.kv_cache, plan.block_table, plan.seq_lens, plan.query_start_loc, plan.visible_lens,
        plan.first_visible, 17, 53, 53, 0.1, c.logits_soft_cap, None, batch.sinks, torch.float32, None, None, False,
        NEUTRAL_SPLIT_RULE,
        FP8_E4M3, batch.k_scale, batch.v_scale, batch.k_scale,
    )  # fmt: skip
    packed = (
        *packed_inputs(PACKED["encoder"], torch.float32)[:7],
        0.1,
        "decoder",
        4,
        8,
        0.5,
        None,
        None,
        torch.float32,
    )
    write = (batch.q[:, :2], batch.q[:, :2], batch.kv_cache, batch.slot_mapping, FP8_E4M3, batch.k_scale, batch.v_scale)

    def faked(mode, arguments):
        return [mode.from_tensor(each) if torch.is_tensor(each) else each for each in arguments]

    for op, arguments in (
        ("gqa_paged_attention", given),
        ("gqa_varlen_attention", packed),
        ("reshape_and_cache", write),
    ):
        with FakeTensorMode() as mode:
            backends.imported(f"fast.kernels.torch:{op}")(*faked(mode, arguments))
            with pytest.raises(DataDependentOutputException):
                backends.imported(f"fast.kernels.cpu:{op}")(*faked(mode, arguments))


def test_devices(monkeypatch):
    """Ask for the backends of a CPU, an old GPU and a new GPU -> each has one; "torch" is not batch-invariant."""
    for device, capability, name in (("cpu", None, "cpu"), ("cuda", (7, 5), "torch"), ("cuda", (8, 0), "triton")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, found=capability: found)
        device = torch.device(device)
        config = CONFIGS["all of them"]
        requests = (
            backends.paged_attention_request(config, device, torch.bfloat16, 16, cache_format=FP8_E4M3,
                                             graph=GraphSupport.ANY, q_in_e4m3=True),
            backends.varlen_attention_request(config, device, torch.bfloat16),
            backends.key_value_write_request(device, torch.bfloat16, 80, 16, FP8_E4M3, GraphSupport.ANY),
        )  # fmt: skip
        assert [backends.select(request).name for request in requests] == [name] * 3
        said = backends.explain(config, device=device, dtype=torch.bfloat16, block_size=16).splitlines()
        found = {line.split(" (")[0] for line in said if line.startswith(("gqa_", "reshape_"))}
        ops = ("gqa_paged_attention", "gqa_varlen_attention", "reshape_and_cache")
        assert found == {f"{op}: {name}, chosen by priority" for op in ops}
        assert not [line for line in said if line.startswith(ops) and ": none" in line]
    invariant = replace(requests[0], batch_invariant=True)
    with pytest.raises(UnsupportedConfiguration, match="torch: is not batch-invariant"):
        backends.select(invariant, "torch")
    assert backends.select(invariant).name == "triton"


@pytest.mark.parametrize("feature, config", [
    ("alibi", replace(GROUPED, alibi_slopes=SLOPES)), ("soft_cap", replace(GROUPED, logits_soft_cap=2.0)),
    ("sinks", replace(GROUPED, attention_sinks=True)), ("window", replace(GROUPED, sliding_window=3)),
    ("attention_chunk", replace(GROUPED, attention_chunk_size=8)),
])  # fmt: skip
def test_missing_features(feature, config):
    """Name a backend that lacks a feature -> a one-line error before anything is written; without it, the call runs."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("runs kernels of the backend cpu")
    ops = {op: replace(support, features=tuple(each for each in support.features if each != feature))
           for op, support in CPU_BACKEND.ops.items() if op.startswith("gqa_")}  # fmt: skip
    arguments = packed_inputs(config, torch.float32)
    out = torch.full_like(arguments[0], 7)
    with registered(Backend("lacking", 99, "cpu", ops)):
        message = f"^lacking: has no {feature}$"
        with pytest.raises(UnsupportedConfiguration, match=message):
            fast.gqa_varlen_attention(*arguments, out=out, backend="lacking")
        assert out.eq(7).all()
        fast.gqa_varlen_attention(*arguments)  # another backend serves the call
        if feature != "attention_chunk":  # over a cache, chunks are the requests of the plan
            batch = gqa_batch(config, LENS, dtype=torch.float32)
            with pytest.raises(UnsupportedConfiguration, match=message):
                attend(fast, batch, backend="lacking")
        attend(fast, gqa_batch(GROUPED, LENS, dtype=torch.float32), backend="lacking")


def test_ignored_scales():
    """Name a backend whose kernels ignore scales -> it serves scales of 1, and refuses any other scale."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("runs kernels of the backend cpu")
    ops = {op: replace(CPU_BACKEND.ops[op], features=()) for op in ("gqa_paged_attention", "reshape_and_cache")}
    batch = gqa_batch(GROUPED, LENS, dtype=torch.float32, cache_format=FP8_E4M3)
    ones = replace(batch, k_scale=torch.tensor(1.0), v_scale=torch.tensor(1.0))
    cache = batch.kv_cache.clone()
    with registered(Backend("ignoring", 99, "cpu", ops)):
        for _ in range(2):  # the second call skips the checks of the first call, but not this one
            assert_same_bits(attend(fast, ones, backend="ignoring").out, attend(fast, ones, backend="cpu").out)
            wrong = replace(ones, v_scale=batch.v_scale)
            refused = pytest.raises(UnsupportedConfiguration, match="^ignoring: ignores v_scale and needs 1, got 0.006")
            with refused:
                attend(fast, wrong, backend="ignoring")
            with refused:
                fast.reshape_and_cache(
                    batch.new_k, batch.new_v, cache, batch.slot_mapping, **wrong.scales, backend="ignoring"
                )
        assert_same_bits(cache, batch.kv_cache)
        assert_same_bits(attend(fast, batch).out, attend(fast, batch, backend="cpu").out)  # never chosen unnamed


def test_a_plan_that_names_a_backend(padded):
    """Attend a plan that names a backend -> this backend serves it, and another name is refused."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("runs kernels of the backend cpu")
    batch = gqa_batch(GROUPED, LENS, dtype=torch.float32)
    named = replace(batch, metadata=replace(batch.metadata, backend=padded))
    assert_same_bits(attend(fast, named).out, attend(fast, batch, backend=padded).out)
    with pytest.raises(ValueError, match="^metadata.backend: expected cpu, the backend of the call, got padded$"):
        attend(fast, named, backend="cpu")
