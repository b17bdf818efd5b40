"""Weights: which matmuls can find their stationary tile in the array, because an earlier matmul loaded the same tile.

A compiler omits a load of weights where neither the tile nor its position in the array changes. Two matmuls share their
weights if they read the same box in the same way (`Cost.stationary`) and no event writes to that box in between. Such
matmuls get the same number here. Numbers follow from the stream alone, so equal numbers mean equal weights in any
schedule.
"""

from __future__ import annotations

from simulate.isa.enums import Engine
from simulate.run.stream import READ, Stream


def weights_of(stream: Stream) -> dict[int, int]:
    """For every event whose array could still hold its weights from an earlier one, the number of those weights.

    Empty where no cost of the stream would be lower for it.
    """
    if not any(cost.kept_cycles for cost in stream.costs):
        return {}
    kept = [cost.stationary for cost in stream.costs]
    tensor = Engine.tensor.value
    found: dict[int, int] = {}
    numbers: dict[tuple[object, ...], int] = {}
    written: dict[int, list[tuple[int, int, int, int]]] = {}  # boxes by tensor, in order
    seen: dict[
        tuple[object, ...], int
    ] = {}  # how many of them were known when the weights were numbered last
    rows, ends = stream.rows, stream.row_ends
    start = 0
    for event, (engine, cost, end) in enumerate(zip(stream.engines, stream.cost_ids, ends)):
        if engine == tensor and kept[cost] is not None and rows[start] & 3 == READ:
            box = tuple(rows[start : start + 5])
            key = (box, kept[cost])
            boxes = written.get(box[0] >> 2, [])
            if key not in numbers or any(_overlap(box, other) for other in boxes[seen[key] :]):
                numbers[key] = event
            seen[key] = len(boxes)
            found[event] = numbers[key]
        for at in range(start, end, 5):
            if rows[at] & 3 != READ:
                written.setdefault(rows[at] >> 2, []).append(
                    (rows[at + 1], rows[at + 2], rows[at + 3], rows[at + 4])
                )
        start = end
    return found


def _overlap(box: tuple[int, ...], other: tuple[int, int, int, int]) -> bool:
    """Whether a row of the stream and a written box of the same tensor have a byte in common."""
    _, first_row, end_row, first_byte, end_byte = box
    return first_row < other[1] and other[0] < end_row and first_byte < other[3] and other[2] < end_byte
