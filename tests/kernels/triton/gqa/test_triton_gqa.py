"""Tests of the Triton kernels of grouped-query attention against the reference: masks, splits, schedules and writes.

On a GPU the kernels are compiled. Without a GPU, one test runs this file again in Triton's interpreter, in which the
backend `interpreted` has the same kernels. The interpreter computes wrong products of bfloat16 numbers. Queries in
bfloat16 are therefore tested there only over a cache in e4m3, whose products are in float16.

The budgets are those of `fast.parity`. The letters of shapes: T query tokens, N heads, Dh head dim.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast.backends import Backend
from fast.backends.own import TRITON
from reference.interfaces import COMPUTE_FORMAT, FP8_E4M3, NEUTRAL_SPLIT_RULE, UNDIVIDED, DecodeSchedule
from reference.interfaces.gqa import GQAConfig
from reference.planning.visible_lens import scheduled_lens

from ....gqa.test_fast_attention import (
    PACKED,
    SINKS_AND_CAP,
    attend,
    check_nan_stays,
    check_parity,
    doubled,
    packed_inputs,
    verdict,
)
from ....gqa.test_fast_cache import written
from ....support.backends import registered
from ....support.factories import assert_same_bits
from ....support.gqa import CONFIGS, GROUPED, LENS, MHA, MQA, WIDE, gqa_batch, rows_of
from ....support.triton_mode import INTERPRETED, ON_GPU, run_in_interpreter, runs, starts_interpreter

if ON_GPU or INTERPRETED:
    from fast.kernels.torch import attention as padded_kernels
    from fast.kernels.triton.gqa import paged

FORMATS = (COMPUTE_FORMAT, FP8_E4M3)
DTYPES = (torch.float32, torch.float16) + (torch.bfloat16,) * ON_GPU
SHORT = LENS if ON_GPU else ((1, 1), (1, 37), (0, 20), (1, 0), (2, 17), (17, 53), (1, 31))
FEW = LENS if ON_GPU else ((1, 37), (2, 17), (0, 5), (1, 0), (1, 1), (4, 31))
LONG = ((1, 100), (25, 90), (1, 33), (40, 40), (0, 5), (1, 0))  # several tiles of keys, and several blocks of rows
ALL = CONFIGS["all of them"]


@pytest.fixture(autouse=True)
def on_device():
    """Create tensors on the GPU if there is one."""
    with torch.device("cuda" if ON_GPU else "cpu"):
        yield


@pytest.fixture
def triton():
    """Return the name of a backend with the Triton kernels that serves the device of the run."""
    if ON_GPU:
        yield "triton"
    else:
        ops = {
            op: replace(support, only_named=False)
            for op, support in TRITON.ops.items()
            if "gqa" in op or "reshape" in op
        }
        with registered(Backend("interpreted", -1, "cpu", ops)):
            yield "interpreted"


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


def schedule_for(batch, programs: int, batch_invariant: bool = False) -> DecodeSchedule:
    """Return a schedule of a batch for a number of programs; 0 means no schedule."""
    if programs == 0:
        return DecodeSchedule(None, None, True) if batch_invariant else None
    plan = batch.metadata
    counted = scheduled_lens(plan.query_start_loc.cpu(), plan.seq_lens.cpu(), batch.config.sliding_window)
    return fast.plan_decode(counted.to(plan.seq_lens.device), programs, batch_invariant=batch_invariant)


@runs
@pytest.mark.parametrize("number, name", list(enumerate(CONFIGS)))
def test_features(number, name, triton):
    """Attend with windows, caps, ALiBi, sinks and e4m3 caches -> within the budgets; dtypes and formats alternate."""
    if name == "8 KV heads" and INTERPRETED:
        pytest.skip("the interpreter needs long for many heads")
    pairs = list(itertools.product(DTYPES, FORMATS))
    for dtype, cache_format in pairs if ON_GPU else pairs[number % len(pairs) :][:1]:
        batch = gqa_batch(CONFIGS[name], SHORT, dtype=dtype, cache_format=cache_format, padding=2)
        check_parity(batch, backend=triton)


@runs
@pytest.mark.parametrize("head_dim", [32, 80, 96, 112, 120, 128, 160, 192, 224, 256] if ON_GPU else [64, 112, 256])
@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (3, 1), (28, 4), (71, 1)] if ON_GPU else [(3, 1), (14, 2)])
def test_dims(heads, kv_heads, head_dim, triton):
    """Attend with groups of any size, head dims that are padded, and block sizes above and below a tile."""
    layouts = (16, "HND"), (64, "NHD"), (48, "HND")
    for block_size, layout in layouts if ON_GPU else layouts[(heads + head_dim // 16) % 3 :][:1]:
        lens = ((1, 40), (3, 70))
        batch = gqa_batch(GQAConfig(heads, kv_heads, head_dim), lens, block_size, torch.float16, layout)
        check_parity(batch, backend=triton)


@runs
@pytest.mark.parametrize("number, name", list(enumerate(["grouped", "window", "window and sinks", "all of them"])))
def test_long_prefills(number, name, triton):
    """Attend tiles that need no mask, between tiles that need one -> within the budgets; formats alternate."""
    windowed = replace(MHA, sliding_window=50)
    config = {"grouped": GROUPED, "window": windowed, "window and sinks": replace(windowed, attention_sinks=True),
              "all of them": replace(ALL, sliding_window=70)}[name]  # fmt: skip
    for cache_format in FORMATS if ON_GPU else FORMATS[number % 2 :][:1]:
        batch = gqa_batch(config, LONG, 32, torch.float16, cache_format=cache_format, padding=70)
        check_parity(batch, backend=triton)


@runs
@pytest.mark.parametrize("splits, config, lens", [(2, ALL, LONG if ON_GPU else FEW), (9, ALL, FEW), (3, GROUPED, FEW)])
def test_splits(splits, config, lens, triton, monkeypatch):
    """Divide requests into splits, some of which have no keys -> within the budgets; padding tokens stay 0."""
    monkeypatch.setattr(paged, "_num_splits", lambda *_: splits)
    check_parity(gqa_batch(config, lens, 16, torch.float32, padding=3), backend=triton)


@runs
@pytest.mark.parametrize("config", [MQA, replace(ALL, sliding_window=150)], ids=["multi-query", "all of them"])
@pytest.mark.parametrize("programs", [1, 3, 8] if ON_GPU else [3, 8])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_schedules(batch_invariant, programs, config, triton):
    """Follow a schedule of few and many programs -> within the budgets, also for requests without keys."""
    batch = gqa_batch(config, ((1, 300), (2, 67), (1, 0), (0, 9), (3, 150)), 16, torch.float16, padding=2)
    check_parity(batch, schedule=schedule_for(batch, programs, batch_invariant), backend=triton)


def each_alone(batch):
    """Yield the rows of each request in the output of a batch, and a batch of this request alone."""
    starts = batch.metadata.query_start_loc.tolist()
    for request, rows in enumerate(itertools.starmap(slice, itertools.pairwise(starts))):
        part = slice(request, request + 1)
        yield rows, replace(batch, lens=batch.lens[part], q=batch.q[rows], metadata=rows_of(batch.metadata, part))


@runs
@pytest.mark.parametrize("programs", [0, 3])
@pytest.mark.parametrize("name", ["multi-head", "all of them"])
def test_batch_invariance(name, programs, triton):
    """Attend each request alone -> its bits in the batch, with and without tile ranges in the schedule."""
    lens = ((1, 300), (2, 67), (1, 1)) if INTERPRETED else ((1, 300), (2, 67), (1, 1), (1, 150), (3, 200))
    features = {"all of them": dict(sliding_window=150, attention_sinks=True, logits_soft_cap=1.1)}.get(name, {})
    batch = gqa_batch(replace(MHA, **features), lens, 16, torch.float16)
    schedule = schedule_for(batch, programs, True)
    if programs == 0:
        schedule = replace(schedule, split_rule=replace(NEUTRAL_SPLIT_RULE, small_tiles=2, small_splits=2))
    whole = attend(fast, batch, schedule=schedule, backend=triton)
    for rows, alone in each_alone(batch):
        own = schedule if programs == 0 else schedule_for(alone, programs + 1, True)
        found = attend(fast, alone, schedule=own, backend=triton)
        assert_same_bits(found.out, whole.out[rows])
        assert_same_bits(found.lse, whole.lse[:, rows])


@runs
@pytest.mark.parametrize("cache_format", FORMATS, ids=lambda cache_format: cache_format.name)
@pytest.mark.parametrize("name", ["grouped", "all of them"])
def test_batch_invariant_prefills(name, cache_format, triton, monkeypatch):
    """Attend each prefill alone -> its bits in the batch. Without `UNDIVIDED`, other splits change some bits."""
    monkeypatch.setattr(paged, "_num_splits", lambda programs, *_: 3 if programs < 12 else 1)
    config = replace(ALL, sliding_window=70) if name == "all of them" else CONFIGS[name]
    lens = ((40, 170), (2, 67), (66, 80), (1, 130), (17, 17))
    batch = gqa_batch(config, lens, 16, DTYPES[-1], cache_format=cache_format)
    differ = []
    for schedule in (UNDIVIDED, None):
        whole = attend(fast, batch, schedule=schedule, backend=triton)
        for rows, alone in each_alone(batch):
            found = attend(fast, alone, schedule=schedule, backend=triton)
            if schedule is UNDIVIDED:
                assert_same_bits(found.out, whole.out[rows])
                assert_same_bits(found.lse, whole.lse[:, rows])
            differ.append(not torch.equal(found.out, whole.out[rows]))
    assert any(differ)
    check_parity(batch, schedule=UNDIVIDED, backend=triton)


@runs
def test_queries_in_e4m3(triton):
    """Round the queries to e4m3 first -> within the budgets of the reference with the same scale."""
    for dtype in (*DTYPES, torch.bfloat16):
        batch = gqa_batch(SINKS_AND_CAP, FEW, dtype=dtype, cache_format=FP8_E4M3)
        check_parity(batch, q_scale=torch.tensor(0.013), backend=triton)


@runs
@pytest.mark.parametrize("size", [1e-5, 1.0, 1e5])
def test_bfloat16_queries_over_e4m3(size, triton):
    """Attend bfloat16 queries of any size, which are converted to float16 -> within the budgets."""
    config = replace(GROUPED, scale=0.1 / max(size, 1.0))
    batch = gqa_batch(config, ((1, 40), (20, 90)), dtype=torch.bfloat16, cache_format=FP8_E4M3)
    check_parity(replace(batch, q=batch.q * size), backend=triton)


@runs
@pytest.mark.parametrize("splits", [1, 3])
def test_nan_stays_in_its_request(splits, triton, monkeypatch):
    monkeypatch.setattr(paged, "_num_splits", lambda *_: splits)
    check_nan_stays(gqa_batch(ALL, FEW, 16, torch.float32, padding=1), (2, 7) if ON_GPU else (1, 5), triton)


def launched(batch, plan, dtype):
    """Return the arguments of a launch with a plan that may be malformed, and check its state against "torch"."""
    given = (
        batch.q, batch.kv_cache, plan.block_table, plan.seq_lens, plan.query_start_loc, plan.visible_lens, None,
        plan.max_query_len, plan.max_seq_len, plan.max_seq_len, 0.1, None, None, None, dtype, None, None, False,
        NEUTRAL_SPLIT_RULE,
    )  # fmt: skip
    wide = [each.double() if torch.is_tensor(each) and each.is_floating_point() else each for each in given]
    wide = [torch.float64 if each is dtype else each for each in wide]
    found = [paged.gqa_paged_attention(*given)]
    found += [padded_kernels.gqa_paged_attention(*each) for each in (given, wide)]
    verdict("gqa_paged_attention", *(fast.AttentionState(*state) for state in found))
    return given


@runs
@pytest.mark.parametrize("lens", [((1, 33), (2, 20)), ((40, 130), (1, 20))], ids=["decodes", "a prefill"])
def test_invalid_values_are_masked(lens, triton):
    """Attend with invalid blocks, lengths and offsets -> the states of the backend "torch", which masks these keys."""
    batch = gqa_batch(MQA, lens, 16, torch.float32)
    batch = replace(batch, kv_cache=batch.kv_cache.nan_to_num())  # longer lengths attend memory without tokens
    plan = batch.metadata
    table = plan.block_table.clone()
    table[0, 1], table[1, 1] = 2**31 - 1, -7
    long = dict(seq_lens=plan.seq_lens + 10**6, visible_lens=plan.visible_lens + 10**6, max_seq_len=10**9)
    beyond = plan.block_table.clone()
    beyond[:, 3:] = 2**30
    for changes in (dict(block_table=table), dict(block_table=beyond, **long), dict(seq_lens=plan.seq_lens * 0 - 3)):
        given = launched(batch, replace(plan, **changes), torch.float32)
    starts = torch.tensor([0, -5, 10**6], dtype=torch.int32)
    assert paged.gqa_paged_attention(*given[:4], starts, *given[5:])[0].shape == batch.q.shape


@runs
@pytest.mark.parametrize("splits", [1, 2])
def test_out(splits, triton, monkeypatch):
    """Attend into a tensor with any strides -> the same bits, and the tensor itself is returned."""
    monkeypatch.setattr(paged, "_num_splits", lambda *_: splits)
    batch = gqa_batch(SINKS_AND_CAP, FEW, dtype=torch.float32, padding=2)
    wanted = attend(fast, batch, backend=triton)
    for out in (torch.empty_like(batch.q), torch.empty(6, len(batch.q), 160)[..., ::2].transpose(0, 1)):
        state = attend(fast, batch, out=out, backend=triton)
        assert state.out is out
        assert_same_bits(out, wanted.out)
        assert_same_bits(state.lse, wanted.lse)


@runs
def test_empty_batches(triton):
    """Attend no request, no query token, and a cache without blocks -> empty states, or rows without keys."""
    batch = gqa_batch(SINKS_AND_CAP, LENS, dtype=torch.float32)
    nobody = replace(batch, q=batch.q[:0], metadata=rows_of(batch.metadata, slice(0, 0)))
    state = attend(fast, nobody, backend=triton)
    assert state.out.shape == (0, 6, 80) and state.lse.shape == (6, 0)
    row = rows_of(batch.metadata, slice(4, 5))  # the padding row has one query token
    for schedule in (None, schedule_for(replace(batch, metadata=row), 2)):
        alone = replace(batch, q=batch.q[3:4], kv_cache=batch.kv_cache[:, :0], metadata=row)
        state = attend(fast, alone, schedule=schedule, backend=triton)
        assert state.out.eq(0).all()
        # the kernel divides a sink by ln 2 and multiplies it by ln 2: two roundings
        torch.testing.assert_close(state.lse[:, 0], batch.sinks, rtol=2 * torch.finfo(torch.float32).eps, atol=0)


@runs
@pytest.mark.parametrize("number, name", list(enumerate(PACKED)))
def test_packed(number, name, triton):
    """Attend packed keys with every mask -> within the budgets; dtypes alternate without a GPU."""
    for dtype in DTYPES if ON_GPU else DTYPES[number % 2 :][:1]:
        arguments = packed_inputs(PACKED[name], dtype)
        gold, low = reference.gqa_varlen_attention(*doubled(arguments)), reference.gqa_varlen_attention(*arguments)
        found = fast.gqa_varlen_attention(*arguments, backend=triton)
        verdict("gqa_varlen_attention", found, low, gold)
        if number % 5 and INTERPRETED:
            continue
        out = torch.empty(found.out.shape[1], found.out.shape[0], found.out.shape[2], dtype=dtype).transpose(0, 1)
        assert_same_bits(fast.gqa_varlen_attention(*arguments, out=out, backend=triton).out, found.out)


@runs
@pytest.mark.parametrize("cache_format", FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_writes(dtype, layout, cache_format, triton):
    """Write tokens, some of them with slot -1 -> the bits of the reference."""
    for config, block_size in ((GROUPED, 16), (WIDE, 48)):
        batch = gqa_batch(config, FEW, block_size, dtype, layout, cache_format, padding=3, new_tokens=False)
        assert_same_bits(written(fast, batch, backend=triton), written(reference, batch))
