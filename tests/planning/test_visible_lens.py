"""Tests of `compute_visible_lens` and `compute_first_visible`: the keys that each query token sees.

`compute_visible_lens` computes how many keys a query token of a decode sees, and `compute_first_visible` the first key
in its window and its attention chunk.

On ranks that share sequences, the function counts only keys that this rank owns. Padding tokens are the query tokens
behind the last request. Without a GPU, one test runs this file again in Triton's interpreter.
"""

from __future__ import annotations

from bisect import bisect_right

import pytest
import torch

import fast
import reference
from reference.interfaces import GraphSupport, TokenOwnership, UnsupportedConfiguration

from ..support.backends import registered
from ..support.factories import integers, offsets
from ..support.planning import same
from ..support.properties import given, st
from ..support.triton_mode import DEVICE, INTERPRETED, ON_GPU, run_in_interpreter, runs, starts_interpreter

if ON_GPU or INTERPRETED:
    from fast.kernels.triton import visible_lens

BATCHES = {  # query lengths, sequence lengths, padding tokens
    "mixed": ([2, 1, 3], [9, 1, 40], 0),
    "padding tokens": ([2, 1, 3], [9, 1, 40], 5),
    "requests without tokens at the end": ([1, 3, 0, 0], [7, 3, 0, 0], 4),
    "requests without tokens inside": ([0, 2, 0, 1], [5, 2, 0, 64], 3),
    "padding rows with tokens": ([2, 2, 2], [0, 33, 0], 2),
    "no token": ([0, 0], [0, 0], 3),
    "no request": ([], [], 2),
    "many": ([1, 2, 3, 0] * 80, [1, 2, 500, 0] * 80, 1),
}
ON_RANKS = (None, TokenOwnership(2, 1), TokenOwnership(3, 0, 4), TokenOwnership(3, 2, 4))


def brute_force(query_lens, seq_lens, padding, ownership):
    """Return for each query token the number of owned keys at positions up to its own position."""
    visible = []
    for query_len, length in zip(query_lens, seq_lens, strict=True):
        for position in range(length - query_len, length) if length else [-1] * query_len:
            keys = range(position + 1)
            if ownership is not None:
                keys = [key for key in keys if key // ownership.interleave % ownership.size == ownership.rank]
            visible.append(len(keys))
    return visible + [0] * padding


@pytest.mark.parametrize("ownership", ON_RANKS, ids=str)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_masks(ops, batch, ownership):
    """The visible length of every token is that of `brute_force`, and padding tokens see no key."""
    query_lens, seq_lens, padding = batch
    found = ops.compute_visible_lens(offsets(query_lens), integers(*seq_lens), sum(query_lens) + padding, ownership)
    assert found.dtype == torch.int32 and found.tolist() == brute_force(*batch, ownership)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 90)), max_size=8), st.integers(0, 6))
def test_twins(lens, padding):
    """Both packages give the same integers for any batch."""
    query_lens = [query_len for query_len, _ in lens]
    seq_lens = [context and context + query_len for query_len, context in lens]
    given_lens = offsets(query_lens), integers(*seq_lens), sum(query_lens) + padding
    for ownership in ON_RANKS:
        same(*(ops.compute_visible_lens(*given_lens, ownership) for ops in (reference, fast)))


