"""Tests of Hopper's `flash_attn_varlen` (attention over packed requests): its results are compared with `reference`.

Gluon has no interpreter, so these tests need a Hopper GPU. Letters: S keys and Sq query tokens of a request; P, R and V
are the head dims without rope, of rope, and of values. A query tile has 128 query tokens, and a key tile has 128 keys
(64 if V is 256). The budget of a result is the largest error that docs/correctness.md allows. In a test with the
argument `splits`, each call divides the keys of its query tiles into this number of splits; 1 means no splits.
"""

from __future__ import annotations

import math

import pytest
import torch

import reference
from fast.attention.varlen import flash_attn_varlen, flash_attn_varlen_shared_rope
from fast.parity import compare_states
from reference.interfaces import AttentionState, UnsupportedConfiguration

from ....support.backends import own_backends, with_backends
from ....support.factories import assert_same_bits, far_heads, offsets
from ....support.triton_mode import DEVICE, ON_HOPPER

if not ON_HOPPER:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from fast.kernels.hopper.varlen import launch, select
from fast.kernels.triton import attention as portable

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FP16]
MLA = (128, 64, 128)
DIMS = [MLA, (192, 0, 128), (128, 0, 128), (64, 0, 64), (64, 32, 64), (96, 0, 64), (256, 0, 256)]  # P, R, V
OTHER_DIMS = [(192, 64, 256), (48, 16, 64), (64, 64, 128), (256, 0, 64), (64, 0, 256), (192, 0, 256)]
LENS = {  # query lengths, key lengths
    "one tile": ([128], [128]),
    "two tiles": ([256], [256]),
    "one token": ([1], [1]),
    "one key": ([5, 130], [1, 1]),
    "edges": ([127, 128, 129, 255, 257], [127, 128, 129, 255, 257]),
    "ragged": ([5, 0, 31, 1, 200, 64, 333], [70, 9, 31, 1009, 331, 65, 500]),
    "few queries": ([1, 3, 64, 65], [1500, 700, 1023, 1025]),
    "fewer keys": ([300, 129, 64, 400], [7, 0, 63, 135]),
    "no keys": ([3, 200], [0, 0]),
    "stages": ([64, 64, 64, 64], [128, 257, 513, 641]),
}
SCALE = 0.11
with_splits = pytest.mark.parametrize("splits", [1, 3], indirect=True)


@pytest.fixture
def splits(request, monkeypatch):
    """Let every call use the number of splits that is the parameter of the test, and return this number."""
    monkeypatch.setattr(select, "best_num_splits", lambda *_: request.param)
    return request.param


