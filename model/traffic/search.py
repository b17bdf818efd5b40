"""The rate at which a service level breaks, by bisection."""

from __future__ import annotations

from collections.abc import Callable

PRECISION = 0.02
"""Of the rate that is found: its distance to one at which the level does not hold."""

_MOST_HALVINGS = 40


def breaking_rate(holds: Callable[[float], bool], most: float) -> float | None:
    """The highest rate tried at which a service level holds, at most 2 % below one at which it does not.

    At the rate `most` it does not hold. None where it holds at no rate down to 2^-40 of that.
    """
    low = high = most
    for _ in range(_MOST_HALVINGS):
        low, high = low / 2, low
        if holds(low):
            break
    else:
        return None
    while high > low * (1 + PRECISION):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