def first_keys(query_lens, seq_lens, padding, window, ownership, chunk=None):
    """Return for each query token the number of owned keys before the first key that the token sees.

    The token sees the last `window` keys up to its own key, without the keys of other attention chunks (`chunk` keys).
    """
    firsts = []
    for query_len, length in zip(query_lens, seq_lens, strict=True):
        for position in range(length - query_len, length) if length else [-1] * query_len:
            seen = list(range(position + 1))[-window if window else 0 :]
            seen = [key for key in seen if chunk is None or key // chunk == position // chunk]
            keys = range(seen[0]) if seen else []
            if ownership is not None:
                keys = [key for key in keys if key // ownership.interleave % ownership.size == ownership.rank]
            firsts.append(len(keys))
    return firsts + [0] * padding


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 2**31 - 1])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_windows(ops, batch, window):
    """The first visible key of every token is that of `first_keys`; 0 for padding tokens."""
    query_lens, seq_lens, padding = batch
    tokens = sum(query_lens) + padding
    for ownership in ON_RANKS:
        found = ops.compute_first_visible(offsets(query_lens), integers(*seq_lens), tokens, window, ownership)
        wanted = first_keys(*batch, window, ownership)
        assert found.dtype == torch.int32 and found.tolist() == wanted


@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 2**31 - 1])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_attention_chunks(ops, batch, chunk, window):
    """With attention chunks, the first visible key is in the attention chunk of the token, and in its window."""
    query_lens, seq_lens, padding = batch
    given_lens = offsets(query_lens), integers(*seq_lens), sum(query_lens) + padding
    for ownership in ON_RANKS:
        found = ops.compute_first_visible(*given_lens, window, ownership, chunk)
        assert found.dtype == torch.int32 and found.tolist() == first_keys(*batch, window, ownership, chunk)


def test_neither_a_window_nor_chunks(ops):
    """Without a window and attention chunks, every token sees the keys from 0 on."""
    found = ops.compute_first_visible(offsets([2, 1]), integers(9, 4), 5, None)
    assert found.dtype == torch.int32 and found.tolist() == [0] * 5


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 90)), max_size=8), st.integers(0, 6), st.integers(1, 100),
       st.sampled_from([None, 1, 16, 30]))  # fmt: skip
def test_twins_of_windows(lens, padding, window, chunk):
    """Both packages give the same integers, and no first key is behind the last one."""
    query_lens = [query_len for query_len, _ in lens]
    seq_lens = [context and context + query_len for query_len, context in lens]
    given_lens = offsets(query_lens), integers(*seq_lens), sum(query_lens) + padding
    for ownership in ON_RANKS:
        found = [ops.compute_first_visible(*given_lens, window, ownership, chunk) for ops in (reference, fast)]
        same(*found)
        assert found[0].tolist() == first_keys(query_lens, seq_lens, padding, window, ownership, chunk)
        assert (found[0] <= reference.compute_visible_lens(*given_lens, ownership)).all()


def test_refused_windows(ops, plain_errors):
    given_lens = offsets([2, 1]), integers(9, 4), 3
    for window in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=f"^sliding_window: expected a positive int, got {window}$"):
            ops.compute_first_visible(*given_lens, window)
        with pytest.raises(ValueError, match=f"^sliding_window: expected a positive int, got {window}$"):
            ops.planning.visible_lens.scheduled_lens(*given_lens[:2], window)
        with pytest.raises(ValueError, match=f"^attention_chunk_size: expected a positive int, got {window}$"):
            ops.compute_first_visible(*given_lens, None, None, window)
        with pytest.raises(ValueError, match=f"^attention_chunk_size: expected a positive int, got {window}$"):
            ops.planning.visible_lens.scheduled_lens(*given_lens[:2], attention_chunk_size=window)
    with pytest.raises(TypeError, match="^ownership: expected a TokenOwnership or None, got int$"):
        ops.compute_first_visible(*given_lens, 3, 2)
    with pytest.raises(ValueError, match=r"^query_start_loc: expected shape \[3\], got \[2\]$"):
        ops.planning.visible_lens.scheduled_lens(offsets([2]), integers(9, 4))


