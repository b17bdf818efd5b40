"""Concatenated operands of matmuls: as one view of the value that they are parts of, or by copies."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from simulate.replay.fusion.builder import Builder
from simulate.replay.fusion.graph import Op, ValueKind, View
from simulate.replay.fusion.opcodes import Copy


class Order(Enum):
    """In which order the elements of several views follow one another along an axis."""

    one_after_other = "all of the first view, then all of the second"
    interleaved = "the first of each view, then the second of each"


def concatenated_view(first: View, second: View, axis: int) -> View | None:
    """The view of two views that are adjacent along an axis; None if they are not."""
    if first.value is not second.value:
        return None
    step = second.offset - first.offset
    extent = first.shape[axis]
    if step % extent:
        return None
    stride = step // extent
    for dim in range(len(first.shape)):
        pair = {view.strides[dim] for view in (first, second) if view.shape[dim] > 1}
        if dim == axis:
            if not pair <= {stride}:
                return None
        elif first.shape[dim] != second.shape[dim] or len(pair) > 1:
            return None
    shape = list(first.shape)
    shape[axis] += second.shape[axis]
    strides = list(first.strides)
    strides[axis] = stride
    return View(first.value, first.offset, tuple(shape), tuple(strides))


def concatenated_views(views: Sequence[View], axis: int, order: Order) -> View | None:
    """The view of several views along an axis; None if they are not parts of one matrix in this order."""
    if order is Order.interleaved:
        return _interleaved_view(views, axis)
    operand: View | None = views[0]
    for view in views[1:]:
        operand = None if operand is None else concatenated_view(operand, view, axis)
    return operand


def _interleaved_view(views: Sequence[View], axis: int) -> View | None:
    first, count = views[0], len(views)
    step, rest = divmod(first.strides[axis], count)
    if rest or step <= 0 or first.shape[axis] == 1:
        return None
    for place, view in enumerate(views):
        same_layout = view.shape == first.shape and all(
            extent == 1 or own == wanted
            for extent, own, wanted in zip(view.shape, view.strides, first.strides)
        )
        if view.value is not first.value or view.offset != first.offset + place * step or not same_layout:
            return None
    shape, strides = list(first.shape), list(first.strides)
    shape[axis] *= count
    strides[axis] = step
    return View(first.value, first.offset, tuple(shape), tuple(strides))


def parts_of(whole: View, extents: Sequence[int], axis: int, order: Order) -> list[View]:
    """The views of so many elements each whose concatenation along an axis is `whole`."""
    parts = []
    start = 0
    for place, extent in enumerate(extents):
        shape, strides = list(whole.shape), list(whole.strides)
        shape[axis] = extent
        first = place if order is Order.interleaved else start
        if order is Order.interleaved:
            strides[axis] *= len(extents)
        offset = whole.offset + first * whole.strides[axis]
        parts.append(View(whole.value, offset, tuple(shape), tuple(strides)))
        start += extent
    return parts


def concatenate_by_copies(
    builder: Builder, views: Sequence[View], axis: int, order: Order, sequence: float, ops: list[Op]
) -> View | None:
    """Views concatenated in a new buffer, by copies at a sequence number; None for several dtypes."""
    if len({str(view.value.dtype) for view in views}) > 1:
        return None
    turned = any(abs(view.strides[0]) < abs(view.strides[1]) for view in views if 1 not in view.shape)
    if all(1 in view.shape for view in views):
        turned = axis == 1
    extents = [view.shape[axis] for view in views]
    shape = list(views[0].shape)
    shape[axis] = sum(extents)
    kept = tuple(shape[::-1]) if turned else tuple(shape)
    whole = View.whole(builder.value(ValueKind.buffer, kept, views[0].value.dtype))
    if turned:
        whole = whole.transposed()
    for source, target in zip(views, parts_of(whole, extents, axis, order)):
        if turned:
            source, target = source.transposed(), target.transposed()
        ops.append(Op(Copy(), (source,), (target,), sequence))
    whole.value.ready = int(sequence) - 1  # the copies come between this number and the next
    return whole
