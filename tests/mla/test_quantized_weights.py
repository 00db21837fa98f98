"""Tests of absorbed weights in e4m3 (8 bits), and of queries and values in e4m3.

A number x is stored as x / scale, rounded to e4m3. The tests compute the expected e4m3 number with `nearest_e4m3`,
which searches the list of all e4m3 numbers for the nearest one.
"""

from __future__ import annotations

import pytest
import torch

import fast
import reference
from fast.parity import compare
from reference.interfaces import E4M3, QuantizedWeight, UnsupportedConfiguration

from ..support.factories import CONFIGS, assert_same_bits, make_up_projections

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def nearest_e4m3(x, scale):
    """Return the e4m3 code nearest to each quotient x / scale; the even code if two are equally near; 0x7F for NaN."""
    quotients = (x.float() / scale).double().clamp(-448, 448)
    codes = torch.arange(127, dtype=torch.int64)
    exponents, mantissas = codes // 8, codes % 8
    numbers = torch.where(exponents > 0, 2.0 ** (exponents - 7) * (1 + mantissas / 8), 2.0**-9 * mantissas)
    distances = (quotients.abs()[..., None] - numbers).abs()
    found = (distances * 2 + (codes % 2) * 1e-30).argmin(-1)
    tied = distances.gather(-1, (found + 1).clamp(max=126)[..., None])[..., 0] == distances.amin(-1)
    found = torch.where(tied & (found % 2 == 1), found + 1, found)
    signed = found + 128 * (quotients.signbit())
    return torch.where(quotients.isnan(), 0x7F, signed).to(torch.uint8)


def dense(weight: QuantizedWeight) -> torch.Tensor:
    """Return the float64 weight that a quantised weight stands for."""
    return weight.values.double() * weight.scale.double().reshape(-1, 1, 1)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_weight(ops, dtype, per_head):
    """`quantize_weight` makes the largest number 448, and rounds the others to the nearest e4m3 number."""
    weight = torch.randn(3, 5, 8).to(dtype)
    weight[1] *= 100
    weight[2, 0, :2] = torch.tensor([0.0, -0.0])
    found = ops.quantize_weight(weight, per_head)
    sizes = weight.float().abs()
    largest = sizes.flatten(1).max(1).values if per_head else sizes.max()
    assert_same_bits(found.scale, largest / 448)
    wanted = nearest_e4m3(weight, found.scale.reshape(-1, 1, 1))
    assert_same_bits(found.values.view(torch.uint8), wanted)
    assert found.values.float().abs().amax() == 448


@pytest.mark.parametrize("per_head", [False, True])
def test_unusual_weights(ops, per_head):
    """Zeros get a positive scale; infinity becomes 448, and other weights with its scale become 0; NaN stays NaN."""
    zeros = ops.quantize_weight(torch.zeros(2, 3, 4), per_head)
    assert (zeros.scale == torch.tensor(1e-10) / 448).all() and not zeros.values.float().any()
    weight = torch.randn(2, 3, 4)
    weight[0, 0, 0], weight[0, 1, 1], weight[0, 2, 2] = NAN, INF, -INF
    found = ops.quantize_weight(weight, per_head)
    assert (found.values.view(torch.uint8) == 0x7F).nonzero().tolist() == [[0, 0, 0]]
    assert found.values[0, 1, 1] == 448 and found.values[0, 2, 2] == -448
    assert found.scale.isfinite().all() and (found.scale > 0).all()
    assert not found.values[0][weight[0].isfinite()].float().any()  # weights with the scale of an infinite weight
    assert found.scale.flatten()[0] == torch.finfo(torch.float32).max / 448
    assert found.values[1].float().any() == per_head


def test_twins_quantize_alike():
    """Both packages store the same bits, also for a view of `kv_b_proj`'s weight, whose heads are not contiguous."""
    w_uk_t, w_uv = reference.absorb(*make_up_projections(CONFIGS["low-rank"], torch.bfloat16))
    for weight in (w_uk_t, w_uv):
        for per_head in (False, True):
            ours, theirs = (ops.quantize_weight(weight, per_head) for ops in (fast, reference))
            assert_same_bits(ours.scale, theirs.scale)
            assert_same_bits(ours.values.view(torch.uint8), theirs.values.view(torch.uint8))


