"""Helpers for tests of `mla_decode` with the `triton` backend: dtypes, widths, inputs and launch.

On a GPU the kernels are compiled and have the widths of real models. Without a GPU the kernels run in Triton's
interpreter and have small widths.
"""

from __future__ import annotations

from functools import partial

import torch

from . import decode_inputs
from .triton_mode import INTERPRETED, ON_GPU

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU  # the interpreter computes wrong bfloat16 products
NARROW = {"narrow rope": (32, 8), "narrow": (8, 16)}
WIDTHS = {"V3": (512, 64), "256+32": (256, 32), "no rope": (512, 0), "odd": (40, 24), **NARROW} if ON_GPU else {
    "64+16": (64, 16), "32+32": (32, 32), "no rope": (32, 0), "odd": (24, 8), **NARROW
}  # fmt: skip
WIDTH = next(iter(WIDTHS.values()))  # latent width, rope width

launch = None
if ON_GPU or INTERPRETED:
    from fast.kernels.triton import decode

    launch = partial(decode_inputs.launch, decode)


def make_inputs(query_lens, seq_lens, heads=3, dtype=torch.float32, widths=WIDTH, block_size=64):
    """Return the inputs of `decode_inputs.make_inputs`, by default with the first entry of WIDTHS."""
    return decode_inputs.make_inputs(query_lens, seq_lens, heads, dtype, widths, block_size)
