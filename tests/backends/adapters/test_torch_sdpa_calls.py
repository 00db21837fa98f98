"""Tests of the kept calls of PyTorch's SDPA for requests of equal lengths.

On a CPU, the objects that serve calls on a GPU run with the kernels of the CPU. Whether an object is kept is asked with
tensors without data (device "meta"), which count as tensors of a GPU.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

import reference
from fast.attention.varlen import flash_attn_varlen_shared_rope
from fast.backends.adapters import torch_sdpa, torch_sdpa_calls

from ...support.factories import offsets
from .test_torch_sdpa import GPU, KERNELS, hopper, inputs, joined, on_gpu

KEPT = {torch_sdpa.FLASH: torch_sdpa_calls.kept_flash, torch_sdpa.CUDNN: torch_sdpa_calls.kept_cudnn}
LENGTH, REQUESTS = 6, 3


@pytest.fixture
def any_kernel(monkeypatch):
    """Let SDPA take the kernels of the CPU."""
    monkeypatch.setattr(torch_sdpa_calls, "OnlyKernel", contextlib.nullcontext)


on_a_cpu = pytest.mark.usefixtures("any_kernel")


def unexpected(*arguments):
    raise AssertionError("the launcher runs")


def call_of(kernel, tensors, launch=unexpected):
    """Return the object for calls like the one with these queries, whole keys and values."""
    return torch_sdpa_calls.EqualLengthsCall(kernel, launch, *tensors, REQUESTS, LENGTH)


@on_a_cpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("widths", [(12, 8, 16), (16, 8, 24), (128, 64, 64)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_later_calls_with_other_tensors(kernel, widths, causal):
    """Make an object from one call and call it with other tensors -> the attention of these, with and without `out`.

    With values as wide as the keys, the call copies nothing: the result has the library's own memory.
    """
    lens, dtype = [LENGTH] * REQUESTS, torch.float32
    call = call_of(kernel, joined(inputs(lens, lens, dtype, *widths)[0]))
    for _ in range(2):
        tensors, rest = inputs(lens, lens, dtype, *widths)
        q, k, v = joined(tensors)
        starts, longest, scale = rest[0], rest[2], rest[4]
        given = q, k, None, v, starts, starts, longest, longest, scale, causal, dtype
        new, none = call(*given)
        strided = torch.full((*q.shape[:2], 2 * v.shape[2]), torch.nan)[..., ::2]
        written, nothing = call(*given, strided, None)
        assert none is None and nothing is None and written is strided and new.is_contiguous()
        gold = reference.flash_attn_varlen(q.double(), k.double(), v.double(), *rest, causal)
        torch.testing.assert_close(new, gold.out.float())
        assert torch.equal(new, written)


@on_a_cpu
def test_keys_with_more_rows_than_the_requests():
    """Call with rows of keys after the last request, which have NaN -> no row of the output has NaN."""
    lens = [LENGTH] * REQUESTS
    tensors, rest = inputs(lens, lens, torch.float32)
    q, k, v = joined(tensors)
    k, v = (torch.cat((x, torch.full_like(x[:4], torch.nan))) for x in (k, v))
    given = q, k, None, v, rest[0], rest[0], LENGTH, LENGTH, rest[4], True, torch.float32
    out, _ = call_of(torch_sdpa.CUDNN, (q, k, v))(*given)
    gold = reference.flash_attn_varlen(q, k[: 3 * LENGTH], v[: 3 * LENGTH], *rest, True)
    torch.testing.assert_close(out, gold.out)


@on_a_cpu
def test_other_offsets_of_the_keys():
    """Call with offsets of the keys in other memory -> the launcher runs, because the lengths may differ."""
    lens = [LENGTH] * REQUESTS
    tensors, rest = inputs(lens, lens, torch.float32)
    q, k, v = joined(tensors)
    found, state = [], (v, None)
    call = call_of(torch_sdpa.FLASH, (q, k, v), lambda *arguments: found.append(arguments) or state)
    given = q, k, None, v, rest[0], rest[0].clone(), LENGTH, LENGTH, rest[4], True, torch.float32, None, None
    assert call(*given) is state
    assert len(found) == 1 and all(one is other for one, other in zip(found[0], given, strict=True))


@on_a_cpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_which_calls_are_kept(kernel):
    """Ask for an object -> only for requests of equal lengths on a GPU, with tensors that the kernel takes as they are.

    Other calls run the launcher, which copies tensors or waits for the lengths.
    """
    starts = offsets([LENGTH] * REQUESTS)

    def kept(length=LENGTH, device="meta", step=1, columns=192, starts_k=starts, values=128):
        q, k = (torch.empty(REQUESTS * length, 2, columns, dtype=torch.bfloat16, device=device) for _ in range(2))
        v = torch.empty(REQUESTS * length, 2 * step, values, dtype=torch.bfloat16, device=device)[:, ::step]
        return KEPT[kernel](q, k, None, v, starts, starts_k, length, length, 0.1, True, torch.bfloat16, None, None)

    assert kept().allocates
    assert kept(device="cpu") is None
    assert kept(starts_k=starts.clone()) is None
    assert (kept(length=1) is None) == (kernel == torch_sdpa.CUDNN)  # cuDNN takes no request with a single key
    assert (kept(step=2, columns=128) is None) == (kernel == torch_sdpa.CUDNN)  # values that are not contiguous
    assert kept(step=2, values=64) is not None  # narrow values are copied in any case
    odd = torch.empty(REQUESTS * LENGTH, 2, 193, dtype=torch.bfloat16, device="meta")[..., :192]
    v = odd[..., :128]
    assert KEPT[kernel](odd, odd, None, v, starts, starts, LENGTH, LENGTH, 0.1, True, torch.bfloat16) is None


@on_gpu
@pytest.mark.parametrize("name", ["torch_flash", pytest.param("torch_cudnn", marks=hopper)])
def test_kept_calls_on_a_gpu(name):
    """Run a prefill three times on a GPU -> the same bits each time; the later calls do not wait for the GPU."""
    lens, config = [64, 64], (128, 64, 128, 4)
    tensors, rest = inputs(lens, lens, torch.bfloat16, *config)
    q, k, v = (x.to(GPU) for x in joined(tensors))
    starts = rest[0].to(GPU)

    def run():
        return flash_attn_varlen_shared_rope(
            q, k, k[:, 0, :0], v, starts, starts, 64, 64, rest[4], True, return_lse=False, backend=name
        )

    first = run()
    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        later = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, later)
