"""Tests that merges do not hide a bad LSE: if one state has the LSE NaN or +inf in a row, the merged row is NaN.

A row is one (token, head) pair. All other rows must have no NaN. The tests merge the states of several ranks, merge two
states of one rank, and combine the splits of a decode.

On a GPU, `tl.maximum(NaN, x)` is x; in Triton's interpreter it is NaN. These tests make the interpreter return x too. A
kernel that needs NaN from a maximum must then pass `propagate_nan`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reference.interfaces import AttentionState

from ...support.context_parallel import over_ranks
from ...support.factories import assert_same_bits, integers, offsets
from ...support.triton_mode import DEVICE, INTERPRETED, ON_GPU, run_in_interpreter, runs, starts_interpreter
from .test_triton_context_parallel import pack_and_combine, weight_and_sum

if ON_GPU or INTERPRETED:
    from fast.kernels import combine
    from fast.kernels.triton import merge

NEIGHBOURS = (0.5, -torch.inf, torch.inf, torch.nan)  # LSE of the other ranks in a row in which one rank has a bad LSE
HEADS, TOKENS = 6, len(NEIGHBOURS) + 1


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


@pytest.fixture(autouse=True)
def maximum_of_a_gpu(monkeypatch):
    """Make `tl.maximum` without `propagate_nan` return x for (NaN, x), as PTX's `max.f32` does."""
    if INTERPRETED:
        from triton.runtime.interpreter import InterpreterBuilder

        monkeypatch.setattr(
            InterpreterBuilder, "create_maxnumf", lambda self, a, b: self.binary_op(a, b, np.fmax), raising=True
        )


def states_with(bad, size, dtype):
    """Return states of `size` ranks; in some rows, one rank has the LSE `bad`.

    For each head h < size and each token t except the last token, the LSE is `bad` on rank h and NEIGHBOURS[t] on each
    other rank. The LSEs of all other heads and of the last token are finite or -inf.
    """
    states = []
    for rank in range(size):
        lse = (9 * torch.randn(HEADS, TOKENS, dtype=torch.float64)).masked_fill(
            torch.rand(HEADS, TOKENS) < 0.2, -torch.inf
        )
        lse[:size, :-1] = torch.tensor(NEIGHBOURS, dtype=torch.float64)
        lse[rank, :-1] = bad
        out = torch.randn(TOKENS, HEADS, 5, dtype=torch.float64).masked_fill(lse.T[..., None] == -torch.inf, 0)
        states.append(AttentionState(out.to(dtype), lse.to(torch.float64 if dtype == torch.float64 else torch.float32)))
    return states


def check_bad_rows(found, size):
    """Assert that a merged state is NaN in the rows for which `states_with` sets the LSE `bad`, and in no other row."""
    wanted = torch.zeros(HEADS, TOKENS, dtype=torch.bool)
    wanted[:size, :-1] = True
    assert torch.equal(found.lse.isnan(), wanted), found.lse
    assert torch.equal(found.out.isnan(), wanted.T[..., None].expand_as(found.out)), found.out[..., 0]


BAD = pytest.mark.parametrize("bad", [torch.nan, torch.inf])


