"""Which partitions get a map of their own, where tiles lie side by side."""

from __future__ import annotations

from collections.abc import Sequence

from simulate.occupancy.uses import Memory, Use


def lanes_of(memory: Memory) -> list[range]:
    """The partitions that have a map of their own: all as one, or as halves or quadrants where tiles lie side by side.

    Tiles side by side have the same bytes at the same time, so that one map would draw them over each other.
    """
    beside = _side_by_side([use for use in memory.uses if use.partitions < memory.partitions])
    fewest = min((use.partitions for use in beside), default=memory.partitions)
    lanes = next(n for n in (4, 2, 1) if fewest * n <= memory.partitions)
    size = memory.partitions // lanes
    return [range(start, start + size) for start in range(0, memory.partitions, size)]


def _side_by_side(uses: Sequence[Use]) -> list[Use]:
    """The tiles that share bytes with others that are live at the same time."""
    found: list[Use] = []
    live: list[Use] = []
    for use in sorted(uses, key=lambda use: use.first_use):
        live = [other for other in live if other.last_use >= use.first_use]
        for other in live:
            if other.offset < use.end and use.offset < other.end and not _shares_partitions(use, other):
                found += (use, other)
        live.append(use)
    return found


def _shares_partitions(one: Use, other: Use) -> bool:
    return (
        one.first_partition < other.first_partition + other.partitions
        and other.first_partition < one.first_partition + one.partitions
    )
