"""Passes that eliminate dead code, copies of results, and copies that concatenate; each changes `builder.ops`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulate.memory import Storage, views
from simulate.replay.fusion.builder import Builder
from simulate.replay.fusion.graph import DefUse, Op, Value, ValueLocation, View
from simulate.replay.fusion.opcodes import Copy


def eliminate_dead_code(builder: Builder) -> None:
    """Remove operations without effects of whose results no remaining operation reads any."""
    needed: set[int] = set()
    kept: list[Op] = []
    for op in reversed(builder.ops):
        if op.has_effects or any(view.value.number in needed for view in op.writes):
            kept.append(op)
            needed.update(view.value.number for view in op.reads)
    builder.ops = kept[::-1]


def eliminate_result_copies(builder: Builder, results: dict[int, Storage]) -> int:
    """Remove copies of results: the operations that compute a result write to the copy's destination instead.

    Args:
        builder: The program, whose operations are changed.
        results: Storages that are written once and never read, by id. Destinations are these storages and buffers.

    Returns:
        The number of copies that were removed.
    """
    def_use = DefUse(builder.ops)
    removed: set[int] = set()
    for op in builder.ops:
        if not isinstance(op.opcode, Copy):
            continue
        source, target = op.reads[0], op.writes[0]
        value, destination_value = source.value, target.value
        if (
            value.location is not ValueLocation.buffer
            or not source.is_full
            or value.element != destination_value.element
        ):
            continue
        if destination_value.location is ValueLocation.memory and (
            destination_value.storage is None or id(destination_value.storage) not in results
        ):
            continue
        destination = merge_dims(View(destination_value, target.offset, source.shape, target.strides))
        if not def_use.can_substitute(value, destination):
            continue
        op.reads = ()
        op.writes = ()
        def_use.substitute(value, destination)
        removed.add(id(op))
        for writer in def_use.get_writers(destination_value):
            writer.has_effects = writer.has_effects or destination_value.location is ValueLocation.memory
    builder.ops = [op for op in builder.ops if id(op) not in removed]
    return len(removed)


def eliminate_concatenations(builder: Builder) -> int:
    """Replace values that copies concatenate from parts of one buffer by views of that buffer.

    Matmul fusion and the elimination of copies leave such values: parts that were separate values are adjacent now.

    Returns:
        The number of copies that were removed.
    """
    def_use = DefUse(builder.ops)
    removed: set[int] = set()
    for value in {op.writes[0].value.number: op.writes[0].value for op in builder.ops if op.writes}.values():
        copies = def_use.get_writers(value)
        source_view = _find_concatenated_source(value, copies)
        if source_view is None or not def_use.can_substitute(value, source_view):
            continue
        def_use.substitute(value, source_view)
        for op in copies:
            op.reads, op.writes = (), ()
            removed.add(id(op))
    builder.ops = [op for op in builder.ops if id(op) not in removed]
    return len(removed)


def _find_concatenated_source(value: Value, copies: Sequence[Op]) -> View | None:
    """Return a view of another buffer with the elements of a value; None if there is none.

    Args:
        value: The value.
        copies: All operations that write it; each must be a copy of a part of one buffer.
    """
    if value.location is not ValueLocation.buffer or not copies:
        return None
    if not all(isinstance(op.opcode, Copy) and not op.has_effects for op in copies):
        return None
    source, dims = copies[0].reads[0].value, len(value.shape)
    if source.location is not ValueLocation.buffer or source is value or source.dtype != value.dtype:
        return None
    if sum(views.count(op.writes[0].shape) for op in copies) != value.size:
        return None
    row_major = views.row_major(value.shape)
    source_offsets: dict[tuple[int, ...], int] = {}
    strides: list[int | None] = [None] * dims
    for op in copies:
        piece, target = op.reads[0], op.writes[0]
        if piece.value is not source or len(piece.shape) != dims:
            return None
        for dim, extent in enumerate(piece.shape):
            if extent > 1 and target.strides[dim] != row_major[dim]:
                return None
            if extent > 1 and strides[dim] not in (None, piece.strides[dim]):
                return None
            strides[dim] = piece.strides[dim] if extent > 1 else strides[dim]
        source_offsets[_unravel_offset(target.offset, value.shape)] = piece.offset
    origin = source_offsets.get((0,) * dims)
    if origin is None:
        return None
    for dim, stride in enumerate(strides):
        if stride is None:  # every piece has one element along this dim
            next_offset = source_offsets.get((0,) * dim + (1,) + (0,) * (dims - dim - 1), origin)
            strides[dim] = next_offset - origin
    known_strides = tuple(stride or 0 for stride in strides)
    if any(stride < 0 for stride in known_strides) or any(
        offset != origin + sum(coordinate * stride for coordinate, stride in zip(coordinates, known_strides))
        for coordinates, offset in source_offsets.items()
    ):
        return None
    return View(source, origin, value.shape, known_strides)


def _unravel_offset(offset: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index, one number per dim, of an element of a contiguous array."""
    return tuple(map(int, np.unravel_index(offset, shape)))


def merge_dims(view: View) -> View:
    """Return a view of the same elements in the same order, with as few dims as possible and at least one."""
    shape: list[int] = []
    strides: list[int] = []
    for extent, stride in zip(view.shape, view.strides):
        if extent == 1:
            continue
        if shape and strides[-1] == extent * stride:
            shape[-1], strides[-1] = shape[-1] * extent, stride
        else:
            shape.append(extent)
            strides.append(stride)
    return View(view.value, view.offset, tuple(shape) or (1,), tuple(strides) or (1,))
