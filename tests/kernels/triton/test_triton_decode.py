"""Tests of the Triton decode kernel against the reference: splits, block sizes, masks and invalid values.

On a GPU the kernel is compiled and has the widths of real models. Without a GPU, one test runs this file again in
Triton's interpreter, with small widths. `test_triton_scheduled_decode` tests decodes with a schedule. "Pitfall 2" is
entry 2 of the list in `tests/__init__.py`. `verdict` asserts that a result is within the budget, the largest error that
docs/correctness.md allows. A row is one (query token, head) pair.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from reference.interfaces import AttentionState, DecodeMetadata

from ...support.decode_inputs import captured, on_device, rising_inputs, schedule_of, verdict
from ...support.factories import GARBAGE, HEADS, assert_same_bits, far_heads, integers, offsets
from ...support.triton_decode_inputs import DTYPES, WIDTH, WIDTHS, launch, make_inputs
from ...support.triton_mode import DEVICE, INTERPRETED, ON_GPU, gpu_only, run_in_interpreter, runs, starts_interpreter

if ON_GPU or INTERPRETED:
    from fast.kernels.triton import decode

LENS = {  # query lengths, sequence lengths; a request with a query token and sequence length 0 is a padding row
    "one each": ([1, 1, 1], [1, 130, 67]),
    "page edges": ([1, 1, 1, 1], [63, 64, 65, 128]),
    "uniform": ([2, 2, 2], [97, 2, 64]),
    "ragged": ([3, 0, 1, 5], [131, 20, 0, 70]),
    "padding rows": ([1, 1], [0, 0]),
    "no requests": ([], []),
}


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


def check_parity(*args, **options):
    inputs = make_inputs(*args, **options)
    verdict(launch(*inputs), *inputs)


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_lengths(lens, dtype):
    check_parity(*lens, dtype=dtype)


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_heads(heads, dtype):
    check_parity([1, 2, 0], [66, 17, 5], heads, dtype)


@runs
@pytest.mark.parametrize("query_len", [1, 2, 4])
@pytest.mark.parametrize("heads", [8, 16, 40])
def test_several_queries_share_a_tile(heads, query_len):
    """In a request with several query tokens, each row sees only keys up to the position of its token (pitfall 12)."""
    check_parity([query_len] * 3, [65, 130, query_len], heads, DTYPES[-1])


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 48])
def test_block_sizes(block_size, dtype):
    for heads in (4, 40):
        check_parity([1, 2], [129, 64], heads, dtype, block_size=block_size)


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
def test_widths(widths, dtype):
    for heads in (4, 40):
        check_parity([1, 3], [34, 67], heads, dtype, widths)


@runs
@pytest.mark.parametrize("splits", [1, 2, 9])
def test_splits(splits, monkeypatch):
    """A decode is within the budget even if a request has more splits than tiles of 64 keys.

    Some splits then have no keys (pitfall 2).
    """
    monkeypatch.setattr(decode, "_num_splits", lambda *bounds: splits)
    for heads in (4, 40):
        check_parity([1, 0, 2, 1], [90, 9, 67, 0], heads, DTYPES[-1])


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", ["whole", "split", "scheduled"])
def test_rising_scores(cut, dtype, monkeypatch):
    """A decode is within the budget even if the largest score of some rows rises at a later tile."""
    # When the largest score rises, the kernel must rescale its sums. The scores are larger than 100, so the rounding of
    # scores dominates the error of a float32 result. The budget is computed from the error of `reference`. With few
    # rows this error can be small by chance; 64 heads give many rows.
    heads = 64 if dtype == torch.float32 else 4
    inputs = rising_inputs(heads, dtype, WIDTH)
    monkeypatch.setattr(decode, "_num_splits", lambda *_: 3 if cut == "split" else 1)
    schedule = schedule_of(inputs[3], heads, 3) if cut == "scheduled" else None
    verdict(launch(*inputs, schedule=schedule), *inputs)


@runs
@pytest.mark.parametrize("scheduled", [False, True])
def test_wide_output(scheduled):
    """A float32 output that is rounded to the dtype of the queries has the same bits as an output in this dtype."""
    inputs = make_inputs([1, 2], [300, 131], 4, DTYPES[-1])
    schedule = schedule_of(inputs[3], 4, 3) if scheduled else None
    wide = launch(*inputs, schedule=schedule, out_dtype=torch.float32)
    assert wide.out.dtype == torch.float32
    assert torch.equal(wide.out.to(DTYPES[-1]), launch(*inputs, schedule=schedule).out)


@runs
def test_choice_of_splits():
    """A long request gets many splits if it is alone, and one split if the other requests fill the GPU.

    A request with few keys gets one split.
    """
    assert decode._num_splits(programs=1, rows=16, keys=131072, resident=132) > 100
    assert decode._num_splits(programs=128, rows=2048, keys=4096, resident=132) == 1
    assert decode._num_splits(programs=1, rows=16, keys=64, resident=132) == 1
    assert decode._num_splits(programs=1, rows=1, keys=0, resident=132) == 1


@runs
def test_mask_is_data():
    """Each query token sees as many keys as `visible_lens` says, even if an earlier token of the request sees more."""
    ql, q_pe, cache, plan = make_inputs([4, 2, 3], [150, 70, 40], 5, DTYPES[-1])
    plan = replace(plan, visible_lens=integers(150, 0, 64, 1, 0, 0, 39, 40, 3))
    verdict(launch(ql, q_pe, cache, plan), ql, q_pe, cache, plan)


@runs
@pytest.mark.parametrize("heads", [4, 40])
@pytest.mark.parametrize("block_size", [16, 64])
def test_values_outside_the_tensors(heads, block_size):
    """The kernel skips the tokens of blocks outside the cache, and clamps lengths to the block table (pitfall 8)."""
    latent, rope = WIDTH
    width, dtype = latent + rope, DTYPES[-1]
    cache = torch.randn(9, block_size, width).to(dtype)
    table = integers(3, GARBAGE, 0, 7, -1, 9, 8, -(2**31), 2**31 - 1, -5, 9, 10).view(3, 4)
    lengths, visible = integers(2**31 - 1, 2 * block_size + 5, 3 * block_size), integers(2**31 - 1, 2**30, 2**29)
    ql, q_pe = torch.randn(3, heads, latent).to(dtype) / latent**0.5, torch.randn(3, heads, rope).to(dtype)
    plan = DecodeMetadata(table, lengths, offsets([1, 1, 1]), 1, visible, 2**31 - 1, block_size)
    state = launch(ql, q_pe, cache, plan)

    # the plan `same` has the same requests without the skipped tokens; each request has one block
    kept = [[(0, cache[3]), (2, cache[0]), (3, cache[7])], [(2, cache[8])], []]
    own = [torch.cat([page[: max(0, int(n) - at * block_size)] for at, page in pages] or [cache[0, :0]])
           for pages, n in zip(kept, lengths, strict=True)]  # fmt: skip
    packed = torch.zeros(3, max(map(len, own)), width, dtype=dtype)
    for block, entries in enumerate(own):
        packed[block, : len(entries)] = entries
    counts = integers(*map(len, own))
    same = DecodeMetadata(
        integers(0, 1, 2)[:, None], counts, offsets([1, 1, 1]), 1, counts, int(counts.max()), packed.shape[1]
    )
    verdict(state, ql, q_pe, packed, same)

    below = replace(plan, seq_lens=integers(-1, 0, -(2**31)), visible_lens=integers(5, -3, -(2**31)))
    state = launch(ql, q_pe, cache, below)
    assert state.out.eq(0).all() and state.lse.eq(-torch.inf).all()
    assert launch(ql, q_pe, cache[:0], plan).lse.eq(-torch.inf).all()
    assert launch(ql, q_pe, cache, replace(plan, block_table=table[:, :0])).lse.eq(-torch.inf).all()


@runs
def test_nan_stays_with_its_owner():
    """NaN in the query of a row changes only this row; NaN in a cache entry changes only the request of this entry."""
    ql, q_pe, cache, plan = make_inputs([2, 1, 1], [70, 130, 17], 3, DTYPES[-1])
    clean = launch(ql, q_pe, cache, plan)
    spoilt = ql.clone()
    spoilt[1, 2, 5] = torch.nan
    state = launch(spoilt, q_pe, cache, plan)
    assert state.out[1, 2].isnan().all() and state.lse[2, 1].isnan()
    state.out[1, 2], state.lse[2, 1] = clean.out[1, 2], clean.lse[2, 1]
    assert_same_bits(state.out, clean.out)
    assert_same_bits(state.lse, clean.lse)

    spoilt = cache.clone()
    spoilt[plan.block_table[1, 0], 3] = torch.nan
    state = launch(ql, q_pe, spoilt, plan)
    assert state.out[2].isnan().any()
    assert_same_bits(state.out[[0, 1, 3]], clean.out[[0, 1, 3]])


@runs
@pytest.mark.parametrize("heads", [4, 40])
def test_same_bits_every_time(heads):
    inputs = make_inputs([1, 2, 1], [200, 65, 0], heads, DTYPES[-1])
    first, second = launch(*inputs), launch(*inputs)
    assert_same_bits(first.out, second.out)
    assert_same_bits(first.lse, second.lse)


@runs
@pytest.mark.parametrize("heads", [4, 40])
def test_strides(heads):
    """Strided inputs give the same bits as contiguous inputs (pitfall 18).

    The cache is one layer of several, and the queries and the index tensors are slices of larger tensors.
    """
    ql, q_pe, cache, plan = (x.to(DEVICE) if isinstance(x, torch.Tensor) else x
                             for x in make_inputs([1, 2], [130, 64], heads, DTYPES[-1]))  # fmt: skip
    dense = launch(ql, q_pe, cache, plan)
    layers = torch.full((cache.shape[0], 3, *cache.shape[1:]), torch.nan, dtype=cache.dtype, device=DEVICE)
    layers[:, 1] = cache
    wide = torch.full((*cache.shape[:2], 2 * cache.shape[2]), torch.nan, dtype=cache.dtype, device=DEVICE)
    wide[..., ::2] = cache
    heads_first = ql.transpose(0, 1).contiguous().transpose(0, 1)
    both = torch.cat((q_pe, q_pe), dim=-1)[..., q_pe.shape[2] :]
    table = torch.stack((plan.block_table,) * 2, dim=-1)[..., 0]
    cut = replace(plan, block_table=table, visible_lens=torch.stack((plan.visible_lens,) * 2, dim=-1)[:, 0])
    for pages in (layers[:, 1], wide[..., ::2]):
        state = launch(heads_first, both, pages, cut)
        assert_same_bits(state.out, dense.out)
        assert_same_bits(state.lse, dense.lse)


@runs
def test_float64_is_refused_by_name():
    with pytest.raises(ValueError, match="ql_nope"):
        launch(*make_inputs([1], [4], dtype=torch.float64))


@runs
@pytest.mark.parametrize("starts", [(2**31 - 1, 8), (-(2**31), 8), (0, 2**31 - 1), (5, 2), (9, 9)], ids=str)
def test_query_offsets_out_of_range(starts):
    """The kernel clamps the values of `query_start_loc`, so it accesses no memory outside queries and outputs."""
    ql, q_pe, cache, plan = make_inputs([8], [40], 40)
    assert launch(ql, q_pe, cache, replace(plan, query_start_loc=integers(*starts))).out.shape == ql.shape


@runs
def test_query_strides_beyond_32_bit():
    """Queries whose heads are 2^30 elements apart give the same bits as packed queries (pitfall 8)."""
    ql, q_pe, cache, plan = make_inputs([2, 1], [40, 17], 3, torch.float16)
    near = launch(ql, q_pe, cache, plan)
    far = launch(far_heads(ql.to(DEVICE)), far_heads(q_pe.to(DEVICE)), cache, plan)
    assert_same_bits(far.out, near.out)
    assert_same_bits(far.lse, near.lse)


@gpu_only
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("block_size", [16, 64])
def test_offsets_beyond_32_bit(heads, block_size):
    """A decode over cache blocks behind element 2^31 of the cache is within the budget (pitfall 8)."""
    ql, q_pe, cache, plan = make_inputs([1, 1], [130, 67], heads, torch.bfloat16, block_size=block_size)
    away = 2**31 // cache[0].numel() + 5
    if torch.cuda.mem_get_info()[0] < 2 * (away + 100) * cache[0].numel() * 2:
        pytest.skip("too little memory")
    large = torch.empty(away + cache.shape[0], *cache.shape[1:], dtype=cache.dtype, device=DEVICE)
    large[away:] = cache.to(DEVICE)
    state = launch(ql, q_pe, large, replace(plan, block_table=plan.block_table.clamp(max=2**30) + away))
    verdict(state, ql, q_pe, cache, plan)


@gpu_only
@pytest.mark.parametrize("heads", [16, 128])
def test_graph_replays_with_other_lengths(heads):
    """A replay of a captured decode uses the lengths that were written to the plan's tensors after the capture."""
    ql, q_pe, cache, plan = make_inputs([2, 1], [300, 150], heads, torch.bfloat16)
    buffers = on_device(plan)
    graph, out, lse = captured(decode, ql, q_pe, cache, buffers)
    other = replace(plan, seq_lens=integers(65, 0), visible_lens=integers(64, 65, 0))
    buffers.seq_lens.copy_(other.seq_lens)
    buffers.visible_lens.copy_(other.visible_lens)
    graph.replay()
    verdict(AttentionState(out.cpu(), lse.cpu()), ql, q_pe, cache, other)
