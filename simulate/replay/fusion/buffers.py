"""Places for buffers: over each other where their lives do not meet, and in an operand's place where it dies."""

from __future__ import annotations

from collections.abc import Sequence

from simulate.memory.placement import Tile, place
from simulate.replay.fusion.graph import Op, Value, ValueKind
from simulate.replay.fusion.opcodes import Ufunc

_LINE = 64  # bytes of a cache line


def place_buffers(ops: Sequence[Op]) -> tuple[dict[int, int], int]:
    """A byte offset for each buffer by number, and the bytes that all take."""
    lives: dict[int, list[int]] = {}
    values: dict[int, Value] = {}
    for time, op in enumerate(ops):
        for view in (*op.reads, *op.writes):
            if view.value.kind is ValueKind.buffer:
                values[view.value.number] = view.value
                life = lives.setdefault(view.value.number, [time, time])
                life[1] = time
    owner = _shared(ops, lives)
    merged: dict[int, list[int]] = {}
    for number, (first, last) in lives.items():
        life = merged.setdefault(owner.get(number, number), [first, last])
        life[:] = [min(life[0], first), max(life[1], last)]
    tiles = [
        Tile(number, -(-values[number].nbytes // _LINE) * _LINE, first, last, None)
        for number, (first, last) in merged.items()
    ]
    placed = place(tiles)
    return {number: placed.offsets[owner.get(number, number)] for number in lives}, placed.high_water_bytes


def _shared(ops: Sequence[Op], lives: dict[int, list[int]]) -> dict[int, int]:
    """Results that take the place of an operand of an element-wise operation, which nothing reads later."""
    owner: dict[int, int] = {}
    for time, op in enumerate(ops):
        if not isinstance(op.work, Ufunc) or not op.writes[0].is_whole:
            continue
        result = op.writes[0].value
        if result.kind is not ValueKind.buffer or lives[result.number][0] != time:
            continue
        for view in op.reads:
            value = view.value
            if (
                value.kind is ValueKind.buffer
                and lives[value.number][1] == time
                and value.nbytes == result.nbytes
                and value.element == result.element
                and view.is_whole
                and view.shape == op.writes[0].shape
                and sum(other.value is value for other in op.reads) == 1
            ):
                owner[result.number] = owner.get(value.number, value.number)
                break
    return owner
