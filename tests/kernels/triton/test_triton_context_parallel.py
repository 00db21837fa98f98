"""Tests of the Triton kernels that prepare data for exchanges between ranks, or that process received data.

The merges `ag_rs` and `a2a` join the attention states of all ranks: `ag_rs` by an all-gather and a reduce-scatter,
`a2a` by an all-to-all. Without a GPU, one test runs this file again in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

import fast
import reference
from fast.parity import compare, compare_states
from reference.interfaces import AttentionState, ContextChunk, TokenOwnership

from ...support.factories import assert_same_bits, integers, offsets
from ...support.ranks import RANK_CONFIG, STEPS, Steps, serve
from ...support.triton_mode import DEVICE, INTERPRETED, ON_GPU, gpu_only, run_in_interpreter, runs, starts_interpreter

if ON_GPU or INTERPRETED:
    from fast.kernels.triton import context_parallel as kernels

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if ON_GPU else [])


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


def gathered_rows(size, interleave, lens, width, dtype):
    """Return the all-gathered context [D, padded tokens, width] (NaN follows the rows of each rank), and its chunk."""
    chunk = ContextChunk(integers(*[0] * len(lens)).cpu(), offsets(lens).cpu(), sum(lens), max(lens))
    chunk = reference.rank_local_chunk(chunk, TokenOwnership(size, 0, interleave))
    gathered = torch.randn(size, chunk.padded_tokens, width).to(dtype)
    for rank in range(size):
        gathered[rank, int(chunk.local_cu_seq_lens[rank, -1]) :] = torch.nan
    return gathered, chunk


@runs
@pytest.mark.parametrize(("size", "interleave", "width"), [(1, 1, 7), (2, 1, 96), (3, 4, 7), (4, 16, 576), (7, 2, 96)])
def test_reorg(size, interleave, width):
    """`reorg_kvcache` gives the bits of `reference`, also if there are gaps between the rows of its input.

    It writes nothing into the gaps between the rows of its output.
    """
    for dtype in DTYPES if width == 96 else DTYPES[:1]:
        gathered, chunk = gathered_rows(size, interleave, (5, 0, 33, 1, 70), width, dtype)
        wanted = reference.reorg_kvcache(gathered, chunk)
        cu, local = chunk.cu_seq_lens.to(DEVICE), chunk.local_cu_seq_lens.to(DEVICE)
        for source in (gathered, torch.cat((gathered, gathered), -1)[..., :width]):
            out = torch.full((sum((5, 0, 33, 1, 70)), width + 3), 7.0, dtype=dtype, device=DEVICE)
            kernels.reorg_kvcache(source.to(DEVICE), cu, local, interleave, out[:, :width])
            assert_same_bits(out[:, :width].cpu().contiguous(), wanted)
            assert out[:, width:].eq(7).all()


@runs
@pytest.mark.parametrize("far", [-5, 2147480000])
def test_reorg_of_offsets_outside(far):
    """If the offsets of a rank lie outside the input, `reorg_kvcache` returns 0 for the tokens of this rank."""
    gathered, chunk = gathered_rows(4, 2, (30, 11), 12, torch.float32)
    local = chunk.local_cu_seq_lens.clone()
    local[1] = far
    out = torch.full((41, 12), torch.nan, device=DEVICE)
    kernels.reorg_kvcache(gathered.to(DEVICE), chunk.cu_seq_lens.to(DEVICE), local.to(DEVICE), 2, out)
    wanted = reference.reorg_kvcache(gathered, chunk)
    lost = torch.tensor([t % 8 // 2 == 1 for n in (30, 11) for t in range(n)])
    assert_same_bits(out.cpu(), wanted.masked_fill(lost[:, None], 0))


def rank_states(size, tokens, heads, value, dtype):
    """Return an attention state for each rank.

    A row is one (token, head) pair. If a row has no keys on a rank, its output on this rank is NaN. A merged state must
    not contain this NaN. The row of head 0 and token 1 has no keys on any rank.
    """
    states = []
    for _ in range(size):
        empty = torch.rand(heads, tokens) < 0.3
        empty[0, 1] = True
        out = torch.randn(tokens, heads, value).masked_fill(empty.T[..., None], torch.nan).to(dtype)
        states.append(AttentionState(out, (9 * torch.randn(heads, tokens)).masked_fill(empty, -torch.inf)))
    return states


def merged_by(states, merge):
    """Merge over all ranks with `reference`; return two states: one merged in the dtype of `states`, one in float64."""

    def whole(states):
        function = {"ag_rs": reference.cp_lse_ag_out_rs, "a2a": reference.cp_lse_a2a}[merge]
        merged = reference.simulate(len(states), 1, lambda ranks: function(states[ranks.rank], ranks.cp_group))
        return AttentionState(torch.cat([own.out for own in merged], 1), torch.cat([own.lse for own in merged]))

    return whole(states), whole([AttentionState(s.out.double(), s.lse.double()) for s in states])


def on(device, state, gaps):
    """Return the output and the LSE of a state on a device.

    With `gaps`, the output has gaps between rows. Without `gaps`, the output is stored head by head.
    """
    out = torch.cat((state.out, state.out), -1)[..., : state.out.shape[2]] if gaps else state.out
    return (out if gaps else out.transpose(0, 1).contiguous().transpose(0, 1)).to(device), state.lse.to(device)


@runs
@pytest.mark.parametrize("value", [5, 64, 512])
@pytest.mark.parametrize(("size", "heads"), [(1, 3), (2, 6), (4, 8), (8, 16)])
def test_merges(size, heads, value):
    tokens = 3 if value == 512 else 9
    for dtype in DTYPES:
        states = rank_states(size, tokens, heads, value, dtype)
        for merge in ("ag_rs", "a2a"):
            low, gold = merged_by(states, merge)
            found = {"ag_rs": weight_and_sum, "a2a": pack_and_combine}[merge](states, size, dtype)
            for parity in compare_states(f"{merge} {dtype}", found, low, gold):
                assert parity.passed, parity


def weight_and_sum(states, size, dtype):
    lses = torch.stack([state.lse for state in states]).to(DEVICE)
    weighted = [kernels.weight_attn_out(on(DEVICE, s, rank % 2)[0], lses, rank) for rank, s in enumerate(states)]
    by_owner = torch.stack([out for out, _ in weighted]).sum(0)  # the sum of the reduce-scatter: [D, T, N / D, Dv]
    lse = torch.cat([lse for _, lse in weighted])
    return AttentionState(by_owner.transpose(0, 1).flatten(1, 2).cpu(), lse.cpu())


def pack_and_combine(states, size, dtype):
    tokens, heads, value = states[0].out.shape
    own = heads // size
    lse_bytes = -(-tokens * own * 4 // 16) * 16
    total = lse_bytes + -(-tokens * own * value * dtype.itemsize // 16) * 16
    messages = torch.zeros(size, size, total, dtype=torch.uint8, device=DEVICE)
    for rank, state in enumerate(states):
        kernels.pack_attn_state(*on(DEVICE, state, rank % 2), messages[rank], lse_bytes)
    merged = []
    for rank in range(size):
        out = torch.full((tokens, own, value), torch.nan, dtype=dtype, device=DEVICE)
        lse = torch.full((own, tokens), torch.nan, device=DEVICE)
        kernels.merge_packed_attn_states(messages[:, rank].contiguous(), lse_bytes, out, lse)
        merged.append((out.cpu(), lse.cpu()))
    return AttentionState(torch.cat([out for out, _ in merged], 1), torch.cat([lse for _, lse in merged]))


@runs
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("merge", [weight_and_sum, pack_and_combine], ids=["ag_rs", "a2a"])
def test_infinite_lse_is_nan(merge, bad):
    states = rank_states(2, 4, 6, 5, torch.float32)
    states[1].lse[3, 2] = bad
    found = merge(states, 2, torch.float32)
    assert found.lse[3, 2].isnan() and found.out[2, 3].isnan().all()
    assert found.lse.isnan().sum() == 1 and found.out.isnan().sum() == 5


@gpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("merge", ["ag_rs", "a2a"])
@pytest.mark.parametrize(("size", "total"), [(4, 4), (2, 4)])
def test_layers(size, total, merge, dtype):
    """The errors of a layer on simulated ranks of one GPU are within the budget that docs/correctness.md defines.

    The budget is computed from the error of `reference` in the same dtype.
    """
    steps = Steps(STEPS, 16, 4 * 16 * size * 4, 2)

    def served(ops, dtype, device):
        return ops.simulate(
            size, 4, lambda ranks: serve(ops, RANK_CONFIG, steps, dtype, ranks, device=device), total, merge
        )

    gold, low = served(reference, torch.float64, "cpu"), served(reference, dtype, "cpu")
    for found, rank_low, rank_gold in zip(served(fast, dtype, "cuda"), low, gold, strict=True):
        for step, outputs in enumerate(zip(found, rank_low, rank_gold, strict=True)):
            parity = compare(f"step {step}", *(x.cpu() for x in outputs))
            assert parity.passed, parity


@gpu_only
@pytest.mark.parametrize("merge", ["ag_rs", "a2a"])
def test_a_step_is_captured(merge):
    """A step that gathers queries, decodes and merges can be captured and then replayed with other lengths."""
    # one rank only: several simulated ranks cannot be captured, because the host switches between them
    (wanted,) = fast.simulate(1, 1, lambda ranks: captured_twice(ranks, replay=False), merge=merge)
    (found,) = fast.simulate(1, 1, lambda ranks: captured_twice(ranks, replay=True), merge=merge)
    assert found.out.equal(wanted.out) and found.lse.equal(wanted.lse)


def captured_twice(ranks, replay):
    """Run a step of 3 requests, and return the state of a second step with other lengths.

    With `replay`, a graph captures a step with the first lengths, and the second step is a replay of this graph.
    """
    torch.manual_seed(0)
    cache = torch.randn(30, 16, 48, device="cuda")
    table = torch.randperm(30, device="cuda").int().view(3, 10)
    lens = torch.tensor([100, 7, 160], dtype=torch.int32, device="cuda")
    plan = reference.DecodeMetadata(table, lens, torch.arange(4, dtype=torch.int32, device="cuda"), 1, lens, 160, 16)
    q = torch.randn(3, 4, 48, device="cuda")

    def step():
        return fast.dcp_decode(q[..., :32], q[..., 32:], cache, plan, 0.1, ranks)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if replay:
        with torch.cuda.graph(graph):
            state = step()
    lens.copy_(torch.tensor([5, 0, 33]))
    if not replay:
        return step()
    graph.replay()
    torch.cuda.synchronize()
    return state
