"""Passes that remove operations: dead code, copies of results, and copies that concatenate."""

from __future__ import annotations

from collections.abc import Sequence

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
    """Replace a matrix that copies concatenate from adjacent parts of one value; returns the number of copies removed.

    Matmul fusion leaves such matrices: the results of fused matmuls were separate values, and are adjacent now.
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
    """The view of another buffer whose parts `copies` concatenate to the matrix `value`; None if there is none."""
    if value.kind is not ValueKind.buffer or len(value.shape) != 2 or not copies:
        return None
    first = copies[0]
    if not all(
        isinstance(op.opcode, Copy) and not op.has_effects and len(op.reads[0].shape) == 2 for op in copies
    ):
        return None
    source, strides = first.reads[0].value, first.reads[0].strides
    if source.kind is not ValueKind.buffer or source is value or source.dtype != value.dtype:
        return None
    if sum(views.count(op.writes[0].shape) for op in copies) != value.size:
        return None
    offsets = set()
    for op in copies:
        part, place = op.reads[0], op.writes[0]
        steps = zip(part.shape, part.strides, strides, place.strides, (value.shape[1], 1))
        if part.value is not source or any(
            extent > 1 and (own != wanted or there != unit) for extent, own, wanted, there, unit in steps
        ):
            return None
        row, column = divmod(place.offset, value.shape[1])
        offsets.add(part.offset - row * strides[0] - column * strides[1])
    if len(offsets) != 1:
        return None
    return View(source, offsets.pop(), value.shape, strides)


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
