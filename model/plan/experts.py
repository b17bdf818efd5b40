"""Times of kernels of routed experts, from dry runs with fewer and narrower experts or with other numbers of rows.

`predict` calls this module. A dry run with all experts of a large model would take too long. A kernel of routed experts
takes the same instructions for each chunk of the intermediate size, and `experts_decode` the same for each expert, or
for each choice of an expert by a row. So its time is linear in their number, and dry runs at two small numbers give
both coefficients. `experts_prefill` divides rows into blocks by the number of experts and choices. It is run dry with
all experts, at powers of two of rows, between which its time is interpolated.
"""

from __future__ import annotations

from collections.abc import Callable

from model.config.blocks import Experts
from model.plan.dry import Time, extrapolate

FEW_EXPERTS = 8
"""Experts of the smaller launch of `experts_decode`; the larger one has twice as many."""

WIDTH_PERIOD = 1024
"""Intermediate size of a rank by which launches differ."""

LISTED_ROWS = 8192
"""Rows beyond which `experts_prefill` finds the rows of each expert in another way."""

MeasureExperts = Callable[[int, int, int, int], Time]
"""Function that times a launch for a number of rows, experts, experts of a token, and an intermediate size."""


def time_few_rows(measure: MeasureExperts, rows: int, routing: Experts, ranks: int) -> Time:
    """Return the time of one launch of `experts_decode`, without starting and ending the kernel.

    Args:
        measure: dry run that times a launch of given sizes.
        rows: rows (tokens) of all sequences, at most 128.
        routing: number of a rank's experts, experts per token, and intermediate size.
        ranks: tensor-parallel ranks that divide the intermediate size.
    """
    count, per_token = routing.count, routing.per_token

    def time_narrow(count: int, per_token: int) -> Time:
        return _time_width(measure, rows, count, per_token, routing.width, ranks)

    if rows * per_token <= count:  # all choices may be different experts, so the time follows the choices
        if rows * per_token <= 2 * FEW_EXPERTS:
            return time_narrow(count, per_token)
        return extrapolate(lambda chosen: time_narrow(count, chosen), per_token, period=1)
    choices = min(per_token, FEW_EXPERTS)
    if count <= 2 * FEW_EXPERTS or rows * choices <= 2 * FEW_EXPERTS:
        return time_narrow(count, per_token)
    return _interpolate(lambda experts: time_narrow(experts, choices), count, FEW_EXPERTS, 2 * FEW_EXPERTS)


def time_sorted_rows(measure: MeasureExperts, rows: int, routing: Experts, ranks: int) -> Time:
    """Return the time of one launch of `experts_prefill`, without starting and ending the kernel.

    Args:
        measure: dry run that times a launch of given sizes.
        rows: rows (tokens) of all prompts; any number.
        routing: number of a rank's experts, experts per token, and intermediate size.
        ranks: tensor-parallel ranks that divide the intermediate size.
    """

    def time_rows(rows: int) -> Time:
        return _time_width(measure, rows, routing.count, routing.per_token, routing.width, ranks)

    if rows > LISTED_ROWS:
        return _interpolate(time_rows, rows, LISTED_ROWS + 1, 2 * LISTED_ROWS)
    low = 1 << (rows.bit_length() - 1)
    return time_rows(rows) if low == rows else _interpolate(time_rows, rows, low, 2 * low)


def _time_width(
    measure: MeasureExperts, rows: int, count: int, per_token: int, width: int, ranks: int
) -> Time:
    """Return the time of a launch for a large intermediate size, extrapolated from smaller intermediate sizes.

    The smaller sizes have one and two chunks of `WIDTH_PERIOD` columns per rank, plus the same remainder.
    """
    return extrapolate(lambda narrow: measure(rows, count, per_token, narrow), width, WIDTH_PERIOD * ranks)


def _interpolate(measure: Callable[[int], Time], size: int, low: int, high: int) -> Time:
    """Return the time at `size`, from a line through the measured times at the sizes `low` and `high`."""
    first, last = measure(low), measure(high)
    return first + (last - first) * ((size - low) / (high - low))
