"""Buffer placement: buffers with disjoint live ranges share bytes."""

from __future__ import annotations

from collections.abc import Sequence

from simulate.memory.placement import Tile, place_tiles
from simulate.replay.fusion.graph import Op, Value, ValueLocation

_LINE = 64  # bytes of a cache line


def place_buffers(ops: Sequence[Op]) -> tuple[dict[int, int], int]:
    """Place all buffers of a program in one block; buffers with disjoint live ranges share bytes.

    Returns:
        The byte offset of each buffer by value number, and the size of the block in bytes.
    """
    live_ranges: dict[int, list[int]] = {}
    values: dict[int, Value] = {}
    for time, op in enumerate(ops):
        for view in (*op.reads, *op.writes):
            if view.value.location is ValueLocation.buffer:
                values[view.value.number] = view.value
                live_range = live_ranges.setdefault(view.value.number, [time, time])
                live_range[1] = time
    tiles = [
        Tile(number, -(-values[number].nbytes // _LINE) * _LINE, first, last, None)
        for number, (first, last) in live_ranges.items()
    ]
    placed = place_tiles(tiles)
    return placed.offsets, placed.high_water_bytes
