"""Slopes of ALiBi (arXiv 2108.12409): the score of head h decreases by slope[h] for each token of distance."""

from __future__ import annotations


def standard_alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slopes of ALiBi: 2^(-8 i / P) for head i = 1 .. P, with P the largest power of 2 up to `num_heads`.

    Later heads get the odd powers 1, 3, 5, ... of 2^(-4 / P).
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * head / power) for head in range(1, power + 1)]
    return (*slopes, *(2.0 ** (-4 * odd / power) for odd in range(1, 2 * (num_heads - power), 2)))


def mpt_alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slopes of ALiBi in MPT: 2^(-8 i / P) for i = 1 .. P, with P the smallest power of 2 from `num_heads`.

    If P is above `num_heads`, the slopes with even i come first, then those with odd i, and the last ones are dropped.
    """
    power = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-8 * head / power) for head in range(1, power + 1)]
    return tuple(slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])
