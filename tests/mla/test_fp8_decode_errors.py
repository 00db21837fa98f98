"""Tests of the error of a decode over caches in e4m3, against float64 over the stored bytes.

The decode converts the stored numbers to the dtype of the queries (`converted`). The error of the quantisation itself
is not part of these tests: gold reads the same bytes.
"""

from __future__ import annotations

import pytest
import torch

import fast
import reference
from reference.interfaces import CACHE_FORMATS

from ..benchmarks.fp8_errors import decode_errors
from ..support.decode_inputs import SCALE, make_inputs

MOST = 3e-3  # largest relative error allowed; queries in e4m3 would have an error of 3.6e-2
LENS = ([1, 1, 2], [700, 130, 64])


def relative(value: torch.Tensor, gold: torch.Tensor) -> float:
    return float((value.double() - gold).norm() / gold.norm())


def stored(cache: torch.Tensor, cache_format, kv_scale) -> torch.Tensor:
    """Return the cache in a cache format; every byte of the NaN entries, which belong to no token, becomes 0xFF."""
    entries = cache.flatten(0, 1)
    kept = reference.quantize_entries(*entries.split([512, 64], dim=-1), cache_format, kv_scale).view(torch.uint8)
    kept[entries.isnan().any(-1)] = cache_format.poison
    return kept.view(cache_format.storage_dtype).view(*cache.shape[:2], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_ds_mla"])
def test_error_of_converted_numbers(ops, dtype, name):
    """Decode over e4m3 with queries in float32 or 16 bit -> a relative error of at most 3e-3 in output and LSE.

    In bfloat16 only `fast` has this error: `reference` rounds the scores to bfloat16, and its error is 3.6e-3.
    """
    if ops is reference and dtype is torch.bfloat16:
        pytest.skip("the reference rounds scores to bfloat16")
    ql, q_pe, cache, plan = make_inputs(*LENS, dtype=dtype)
    ql *= 16  # scores with a standard deviation of about 2, so that few keys have most of the probability
    storage = {"cache_format": CACHE_FORMATS[name], "kv_scale": torch.tensor(0.01) if name == "fp8_e4m3" else None}
    kv_cache = stored(cache, *storage.values())
    value = ops.mla_decode(ql, q_pe, kv_cache, plan, SCALE, **storage)
    gold = reference.mla_decode(ql.double(), q_pe.double(), kv_cache, plan, SCALE, **storage)
    assert value.out.dtype == dtype
    assert relative(value.out, gold.out) <= MOST and relative(value.lse, gold.lse) <= MOST


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_ds_mla"])
def test_gold_reads_the_stored_bytes(name):
    """Decode in float64 over the stored bytes -> the result over a float64 cache with the dequantised numbers."""
    ql, q_pe, cache, plan = make_inputs(*LENS, dtype=torch.float64)
    storage = {"cache_format": CACHE_FORMATS[name], "kv_scale": torch.tensor(0.01) if name == "fp8_e4m3" else None}
    kv_cache = stored(cache, *storage.values())
    entries = kv_cache.view(-1, kv_cache.shape[2])
    numbers = reference.dequantize_entries(entries, out_dtype=torch.float64, **storage).view(cache.shape)
    for decode in (reference.mla_decode, fast.mla_decode):
        found, expected = decode(ql, q_pe, kv_cache, plan, SCALE, **storage), decode(ql, q_pe, numbers, plan, SCALE)
        assert relative(found.out, expected.out) < 1e-14 and relative(found.lse, expected.lse) < 1e-14


@pytest.mark.parametrize("length", [1024, 131072])
def test_errors_of_modes(length):
    """Decode in every mode over few and over many keys -> the errors that follow from the rounding to e4m3.

    e4m3 changes a number by at most the factor 1 +- 2^-4. Rounded queries change a score by at most 2^-4 of its size,
    which is about `deviation`; rounded probabilities change the output by at most 2^-4. An error below a tenth of these
    limits would mean that nothing was rounded.

    The backend "cpu" multiplies all other numbers in float32. The kernels of a GPU multiply them in float16, which
    changes a number by at most the factor 1 +- 2^-11. Scores from products in e4m3 are less exact on Hopper, because
    its matrix unit keeps 13 binary digits of their sums; so the limit of `fp8_query` on a GPU is MOST.
    """
    deviation, largest, device = 1.7, 2.0**-4, torch.get_default_device().type
    exact, exact_query = (1e-4, 1e-4) if device == "cpu" else (2.0**-11, MOST)
    with torch.device("cpu"):  # the exact outputs are computed on the CPU
        rows = decode_errors(length, 2, deviation, device)
    assert {each["mode"] for each in rows} == {"converted", "fp8_query", "fp8_product"}
    for each in rows:
        rounding, whole = each["own queries"], each["exact queries"]
        if each["mode"] == "converted":
            assert rounding < exact and whole <= MOST, each
            continue
        assert largest / 10 < whole < largest * deviation, each
        if each["mode"] == "fp8_query":
            assert rounding < exact_query, each
        else:
            assert 1e-3 < rounding < largest, each
