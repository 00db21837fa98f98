"""Tests of Triton's `flash_attn_varlen` (attention over packed requests): its results are compared with `reference`.

On a GPU the kernel is compiled. Without a GPU, one test runs this file again in Triton's interpreter. "Pitfall 8" is
entry 8 of the list in `tests/__init__.py`. The budget of a result is the largest error that docs/correctness.md allows.
Letters: S keys and Sq query tokens of a request; P, R and V are the head dims without rope, of rope, and of values.
"""

from __future__ import annotations

import pytest
import torch

import reference
from fast.parity import compare_states
from reference.interfaces import AttentionState

from ...support.factories import assert_same_bits, far_heads, offsets
from ...support.triton_mode import DEVICE, INTERPRETED, ON_GPU, gpu_only, run_in_interpreter, runs, starts_interpreter

if ON_GPU or INTERPRETED:
    from fast.kernels.triton import attention

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU
RAGGED = ([1, 0, 5, 31, 33], [1, 4, 0, 31, 67])  # in the interpreter a row block has 32 rows
ACROSS_BLOCKS = ([127, 1, 129, 64, 200, 13], [127, 1009, 64, 65, 331, 128])  # one request has S < Sq
SMALL_DIMS = [(16, 16, 16), (12, 8, 10), (48, 16, 24), (16, 0, 32)]  # P, R, V
PRESET_DIMS = [(128, 64, 128), (64, 32, 64), (192, 64, 256), (192, 0, 128)]
SCALE = 0.17


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


