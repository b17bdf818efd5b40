"""Buffer placement: buffers with disjoint live ranges share bytes; an element-wise result may overwrite its operand."""

from __future__ import annotations

from collections.abc import Sequence

from simulate.memory.placement import Tile, place
from simulate.replay.fusion.graph import Op, Value, ValueKind
from simulate.replay.fusion.opcodes import Ufunc

_LINE = 64  # bytes of a cache line


def place_buffers(ops: Sequence[Op]) -> tuple[dict[int, int], int]:
    """The byte offset of each buffer by its value's number, and the size of all in bytes."""
    live_ranges: dict[int, list[int]] = {}
    values: dict[int, Value] = {}
    for time, op in enumerate(ops):
        for view in (*op.reads, *op.writes):
            if view.value.kind is ValueKind.buffer:
                values[view.value.number] = view.value
                live_range = live_ranges.setdefault(view.value.number, [time, time])
                live_range[1] = time
    owner = _in_place(ops, live_ranges)
    merged: dict[int, list[int]] = {}
    for number, (first, last) in live_ranges.items():
        live_range = merged.setdefault(owner.get(number, number), [first, last])
        live_range[:] = [min(live_range[0], first), max(live_range[1], last)]
    tiles = [
        Tile(number, -(-values[number].nbytes // _LINE) * _LINE, first, last, None)
        for number, (first, last) in merged.items()
    ]
    placed = place(tiles)
    return {
        number: placed.offsets[owner.get(number, number)] for number in live_ranges
    }, placed.high_water_bytes


def _in_place(ops: Sequence[Op], live_ranges: dict[int, list[int]]) -> dict[int, int]:
    """The buffer that each in-place result overwrites: an operand of an element-wise operation, at its last use."""
    owner: dict[int, int] = {}
    for time, op in enumerate(ops):
        if not isinstance(op.opcode, Ufunc) or not op.writes[0].is_whole:
            continue
        result = op.writes[0].value
        if result.kind is not ValueKind.buffer or live_ranges[result.number][0] != time:
            continue
        for view in op.reads:
            value = view.value
            if (
                value.kind is ValueKind.buffer
                and live_ranges[value.number][1] == time
                and value.nbytes == result.nbytes
                and value.element == result.element
                and view.is_whole
                and view.shape == op.writes[0].shape
                and sum(other.value is value for other in op.reads) == 1
            ):
                owner[result.number] = owner.get(value.number, value.number)
                break
    return owner
