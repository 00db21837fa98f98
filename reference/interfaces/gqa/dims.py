"""Dims that the kernels of grouped-query attention support."""

from __future__ import annotations

from ..checks import check_int, short_text
from ..errors import UnsupportedConfiguration

HEAD_DIMS = (32, 64, 80, 96, 112, 120, 128, 160, 192, 224, 256)  # head dims that the kernels of this family support
BLOCK_SIZE_UNIT = 16  # the block size of a key/value cache is a multiple of this number of tokens


def head_dim_reason(head_dim: int, argument: str = "head_dim") -> str | None:
    """Return why a head dim is not supported, or None if it is one of `HEAD_DIMS`.

    Raises:
        ValueError: the argument is not a positive int.
    """
    check_int(argument, head_dim)
    if head_dim in HEAD_DIMS:
        return None
    return f"{argument}: expected one of {', '.join(map(str, HEAD_DIMS))}, got {short_text(head_dim)}"


def check_head_dim(head_dim: int) -> None:
    """Check that a head dim is one of `HEAD_DIMS`.

    Raises:
        ValueError: the argument is not a positive int.
        UnsupportedConfiguration: the head dim is not in `HEAD_DIMS`.
    """
    if reason := head_dim_reason(head_dim):
        raise UnsupportedConfiguration([reason])
