"""The few sizes that compiled programs come in."""

from __future__ import annotations


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least `size` and `least`."""
    return max(1 << max(size - 1, 0).bit_length(), least)


def power_of_two_below(size: int) -> int:
    """The largest power of two that is at most `size`, which is at least 1."""
    return 1 << (size.bit_length() - 1)


def rung(size: int, least: int = 16) -> int:
    """The smallest of 16, 24, 32, 48, 64, 96 ... (powers of two and the middles between) that is at least `size`."""
    power = power_of_two(size, least)
    middle = power * 3 // 4
    return middle if size <= middle and middle >= least else power
