"""Concatenation of matmul operands: as one view of a common value, or by copies into a new buffer."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from simulate.replay.fusion.builder import Builder
from simulate.replay.fusion.graph import Op, ValueLocation, View
from simulate.replay.fusion.opcodes import Copy


class Order(Enum):
    """Order in which the elements of several views follow one another along an axis."""

    one_after_other = "all of the first view, then all of the second"
    interleaved = "the first of each view, then the second of each"


def join_views(first: View, second: View, axis: int) -> View | None:
    """Return one view of two views of a value that are adjacent along an axis; None if they are not."""
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


def concatenate_views(views: Sequence[View], axis: int, order: Order) -> View | None:
    """Return one view of the concatenation of views along an axis, without copies.

    Returns None if they are not adjacent, or not evenly interleaved, in one value.
    """
    if order is Order.interleaved:
        return _interleave_views(views, axis)
    operand: View | None = views[0]
    for view in views[1:]:
        operand = None if operand is None else join_views(operand, view, axis)
    return operand


def _interleave_views(views: Sequence[View], axis: int) -> View | None:
    """Return one view of views that interleave evenly along an axis, in order; None if they do not."""
    first, count = views[0], len(views)
    step, remainder = divmod(first.strides[axis], count)
    if remainder or step <= 0 or first.shape[axis] == 1:
        return None
    for index, view in enumerate(views):
        same_layout = view.shape == first.shape and all(
            extent == 1 or stride == first_stride
            for extent, stride, first_stride in zip(view.shape, view.strides, first.strides)
        )
        if view.value is not first.value or view.offset != first.offset + index * step or not same_layout:
            return None
    shape, strides = list(first.shape), list(first.strides)
    shape[axis] *= count
    strides[axis] = step
    return View(first.value, first.offset, tuple(shape), tuple(strides))


def split_view(view: View, extents: Sequence[int], axis: int, order: Order) -> list[View]:
    """Split a view along an axis into views of the given extents, whose concatenation in `order` is the view."""
    pieces = []
    start = 0
    for index, extent in enumerate(extents):
        shape, strides = list(view.shape), list(view.strides)
        shape[axis] = extent
        first = index if order is Order.interleaved else start
        if order is Order.interleaved:
            strides[axis] *= len(extents)
        offset = view.offset + first * view.strides[axis]
        pieces.append(View(view.value, offset, tuple(shape), tuple(strides)))
        start += extent
    return pieces


def concatenate_by_copies(
    builder: Builder, views: Sequence[View], axis: int, order: Order, sequence: float, ops: list[Op]
) -> View | None:
    """Concatenate matrices in a new buffer by copies, which are appended to `ops`.

    Args:
        builder: The builder of the new buffer.
        views: The matrices.
        axis: The axis of the concatenation.
        order: The order of the elements along the axis.
        sequence: The sequence number of the copies.
        ops: The list to which the copies are appended.

    Returns:
        The view of the concatenated elements; None if the views have different dtypes.
    """
    if len({str(view.value.dtype) for view in views}) > 1:
        return None
    is_transposed = any(abs(view.strides[0]) < abs(view.strides[1]) for view in views if 1 not in view.shape)
    if all(1 in view.shape for view in views):
        is_transposed = axis == 1
    extents = [view.shape[axis] for view in views]
    shape = list(views[0].shape)
    shape[axis] = sum(extents)
    buffer_shape = tuple(shape[::-1]) if is_transposed else tuple(shape)
    joined = View.full(builder.add_value(ValueLocation.buffer, buffer_shape, views[0].value.dtype))
    if is_transposed:
        joined = joined.transpose()
    for source, target in zip(views, split_view(joined, extents, axis, order)):
        if is_transposed:
            source, target = source.transpose(), target.transpose()
        ops.append(Op(Copy(), (source,), (target,), sequence))
    joined.value.ready = int(sequence) - 1  # the copies come between this number and the next
    return joined
