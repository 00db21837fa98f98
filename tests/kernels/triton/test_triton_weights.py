"""Tests of the Triton kernel that multiplies by absorbed weights in e4m3 (8 bits), or writes results in e4m3.

On a GPU the kernel is compiled. Without a GPU, one test runs this file again in Triton's interpreter, and another test
compiles the kernel for several GPUs.
"""

from __future__ import annotations

import pytest
import torch

import reference
from fast.parity import compare
from reference.interfaces import E4M3, QuantizedWeight, to_e4m3

from ...support.compiled import Recorded, compiled
from ...support.factories import assert_same_bits
from ...support.triton_mode import DEVICE, INTERPRETED, ON_GPU, gpu_only, run_in_interpreter, runs, starts_interpreter

if ON_GPU or INTERPRETED:
    from fast.kernels.triton import weights

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU
DIMS = [(3, 12, 24), (2, 48, 10), (1, 64, 32), (4, 24, 130)]  # N, K, M
PRESETS = [(16, 128, 512), (16, 512, 128), (128, 512, 128), (40, 64, 256)]


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


def multiply(x, weight, weight_scale=None, output_scale=None, out=None):
    """Return the product of the kernel; if `out` is None, the kernel writes into a new tensor full of NaN."""
    if out is None:
        out = torch.full((*x.shape[:2], weight.shape[2]), torch.nan, device=x.device)
        out = out.to(x.dtype if output_scale is None else E4M3)
    weights.multiply_heads(x, weight, weight_scale, output_scale, out)
    return out


def check_product(tokens, dims, dtype, per_head, transposed=False):
    """Assert that the kernel's product with a weight in e4m3 has an error within the budget."""
    heads, inner, width = dims
    x = torch.randn(tokens, heads, inner).to(dtype)
    weight = torch.randn(heads, width, inner).transpose(1, 2) if transposed else torch.randn(heads, inner, width)
    weight[0] *= 30
    quantised = reference.quantize_weight(weight, per_head)
    exact = quantised.values.double() * quantised.scale.double().reshape(-1, 1, 1)
    gold, low = reference.query_to_latent(x.double(), exact), reference.query_to_latent(x, quantised)
    found = multiply(x.to(DEVICE), quantised.values.to(DEVICE), quantised.scale.to(DEVICE))
    parity = compare("multiply_heads", found.cpu(), low, gold)
    assert parity.passed, parity


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_small_dims(dims, dtype):
    """For widths that the kernel pads, the error is within the budget with one and several tiles (`ProductTile`)."""
    for tokens, per_head, transposed in ((1, False, True), (19, True, False), (70, True, True)):
        check_product(tokens, dims, dtype, per_head, transposed)


@gpu_only
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", PRESETS, ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 33, 256, 1000])
def test_preset_dims(tokens, dims, dtype):
    check_product(tokens, dims, dtype, True, True)


