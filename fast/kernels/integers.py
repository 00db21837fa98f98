"""Fast integer arithmetic for launchers; a call of `triton.cdiv` or `triton.next_power_of_2` takes several us."""

from __future__ import annotations


def cdiv(number: int, divisor: int) -> int:
    """Return number / divisor, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`; 0 for 0, as `triton.next_power_of_2` does."""
    return 1 << (number - 1).bit_length() if number > 0 else 0
