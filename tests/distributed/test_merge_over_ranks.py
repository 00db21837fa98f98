"""Tests of merges over simulated ranks: values, ranks without keys, infinite LSEs, and exchanged bytes.

Each rank has an attention state over its own keys. A merge joins the states of all ranks, by an all-to-all (`a2a`), or
by an all-gather of LSEs and a reduce-scatter of outputs (`ag_rs`). Afterwards each rank keeps some of the heads.
"""

from __future__ import annotations

import functools

import pytest
import torch

import fast
import reference
from fast.parity import compare_states
from reference.interfaces import AttentionState

from ..support.context_parallel import HEADS, MERGES, of_rank, over_ranks, rank_states
from ..support.factories import assert_states64, integers, make_batch, offsets

# Tests of merges.


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_merge_over_ranks(ops, size, merge):
    states = rank_states(size, 5, HEADS, 7, torch.float64)
    found = over_ranks(ops, states, merge)
    assert_states64(found, functools.reduce(reference.merge_attn_states, states))
    assert found.lse[1, 2] == -torch.inf and found.out[2, 1].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("merge", MERGES)
def test_merge_within_budget(merge, dtype):
    """The error of a merge of `fast` against float64 is within the budget that docs/correctness.md defines.

    The budget is computed from the error of the same merge of `reference` in the same dtype. The merged LSE is float32.
    """
    states = rank_states(4, 33, 8, 20, dtype)
    gold = [AttentionState(s.out.double(), s.lse.double()) for s in states]
    gold = functools.reduce(reference.merge_attn_states, gold)
    low, found = over_ranks(reference, states, merge), over_ranks(fast, states, merge)
    assert found.out.dtype == dtype and found.lse.dtype == torch.float32
    for parity in compare_states(merge, found, low, gold):
        assert parity.passed, parity


def test_merges_agree(ops):
    """The merges `a2a` and `ag_rs` give the same state up to rounding."""
    states = rank_states(4, 5, 8, 6, torch.float64)
    assert_states64(over_ranks(ops, states, "a2a"), over_ranks(ops, states, "ag_rs"))


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_infinite_lse_is_nan(ops, merge, bad):
    states = rank_states(3, 4, 6, 5, torch.float64)
    states[1].lse[3, 2] = bad
    found = over_ranks(ops, states, merge)
    assert found.lse[3, 2].isnan() and found.out[2, 3].isnan().all()
    assert found.lse.isnan().sum() == 1 and found.out.isnan().sum() == 5


@pytest.mark.parametrize("merge", MERGES)
def test_a_rank_without_keys_counts_nothing(ops, merge):
    """If the LSE of a row is -inf on a rank, the rank does not change the merged row, even if its output is NaN."""
    states = rank_states(3, 4, 6, 5, torch.float64)
    wanted = over_ranks(ops, states, merge)
    for state in states:
        state.out[-torch.inf == state.lse.T] = torch.nan
    assert_states64(over_ranks(ops, states, merge), wanted)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("merge", MERGES)
def test_no_rows(ops, merge, size):
    states = [AttentionState(torch.zeros(0, 4, 5), torch.zeros(4, 0)) for _ in range(size)]
    found = over_ranks(ops, states, merge)
    assert found.out.shape == (0, 4, 5) and found.lse.shape == (4, 0)
    plan = reference.DecodeMetadata(
        torch.zeros(2, 3, dtype=torch.int32), integers(5, 0), offsets([0, 0]), 0, integers(), 5, 16
    )
    q, cache = torch.zeros(0, 2, 8), torch.full((4, 16, 8), torch.nan)

    def program(ranks):
        return ops.dcp_decode(q[..., :6], q[..., 6:], cache, plan, 0.1, ranks).out.shape

    assert ops.simulate(size, 1, program, merge=merge) == [(0, 2, 6)] * size


@pytest.mark.parametrize("merge", MERGES)
def test_one_rank_with_keys_comes_back_bitwise(ops, merge):
    states = rank_states(4, 3, 8, 5, torch.float32)
    for rank in (0, 2, 3):
        states[rank] = AttentionState(torch.zeros_like(states[rank].out), torch.full_like(states[rank].lse, -torch.inf))
    found = over_ranks(ops, states, merge)
    assert found.out.equal(states[1].out) and found.lse.equal(states[1].lse)


# Tests of the exchanged bytes.


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_bytes_received(ops, size, dtype, merge):
    """In a decode, each rank receives as many bytes as `dcp_wire_bytes` computes.

    An all-to-all message of `fast` can be longer: its LSEs and its outputs are each padded to a multiple of 16 bytes.
    """
    tokens, latent, rope = 6, 32, 16
    batch = make_batch([1] * tokens, [40] * tokens, 16)
    cache = torch.zeros(batch.num_blocks, 16, latent + rope, dtype=dtype)

    def program(ranks):
        common = of_rank(batch.common, 16, ranks.ownership)
        plan = ops.build_mla_metadata(common, 16, 4096, ownership=ranks.ownership).decode
        own = HEADS // size
        q = torch.randn(tokens, own, latent + rope).to(dtype)
        ops.dcp_decode(q[..., :latent], q[..., latent:], cache, plan, 0.1, ranks)
        return ranks.cp_group.received

    wanted = ops.dcp_wire_bytes(tokens, HEADS, latent, rope, size, merge, dtype.itemsize, max(4, dtype.itemsize))
    for received in ops.simulate(size, 1, program, merge=merge):
        assert set(received) == set(wanted)
        for operation, count in wanted.items():
            slack = 16 * 2 * (size - 1) if operation == "all_to_all" and ops is fast else 0
            assert count <= received[operation] <= count + slack


def test_all_to_all_moves_less():
    """With `a2a` a rank receives the LSEs of its 16 heads only; with `ag_rs` it receives the LSEs of all 128 heads."""
    sizes = (32, 128, 512, 64, 8)
    ag_rs, a2a = (reference.dcp_wire_bytes(*sizes, merge, 2) for merge in MERGES[::-1])
    assert sum(ag_rs.values()) - sum(a2a.values()) == 7 * 32 * (128 - 16) * 4
