"""Passes that remove operations: dead code, copies of results, and copies that concatenate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulate.memory import Storage, views
from simulate.replay.fusion.builder import Builder
from simulate.replay.fusion.graph import DefUse, Op, Value, ValueKind, View
from simulate.replay.fusion.opcodes import Copy


def eliminate_dead_code(builder: Builder) -> None:
    """Keep operations with effects, and those whose results a kept operation reads."""
    needed: set[int] = set()
    kept: list[Op] = []
    for op in reversed(builder.ops):
        if op.has_effects or any(view.value.number in needed for view in op.writes):
            kept.append(op)
            needed.update(view.value.number for view in op.reads)
    builder.ops = kept[::-1]


def eliminate_result_copies(builder: Builder, results: dict[int, Storage]) -> int:
    """Let operations write their result to the destination of its copy; returns the number of copies removed.

    The destination is a buffer, or the memory of one of `results`: storages that are written once and never read.
    """
    def_use = DefUse(builder.ops)
    removed: set[int] = set()
    for op in builder.ops:
        if not isinstance(op.opcode, Copy):
            continue
        source, target = op.reads[0], op.writes[0]
        value, into = source.value, target.value
        if value.kind is not ValueKind.buffer or not source.is_whole or value.element != into.element:
            continue
        if into.kind is ValueKind.memory and (into.storage is None or id(into.storage) not in results):
            continue
        place = simplified(View(into, target.offset, source.shape, target.strides))
        if not def_use.can_substitute(value, place):
            continue
        op.reads = ()
        op.writes = ()
        def_use.substitute(value, place)
        removed.add(id(op))
        for writer in def_use.writers(into):
            writer.has_effects = writer.has_effects or into.kind is ValueKind.memory
    builder.ops = [op for op in builder.ops if id(op) not in removed]
    return len(removed)


def eliminate_concatenations(builder: Builder) -> int:
    """Replace a value that copies concatenate from parts of another one; returns the number of copies removed.

    Matmul fusion leaves such values: the results of fused matmuls were separate values, and are adjacent now. So do
    copies that are eliminated.
    """
    def_use = DefUse(builder.ops)
    removed: set[int] = set()
    for value in {op.writes[0].value.number: op.writes[0].value for op in builder.ops if op.writes}.values():
        copies = def_use.writers(value)
        shown = _concatenated_source(value, copies)
        if shown is None or not def_use.can_substitute(value, shown):
            continue
        def_use.substitute(value, shown)
        for op in copies:
            op.reads, op.writes = (), ()
            removed.add(id(op))
    builder.ops = [op for op in builder.ops if id(op) not in removed]
    return len(removed)


def _concatenated_source(value: Value, copies: Sequence[Op]) -> View | None:
    """The view of another buffer whose parts `copies` put together to `value`; None if there is none."""
    if value.kind is not ValueKind.buffer or not copies:
        return None
    if not all(isinstance(op.opcode, Copy) and not op.has_effects for op in copies):
        return None
    source, dims = copies[0].reads[0].value, len(value.shape)
    if source.kind is not ValueKind.buffer or source is value or source.dtype != value.dtype:
        return None
    if sum(views.count(op.writes[0].shape) for op in copies) != value.size:
        return None
    row_major = views.row_major(value.shape)
    places: dict[tuple[int, ...], int] = {}
    strides: list[int | None] = [None] * dims
    for op in copies:
        part, target = op.reads[0], op.writes[0]
        if part.value is not source or len(part.shape) != dims:
            return None
        for dim, extent in enumerate(part.shape):
            if extent > 1 and target.strides[dim] != row_major[dim]:
                return None
            if extent > 1 and strides[dim] not in (None, part.strides[dim]):
                return None
            strides[dim] = part.strides[dim] if extent > 1 else strides[dim]
        places[_digits_of(target.offset, value.shape)] = part.offset
    origin = places.get((0,) * dims)
    if origin is None:
        return None
    for dim, stride in enumerate(strides):
        if stride is None:  # every part has one element there
            next_one = places.get((0,) * dim + (1,) + (0,) * (dims - dim - 1), origin)
            strides[dim] = next_one - origin
    known = tuple(stride or 0 for stride in strides)
    if any(stride < 0 for stride in known) or any(
        offset != origin + sum(at * stride for at, stride in zip(place, known))
        for place, offset in places.items()
    ):
        return None
    return View(source, origin, value.shape, known)


def _digits_of(offset: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of an element of a contiguous array."""
    return tuple(map(int, np.unravel_index(offset, shape)))


def simplified(view: View) -> View:
    """A view of the same elements in the same order with as few dims as possible."""
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
