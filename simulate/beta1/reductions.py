"""Reductions of free dims, and functions composed of them; they return tiles (`simulate.beta1.tile`)."""

from __future__ import annotations

from typing import Any

from nkw.errors import RuleViolation, rule
from simulate.beta1.arithmetic import apply_binary, apply_unary, bring_to_sbuf
from simulate.beta1.elementwise import copy, is_tile
from simulate.beta1.masks import normalise_mask
from simulate.beta1.program import current, issue
from simulate.beta1.region import Region
from simulate.beta1.tile import Tile, defer
from simulate.memory import MemoryRegion
from simulate.numerics import ALU_OPERATORS


def reduce(
    op: Any,
    data: Tile,
    axis: Any,
    dtype: Any = None,
    mask: Any = None,
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> Tile:
    """Return data reduced by `op` over the free dims `axis`, by tensor_reduce.

    A result has at least two dims: if all free dims are reduced, its shape is (P, 1). `keepdims` keeps reduced dims
    with size 1.

    Args:
        op: The ALU operator.
        data: The tile.
        axis: A dim or several, not the partition dim.
        dtype: The dtype of the result; None is that of data.
        mask: A mask over data that selects a rectangle.
        negate: Whether the result is negated.
        keepdims: Whether reduced dims stay.
        name: The name of the instruction.

    Raises:
        RuleViolation: An axis is no free dim, or the mask selects no rectangle.
    """
    is_tile("data", data)
    axes = _list_axes(data, axis)
    selected = normalise_mask(mask)
    kept = tuple(a for a in range(data.ndim) if a not in axes)
    order = kept + axes
    sizes = tuple(1 if a in axes else size for a, size in enumerate(data.shape))
    result = sizes if keepdims else tuple(data.shape[a] for a in kept)
    if len(result) < 2:
        result = (*result, 1)
    program = current()
    box = tuple((0, size) for size in data.shape)
    if selected is not None:
        boxes = selected.boxes(data.shape)
        rectangular_reduction(len(boxes))
        box = boxes[0] if boxes else tuple((0, 0) for _ in box)

    def emit(dst: Region) -> None:
        if any(start == end for start, end in box):
            return
        source = data.region.cut(box).permuted(order)
        outer = [box[a] if a in kept else (0, 1) for a in range(data.ndim)]
        target = dst.cut(tuple(outer if keepdims else _pad_box([box[a] for a in kept])))
        issue(
            "tensor_reduce",
            dst=target.view(),
            op=op,
            data=program.readable(source),
            axis=tuple(range(len(kept), data.ndim)),
            negate=negate,
            name=name,
        )

    return defer(result, data.dtype, emit, dtype_given=dtype, mask=selected)


def mean(x: Tile, axis: Any, dtype: Any = None, mask: Any = None, keepdims: bool = False) -> Tile:
    """Return the mean over the free dims `axis`: the sum in float32, times 1 / count; without `dtype` in x's dtype.

    With a mask, count is the number of selected elements.
    """
    selected = normalise_mask(mask)
    boxes = [tuple((0, size) for size in x.shape)] if selected is None else selected.boxes(x.shape)
    rectangular_reduction(len(boxes))
    count = 1
    for a in _list_axes(x, axis):
        count *= boxes[0][a][1] - boxes[0][a][0] if boxes else 1
    total = reduce(ALU_OPERATORS["add"], x, axis, "float32", mask, keepdims=keepdims)
    return apply_binary("multiply", total, 1.0 / count, dtype or x.dtype)


def variance(x: Tile, axis: Any, dtype: Any = None, mask: Any = None) -> Tile:
    """Return the population variance over the free dims `axis`; reduced dims keep size 1."""
    centre = mean(x, axis, "float32", mask, keepdims=True)
    distance = apply_binary("subtract", x, centre, "float32", mask)
    return mean(apply_binary("multiply", distance, distance), axis, dtype or x.dtype, mask, keepdims=True)


def softmax(x: Tile, axis: Any, dtype: Any = None, mask: Any = None) -> Tile:
    """Return exp(x - max) / sum over the free dims `axis`, computed in float32; without `dtype` in x's dtype."""
    highest = reduce(ALU_OPERATORS["maximum"], x, axis, "float32", mask, keepdims=True)
    shifted = apply_binary("subtract", x, highest, "float32", mask)
    powers = apply_unary("exp", shifted, "float32", mask)
    total = reduce(ALU_OPERATORS["add"], powers, axis, "float32", mask, keepdims=True)
    return apply_binary("divide", powers, total, dtype or x.dtype, mask)


def transpose(data: Tile, dtype: Any = None, name: str | None = None) -> Tile:
    """Return a tile transposed in PSUM by the Tensor engine, its free dims taken as one; in SBUF if `dtype` differs.

    A tile in PSUM is copied to SBUF before.
    """
    source = bring_to_sbuf(data)
    rows = source.size // source.shape[0]

    def emit(dst: Region) -> None:
        issue("nc_transpose", dst=dst.view(), data=source.operand, name=name)

    result = defer(
        (rows, source.shape[0]), source.dtype, emit, MemoryRegion.psum, (MemoryRegion.psum,), source.dtype
    )
    return result if dtype is None or dtype == result.dtype else copy(result, dtype=dtype)


def _pad_box(box: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return a box with at least two axes: (0, 1) is added to a box of one."""
    return tuple(box) if len(box) > 1 else (*box, (0, 1))


def _list_axes(data: Tile, axis: Any) -> tuple[int, ...]:
    """Return axes as sorted numbers from 0. Raises RuleViolation unless all are free dims, each named once."""
    requested = axis if isinstance(axis, (tuple, list)) else (axis,)
    well_formed = all(isinstance(a, int) and not isinstance(a, bool) for a in requested)
    axes = tuple(sorted(a + data.ndim if a < 0 else a for a in requested)) if well_formed else ()
    free_axes(data, axis, axes)
    return axes


@rule("NKW-BETA1-AXIS")
def free_axes(data: Tile, axis: Any, axes: tuple[int, ...]) -> None:
    """A reduction runs over free dims, each named once; partitions are reduced by a matmul with ones.

    Raises RuleViolation if `axes`, the parsed `axis`, is empty, repeats a dim, or has one that is no free dim of
    data.
    """
    if not axes or len(set(axes)) < len(axes) or not all(0 < a < data.ndim for a in axes):
        raise RuleViolation(
            free_axes, f"axis={axis!r:.40} of {data.shape}", limit=f"1 to {data.ndim - 1}", hint="axis=1"
        )


@rule("NKW-BETA1-REDUCE-MASK")
def rectangular_reduction(boxes: int) -> None:
    """The mask of a reduction selects a rectangle.

    Raises RuleViolation if the mask has more than one rectangle.
    """
    if boxes > 1:
        raise RuleViolation(
            rectangular_reduction,
            f"a mask of {boxes} rectangles",
            hint="select with nisa.affine_select before, with a fill that the reduction ignores",
        )
