"""Times of routed experts from dry runs of fewer and narrower experts.

A launch of routed experts takes the same instructions for each expert, or block of rows of an expert, and for each
chunk of the intermediate size. So its time is linear in their number, and launches at two small numbers give both
coefficients.
"""

from __future__ import annotations

from collections.abc import Callable

from model.config.parts import Experts
from model.plan.dry import ROWS_PERIOD, ROWS_TOGETHER, Time, extrapolate

FEW_EXPERTS = 8
"""Experts of the smaller launch; the larger one has twice as many."""

WIDTH_PERIOD = 1024
"""Intermediate size of a rank by which launches differ."""


def time_experts(
    measure: Callable[[int, int, int, int], Time], tokens: int, routing: Experts, ranks: int
) -> Time:
    """Return the time of a layer's routed experts.

    Args:
        measure: times the launch for a number of tokens, experts, experts of a token, and an intermediate size.
        tokens: tokens of all sequences.
        routing: number and sizes of the experts of a rank.
        ranks: tensor-parallel ranks that divide the intermediate size.
    """

    def time_narrow(rows: int, count: int, per_token: int) -> Time:
        """Return the time of all chunks of the intermediate size, from one and two chunks."""

        def time_width(width: int) -> Time:
            return measure(rows, count, per_token, width)

        return extrapolate(time_width, routing.width, order=1, period=WIDTH_PERIOD * ranks)

    def time_few(rows: int) -> Time:
        """Return the time of all experts, from fewer experts of a rank or of a token."""
        count, per_token = routing.count, routing.per_token
        if rows > ROWS_TOGETHER:
            fewest = max(per_token, FEW_EXPERTS, -(-(ROWS_TOGETHER + 1) * count // rows))
            if 2 * fewest >= count:
                return time_narrow(rows, count, per_token)
            return interpolate(
                lambda experts: time_narrow(rows * experts // count, experts, per_token), count, fewest
            )
        if rows * per_token <= count:  # all choices may be different experts, so the time follows the choices
            if rows * per_token <= 2 * FEW_EXPERTS:
                return time_narrow(rows, count, per_token)
            return extrapolate(lambda chosen: time_narrow(rows, count, chosen), per_token, order=1, period=1)
        choices = min(per_token, FEW_EXPERTS)
        if count <= 2 * FEW_EXPERTS or rows * choices <= 2 * FEW_EXPERTS:
            return time_narrow(rows, count, per_token)
        return interpolate(lambda experts: time_narrow(rows, experts, choices), count, FEW_EXPERTS)

    if tokens <= ROWS_TOGETHER:
        return time_few(tokens)
    return extrapolate(time_few, tokens, order=1, period=ROWS_PERIOD)


def interpolate(measure: Callable[[int], Time], size: int, smaller: int) -> Time:
    """Return the time at a size, which grows linearly, from the times at a smaller size and at twice that size."""
    low, high = measure(smaller), measure(2 * smaller)
    return low + (high - low) * ((size - smaller) / smaller)
