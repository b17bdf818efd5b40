"""Run-time scalars of NKI 0.7: `nisa.NkiScalar`, `scalar_load` and `scalar_store`.

A scalar is a register with Python's arithmetic: every operator issues an instruction and returns a new scalar. Its
width, 32 or 64 bits, is that of the tensor that it was loaded from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from nkw.errors import RuleViolation, rule
from simulate.isa.book import INSTRUCTIONS
from simulate.isa.instructions.registers import immediate
from simulate.isa.scalars import ScalarOperator, scalar_arithmetic
from simulate.memory import MemoryRegion, NkiTensor
from simulate.memory.registers import VirtualRegister, allocate_cell
from simulate.numerics import DType, as_dtype
from simulate.run import current_core, running_level
from simulate.run.issue import issue_call, issue_plan


def _operator(operation: ScalarOperator, swapped: bool = False) -> Callable[[Any, Any], NkiScalar]:
    def method(self: NkiScalar, other: Any) -> NkiScalar:
        left, right = (other, self) if swapped else (self, other)
        return _combine(operation, left, right)

    return method


class NkiScalar(VirtualRegister):
    """One integer, computed on the device: an operand of +, - and *, a `scalar_offset`, a bound of fori_loop.

    Sums and products wrap to its width. Comparisons of 32 bits are traced, but their result cannot be used, and Python
    cannot look at a scalar: no `if`, `int()` or `range()`. An int64 scalar is not compared, bounds no loop, and is an
    offset in HBM only. A refused use raises RuleViolation.
    """

    __slots__ = ("dtype", "is_comparison")

    def __init__(self, state: Any = None, dtype: Any = None, is_comparison: bool = False) -> None:
        super().__init__(
            getattr(getattr(state, "cell", None), "storage", state)
            or (None if dtype is None else allocate_cell(as_dtype(dtype))),
            getattr(state, "frozen", False),
        )
        self.dtype: DType = self.cell.dtype
        self.is_comparison = is_comparison

    __add__, __radd__ = _operator(ScalarOperator.add), _operator(ScalarOperator.add, True)
    __sub__, __rsub__ = _operator(ScalarOperator.subtract), _operator(ScalarOperator.subtract, True)
    __mul__, __rmul__ = _operator(ScalarOperator.multiply), _operator(ScalarOperator.multiply, True)
    __lt__, __le__ = _operator(ScalarOperator.less), _operator(ScalarOperator.less_equal)
    __gt__, __ge__ = _operator(ScalarOperator.greater), _operator(ScalarOperator.greater_equal)
    __eq__ = _operator(ScalarOperator.equal)  # type: ignore[assignment]
    __ne__ = _operator(ScalarOperator.not_equal)  # type: ignore[assignment]
    __hash__ = object.__hash__

    def __neg__(self) -> NkiScalar:
        return _combine(ScalarOperator.subtract, 0, self)

    def __bool__(self) -> bool:
        return bool(self._refuse())


def scalar_load(src: NkiTensor) -> NkiScalar:
    """Load the one element of src, an int32 or int64 tensor in SBUF or HBM, and return it as a scalar of src's dtype.

    Raises:
        RuleViolation: src has more elements, another dtype or is in PSUM, or the level has no scalars.
    """
    running_level().require("nisa.scalar_load")
    one_element("src", src)
    scalar = NkiScalar(current_core().allocate_register(dtype=src.dtype))
    issue_call(INSTRUCTIONS["register_load"], (scalar, src), {})
    return scalar


def scalar_store(dst: NkiTensor, value: NkiScalar) -> None:
    """Write a scalar to the one element of dst, a tensor in SBUF or HBM of the scalar's dtype.

    Raises:
        RuleViolation: The value is no scalar or a comparison's result, dst has more elements, another dtype or is in
            PSUM, or the level has no scalars.
    """
    running_level().require("nisa.scalar_store")
    one_element("dst", dst)
    is_scalar(value)
    not_a_comparison(value)
    same_width(dst.dtype, value.dtype)
    issue_call(INSTRUCTIONS["register_store"], (dst, value), {})


def _combine(operation: ScalarOperator, left: Any, right: Any) -> NkiScalar:
    core = current_core()
    dtypes = [operand.cell.dtype for operand in (left, right) if isinstance(operand, VirtualRegister)]
    same_width(dtypes[0], dtypes[-1])
    if operation.compares:
        thirty_two_bits(dtypes[0], "a comparison")
    result = NkiScalar(core.allocate_register(dtype=dtypes[0]), is_comparison=operation.compares)
    operands = [_operand(operand, dtypes[0]) for operand in (left, right)]
    issue_plan(core, "scalar_arithmetic", scalar_arithmetic(core.hardware, operation, result.cell, *operands))
    return result


def _operand(value: Any, dtype: DType) -> NkiTensor | int:
    if isinstance(value, VirtualRegister):
        not_a_comparison(value)
        return value.cell
    whole_number(value)
    return immediate(value, 8 * dtype.itemsize)


@rule("NKW-SCALAR-TILE", hint="slice one element, as t[0:1, 0:1], of an int32 or int64 tensor")
def one_element(operand: str, tile: Any) -> None:
    """A scalar exchanges one int32 or int64 element with a tensor in SBUF or HBM; unsigned dtypes are not accepted.

    Raises RuleViolation otherwise.
    """
    fits = (
        isinstance(tile, NkiTensor)
        and tile.size == 1
        and tile.dtype in ("int32", "int64")
        and tile.buffer is not MemoryRegion.psum
    )
    if not fits:
        seen = tile.describe() if isinstance(tile, NkiTensor) else repr(tile)[:60]
        raise RuleViolation(
            one_element, f"{operand} is {seen}", limit="one int32 or int64 element in sbuf or hbm"
        )


@rule("NKW-SCALAR-WIDTH")
def same_width(one: DType, other: DType) -> None:
    """Scalars of one operation, and the tensor that a scalar is stored to, have one dtype; a width never changes.

    Raises RuleViolation otherwise.
    """
    if one != other:
        raise RuleViolation(same_width, f"{one} and {other}", hint="load both from tensors of one dtype")


@rule("NKW-SCALAR-64")
def thirty_two_bits(dtype: DType, use: str) -> None:
    """A 64-bit scalar has +, - and * alone: it is not compared and bounds no loop.

    Raises RuleViolation if the dtype has not 32 bits; `use` names what the scalar is used for.
    """
    if dtype.itemsize != 4:
        raise RuleViolation(thirty_two_bits, f"{use} of {dtype}", hint="load the value from an int32 tensor")


@rule("NKW-SCALAR")
def is_scalar(value: Any) -> None:
    """scalar_store takes an NkiScalar; a number known while specialising is written with nisa.memset.

    Raises RuleViolation otherwise.
    """
    if not isinstance(value, NkiScalar):
        raise RuleViolation(is_scalar, f"{value!r:.60}", hint="nisa.memset(dst=tile, value=number)")


@rule("NKW-SCALAR-OPERAND", hint="pass a Python int, or load the value with nisa.scalar_load")
def whole_number(value: Any) -> None:
    """The other operand of a scalar's arithmetic is a Python int or another scalar.

    Raises RuleViolation otherwise.
    """
    try:
        operator.index(value)
    except TypeError:
        raise RuleViolation(whole_number, f"{value!r:.60} of type {type(value).__name__}") from None


@rule("NKW-SCALAR-COMPARISON")
def not_a_comparison(value: Any) -> None:
    """The result of comparing scalars is traced and cannot be used.

    Raises RuleViolation if the value is the result of a comparison.
    """
    if getattr(value, "is_comparison", False):
        raise RuleViolation(not_a_comparison, "a comparison as an operand", hint="compare tiles instead")