def noise(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def make_inputs(query_lens, key_lens, heads, dims, dtype):
    """Return q, k_nope, k_pe (None without rope) and v."""
    nope, rope, value = dims
    keys = sum(key_lens)
    return (
        noise(sum(query_lens), heads, nope + rope, dtype=dtype),
        noise(keys, heads, nope, dtype=dtype),
        noise(keys, rope, dtype=dtype) if rope else None,
        noise(keys, heads, value, dtype=dtype),
    )


def attend(inputs, query_lens, key_lens, causal, scale=SCALE, out_dtype=None) -> AttentionState:
    cu_q, cu_k = offsets(query_lens).to(DEVICE), offsets(key_lens).to(DEVICE)
    longest = max(query_lens, default=0), max(key_lens, default=0)
    return AttentionState(
        *attention.flash_attn_varlen(*inputs, cu_q, cu_k, *longest, scale, causal, out_dtype or inputs[0].dtype)
    )


def check_parity(inputs, query_lens, key_lens, causal, scale=SCALE, out_dtype=None):
    q, k, k_pe, v = (x if x is None else x.cpu() for x in inputs)
    if k_pe is not None:
        k = torch.cat((k, k_pe[:, None].expand(-1, k.shape[1], -1)), dim=-1)
    longest = max(query_lens, default=0), max(key_lens, default=0)
    rest = (offsets(query_lens), offsets(key_lens), *longest, scale, causal)
    gold = reference.flash_attn_varlen(q.double(), k.double(), v.double(), *rest)
    low = reference.flash_attn_varlen(q, k, v, *rest, out_dtype)
    state = attend(inputs, query_lens, key_lens, causal, scale, out_dtype)
    assert state.out.is_contiguous() and state.out.dtype == (out_dtype or q.dtype)
    assert state.lse.is_contiguous() and state.lse.dtype == torch.float32
    for parity in compare_states("flash_attn_varlen", AttentionState(state.out.cpu(), state.lse.cpu()), low, gold):
        assert parity.passed, parity
    return state


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", SMALL_DIMS)
def test_small_dims(dims, causal, dtype):
    """The error of attention is within the budget for small widths and different lengths.

    The kernel computes with widths that are powers of two. So it pads some of the widths P, R and V, and divides a P of
    48 into 32 + 16. R can be 0. In the interpreter a row block has 32 rows, so the query lengths include 0, 1, 31 and
    33. One request has S < Sq.
    """
    check_parity(make_inputs(*RAGGED, 2, dims, dtype), *RAGGED, causal)


@gpu_only
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", PRESET_DIMS)
def test_preset_dims(dims, causal, dtype):
    check_parity(make_inputs(*ACROSS_BLOCKS, 3, dims, dtype), *ACROSS_BLOCKS, causal)


@runs
@pytest.mark.parametrize("heads", [1, 16] + [126, 128] * ON_GPU)
def test_heads(heads):
    lens = ([9], [13])
    check_parity(make_inputs(*lens, heads, (16, 16, 16), torch.float16), *lens, True)


@runs
@pytest.mark.parametrize("lens", [([40], [40]), ([1], [97]), ([33, 3], [0, 0]), ([3, 40], [70, 7])], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_lengths(lens, causal):
    """Attention is right for several row blocks, requests without keys, and requests with fewer keys than queries."""
    check_parity(make_inputs(*lens, 2, (16, 16, 16), torch.float32), *lens, causal)


@runs
@pytest.mark.parametrize("query_lens", [[], [0, 0]])
def test_no_queries(query_lens):
    key_lens = [3] * len(query_lens)
    inputs = make_inputs(query_lens, key_lens, 2, (16, 16, 16), torch.float32)
    state = attend(inputs, query_lens, key_lens, True)
    assert state.out.shape == (0, 2, 16) and state.lse.shape == (2, 0)


@runs
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_views(dtype):
    """Strided inputs give the same bits as contiguous inputs.

    Keys and values are stored head by head, the rope key is a part of cache entries, and q is every second column of a
    wider tensor.
    """
    lens = ([5, 31], [37, 64])
    dims = (64, 32, 64) if ON_GPU else (16, 16, 16)
    q, k, k_pe, v = make_inputs(*lens, 3, dims, dtype)
    entries = torch.cat((torch.full((101, 24), torch.nan, dtype=dtype, device=DEVICE), k_pe), dim=1)
    doubled = torch.stack((q, torch.full_like(q, torch.nan)), dim=-1).flatten(-2)
    views = (
        doubled[..., ::2],
        k.transpose(0, 1).contiguous().transpose(0, 1),
        entries[:, 24:],
        v.transpose(0, 1).contiguous().transpose(0, 1),
    )
    assert not any(view.is_contiguous() for view in views)
    check_parity(views, *lens, True)
    packed, viewed = attend((q, k, k_pe, v), *lens, True), attend(views, *lens, True)
    assert_same_bits(packed.out, viewed.out)
    assert_same_bits(packed.lse, viewed.lse)


@runs
def test_unaligned_keys():
    """Attention is right if the keys are not aligned for TMA (the GPU's bulk copy engine), in address or stride."""
    lens = ([5, 31], [37, 64])
    q, k, k_pe, v = make_inputs(*lens, 3, (64, 32, 64) if ON_GPU else (16, 16, 16), torch.float16)
    padded = torch.nn.functional.pad(k, (1, 2), value=torch.nan)
    check_parity((q, padded[..., 1:-2], k_pe, v), *lens, False)


@runs
@pytest.mark.parametrize("causal", [True, False])
def test_wide_out(causal):
    """For float16 inputs, the kernel can return float32 outputs, which a prefill with several chunks needs."""
    check_parity(make_inputs(*RAGGED, 2, (16, 16, 16), torch.float16), *RAGGED, causal, out_dtype=torch.float32)


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
def test_written_without_lse(dtype, causal):
    """The kernel writes its output into a strided view that the caller gives, and writes nothing outside this view.

    The output has the same bits with and without a tensor for the LSE.
    """
    inputs = make_inputs(*RAGGED, 2, (16, 16, 16), dtype)
    cu_q, cu_k = (offsets(lens).to(DEVICE) for lens in RAGGED)
    for out_dtype in (dtype, torch.float32):
        wanted = attend(inputs, *RAGGED, causal, out_dtype=out_dtype)
        wide = torch.full((72, 3, 40), 7.0, dtype=out_dtype, device=DEVICE)
        for view in (wide[1:71, :2, :16], wide[1:71, 1:, 4:36:2]):
            wide.fill_(7.0)
            given = (*inputs, cu_q, cu_k, 33, 67, SCALE, causal, out_dtype, view)
            out, lse = attention.flash_attn_varlen(*given)
            assert out is view and lse is None
            assert_same_bits(view.contiguous(), wanted.out)
            held = torch.full_like(wanted.lse, torch.nan)
            assert attention.flash_attn_varlen(*given, held)[1] is held
            assert_same_bits(held, wanted.lse)
            view.fill_(7.0)
            assert wide.eq(7.0).all()


@runs
@pytest.mark.parametrize("scale", [-0.3, 0.0, 4.0])
def test_scales(scale):
    """Attention is right for a large scale, for 0, and for a negative scale, which reverses the order of the scores."""
    lens = ([3, 40], [70, 33])
    check_parity(make_inputs(*lens, 2, (16, 16, 16), torch.float32), *lens, True, scale)


@runs
@pytest.mark.parametrize("causal", [True, False])
def test_empty_rows(causal):
    """Rows without keys give output 0 and LSE -inf, even if other rows of their row block see keys."""
    lens = ([20, 2], [7, 0])
    state = attend(make_inputs(*lens, 2, (16, 16, 16), torch.float16), *lens, causal)
    empty = torch.tensor([causal] * 13 + [False] * 7 + [True] * 2, device=DEVICE)
    assert state.out[empty].eq(0).all() and state.lse[:, empty].eq(-torch.inf).all()
    assert state.out[~empty].ne(0).any() and state.lse[:, ~empty].isfinite().all()


@runs
@pytest.mark.parametrize("causal", [True, False])
def test_nan_query_row(causal):
    """If the query of one row (token, head) has a NaN, only the output and the LSE of this row are NaN."""
    lens = ([9, 40], [33, 70])
    inputs = make_inputs(*lens, 2, (16, 16, 16), torch.float16)
    clean = attend(inputs, *lens, causal)
    poisoned = inputs[0].clone()
    where = ((12, 1, 3), (0, 0, 20), (48, 1, 20))  # token, head, column; columns from 16 on are the rope dims
    for row, head, column in where:
        poisoned[row, head, column] = torch.nan
    state = attend((poisoned, *inputs[1:]), *lens, causal)
    for row, head, _ in where:
        assert state.out[row, head].isnan().all() and state.lse[head, row].isnan()
        state.out[row, head], state.lse[head, row] = clean.out[row, head], clean.lse[head, row]
    assert_same_bits(state.out, clean.out)
    assert_same_bits(state.lse, clean.lse)


@runs
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", [(16, 16, 16)] + [(128, 64, 128)] * ON_GPU)
def test_bad_keys_stay_with_their_request(dims, causal, bad):
    """NaN or inf in the keys and values of one request changes no bit of the other requests.

    A tile of keys can contain keys of the next request. These keys must not be multiplied, because 0 x NaN is NaN.
    """
    lens = ([5, 7, 3], [37, 33, 40])
    inputs = make_inputs(*lens, 2, dims, torch.float16)
    clean = attend(inputs, *lens, causal)
    for x in inputs[1:]:
        x[37:70] = bad
    state = attend(inputs, *lens, causal)
    for rows in (slice(0, 5), slice(12, 15)):
        assert_same_bits(state.out[rows], clean.out[rows])
        assert_same_bits(state.lse[:, rows], clean.lse[:, rows])
    assert not state.out[5:12].isfinite().all()


@runs
def test_hidden_keys_do_not_count():
    """With a causal mask, the result of a token does not depend on later keys."""
    lens = ([40], [40])
    q, k, k_pe, v = make_inputs(*lens, 2, (16, 16, 16), torch.float16)
    whole = attend((q, k, k_pe, v), *lens, True)
    for seen in (1, 32, 33):
        part = attend((q[:seen], k[:seen], k_pe[:seen], v[:seen]), [seen], [seen], True)
        torch.testing.assert_close(part.lse, whole.lse[:, :seen])
        torch.testing.assert_close(part.out, whole.out[:seen])


@runs
@pytest.mark.parametrize("cu_seqlens", [[0, -5, 900], [0, 7, 2**31 - 1], [-(2**31), 3, 9], [9, 4, 0]], ids=str)
def test_offsets_out_of_range_stay_inside(cu_seqlens):
    """The kernel clamps invalid offsets, so it raises no error and accesses no memory outside the tensors."""
    inputs = make_inputs([9], [9], 2, (16, 16, 16), torch.float16)
    bad = torch.tensor(cu_seqlens, dtype=torch.int32, device=DEVICE)
    good = torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
    for cu_q, cu_k in ((bad, good), (good, bad), (bad, bad)):
        out, lse = attention.flash_attn_varlen(*inputs, cu_q, cu_k, 9, 9, SCALE, True, torch.float16)
        assert out.shape == (9, 2, 16) and lse.shape == (2, 9)


@runs
def test_strides_beyond_32_bit():
    """Results have the same bits if the heads are so far apart in memory that offsets exceed 32 bits (pitfall 8)."""
    q, k, k_pe, v = make_inputs([9], [20], 3, (16, 16, 16), torch.float16)
    near = attend((q, k, k_pe, v), [9], [20], True)
    for far in ((far_heads(q), k, k_pe, v), (q, far_heads(k), k_pe, v), (q, k, k_pe, far_heads(v))):
        state = attend(far, [9], [20], True)
        assert_same_bits(state.out, near.out)
        assert_same_bits(state.lse, near.lse)


@runs
@pytest.mark.parametrize("causal", [True, False])
def test_keys_that_all_heads_share(causal):
    """Attention is right if keys and values are expanded over the heads with stride 0."""
    dims = (128, 64, 128) if ON_GPU else (16, 16, 16)
    q, k, k_pe, v = make_inputs([9], [200], 3, dims, torch.float16)
    check_parity((q, k[:, :1].expand(-1, 3, -1), k_pe, v[:, :1].expand(-1, 3, -1)), [9], [200], causal)


@runs
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_again(dtype):
    inputs = make_inputs(*RAGGED, 2, (16, 16, 16), dtype)
    first, second = attend(inputs, *RAGGED, True), attend(inputs, *RAGGED, True)
    assert_same_bits(first.out, second.out)
    assert_same_bits(first.lse, second.lse)


@gpu_only
@pytest.mark.parametrize("dims", [(128, 64, 128), (12, 8, 10)])
def test_captured_in_a_graph(dims):
    """Change the lengths of a captured graph, but not their sum -> a replay has the bits of a call without a graph."""
    lens, other = ([40, 200], [70, 330]), ([111, 129], [71, 329])
    inputs = make_inputs(*lens, 4, dims, torch.bfloat16)
    cu = [offsets(each).to(DEVICE) for each in lens]

    def call():
        return attention.flash_attn_varlen(*inputs, *cu, 240, 400, SCALE, True, torch.bfloat16)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for each in (lens, other):
        for held, given in zip(cu, each, strict=True):
            held.copy_(offsets(given))
        graph.replay()
        expected = attend(inputs, *each, True)
        assert_same_bits(out, expected.out)
        assert_same_bits(lse, expected.lse)