def test_refusals(ops, plain_errors):
    """On a CPU, invalid values in tensors are refused. On a GPU, the host does not read and does not check them."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("values are checked on a CPU")
    with pytest.raises(ValueError, match="^num_tokens: expected at least 3, got 2$"):
        ops.compute_visible_lens(offsets([2, 1]), integers(9, 4), 2)
    with pytest.raises(ValueError, match=r"^query_start_loc: expected shape \[3\], got \[2\]$"):
        ops.compute_visible_lens(offsets([2]), integers(9, 4), 2)
    with pytest.raises(ValueError, match="^query_start_loc: expected values that never decrease, got 2 then 1 at"):
        ops.compute_visible_lens(integers(0, 2, 1), integers(9, 4), 2)
    with pytest.raises(ValueError, match="^seq_lens: expected at least the query length 2, got 1 at request 0$"):
        ops.compute_visible_lens(offsets([2, 1]), integers(1, 4), 3)
    with pytest.raises(TypeError, match="^ownership: expected a TokenOwnership or None, got int$"):
        ops.compute_visible_lens(offsets([2, 1]), integers(9, 4), 3, 2)


def test_refusals_of_fast(plain_errors):
    """`fast.compute_visible_lens` refuses a captured call that the named backend cannot serve."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("registers a backend for the CPU")
    with pytest.raises(TypeError, match="^graph: expected a GraphSupport, got str$"):
        fast.compute_visible_lens(offsets([1]), integers(9), 1, graph="any")
    support = fast.backends.OpSupport(lambda *_: None, graph=GraphSupport.ONE_QUERY_LEN)
    with (
        registered(fast.backends.Backend("uniform", 50, "cpu", {"compute_visible_lens": support})),
        pytest.raises(UnsupportedConfiguration, match="uniform: has graph support 'one', got"),
    ):
        fast.compute_visible_lens(offsets([1]), integers(9), 1, graph=GraphSupport.ANY, backend="uniform")


# Tests of the Triton kernel.


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


@runs
@pytest.mark.parametrize("ownership", ON_RANKS, ids=str)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_kernel(batch, ownership):
    """The Triton kernel gives the integers of `brute_force`, for contiguous and strided tensors."""
    query_lens, seq_lens, padding = batch
    starts, lens, tokens = offsets(query_lens).to(DEVICE), integers(*seq_lens).to(DEVICE), sum(query_lens) + padding
    owned = (1, 0, 1) if ownership is None else (ownership.size, ownership.rank, ownership.interleave)
    wanted = brute_force(*batch, ownership)
    assert visible_lens.compute_visible_lens(starts, lens, tokens, *owned).tolist() == wanted
    starts, lens = (torch.stack((x, x + 77), 1)[:, 0] for x in (starts, lens))
    assert visible_lens.compute_visible_lens(starts, lens, tokens, *owned).tolist() == wanted


@runs
def test_kernel_with_any_values():
    """For any lengths and any `query_start_loc`, the kernel gives numbers from 0 to the length of the token's request.

    The request of a token is the request that `bisect_right` finds, even if the values of `query_start_loc` decrease.
    """
    lens = torch.tensor([-5, 2**31 - 1, -(2**31), 64], dtype=torch.int32, device=DEVICE)
    most = [*lens.clamp(min=0).tolist(), 0]  # a token behind the last request sees no key
    for offsets_of_requests in ([0, 2, 4, 6, 8], [0, 2**31 - 1, 3, -7, 4], [0, 0, 0, 0, 0], [5, 5, 5, 5, 2]):
        starts = torch.tensor(offsets_of_requests, dtype=torch.int32, device=DEVICE)
        found = visible_lens.compute_visible_lens(starts, lens, 9, 1, 0, 1).tolist()
        bounds = [most[bisect_right(offsets_of_requests[1:], token)] for token in range(9)]
        assert all(0 <= number <= bound for number, bound in zip(found, bounds, strict=True))
    assert visible_lens.compute_visible_lens(offsets([2, 2, 2, 2]).to(DEVICE), lens, 9, 1, 0, 1).tolist() == [
        0, 0, 2**31 - 2, 2**31 - 1, 0, 0, 63, 64, 0
    ]  # fmt: skip
