"""Arithmetic between tiles and numbers, for the functions of `nki.language` and the operators of a tile.

A result is a `Tile` whose instruction waits for its target (`simulate.beta1.tile.defer`): the tile of an assignment,
else a fresh one in SBUF. `name` is an operator of `simulate.beta1.operators`, `dtype` that of the result, and a mask
leaves out elements of the result.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

from nkw.errors import RuleViolation, rule
from simulate.beta1.elementwise import copy, elementwise, partition_broadcast
from simulate.beta1.operators import BINARY, UNARY
from simulate.beta1.program import current, issue, remark
from simulate.beta1.region import Region
from simulate.beta1.tile import Tile, assign, defer_masked
from simulate.memory import MemoryRegion
from simulate.numerics import ALU_OPERATORS, DTYPES, DType, OperatorFamily

_COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
_TRUTH = (*_COMPARISONS, "logical_and", "logical_or", "logical_xor")


def apply_binary(name: str, x: Any, y: Any, dtype: Any = None, mask: Any = None) -> Tile:
    """Return `x name y`, such as x + y for "add", as a tile. One of x and y may be a number.

    Tiles broadcast by NumPy's rule; over partitions by a copy.

    The dtype is `dtype`, else that of the wider operand, float before integer (bfloat16 with float16: float32). A
    number counts only if it is a fraction next to an integer tile, then as float32. Quotients of integers are
    float32, comparisons bool.

    Raises:
        RuleViolation: Neither operand is a tile, or the shapes do not broadcast.
    """
    op = BINARY[name]
    two_operands(name, x, y)
    if not isinstance(x, Tile) or not isinstance(y, Tile):
        tile, number = (x, y) if isinstance(x, Tile) else (y, x)
        fraction = tile.dtype.is_integer and not isinstance(number, Integral)
        natural = _choose_result_dtype(name, tile.dtype, *([DTYPES["float32"]] if fraction else []))
        attributes = {"op0": op, "reverse0": tile is y and x is not y}
        return elementwise(
            "tensor_scalar", {"data": tile}, {"operand0": number}, attributes, dtype, mask, natural
        )
    _remark_on_broadcast(name, x, y)
    if x.shape[0] != y.shape[0]:
        rows = max(x.shape[0], y.shape[0])
        x, y = (partition_broadcast(tile, rows) if tile.shape[0] == 1 < rows else tile for tile in (x, y))
    natural = _choose_result_dtype(name, x.dtype, y.dtype)
    if _is_column(y, x) and _can_stream_column(name, y):
        attributes = {"op0": op}
        return elementwise("tensor_scalar", {"data": x}, {"operand0": y}, attributes, dtype, mask, natural)
    if _is_column(x, y) and _can_stream_column(name, x):
        attributes = {"op0": op, "reverse0": True}
        return elementwise("tensor_scalar", {"data": y}, {"operand0": x}, attributes, dtype, mask, natural)
    if x.buffer is MemoryRegion.psum and y.buffer is MemoryRegion.psum:
        y = bring_to_sbuf(y)
    return elementwise("tensor_tensor", {"data1": x, "data2": y}, {}, {"op": op}, dtype, mask, natural)


def _remark_on_broadcast(name: str, x: Tile, y: Tile) -> None:
    """Record a remark in the stream if a binary operation repeats x or y along partitions or several free dims.

    A tile with one element per partition may be repeated along free dims without a remark.
    """
    over_rows = x.shape[0] != y.shape[0]
    free = [tile.shape[1:] for tile in (x, y)]
    over_third = (
        max(map(len, free)) > 1 and free[0] != free[1] and min(x.size, y.size) > max(x.shape[0], y.shape[0])
    )
    if over_rows or over_third:
        remark("NKW-BETA1-BROADCAST", f"{name} of {x.shape} and {y.shape} spreads one over the other")


def apply_unary(name: str, x: Tile, dtype: Any = None, mask: Any = None) -> Tile:
    """Return a function of x, element by element, computed by the Scalar engine; `invert` by the Vector engine."""
    if name in UNARY:
        return elementwise("activation", {"data": x}, {}, {"op": UNARY[name]}, dtype, mask)
    attributes = {"op0": ALU_OPERATORS[name], "operand0": None}
    return elementwise("tensor_scalar", {"data": x}, {}, attributes, dtype, mask)


def update_in_place(name: str, target: Tile, value: Any) -> Tile:
    """Compute `target name value` into `target`, such as target += value for "add", and return the target.

    A matmul's pending result that is added to a tile in PSUM is accumulated by the matmul itself. Other updates in
    PSUM are recorded as a remark.
    """
    program = current()
    pending = value.pending if isinstance(value, Tile) else None
    if (
        pending is not None
        and pending is program.waiting
        and pending.accumulate is not None
        and name == "add"
    ):
        region = target.region.reshaped(pending.shape) if target.pending is None else None
        if target.buffer is MemoryRegion.psum and region is not None:
            pending.complete(region, accumulate=True)
            return target
    if target.buffer is MemoryRegion.psum:
        remark(
            "NKW-BETA1-UPDATE", f"{name} in place on {target.tensor.describe()} of what no matmul returned"
        )
    region = target.region
    assign(region, apply_binary(name, target, value))
    return target


def where(condition: Tile, x: Any, y: Any, dtype: Any = None, mask: Any = None) -> Tile:
    """Return a tile with x where the condition is not 0, else y; x and y are tiles or numbers.

    The condition's shape is the result's. The dtype is `dtype`, else the wider of the tiles', else float32. y is
    copied to the result, then x by tensor_copy_predicated.
    """
    program = current()
    condition = _convert_predicate(condition)
    tiles = [value for value in (x, y) if isinstance(value, Tile)]
    natural = _find_widest(*(tile.dtype for tile in tiles)) if tiles else "float32"

    def run(region: Region, box: Any) -> None:
        chosen, first, second = (
            program.readable(value.region.repeated(condition.shape).cut(box))
            if isinstance(value, Tile)
            else value
            for value in (condition, x, y)
        )
        if isinstance(y, Tile):
            issue("tensor_copy", dst=region.view(), src=second)
        else:
            issue("memset", dst=region.view(), value=second)
        issue("tensor_copy_predicated", dst=region.view(), src=first, predicate=chosen)

    return defer_masked(condition.shape, natural, run, mask, dtype_given=dtype)


def _convert_predicate(condition: Tile) -> Tile:
    """Return a condition as an unsigned integer tile: the bits of an integer tile, else uint8, whether it is not 0."""
    if condition.dtype.is_integer:
        return condition.bitcast({1: "uint8", 2: "uint16", 4: "uint32"}[condition.itemsize])
    return apply_binary("not_equal", condition, 0.0, "uint8")


def bring_to_sbuf(tile: Tile) -> Tile:
    """Return the tile itself, or for a tile in PSUM a copy in SBUF."""
    return copy(tile) if tile.buffer is MemoryRegion.psum else tile


def _is_column(tile: Tile, other: Tile) -> bool:
    """Return whether `tile` has one element per partition and `other` has more."""
    return tile.size == tile.shape[0] and other.size > other.shape[0]


def _can_stream_column(name: str, column: Tile) -> bool:
    """Return whether tensor_scalar can take a (P, 1) tile: float32, with an operator neither bitwise nor power."""
    arithmetic = BINARY[name].family is not OperatorFamily.bitvec
    return arithmetic and column.dtype == "float32" and name != "power"


def _choose_result_dtype(name: str, dtype: DType, *dtypes: DType) -> DType:
    """Return the dtype of a binary operation: bool for comparisons and logic, float32 for quotients of integers.

    Otherwise it is the widest of the dtypes.
    """
    if name in _TRUTH:
        return DTYPES["bool_"]
    integers = dtype.is_integer and all(other.is_integer for other in dtypes)
    return DTYPES["float32"] if name == "divide" and integers else _find_widest(dtype, *dtypes)


def _find_widest(first: DType, *dtypes: DType) -> DType:
    """Return the widest dtype: float before integer, then more bytes, then the first.

    Floats of the same size that differ, such as float16 and bfloat16, give float32.
    """
    widest = first
    for dtype in dtypes:
        if dtype == widest:
            continue
        if dtype.is_float != widest.is_float:
            widest = dtype if dtype.is_float else widest
        elif dtype.itemsize == widest.itemsize and dtype.is_float:
            return DTYPES["float32"]
        else:
            widest = dtype if dtype.itemsize > widest.itemsize else widest
    return widest


@rule("NKW-BETA1-OPERANDS")
def two_operands(name: str, x: Any, y: Any) -> None:
    """An operator of two operands takes two tiles, or a tile and a number.

    Raises RuleViolation if neither x nor y is a Tile; `name` is the operator, for the message.
    """
    if not isinstance(x, Tile) and not isinstance(y, Tile):
        raise RuleViolation(two_operands, f"{name} of {type(x).__name__} and {type(y).__name__}")
