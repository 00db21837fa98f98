"""Tests of the Hopper decode kernels with many shapes: heads, query tokens, block sizes, widths of cache entries.

A result is "within the budget" if its error against the reference is at most the budget of docs/correctness.md.
`tests/__init__.py` lists the pitfalls by number.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ....support import decode_inputs
from ....support.decode_inputs import make_inputs, schedule_of, verdict
from ....support.triton_mode import ON_HOPPER

if not ON_HOPPER:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from fast.kernels.hopper.mla_decode import launch as decode
from fast.kernels.hopper.mla_decode import select

BF16, FP16 = torch.bfloat16, torch.float16
WIDTHS = [(latent, rope) for latent in (512, 256) for rope in (64, 32, 0)]
launch = partial(decode_inputs.launch, decode)


def check_parity(*args, **options):
    inputs = make_inputs(*args, **options)
    verdict(launch(*inputs), *inputs)


@pytest.mark.parametrize("heads", [1, 2, 7, 8, 17, 33, 40, 96, 126, 127, 128])
def test_heads(heads):
    """A decode is within the budget for any number of heads.

    A row is one (query token, head) pair, and a row block is 16, 32 or 64 rows of a request. With few heads, a row
    block has rows of several tokens; with many heads, one token fills several row blocks.
    """
    check_parity([1, 2, 0, 5], [66, 333, 5, 129], heads, BF16)


@pytest.mark.parametrize("query_len", range(1, 9))
@pytest.mark.parametrize("heads", [4, 16, 128])
def test_several_queries(heads, query_len):
    """In a request with several query tokens, each token sees only keys up to its own position (pitfall 12)."""
    check_parity([query_len] * 3, [65, 330, query_len], heads, BF16)


@pytest.mark.parametrize(
    "block_size, widths",
    [(64, widths) for widths in WIDTHS]
    + [(16, (512, 64)), (32, (512, 64)), (128, (512, 64)), (16, (256, 32)), (32, (256, 0))],
    ids=str,
)  # fmt: skip
def test_blocks_and_widths(block_size, widths):
    for heads in (4, 40, 64):
        check_parity([1, 2, 1], [129, 64, 700], heads, BF16, widths=widths, block_size=block_size)


@pytest.mark.parametrize("cut", ["whole", "scheduled", "batch-invariant", "batch-invariant, planned"])
@pytest.mark.parametrize("heads", [8, 16, 40, 64])
@pytest.mark.parametrize("block_size, widths, dtype", [
    (64, (256, 64), BF16), (64, (512, 32), FP16), (64, (256, 0), FP16), (16, (256, 32), BF16), (32, (512, 64), FP16),
    (128, (512, 0), BF16),
], ids=str)  # fmt: skip
def test_cuts_of_widths(block_size, widths, dtype, heads, cut, monkeypatch):
    """A decode is within the budget for each entry width and each way to divide a request among programs.

    With 16 heads, a row block of 32 rows has the rows of two tokens.
    """
    monkeypatch.setattr(select, "best_num_splits", lambda *_: 1)
    monkeypatch.setattr(select, "best_num_programs", lambda *_: 2)
    monkeypatch.setattr(select, "_scored_at_once", lambda *_: False)
    inputs = make_inputs([1, 2, 1], [2950, 64, 700], heads, dtype, widths, block_size)
    schedule = None
    if cut != "whole":
        programs = 0 if cut == "batch-invariant" else 3
        schedule = schedule_of(inputs[3], heads, programs, cut != "scheduled", 1)
    verdict(launch(*inputs, schedule=schedule), *inputs)


@pytest.mark.parametrize("heads", [129, 192])
def test_more_heads_than_any_preset(heads):
    check_parity([1, 2, 1], [129, 64, 700], heads, BF16)