def whole_numbers(*shape):
    """Return small whole numbers: every sum of their products is exact, in any order."""
    return torch.randint(-3, 4, shape).float()


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
def test_results_in_e4m3(quantised, per_head, dtype):
    """For inputs whose sums are exact, a result in e4m3 is the exact product, quantised with the output scale.

    NaN stays NaN, and a quotient above 448 saturates. For float32 inputs whose sums are rounded, the result in e4m3 is
    the kernel's float32 result, quantised with the output scale. All results are compared bit for bit.
    """
    x, weight = whole_numbers(21, 3, 24).to(dtype).to(DEVICE), whole_numbers(3, 24, 10).to(DEVICE)
    x[3, 1], x[4, 2, 0] = x[3, 1] * 2000, torch.nan
    scale = (torch.tensor([0.37, 1.0, 5.5]) if per_head else torch.tensor(0.37)).to(DEVICE)
    half = torch.tensor(0.5, device=DEVICE)
    given = (weight.to(E4M3), half) if quantised else (weight.to(dtype), None)
    product = torch.einsum("tnk,nkm->tnm", x.double(), weight.double()) * (0.5 if quantised else 1)
    wanted = to_e4m3(product.float(), scale.reshape(-1, 1))
    found = multiply(x, *given, scale)
    assert_same_bits(found.view(torch.uint8), wanted.view(torch.uint8))
    codes = found.view(torch.uint8)
    assert (codes == 0x7F).any() and (codes & 0x7F == 0x7E).any()
    if dtype == torch.float32:
        x, weight = torch.randn(21, 3, 24, device=DEVICE), torch.randn(3, 24, 10, device=DEVICE)
        given = (to_e4m3(weight, half), half) if quantised else (weight, None)
        unquantised = multiply(x, *given) if quantised else multiply(x, weight, None, None)
        wanted = to_e4m3(unquantised, scale.reshape(-1, 1))
        assert_same_bits(multiply(x, *given, scale).view(torch.uint8), wanted.view(torch.uint8))


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code(dtype):
    """The kernel multiplies by the exact value of each of the 256 codes; NaN codes give NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    values = codes.view(E4M3).float()
    x = torch.eye(16)[:, None].to(dtype)
    found = multiply(x.to(DEVICE), codes.view(E4M3).to(DEVICE), torch.ones((), device=DEVICE)).cpu()[:, 0]
    nan = values[0].isnan().any(0)  # a column with a NaN is NaN, because 0 * NaN is NaN
    assert found[:, nan].isnan().all() and nan.sum() == 1
    assert_same_bits(found[:, ~nan].float() + 0.0, values[0][:, ~nan] + 0.0)


@runs
@pytest.mark.parametrize("transposed", [False, True])
def test_strides_and_borders(transposed):
    """The kernel reads no NaN around the elements of strided inputs, and writes only the elements of `out`."""
    x = torch.full((18, 4, 30), torch.nan, device=DEVICE)
    x[:, :3, 3:27] = whole_numbers(18, 3, 24).to(DEVICE)
    weight = torch.full((3, 26, 12), torch.nan, device=DEVICE).to(E4M3)
    weight[:, :24, :10] = whole_numbers(3, 24, 10).to(DEVICE).to(E4M3)
    view = weight[:, :24, :10]
    if transposed:
        view = view.transpose(1, 2).contiguous().transpose(1, 2)
    memory = torch.full((20, 5, 14), 7.0, device=DEVICE)
    multiply(x[:, :3, 3:27], view, torch.ones((), device=DEVICE), None, memory[1:19, 1:4, 2:12])
    wanted = torch.full_like(memory, 7.0)
    wanted[1:19, 1:4, 2:12] = torch.einsum("tnk,nkm->tnm", x[:, :3, 3:27], weight[:, :24, :10].float())
    assert_same_bits(memory, wanted)
    assert multiply(x[:0, :3, 3:27], view, torch.ones((), device=DEVICE)).shape == (0, 3, 10)


@pytest.fixture
def launches(monkeypatch):
    """Record the launches of the kernel instead of running them."""
    from fast.kernels.triton import weights as module

    recorded: dict = {}
    monkeypatch.setattr(module, "_multiply_heads_kernel", Recorded(module._multiply_heads_kernel, recorded))
    monkeypatch.setattr(module, "launch", lambda kernel, grid, *given, **constants: kernel[grid](*given, **constants))
    return recorded


CHIPS = {(8, 0): (108, 166912), (8, 9): (128, 101376), (9, 0): (132, 232448)}  # multiprocessors, bytes of shared memory


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    "capability, dtype",
    [((8, 0), torch.bfloat16), ((8, 9), torch.float32), ((8, 9), torch.float16), ((9, 0), torch.bfloat16)], ids=str
)  # fmt: skip
def test_compiles_for(capability, dtype, launches, monkeypatch):
    """Compile the smallest and the largest variant for a GPU -> each fits into shared memory.

    Only from compute capability 8.9 on, the GPU has instructions that convert e4m3.
    """
    from fast.kernels.device import DeviceFacts
    from fast.kernels.triton import fp8
    from fast.kernels.triton import weights as module

    processors, shared = CHIPS[capability]
    for each in (module, fp8):
        monkeypatch.setattr(each, "device_facts", lambda device: DeviceFacts(processors, capability, shared))
    weight, scale = torch.zeros(16, 128, 512, dtype=E4M3), torch.ones(16)
    quantised = QuantizedWeight(weight, scale)
    for tokens in (1, 256):
        x = torch.zeros(tokens, 16, 128, dtype=dtype)
        for given in ((quantised.values, scale, None), (weight.to(dtype), None, scale), (weight, scale, scale)):
            out = torch.zeros(tokens, 16, 512, dtype=dtype if given[2] is None else E4M3)
            module.multiply_heads(x, *given, out)
    assert len(launches) == 2 * 3
    for kernel, kinds, constants in launches.values():
        made = compiled(kernel, kinds, constants, capability)
        assert made.metadata.shared <= shared, f"{constants}: {made.metadata.shared} bytes"
        converts = "cvt.rn.f16x2.e4m3x2" in made.asm["ptx"] or "cvt.rn.satfinite.e4m3x2" in made.asm["ptx"]
        assert converts == (capability >= (8, 9))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("dims", [*PRESETS, (1, 512, 128), (8, 128, 512)], ids=str)
def test_variants(dims):
    """For each `ProductTile` that 1 to 256 tokens need, `variant_tokens` returns exactly one number of tokens."""
    from fast.kernels.triton.weights import product_tile, variant_tokens

    def tiles(tokens):
        return [product_tile(each, *dims, torch.bfloat16, 132) for each in tokens]

    found = tiles(variant_tokens(256))
    assert len(set(found)) == len(found) and set(found) == set(tiles(range(1, 257)))
    assert set(tiles(variant_tokens(16))) == set(tiles(range(1, 17)))
