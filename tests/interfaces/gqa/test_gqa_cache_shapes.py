"""Tests of the shape, the order in memory and the allocation of the key/value cache."""

from __future__ import annotations

import itertools

import pytest
import torch

from reference.interfaces import E4M3, FP8_E4M3, UnsupportedConfiguration
from reference.interfaces.gqa import (
    KEY_VALUE_FORMATS,
    allocate_key_value_cache,
    check_key_value_format,
    key_value_cache_shape,
    key_value_stride_order,
)

SIZES = dict(num_blocks=5, block_size=32, num_kv_heads=3, head_dim=64)


def test_shapes():
    assert key_value_cache_shape(**SIZES) == (2, 5, 32, 3, 64)
    assert key_value_cache_shape(**SIZES, num_layers=4) == (4, 2, 5, 32, 3, 64)
    assert key_value_cache_shape(0, 16, 1, 256) == (2, 0, 16, 1, 256)


def test_stride_orders():
    assert key_value_stride_order() == key_value_stride_order(layout="NHD") == (0, 1, 2, 3, 4)
    assert key_value_stride_order(layout="HND") == (0, 1, 3, 2, 4)
    assert key_value_stride_order(True) == (0, 1, 2, 3, 4, 5)
    assert key_value_stride_order(True, "HND") == (0, 1, 2, 4, 3, 5)


@pytest.mark.parametrize("layers, layout", list(itertools.product([None, 4], ["NHD", "HND"])))
def test_allocated_caches(layers, layout):
    """The logical axes never change; with "HND" the tokens of a block and a head are contiguous in memory."""
    cache = allocate_key_value_cache(**SIZES, dtype=torch.float16, num_layers=layers, layout=layout)
    assert tuple(cache.shape) == key_value_cache_shape(**SIZES, num_layers=layers)
    assert cache.dtype == torch.float16 and cache.device.type == "cpu"
    block_size, heads, dim = 32, 3, 64
    token, head = (heads * dim, dim) if layout == "NHD" else (dim, block_size * dim)
    block = block_size * heads * dim
    wanted = [5 * block, block, token, head, 1]
    assert list(cache.stride()) == ([] if layers is None else [2 * 5 * block]) + wanted
    order = key_value_stride_order(layers is not None, layout)
    assert cache.permute(order).is_contiguous()
    assert cache.untyped_storage().nbytes() == cache.numel() * 2


def test_dtypes_of_the_formats():
    assert KEY_VALUE_FORMATS == ("compute_dtype", "fp8_e4m3")
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, E4M3):
        assert allocate_key_value_cache(**SIZES, dtype=dtype).dtype == dtype
    assert allocate_key_value_cache(**SIZES, dtype=torch.float32, device=torch.device("meta")).is_meta
    check_key_value_format(FP8_E4M3)


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(num_blocks=-1), "num_blocks: expected an int >= 0, got -1"),
        (dict(block_size=8), "block_size: expected a positive multiple of 16, got 8"),
        (dict(block_size=24), "block_size: expected a positive multiple of 16, got 24"),
        (dict(block_size=0), "block_size: expected a positive multiple of 16, got 0"),
        (dict(num_kv_heads=0), "num_kv_heads: expected a positive int, got 0"),
        (dict(head_dim=48), "head_dim: expected one of 32, 64, 80, 96, 112, 120, 128, 160, 192, 224, 256, got 48"),
        (dict(num_layers=0), "num_layers: expected a positive int or None, got 0"),
        (dict(layout="HDN"), "layout: expected one of NHD, HND, got HDN"),
        (dict(layout=["NHD"]), "layout: expected one of NHD, HND, got ['NHD']"),
        (dict(device="cpux"), "device: expected a torch.device or its name, got 'cpux'"),
    ],
    ids=str,
)
def test_allocation_refuses(changed, message, plain_errors):
    with pytest.raises(ValueError) as error:
        allocate_key_value_cache(**SIZES | dict(dtype=torch.float32) | changed)
    assert str(error.value) == message


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e5m2, "float32"], ids=str)
def test_allocation_refuses_a_dtype(dtype, plain_errors):
    """uint8 is the dtype of `fp8_ds_mla`, a format of the latent cache alone."""
    names = "torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn"
    with pytest.raises(ValueError) as error:
        allocate_key_value_cache(**SIZES, dtype=dtype)
    assert str(error.value) == f"dtype: expected one of {names}, got {dtype}"


def test_stride_order_refuses(plain_errors):
    with pytest.raises(TypeError, match="^include_layers: expected True or False, got int$"):
        key_value_stride_order(1)
    with pytest.raises(ValueError, match="^layout: expected one of NHD, HND, got layers_first$"):
        key_value_stride_order(False, "layers_first")


def test_shape_of_another_head_dim_is_unsupported(plain_errors):
    with pytest.raises(UnsupportedConfiguration, match="^head_dim: expected one of 32, .*, got 100$"):
        key_value_cache_shape(3, 16, 2, 100)
