"""Weights: which matmuls can find their stationary operand in the array, because an earlier matmul loaded it.

A compiler omits a load of weights if neither the tile nor its position in the array changes. Two matmuls share their
weights if they read the same box in the same way (`Cost.stationary`) and no event writes to that box in between. Such
matmuls get the same number here. Numbers follow from the stream alone, so equal numbers mean equal weights in any
schedule.
"""

from __future__ import annotations

from simulate.isa.enums import Engine
from simulate.run.stream import READ, Stream


def number_weights(stream: Stream) -> dict[int, int]:
    """Return a number for the stationary operand of every matmul; equal numbers mean the same unchanged operand.

    The number is the first event that used the operand since it was written. The keys are the events of matmuls with a
    `Cost.stationary`. Empty if no instruction of the stream is cheaper with an operand that is loaded already.
    """
    if not any(cost.kept_cycles for cost in stream.costs):
        return {}
    stationary = [cost.stationary for cost in stream.costs]
    tensor = Engine.tensor.value
    weight_numbers: dict[int, int] = {}
    numbers: dict[tuple[object, ...], int] = {}
    written: dict[int, list[tuple[int, int, int, int]]] = {}  # boxes by tensor, in order
    seen: dict[tuple[object, ...], int] = {}  # number of written boxes when the weights were numbered last
    rows, ends = stream.rows, stream.row_ends
    start = 0
    for event, (engine, cost, end) in enumerate(zip(stream.engines, stream.cost_ids, ends)):
        if engine == tensor and stationary[cost] is not None and rows[start] & 3 == READ:
            box = tuple(rows[start : start + 5])
            key = (box, stationary[cost])
            boxes = written.get(box[0] >> 2, [])
            if key not in numbers or any(_overlap(box, written_box) for written_box in boxes[seen[key] :]):
                numbers[key] = event
            seen[key] = len(boxes)
            weight_numbers[event] = numbers[key]
        for row in range(start, end, 5):
            if rows[row] & 3 != READ:
                written.setdefault(rows[row] >> 2, []).append(
                    (rows[row + 1], rows[row + 2], rows[row + 3], rows[row + 4])
                )
        start = end
    return weight_numbers


def _overlap(box: tuple[int, ...], other: tuple[int, int, int, int]) -> bool:
    """Return whether two boxes of the same tensor have a byte in common.

    Args:
        box: A row of `Stream.rows`: tensor and mode, then first and end partition, first and end byte.
        other: First and end partition, first and end byte.
    """
    _, first_row, end_row, first_byte, end_byte = box
    return first_row < other[1] and other[0] < end_row and first_byte < other[3] and other[2] < end_byte
