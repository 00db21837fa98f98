"""Tests of merges with an output in e4m3 (8 bits), in both packages and in the Triton kernel.

On a GPU the kernel is compiled. Without a GPU, one test runs this file again in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

import fast
import reference
from reference.interfaces import E4M3, AttentionState, UnsupportedConfiguration, to_e4m3

from ..support.factories import assert_same_bits
from ..support.triton_mode import DEVICE, INTERPRETED, ON_GPU, run_in_interpreter, runs, starts_interpreter

INF, NAN = float("inf"), float("nan")


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


def make_states(dtype, tokens=21, heads=3, width=20):
    """Return two states in which some rows have no keys, an LSE of NaN or inf, or outputs of NaN or 10^4."""
    states = []
    for _ in range(2):
        lse = torch.randn(heads, tokens, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        states.append(AttentionState(torch.randn(tokens, heads, width).to(dtype), lse))
    for state, row in ((states[0], 1), (states[1], 2), (states[0], 3), (states[1], 3)):
        state.lse[:, row], state.out[row] = -INF, 0
    states[0].lse[-1, 5], states[1].lse[0, 6], states[0].out[7, 0, 1], states[0].out[8] = INF, NAN, NAN, 1e4
    return states


def assert_quantised(found, unquantised, scale):
    """Assert that `found` has the quantised output and the LSE of `unquantised`, bit for bit."""
    assert found.out.dtype == E4M3
    assert_same_bits(found.out.view(torch.uint8), to_e4m3(unquantised.out, scale).view(torch.uint8))
    assert_same_bits(found.lse, unquantised.lse)
    codes = found.out.view(torch.uint8)
    assert ((codes & 0x7F) == 0x7F).any() and ((codes & 0x7F) == 0x7E).any()  # both NaN and 448 occur


@pytest.mark.skipif(INTERPRETED, reason="needs no Triton")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_merge(ops, dtype):
    """The e4m3 output is the output of a merge in float32 or float64, divided by the scale and rounded once."""
    prefix, suffix = make_states(dtype)
    scale = torch.tensor(0.013)
    wide = [AttentionState(x.out.to(x.lse.dtype), x.lse) for x in (prefix, suffix)]
    assert_quantised(ops.merge_attn_states(prefix, suffix, output_scale=scale), ops.merge_attn_states(*wide), scale)
    if ops is fast:
        out = AttentionState(torch.empty(prefix.out.shape).to(E4M3), torch.empty_like(prefix.lse))
        assert fast.merge_attn_states(prefix, suffix, output_scale=scale, out=out) is out
        assert_quantised(out, fast.merge_attn_states(*wide), scale)


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads, width", [(3, 20), (1, 512), (16, 128)])
def test_triton_merge(heads, width, dtype):
    """The kernel's e4m3 output equals the kernel's own float32 output after quantisation, bit for bit."""
    from fast.kernels.triton.merge import merge_attn_states

    states = [AttentionState(x.out.to(DEVICE), x.lse.to(DEVICE)) for x in make_states(dtype, 21, heads, width)]
    scale, arguments = torch.tensor(0.013, device=DEVICE), [x for state in states for x in state]
    outs = []
    for out_dtype, given in ((torch.float32, None), (E4M3, scale)):
        out = torch.full(states[0].out.shape, NAN, device=DEVICE).to(out_dtype)
        lse = torch.full_like(states[0].lse, NAN)
        merge_attn_states(*arguments, out, lse, *(() if given is None else (given,)))
        outs.append(AttentionState(out.cpu(), lse.cpu()))
    if dtype != torch.float32:  # the kernel rounds merged 16-bit states to 16 bits, so merge float32 states instead
        wide = [x.float() if x.dtype == dtype else x for x in arguments]
        outs[0] = AttentionState(*(x.cpu() for x in merge_attn_states(*wide)))
    assert_quantised(outs[1], outs[0], scale.cpu())


@runs
def test_triton_merge_without_a_scale():
    """Without a scale, the kernel differs from the reference by rounding only."""
    from fast.kernels.triton.merge import merge_attn_states

    prefix, suffix = make_states(torch.float32)
    out, lse = merge_attn_states(*(x.to(DEVICE) for x in (*prefix, *suffix)))
    wanted = reference.merge_attn_states(prefix, suffix)
    assert torch.allclose(out.cpu(), wanted.out, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.allclose(lse.cpu(), wanted.lse, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.skipif(INTERPRETED or ON_GPU, reason="needs tensors on the CPU and no Triton interpreter")
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)], ids=str)
def test_compiles_for(capability, monkeypatch):
    """With a scale, the compiled kernel uses a GPU instruction to convert to e4m3.

    GPUs of compute capability below 8.9 have no such instruction, and the kernel does not use it there.
    """
    from fast.kernels.device import DeviceFacts
    from fast.kernels.triton import fp8, merge

    from ..support.compiled import Recorded, compiled

    launches: dict = {}
    monkeypatch.setattr(fp8, "device_facts", lambda device: DeviceFacts(100, capability, 101376))
    monkeypatch.setattr(merge, "_merge_kernel", Recorded(merge._merge_kernel, launches))
    monkeypatch.setattr(merge, "launch", lambda kernel, grid, *given, **constants: kernel[grid](*given, **constants))
    prefix, suffix = make_states(torch.bfloat16)
    out = torch.zeros(prefix.out.shape).to(E4M3)
    merge.merge_attn_states(*prefix, *suffix, out, torch.zeros_like(prefix.lse), torch.tensor(0.5))
    merge.merge_attn_states(*prefix, *suffix)
    ptx = [compiled(*launch, capability).asm["ptx"] for launch in launches.values()]
    assert len(ptx) == 2
    assert ["satfinite.e4m3x2" in each for each in ptx] == [capability >= (8, 9), False]


@pytest.mark.skipif(INTERPRETED, reason="needs no Triton")
def test_refusals(ops, plain_errors):
    prefix, suffix = make_states(torch.float32)
    with pytest.raises(UnsupportedConfiguration, match="^output_block_scale: block-scaled outputs are not implemented"):
        ops.merge_attn_states(prefix, suffix, output_block_scale=torch.ones(3))
    finite = "a finite number above 0"
    for scale, message in (
        (torch.tensor(0.0), f"{finite}, got 0.0"), (torch.tensor(NAN), f"{finite}, got nan"),
        (torch.ones(3), r"shape \[\], got \[3\]"), (0.5, "a tensor, got float"),
        (torch.ones((), device="meta"), "device cpu, got meta"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=f"^output_scale: expected {message}$"):
            ops.merge_attn_states(prefix, suffix, output_scale=scale)
    if ops is fast:
        out = AttentionState(torch.zeros_like(prefix.out), torch.zeros_like(prefix.lse))
        with pytest.raises(ValueError, match="^out.out: expected dtype torch.float8_e4m3fn, got torch.float32$"):
            fast.merge_attn_states(prefix, suffix, output_scale=torch.tensor(0.5), out=out)
        out = AttentionState(out.out.to(E4M3), out.lse)
        with pytest.raises(ValueError, match="^out.out.dtype: expected one of torch.float32, "):
            fast.merge_attn_states(prefix, suffix, out=out)