@BAD
@pytest.mark.parametrize("merge", ["a2a", "ag_rs"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_of_any_rank(ops, size, merge, bad):
    """In both packages, a merged row is NaN if any rank has a bad LSE in this row, and no other merged row is NaN."""
    check_bad_rows(over_ranks(ops, states_with(bad, size, torch.float64), merge), size)


@runs
@BAD
@pytest.mark.parametrize("merge", [weight_and_sum, pack_and_combine], ids=["ag_rs", "a2a"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_of_any_rank_in_triton(size, merge, bad):
    """The Triton kernels of a merge over ranks return NaN exactly in the rows in which any rank has a bad LSE.

    The test fails if a kernel's maximum ignores the NaN of a rank. The kernel would then treat this rank as a rank
    without keys.
    """
    check_bad_rows(merge(states_with(bad, size, torch.float32), size, torch.float32), size)


@runs
@BAD
def test_of_either_state_in_triton(bad):
    a, b = states_with(bad, 2, torch.float32)
    found = merge.merge_attn_states(*(x.to(DEVICE) for x in (a.out, a.lse, b.out, b.lse)))
    check_bad_rows(AttentionState(*(x.cpu() for x in found)), 2)


@runs
@pytest.mark.parametrize("other", [0.5, -torch.inf, torch.nan])
@pytest.mark.parametrize("cut", ["evenly", "scheduled", "batch-invariant", "batch-invariant, planned"])
@pytest.mark.parametrize("requests", [1, 2])
def test_of_any_split_in_triton(requests, cut, other):
    """If a split has NaN as largest score or as sum of exponentials of a row, only this row of the result is NaN."""
    splits, latent = 3, 24
    # In the last request, split i has NaN as largest score of row i, and as sum of exponentials of row `splits` + i.
    # The last 2 rows have no NaN.
    bad = 2 * splits
    largest = 9 * torch.randn(requests, splits, bad + 2)
    total, values = torch.rand(requests, splits, bad + 2) + 0.5, torch.randn(requests, splits, bad + 2, latent)
    largest[-1, :, :bad] = other
    if other == -torch.inf:  # the other splits have no keys
        total[-1, :, :bad], values[-1, :, :bad] = 0, 0
    for split in range(splits):
        largest[-1, split, split] = torch.nan
        total[-1, split, splits + split] = torch.nan
    progress = torch.empty(0)
    if cut == "evenly":
        largest, total, values = (x.transpose(0, 1) for x in (largest, total, values))
    elif cut != "scheduled":
        progress = integers(*(1, splits) * requests).view(torch.float32)
    schedule = (torch.zeros(1, 5, dtype=torch.int32), offsets([splits] * requests))
    planned = cut in ("scheduled", "batch-invariant, planned")
    out, lse = torch.full((requests, bad + 2, latent), 7.0), torch.full((bad + 2, requests), 7.0)
    parts = torch.cat((largest.reshape(-1), total.reshape(-1), progress))
    tensors = (values.reshape(-1), parts, offsets([1] * requests), *schedule, out, lse)
    values, parts, starts, *schedule, out, lse = (x.to(DEVICE) for x in tensors)
    combine.combine_partial_outputs(
        values, parts, starts, 1, *(schedule if planned else (None, None)), cut.startswith("batch-invariant"), out, lse
    )
    wanted = torch.zeros(bad + 2, requests, dtype=torch.bool)
    wanted[:bad, -1] = True
    assert torch.equal(lse.isnan().cpu(), wanted), lse
    assert torch.equal(out.isnan().cpu(), wanted.T[..., None].expand_as(out)), out[..., 0]


@runs
@pytest.mark.parametrize("layout", ["gaps between heads", "transposed"])
def test_layouts_of_a_merged_lse(layout):
    """Merge into an LSE with gaps between heads, or with the heads of a token side by side -> as into a new LSE."""
    states = [
        AttentionState(state.out.to(DEVICE), state.lse.to(DEVICE)) for state in states_with(0.25, 2, torch.float32)
    ]
    wanted = merge.merge_attn_states(*states[0], *states[1])
    memory = torch.full((HEADS, TOKENS + 3) if layout == "gaps between heads" else (TOKENS, HEADS), 7.0, device=DEVICE)
    lse = memory[:, 2:-1] if layout == "gaps between heads" else memory.T
    out, found = merge.merge_attn_states(*states[0], *states[1], torch.empty_like(states[0].out), lse)
    assert found is lse
    assert_same_bits(out, wanted[0])
    assert_same_bits(lse.contiguous(), wanted[1])
    assert (memory[:, [0, 1, -1]] == 7).all() or layout == "transposed"
