"""Times of routed experts from dry runs of fewer and narrower ones.

A launch of routed experts takes the same instructions for each expert, or block of rows of one, and for each chunk of
the intermediate size, so its time is linear in their number. Launches at two small numbers give both coefficients.
"""

from __future__ import annotations

from collections.abc import Callable

from model.config.parts import Experts
from model.layers.launch import Launch
from model.plan.dry import ROWS_PERIOD, ROWS_TOGETHER, Time, continued

Sized = Callable[[int, int, int, int], Launch]
"""A launch by its tokens, its experts, those of a token, and the width of an expert."""

FEW_EXPERTS = 8
"""Experts of the smaller launch; the larger one has twice as many."""

WIDTH = 1024
"""Of an expert on a rank, by which launches differ."""


def by_experts(
    launched: Callable[[Launch], Time], sized: Sized, tokens: int, routing: Experts, ranks: int
) -> Time:
    """The time of experts for so many tokens."""

    def narrow(rows: int, count: int, chosen: int) -> Time:
        step = WIDTH * ranks
        repeats, rest = divmod(routing.width, step)

        def of_width(repeat: int) -> Time:
            return launched(sized(rows, count, chosen, repeat * step + rest))

        return of_width(repeats) if repeats <= 2 else linear(of_width, repeats, 1, 2)

    def few(rows: int) -> Time:
        count, chosen = routing.count, routing.per_token
        if rows > ROWS_TOGETHER:
            least = max(chosen, FEW_EXPERTS, -(-(ROWS_TOGETHER + 1) * count // rows))
            if 2 * least >= count:
                return narrow(rows, count, chosen)
            return linear(lambda each: narrow(rows * each // count, each, chosen), count, least, 2 * least)
        if rows * chosen <= count:
            if chosen <= 2 or rows * chosen <= 2 * FEW_EXPERTS:
                return narrow(rows, count, chosen)
            return linear(lambda each: narrow(rows, count, each), chosen, 1, 2)
        together = min(chosen, FEW_EXPERTS)
        if count <= 2 * FEW_EXPERTS or rows * together <= 2 * FEW_EXPERTS:
            return narrow(rows, count, chosen)
        return linear(lambda each: narrow(rows, each, together), count, FEW_EXPERTS, 2 * FEW_EXPERTS)

    return continued(few, tokens, order=1, period=ROWS_PERIOD) if tokens > ROWS_TOGETHER else few(tokens)


def linear(time: Callable[[int], Time], size: int, first: int, second: int) -> Time:
    """The time at `size` of one that is linear, by those at two sizes."""
    low, high = time(first), time(second)
    return low + (high - low) * ((size - first) / (second - first))