def noise(*shape: int, dtype=F32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def make_inputs(query_lens, key_lens, heads, dims, dtype):
    """Return q, k_nope, k_pe (None without rope) and v; k_nope and v are views of one tensor."""
    nope, rope, value = dims
    keys = sum(key_lens)
    k_nope, v = noise(keys, heads, nope + value, dtype=dtype).split([nope, value], -1)
    q = noise(sum(query_lens), heads, nope + rope, dtype=dtype)
    return q, k_nope, noise(keys, rope, dtype=dtype) if rope else None, v


def attend(inputs, query_lens, key_lens, causal, scale=SCALE, out_dtype=None, module=launch) -> AttentionState:
    cu_q, cu_k = offsets(query_lens).to(DEVICE), offsets(key_lens).to(DEVICE)
    longest = max(query_lens, default=0), max(key_lens, default=0)
    return AttentionState(
        *module.flash_attn_varlen(*inputs, cu_q, cu_k, *longest, scale, causal, out_dtype or inputs[0].dtype)
    )


def check_parity(inputs, query_lens, key_lens, causal, scale=SCALE, out_dtype=None) -> AttentionState:
    state = attend(inputs, query_lens, key_lens, causal, scale, out_dtype)
    q, k, k_pe, v = inputs
    if k_pe is not None:
        k = torch.cat((k, k_pe[:, None].expand(-1, k.shape[1], -1)), dim=-1)
    longest = max(query_lens, default=0), max(key_lens, default=0)
    rest = (offsets(query_lens).to(DEVICE), offsets(key_lens).to(DEVICE), *longest, scale, causal)
    gold = reference.flash_attn_varlen(q.double(), k.double(), v.double(), *rest)
    low = reference.flash_attn_varlen(q, k, v, *rest, out_dtype)
    assert state.out.is_contiguous() and state.out.dtype == (out_dtype or q.dtype)
    assert state.lse.is_contiguous() and state.lse.dtype == F32
    for parity in compare_states("flash_attn_varlen", state, low, gold):
        assert parity.passed, parity
    return state


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lens", LENS)
def test_lengths(lens, causal):
    """Results are within the budget for lengths around the tile sizes, and for requests without keys."""
    check_parity(make_inputs(*LENS[lens], 3, MLA, BF16), *LENS[lens], causal)


@pytest.mark.parametrize("out_dtype", [None, F32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(dims, causal, dtype, out_dtype):
    for lens in ("ragged", "fewer keys"):
        check_parity(make_inputs(*LENS[lens], 2, dims, dtype), *LENS[lens], causal, out_dtype=out_dtype)


@pytest.mark.parametrize("dims", OTHER_DIMS, ids=str)
def test_other_dims(dims):
    """Keys whose parts the kernel does not serve are joined first; values may be wider or narrower than keys."""
    check_parity(make_inputs(*LENS["ragged"], 2, dims, BF16), *LENS["ragged"], True)


@pytest.mark.parametrize("splits", [2, 7], indirect=True)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lens", LENS)
def test_lengths_with_splits(lens, causal, splits):
    """Results are within the budget if some splits are empty, and if a request has fewer key tiles than splits."""
    check_parity(make_inputs(*LENS[lens], 3, MLA, BF16), *LENS[lens], causal)


@pytest.mark.parametrize("splits", [3], indirect=True)
@pytest.mark.parametrize("out_dtype", [None, F32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", DIMS + OTHER_DIMS, ids=str)
def test_dims_with_splits(dims, causal, dtype, out_dtype, splits):
    check_parity(make_inputs(*LENS["ragged"], 2, dims, dtype), *LENS["ragged"], causal, out_dtype=out_dtype)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lens", [([130, 40], [4200, 2100]), ([1], [9000]), ([3, 0, 9], [5000, 7, 1])], ids=str)
def test_chosen_splits(lens, causal):
    """A few query tiles over many keys are split without being forced, and the results are within the budget."""
    batch = select.BatchSizes(sum(lens[0]), sum(lens[1]), len(lens[0]), 2, max(lens[0]), max(lens[1]), causal)
    assert select.best_num_splits(batch, 128, torch.cuda.get_device_properties(DEVICE).multi_processor_count) > 1
    check_parity(make_inputs(*lens, 2, MLA, BF16), *lens, causal)


@pytest.mark.parametrize("splits", [1, 2, 32], indirect=True)
def test_scores_of_very_different_sizes(splits):
    """Five keys have scores ten times as large as the other keys, so one split has nearly all the weight of a row."""
    lens = ([3, 130], [4200, 4300])
    q, k, k_pe, v = make_inputs(*lens, 2, MLA, BF16)
    k = k.clone()
    for key in (0, 2111, 4199, 4201, 8499):
        k[key] *= 10
    check_parity((q, k, k_pe, v), *lens, False)


@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_heads(heads, causal):
    """With many heads, a program processes several work items, also with different numbers of key tiles."""
    lens = ([700, 1, 130], [900, 513, 20])
    check_parity(make_inputs(*lens, heads, MLA, BF16), *lens, causal)


@with_splits
def test_many_items(splits):
    """Every program processes dozens of work items with 0 to 9 key tiles, so that each barrier turns over often."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        lens = [torch.randint(0, 1200, (24,), generator=generator).tolist() for _ in range(2)]
        inputs = make_inputs(*lens, 16, MLA, BF16)
        for causal in (True, False):
            found, wanted = attend(inputs, *lens, causal), attend(inputs, *lens, causal, module=portable)
            torch.testing.assert_close(found.out.float(), wanted.out.float(), atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(found.lse, wanted.lse, atol=1e-4, rtol=1e-4)


@with_splits
@pytest.mark.parametrize("group_heads", [1, 2, 3, 5])
def test_groups_of_heads(group_heads, splits, monkeypatch):
    """The order of work items changes no bit of the result; the last group may have fewer heads."""
    inputs = make_inputs(*LENS["ragged"], 5, MLA, BF16)
    wanted = attend(inputs, *LENS["ragged"], True)
    order_of = select.order_of
    monkeypatch.setattr(launch, "order_of", lambda *given: order_of(*given)._replace(group_heads=group_heads))
    found = attend(inputs, *LENS["ragged"], True)
    assert_same_bits(found.out, wanted.out)
    assert_same_bits(found.lse, wanted.lse)


@with_splits
def test_few_programs(splits, monkeypatch):
    """One program that processes all work items computes the same bits as 132 programs."""
    inputs = make_inputs(*LENS["ragged"], 3, MLA, BF16)
    wanted = attend(inputs, *LENS["ragged"], True)
    order_of = select.order_of
    for programs in (1, 7):
        changed = {"programs": programs, "counts_items": True}
        monkeypatch.setattr(launch, "order_of", lambda *given, to=changed: order_of(*given)._replace(**to))
        found = attend(inputs, *LENS["ragged"], True)
        assert_same_bits(found.out, wanted.out)
        assert_same_bits(found.lse, wanted.lse)


@with_splits
@pytest.mark.parametrize("causal", [True, False])
def test_batch_invariance(causal, splits):
    """With the same number of splits, a request gets the same bits alone and among other requests.

    The sizes of the whole batch choose the number of splits, except in batch-invariant calls, which have no splits
    (`tests/attention/test_invariant_varlen.py`).
    """
    lens = LENS["ragged"]
    inputs = make_inputs(*lens, 2, MLA, BF16)
    whole = attend(inputs, *lens, causal)
    starts_q, starts_k = (offsets(each).tolist() for each in lens)
    for i in range(len(lens[0])):
        rows, keys = slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])
        alone = attend((inputs[0][rows], *(x[keys] for x in inputs[1:])), [lens[0][i]], [lens[1][i]], causal)
        assert_same_bits(alone.out, whole.out[rows])
        assert_same_bits(alone.lse, whole.lse[:, rows])


@with_splits
@pytest.mark.parametrize("causal", [True, False])
def test_empty_rows(causal, splits):
    """Rows without keys give output 0 and LSE -inf, even if other rows of their query tile see keys."""
    lens = ([400, 2, 70], [135, 0, 200])
    state = attend(make_inputs(*lens, 2, MLA, BF16), *lens, causal)
    empty = torch.tensor([causal] * 265 + [False] * 135 + [True] * 2 + [False] * 70, device=DEVICE)
    assert state.out[empty].eq(0).all() and state.lse[:, empty].eq(-math.inf).all()
    assert state.out[~empty].ne(0).any(-1).all() and state.lse[:, ~empty].isfinite().all()


@with_splits
@pytest.mark.parametrize("query_lens", [[], [0, 0]])
def test_no_queries(query_lens, splits):
    key_lens = [3] * len(query_lens)
    state = attend(make_inputs(query_lens, key_lens, 2, MLA, BF16), query_lens, key_lens, True)
    assert state.out.shape == (0, 2, 128) and state.lse.shape == (2, 0)


@with_splits
@pytest.mark.parametrize("causal", [True, False])
def test_nan_query_row(causal, splits):
    """If the query of one row (token, head) has a NaN, only the output and the LSE of this row are NaN."""
    lens = ([9, 340], [133, 570])
    inputs = make_inputs(*lens, 2, MLA, FP16)
    clean = attend(inputs, *lens, causal)
    poisoned = inputs[0].clone()
    where = ((8, 1, 3), (0, 0, 130), (9, 0, 0), (148, 1, 190), (348, 1, 20))  # token, head, column (rope from 128 on)
    for row, head, column in where:
        poisoned[row, head, column] = torch.nan
    state = attend((poisoned, *inputs[1:]), *lens, causal)
    for row, head, _ in where:
        assert state.out[row, head].isnan().all() and state.lse[head, row].isnan()
        state.out[row, head], state.lse[head, row] = clean.out[row, head], clean.lse[head, row]
    assert_same_bits(state.out, clean.out)
    assert_same_bits(state.lse, clean.lse)


@with_splits
@pytest.mark.parametrize("part", ["k_nope", "k_pe"])
def test_nan_in_a_visible_key(part, splits):
    """A NaN in a key gives NaN in each row that sees the key; other rows of earlier tiles keep their bits."""
    lens = ([300], [300])
    inputs = list(make_inputs(*lens, 2, MLA, BF16))
    clean = attend(inputs, *lens, True)
    place = 1 if part == "k_nope" else 2
    inputs[place] = inputs[place].clone()
    inputs[place][200] = torch.nan
    state = attend(inputs, *lens, True)
    assert state.out[200:].isnan().all() and state.lse[:, 200:].isnan().all()
    assert_same_bits(state.lse[:, :200], clean.lse[:, :200])
    assert_same_bits(state.out[:200], clean.out[:200])


@with_splits
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", [MLA, (64, 32, 64), (256, 0, 256)], ids=str)
def test_bad_keys_stay_with_their_request(dims, causal, bad, splits):
    """NaN or inf in the queries, keys and values of some requests changes no bit of the other requests.

    The tiles of a request end in the middle of the next request, at every multiple of 8 keys and between them.
    """
    key_lens = [37, 133, 8, 33, 64, 10, 127, 33, 128, 33, 200, 33, 1, 33, 121, 33]
    query_lens = [5, 7] * 8
    inputs = make_inputs(query_lens, key_lens, 2, dims, BF16)
    clean = attend(inputs, query_lens, key_lens, causal)
    starts_q, starts_k = offsets(query_lens).tolist(), offsets(key_lens).tolist()
    own = torch.zeros(starts_q[-1], dtype=torch.bool, device=DEVICE)
    q, *rest = inputs
    q = q.clone()
    for i in range(1, len(key_lens), 2):
        own[starts_q[i] : starts_q[i + 1]] = True
        q[starts_q[i] : starts_q[i + 1]] = bad
        for x in rest:
            if x is not None:
                x[starts_k[i] : starts_k[i + 1]] = bad
    state = attend((q, *rest), query_lens, key_lens, causal)
    assert_same_bits(state.out[~own], clean.out[~own])
    assert_same_bits(state.lse[:, ~own], clean.lse[:, ~own])
    assert not state.out[own].isfinite().all()


@with_splits
def test_keys_behind_the_last_request(splits):
    """Keys and queries behind the last request may be NaN; rows that belong to no request are not written."""
    lens = ([70, 9], [37, 133])
    q, k_nope, k_pe, v = inputs = make_inputs([*lens[0], 50], [*lens[1], 300], 2, MLA, BF16)
    clean = attend((q[:79], k_nope[:170], k_pe[:170], v[:170]), *lens, False)
    q[79:] = torch.nan
    for x in (k_nope, k_pe, v):
        x[170:] = torch.nan
    out = torch.full((129, 2, 128), 7.0, dtype=BF16, device=DEVICE)
    lse = torch.full((2, 129), 7.0, device=DEVICE)
    cu_q, cu_k = (offsets(each).to(DEVICE) for each in lens)
    launch.flash_attn_varlen(*inputs, cu_q, cu_k, 70, 133, SCALE, False, BF16, out, lse)
    assert_same_bits(out[:79], clean.out)
    assert_same_bits(lse[:, :79], clean.lse)
    assert out[79:].eq(7).all() and lse[:, 79:].eq(7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_views(dtype):
    """Strided inputs give the same bits as contiguous inputs, whether TMA reads them in place or not."""
    lens = ([5, 231], [137, 264])
    q, k, k_pe, v = make_inputs(*lens, 3, MLA, dtype)
    packed = attend((q, k.contiguous(), k_pe, v.contiguous()), *lens, True)
    doubled = torch.stack((q, torch.full_like(q, torch.nan)), dim=-1).flatten(-2)[..., ::2]
    wide_q = torch.cat((q, torch.full_like(q, torch.nan)), dim=-1)[..., :192]
    entries = torch.cat((torch.full((401, 512), torch.nan, dtype=dtype, device=DEVICE), k_pe), dim=1)[:, 512:]
    shifted = torch.nn.functional.pad(k, (1, 2), value=torch.nan)[..., 1:-2]
    by_head = v.transpose(0, 1).contiguous().transpose(0, 1)
    for views in ((q, k, k_pe, v), (doubled, k, entries, v), (wide_q, shifted, k_pe, by_head)):
        state = attend(views, *lens, True)
        assert_same_bits(state.out, packed.out)
        assert_same_bits(state.lse, packed.lse)


@with_splits
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_written_without_lse(dtype, splits):
    """The kernel writes its output into a strided view, and writes nothing outside this view."""
    inputs = make_inputs(*LENS["ragged"], 2, MLA, BF16)
    cu_q, cu_k = (offsets(lens).to(DEVICE) for lens in LENS["ragged"])
    wanted = attend(inputs, *LENS["ragged"], True, out_dtype=dtype)
    tokens = sum(LENS["ragged"][0])
    wide = torch.full((tokens + 2, 3, 260), 7.0, dtype=dtype, device=DEVICE)
    for view in (wide[1:-1, :2, :128], wide[1:-1, 1:, 4:260:2]):
        wide.fill_(7.0)
        given = (*inputs, cu_q, cu_k, 333, 1009, SCALE, True, dtype, view)
        out, lse = launch.flash_attn_varlen(*given)
        assert out is view and lse is None
        assert_same_bits(view.contiguous(), wanted.out)
        held = torch.full_like(wanted.lse, torch.nan)
        assert launch.flash_attn_varlen(*given, held)[1] is held
        assert_same_bits(held, wanted.lse)
        view.fill_(7.0)
        assert wide.eq(7.0).all()


@with_splits
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-3, 4.0, 50.0])
def test_scales(scale, splits):
    lens = ([3, 140], [270, 133])
    inputs = make_inputs(*lens, 2, MLA, BF16)
    check_parity(inputs, *lens, True, scale)


@pytest.mark.parametrize("cu_seqlens", [[0, -5, 900], [0, 7, 2**31 - 1], [-(2**31), 3, 9], [9, 4, 0]], ids=str)
@with_splits
def test_offsets_out_of_range_stay_inside(cu_seqlens, splits):
    """The kernel clamps invalid offsets, so it raises no error, ends, and accesses no memory outside the tensors."""
    inputs = make_inputs([9], [9], 2, MLA, BF16)
    bad, good = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (cu_seqlens, [0, 4, 9]))
    for cu_q, cu_k in ((bad, good), (good, bad), (bad, bad)):
        out, lse = launch.flash_attn_varlen(*inputs, cu_q, cu_k, 9, 9, SCALE, True, BF16)
        torch.cuda.synchronize()
        assert out.shape == (9, 2, 128) and lse.shape == (2, 9)


def test_strides_beyond_32_bit():
    """Results have the same bits if the heads are so far apart in memory that offsets exceed 32 bits (pitfall 8)."""
    q, k, k_pe, v = (x.contiguous() for x in make_inputs([9], [200], 3, MLA, BF16))
    near = attend((q, k, k_pe, v), [9], [200], True)
    for place in range(3):
        given = [q, k, k_pe, v]
        given[place if place < 2 else 3] = far_heads(given[place if place < 2 else 3])
        state = attend(given, [9], [200], True)
        assert_same_bits(state.out, near.out)
        assert_same_bits(state.lse, near.lse)


def test_keys_that_all_heads_share():
    """Keys and values with stride 0 over the heads are copied, because TMA cannot read them."""
    q, k, k_pe, v = make_inputs([9], [200], 3, MLA, BF16)
    check_parity((q, k[:, :1].expand(-1, 3, -1), k_pe, v[:, :1].expand(-1, 3, -1)), [9], [200], True)


@with_splits
def test_same_bits_many_times(splits):
    """Repeat a call 300 times; a race between loads and products would change bits (pitfall 20)."""
    lens = ([700, 1, 130, 257], [900, 513, 20, 1025])
    inputs = make_inputs(*lens, 32, MLA, BF16)
    for causal in (True, False):
        first = attend(inputs, *lens, causal)
        for _ in range(300):
            again = attend(inputs, *lens, causal)
        assert_same_bits(first.out, again.out)
        assert_same_bits(first.lse, again.lse)


@with_splits
def test_captured_in_a_graph(splits):
    """Change the lengths of a captured graph, but not their sum -> a replay has the bits of a call without a graph."""
    lens, other = ([40, 200], [70, 330]), ([111, 129], [71, 329])
    inputs = make_inputs(*lens, 4, MLA, BF16)
    cu = [offsets(each).to(DEVICE) for each in lens]

    def call():
        return launch.flash_attn_varlen(*inputs, *cu, 240, 400, SCALE, True, BF16)

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


@with_splits
def test_named_backend(splits):
    """`backend="hopper"` serves the public ops, and refuses other widths."""
    lens = LENS["ragged"]
    inputs = make_inputs(*lens, 2, MLA, BF16)
    cu_q, cu_k = (offsets(each).to(DEVICE) for each in lens)
    call = (*inputs, cu_q, cu_k, 333, 1009, SCALE, True)
    named, wanted = flash_attn_varlen_shared_rope(*call, backend="hopper"), attend(inputs, *lens, True)
    assert_same_bits(named.out, wanted.out)
    assert_same_bits(named.lse, wanted.lse)
    for _ in range(4):  # the third call of a signature may be a replay
        assert_same_bits(flash_attn_varlen_shared_rope(*call, backend="hopper").out, wanted.out)
    with pytest.raises(UnsupportedConfiguration, match="hopper: serves qk_head_dim"):
        narrow = make_inputs(*lens, 2, (40, 0, 64), BF16)
        flash_attn_varlen(narrow[0], narrow[1], narrow[3], cu_q, cu_k, 333, 1009, SCALE, True, backend="hopper")


@pytest.mark.parametrize("dims", [*DIMS, *OTHER_DIMS, (40, 0, 64)], ids=str)
def test_chosen_without_a_name(dims, monkeypatch):
    """Without a name, the public ops launch this kernel, and for other widths portable Triton."""
    with_backends(monkeypatch, *own_backends())
    q, k, k_pe, v = inputs = make_inputs(*LENS["ragged"], 2, dims, BF16)
    rest = (*(offsets(each).to(DEVICE) for each in LENS["ragged"]), 333, 1009, SCALE, True)
    found = flash_attn_varlen(q, k, v, *rest) if k_pe is None else flash_attn_varlen_shared_rope(q, k, k_pe, v, *rest)
    module = portable if dims == (40, 0, 64) else launch
    assert_same_bits(found.out, attend(inputs, *LENS["ragged"], True, module=module).out)