def test_quantize_in_place():
    """With `out=`, a quantised weight keeps its memory; an `out` with values or scales of another shape is refused."""
    first = fast.quantize_weight(torch.randn(3, 5, 8), True)
    addresses = first.values.data_ptr(), first.scale.data_ptr()
    weight = torch.randn(3, 5, 8)
    assert fast.quantize_weight(weight, True, out=first) is first
    assert (first.values.data_ptr(), first.scale.data_ptr()) == addresses
    assert_same_bits(dense(first), dense(reference.quantize_weight(weight, True)))
    with pytest.raises(ValueError, match=r"^out.scale: expected shape \[\], got \[3\]$"):
        fast.quantize_weight(weight, False, out=first)
    with pytest.raises(ValueError, match=r"^out.values: expected shape \[3, 5, 4\], got \[3, 5, 8\]$"):
        fast.quantize_weight(weight[..., :4], True, out=first)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_products(tokens, dtype, per_head):
    """A product with a weight in e4m3 is within the budget; gold multiplies the same numbers in float64."""
    c = CONFIGS["low-rank"]
    pairs = zip(reference.absorb(*make_up_projections(c, dtype)), (c.qk_nope_head_dim, c.kv_lora_rank), strict=True)
    for name, (weight, width) in zip(("query_to_latent", "latent_to_value"), pairs, strict=True):
        x = torch.randn(tokens, c.num_heads, width).to(dtype)
        quantised = reference.quantize_weight(weight, per_head)
        gold = getattr(reference, name)(x.double(), dense(quantised))
        low, found = (getattr(ops, name)(x, quantised) for ops in (reference, fast))
        assert found.dtype == low.dtype == dtype
        parity = compare(name, found, low, gold)
        assert parity.passed, parity


def whole_numbers(*shape):
    """Return small whole numbers: every sum of their products is exact, in any order."""
    return torch.randint(-3, 4, shape).float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_results_in_e4m3(ops, per_head, quantised, dtype):
    """Results in e4m3 are the exact product divided by the scale and rounded once; large ones saturate.

    Only the scale of queries may have one number for each head.
    """
    x, weight = whole_numbers(5, 3, 24).to(dtype), whole_numbers(3, 24, 10)
    x[3, 1], x[4, 2, 0] = x[3, 1] * 2000, NAN
    scale = torch.tensor([0.37, 1.0, 5.5]) if per_head else torch.tensor(0.37)
    product = torch.einsum("tnk,nkm->tnm", x.double(), weight.double())
    given = QuantizedWeight(weight.to(E4M3), torch.tensor(0.5)) if quantised else weight.to(dtype)
    exact = product * 0.5 if quantised else product
    wanted = nearest_e4m3(exact, scale.reshape(-1, 1))
    found = [ops.query_to_latent(x, given, scale)]
    if not per_head:
        found.append(ops.latent_to_value(x, given, output_scale=scale))
    for each in found:
        assert each.dtype == E4M3
        assert_same_bits(each.view(torch.uint8), wanted)
    assert (wanted == 0x7F).any() and ((wanted & 0x7F) == 0x7E).any()


def test_out_in_e4m3():
    """`fast.latent_to_value` writes e4m3 into an `out` of any strides; an `out` of another dtype is refused."""
    latent, weight, scale = whole_numbers(5, 3, 24), whole_numbers(3, 24, 10), torch.tensor(0.5)
    wanted = reference.latent_to_value(latent, weight, output_scale=scale)
    for memory in (torch.zeros(5, 3, 10), torch.zeros(3, 5, 10).transpose(0, 1), torch.zeros(5, 3, 20)[..., ::2]):
        out = torch.empty_strided(memory.shape, memory.stride(), dtype=E4M3)
        assert fast.latent_to_value(latent, weight, output_scale=scale, out=out) is out
        assert_same_bits(out.view(torch.uint8), wanted.view(torch.uint8))
    with pytest.raises(ValueError, match="^out: expected dtype torch.float8_e4m3fn, got torch.float32$"):
        fast.latent_to_value(latent, weight, output_scale=scale, out=torch.zeros(5, 3, 10))
    quantised = reference.quantize_weight(weight)
    with pytest.raises(ValueError, match="^out: expected memory that no input has, got a tensor that overlaps"):
        fast.latent_to_value(latent, quantised, output_scale=scale, out=quantised.values.view(-1)[:150].view(5, 3, 10))


