"""Tests of products with one weight for each head, in blocks of rows, and of the prefills that multiply so."""

from __future__ import annotations

import pytest
import torch

import fast
from fast.mla.head_products import INVARIANT_ROWS, bmm_into
from fast.mla.weights import expand_into

from ..support.factories import DIRECT, make_batch

HEADS, COLUMNS, WIDTH, BLOCK = 3, 64, 24, 16


def rows_of(layout, rows, dtype):
    """Return factors [HEADS, rows, COLUMNS]: own, shared by the heads, or parts of shared wider rows."""
    if layout == "own":
        return torch.randn(HEADS, rows, COLUMNS).to(dtype)
    wide = torch.randn(rows, COLUMNS + 8 * (layout == "wide")).to(dtype)
    return wide[:, :COLUMNS].expand(HEADS, -1, -1)


@pytest.mark.parametrize("rows", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, 0])
@pytest.mark.parametrize("layout", ["own", "shared", "wide"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_product(dtype, layout, rows):
    """Multiply in blocks, into memory with gaps -> the product of all rows; nothing else is written."""
    a, b = rows_of(layout, rows, dtype), torch.randn(HEADS, COLUMNS, WIDTH).to(dtype)
    memory = torch.full((HEADS, rows + 2, WIDTH + 8), 7.0, dtype=dtype)
    bmm_into(a, b, memory[:, 1:-1, :WIDTH], BLOCK)
    torch.testing.assert_close(memory[:, 1:-1, :WIDTH], torch.bmm(a, b))
    memory[:, 1:-1, :WIDTH] = 7
    assert memory.eq(7).all()


@pytest.mark.parametrize("layout", ["shared", "wide"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_of_a_row(dtype, layout):
    """Multiply some rows alone, and behind others that have NaN too -> the same bits of these rows."""
    a, b = rows_of(layout, 2 * INVARIANT_ROWS + 90, dtype), torch.randn(HEADS, COLUMNS, WIDTH)
    a[0, 3] = torch.nan  # the heads share their rows
    b = b.to(dtype)

    def product(rows):
        made = b.new_empty(HEADS, rows.shape[1], WIDTH)
        bmm_into(rows, b, made, INVARIANT_ROWS)
        return made

    whole = product(a)
    for first, end in ((4, 5), (20, 84), (200, 300), (INVARIANT_ROWS + 7, a.shape[1])):
        assert torch.equal(product(a[:, first:end]), whole[:, first:end]), (first, end)


def test_keys_with_the_sizes_of_a_model():
    """Expand latents alone and beside others, with the dims of DeepSeek-V2-Lite in bfloat16 -> the same bits."""
    config, dtype = fast.MLAConfig.from_preset("deepseek-v2-lite"), torch.bfloat16
    widths = config.qk_nope_head_dim, config.v_head_dim
    weights = [torch.randn(config.kv_lora_rank, config.num_heads, n).to(dtype) / 22 for n in widths]
    latents = torch.randn(2 * INVARIANT_ROWS + 8, config.kv_lora_rank).to(dtype)
    beside = expand_into(latents, *weights, None, INVARIANT_ROWS)
    for first, end in ((0, 64), (7, 107), (100, 220), (200, 500)):
        alone = expand_into(latents[first:end], *weights, None, INVARIANT_ROWS)
        assert all(torch.equal(one, other[first:end]) for one, other in zip(alone, beside, strict=True))


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_prefill_multiplies_in_blocks(batch_invariant, monkeypatch):
    """Prefill two requests -> in a batch-invariant plan, every product with latents has the rows of one block."""
    rows, multiply = [], torch.bmm

    def recorded(a, b, **options):
        rows.extend([a.shape[1]] if a.shape[2] == DIRECT.kv_lora_rank else [])
        return multiply(a, b, **options)

    monkeypatch.setattr(torch, "bmm", recorded)
    lens, heads, latent = [300, 20], DIRECT.num_heads, DIRECT.kv_lora_rank
    plan = fast.build_mla_metadata(make_batch(lens, lens).common, 16, 4096, batch_invariant=batch_invariant).prefill
    shapes = (heads, DIRECT.qk_head_dim), (latent,), (DIRECT.qk_rope_head_dim,)
    new, cache = [torch.randn(sum(lens), *shape) for shape in shapes], torch.zeros(1, 16, DIRECT.head_size)
    weights = [torch.randn(latent, heads, n) for n in (DIRECT.qk_nope_head_dim, DIRECT.v_head_dim)]
    fast.forward_prefill(*new, cache, plan, *weights, 0.1)
    assert rows == ([INVARIANT_ROWS] * 4 if batch_invariant else [320] * 2)
