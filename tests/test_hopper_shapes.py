"""The Hopper decode kernels at every shape they declare: heads, query tokens, block sizes and widths of an entry."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from . import decode_inputs
from .decode_inputs import make_inputs, verdict
from .triton_mode import ON_GPU

if not (ON_GPU and torch.cuda.get_device_capability() == (9, 0)):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from fast.kernels.hopper import decode

BF16 = torch.bfloat16
WIDTHS = [(latent, rope) for latent in (512, 256) for rope in (64, 32, 0)]
launch = partial(decode_inputs.launch, decode)


def check_parity(*args, **options):
    inputs = make_inputs(*args, **options)
    verdict(launch(*inputs), *inputs)


@pytest.mark.parametrize("heads", [1, 2, 7, 8, 17, 33, 40, 96, 126, 127, 128])
def test_heads(heads):
    """Not only powers of two; several tokens share a block of rows, or one token fills several."""
    check_parity([1, 2, 0, 5], [66, 333, 5, 129], heads, BF16)


@pytest.mark.parametrize("query_len", range(1, 9))
@pytest.mark.parametrize("heads", [4, 16, 128])
def test_several_queries(heads, query_len):
    """Pitfall 12: each row sees only keys up to its own position."""
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