SCALES = {
    "zero": (torch.tensor(0.0), "a finite number above 0, got 0.0"),
    "negative": (torch.tensor(-1.0), "a finite number above 0, got -1.0"),
    "NaN": (torch.tensor(NAN), "a finite number above 0, got nan"),
    "infinite": (torch.tensor(INF), "a finite number above 0, got inf"),
    "device": (torch.tensor(1.0, device="meta"), "device cpu, got meta"),
    "dtype": (torch.tensor(1.0, dtype=torch.float64), "dtype torch.float32, got torch.float64"),
    "shape": (torch.ones(1, 1), r"shape \[\], got \[1, 1\]"),
    "number": (1.0, "a tensor, got float"),
}


@pytest.mark.parametrize("scale, message", SCALES.values(), ids=SCALES)
def test_bad_scales(ops, scale, message, plain_errors):
    latent, weight = torch.randn(5, 3, 24), torch.randn(3, 24, 10)
    with pytest.raises((TypeError, ValueError), match=f"^output_scale: expected {message}$"):
        ops.latent_to_value(latent, weight, output_scale=scale)
    either = message.replace(r"shape \[\]", r"shape \[\] or \[3\]")  # one scale, or one for each head
    with pytest.raises((TypeError, ValueError), match=f"^q_scale: expected {either}$"):
        ops.query_to_latent(latent, weight, scale)
    with pytest.raises((TypeError, ValueError), match=f"^w_uv.scale: expected {either}$"):
        ops.latent_to_value(latent, QuantizedWeight(weight.to(E4M3), scale))


def test_refusals(ops, plain_errors):
    latent, weight = torch.randn(5, 3, 24), torch.randn(3, 24, 10)
    with pytest.raises(UnsupportedConfiguration, match="^output_block_scale: block-scaled outputs are not implemented"):
        ops.latent_to_value(latent, weight, output_block_scale=torch.ones(3))
    with pytest.raises(ValueError, match=r"^output_scale: expected shape \[\], got \[3\]$"):
        ops.latent_to_value(latent, weight, output_scale=torch.ones(3))
    with pytest.raises(ValueError, match=r"^w_uv.values: expected dtype torch.float8_e4m3fn, got torch.float32$"):
        ops.latent_to_value(latent, QuantizedWeight(weight, torch.tensor(1.0)))
    with pytest.raises(ValueError, match=r"^w_uk_t.values: expected shape \[3, 24, Lkv\], got \[3, 23, 10\]$"):
        ops.query_to_latent(latent, ops.quantize_weight(weight[:, 1:]))
    with pytest.raises(TypeError, match="^per_head: expected True or False, got int$"):
        ops.quantize_weight(weight, 1)
    with pytest.raises(ValueError, match=r"^weight: expected shape \[N, K, M\], got \[3, 24\]$"):
        ops.quantize_weight(weight[..., 0])


def test_a_backend_without_the_product(monkeypatch):
    """Name a backend without `multiply_heads` -> an error for products in e4m3, and none for other products."""
    latent, weight = torch.randn(5, 3, 24), torch.randn(3, 24, 10)
    with pytest.raises(UnsupportedConfiguration, match="^hopper: has no kernel for multiply_heads"):
        fast.latent_to_value(latent, fast.quantize_weight(weight), backend="hopper")
    assert_same_bits(fast.latent_to_value(latent, weight, backend="hopper"), fast.latent_to_value(latent, weight))


def relative_error(weight, quantised, heads):
    """Return the root mean square error of the given heads, divided by the root mean square of their weights."""
    error, size = (dense(quantised) - weight.double())[heads], weight.double()[heads]
    return float((error.square().mean() / size.square().mean()).sqrt())


@pytest.mark.parametrize("factor, one, each", [(1, 2.6e-2, 2.6e-2), (1e3, 2.6e-2, 2.6e-2), (1e4, 5.3e-2, 2.6e-2),
                                               (1e5, 5.2e-1, 2.6e-2)])  # fmt: skip
def test_error_of_scales(factor, one, each):
    """One scale for the weight loses digits of heads whose weights are small; one scale for each head does not.

    The expected errors are those of the table in `quantize_weight`'s docstring.
    """
    torch.manual_seed(0)
    weight = torch.randn(16, 128, 512)
    weight[3] *= factor
    others = [head for head in range(16) if head != 3]
    found = [relative_error(weight, reference.quantize_weight(weight, per_head), others) for per_head in (False, True)]
    for error, wanted in zip(found, (one, each), strict=True):
        assert f"{error:.1e}" == f"{wanted:.1e}"
