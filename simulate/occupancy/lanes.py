"""Choice of the partitions that get separate maps, if tiles use the same bytes of different partitions."""

from __future__ import annotations

from collections.abc import Sequence

from simulate.occupancy.uses import Memory, Use


def choose_lanes(memory: Memory) -> list[range]:
    """Return the ranges of partitions that get separate maps of bytes over time: one, two or four equal ranges.

    Tiles on different partitions may use the same bytes at the same time, so that a single map would draw them over
    each other. There are as many ranges as the smallest of these tiles fits side by side, else one of all partitions.
    """
    overlapping = _find_overlapping([use for use in memory.uses if use.partitions < memory.partitions])
    fewest = min((use.partitions for use in overlapping), default=memory.partitions)
    num_lanes = next(count for count in (4, 2, 1) if fewest * count <= memory.partitions)
    size = memory.partitions // num_lanes
    return [range(start, start + size) for start in range(0, memory.partitions, size)]


def _find_overlapping(uses: Sequence[Use]) -> list[Use]:
    """Return the tiles that use the same bytes as another tile at the same time, on other partitions; may repeat."""
    overlapping: list[Use] = []
    live: list[Use] = []
    for use in sorted(uses, key=lambda use: use.first_use):
        live = [live_use for live_use in live if live_use.last_use >= use.first_use]
        for live_use in live:
            if (
                live_use.offset < use.end
                and use.offset < live_use.end
                and not _shares_partitions(use, live_use)
            ):
                overlapping += (use, live_use)
        live.append(use)
    return overlapping


def _shares_partitions(use: Use, live_use: Use) -> bool:
    """Return whether two tiles have a partition in common."""
    return (
        use.first_partition < live_use.first_partition + live_use.partitions
        and live_use.first_partition < use.first_partition + use.partitions
    )
