"""ALU operators of the Vector, GpSimd and Scalar engines: `ALU_OPERATORS`, a row for each by its name in nki.language.

Arithmetic operators take float32 arrays (or Python numbers with an array) and give float32; comparisons and logical
operators give 1.0 or 0.0. Bitvec operators take integer arrays of one dtype and keep that dtype: raw bit patterns, no
conversion. Of a Python integer beside such an array, the bits that fit the dtype count.

NaN follows IEEE 754 and NumPy: maximum and minimum propagate it, every comparison but not_equal is false. The
documentation is silent there. NumPy's floating-point warnings are off inside every function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulate.hardware import Hardware
from simulate.numerics.quiet import quiet
from simulate.numerics.resolve import make_resolver

Axis = int | tuple[int, ...]
Reduction = Callable[[NDArray[Any], Axis], NDArray[Any]]


def _on_every_chip(_: Hardware) -> bool:
    return True


class OperatorFamily(Enum):
    """Family of operators; all operators of one instruction must belong to the same family."""

    arithmetic = "arithmetic"
    bitvec = "bitvec"


@dataclass(frozen=True, slots=True)
class AluOperator:
    """ALU operator.

    Attributes:
        name: Name of the operator in nki.language.
        function: The operator on arrays, with as many arguments as `arity`.
        family: Arithmetic, on float32, or bitvec, on raw bits.
        arity: Number of operands, 1 or 2.
        reducible: Whether the documentation lists it as a reduction operator. abs_max and abs_min are not listed, yet
            `activate2` accepts them, so they have a `reduce`.
        reduce: Function of (array, axis) that drops the reduced axes; None if nothing reduces with the operator.
        identity: Content of an accumulator register before the first element.
        engines: Engines that have the operator on at least one chip.
        exists_on: Function that tells whether some engine of a chip has the operator.
    """

    name: str
    function: Callable[..., NDArray[Any]]
    family: OperatorFamily
    arity: int
    reducible: bool
    reduce: Reduction | None
    identity: float | int | None
    engines: frozenset[str]
    exists_on: Callable[[Hardware], bool] = _on_every_chip


def _truth(compare: np.ufunc) -> Callable[..., NDArray[Any]]:
    @quiet
    def function(x: Any, y: Any) -> NDArray[Any]:
        return compare(x, y).astype(np.float32)

    return function


def _float_reduction(ufunc: np.ufunc) -> Reduction:
    @quiet
    def reduce(array: NDArray[Any], axis: Axis) -> NDArray[Any]:
        return ufunc.reduce(array, axis=axis, dtype=np.float32)

    return reduce


def _logical_reduction(ufunc: np.ufunc) -> Reduction:
    def reduce(array: NDArray[Any], axis: Axis) -> NDArray[Any]:
        return ufunc.reduce(array != 0, axis=axis).astype(np.float32)

    return reduce


def _bit_reduction(ufunc: np.ufunc) -> Reduction:
    def reduce(array: NDArray[Any], axis: Axis) -> NDArray[Any]:
        return ufunc.reduce(array, axis=axis)

    return reduce


def _join_reduced_axes(array: NDArray[Any], axis: Axis) -> NDArray[Any]:
    """Return an array whose reduced axes are joined into one, the last, in row-major order.

    The other axes keep their order before it.
    """
    axes = sorted(a % array.ndim for a in (axis if isinstance(axis, tuple) else (axis,)))
    kept = [a for a in range(array.ndim) if a not in axes]
    return array.transpose(kept + axes).reshape([array.shape[a] for a in kept] + [-1])


@quiet
def _reduce_subtract(array: NDArray[Any], axis: Axis) -> NDArray[Any]:
    """Return the first element minus all further ones along the axes; not documented, but folding x - y gives it."""
    rows = _join_reduced_axes(array, axis)
    return np.subtract(rows[..., 0], np.add.reduce(rows[..., 1:], axis=-1, dtype=np.float32))


@quiet
def _average(x: Any, y: Any) -> NDArray[Any]:
    return np.multiply(np.add(x, y), np.float32(0.5))


@quiet
def _reduce_average(array: NDArray[Any], axis: Axis) -> NDArray[Any]:
    return np.asarray(np.mean(array, axis=axis, dtype=np.float32))


@quiet
def _abs_max(x: Any, y: Any) -> NDArray[Any]:
    return np.where(np.abs(x) > np.abs(y), x, y).astype(np.float32, copy=False)


@quiet
def _abs_min(x: Any, y: Any) -> NDArray[Any]:
    return np.where(np.abs(x) < np.abs(y), x, y).astype(np.float32, copy=False)


def _magnitude_reduction(pick: Callable[..., Any], identity: float) -> Reduction:
    """Return a reduction to the element, with its sign, of the largest or smallest magnitude; ties keep the first.

    As an ALU it sets the register to op(element, register). NaN is never taken, as it compares with nothing.

    Args:
        pick: np.argmax for the largest magnitude, np.argmin for the smallest.
        identity: Result if all elements are NaN.
    """
    never = np.float32(-np.inf if pick is np.argmax else np.inf)

    def reduce(array: NDArray[Any], axis: Axis) -> NDArray[Any]:
        rows = _join_reduced_axes(array, axis)
        nan = np.isnan(rows)
        position = pick(np.where(nan, never, np.abs(rows)), axis=-1, keepdims=True)
        taken = np.take_along_axis(np.where(nan, np.float32(identity), rows), position, axis=-1)
        return taken[..., 0].astype(np.float32, copy=False)

    return reduce


@quiet
def _square(x: Any) -> NDArray[Any]:
    return np.multiply(x, x)


@quiet
def _relu(x: Any) -> NDArray[Any]:
    return np.maximum(x, np.float32(0))


@quiet
def _rsqrt(x: Any) -> NDArray[Any]:
    return np.divide(np.float32(1), np.sqrt(x))


@quiet
def _reciprocal(x: Any) -> NDArray[Any]:
    return np.divide(np.float32(1), x)


def _bypass(x: Any) -> Any:
    return x


def _raw(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return an operand of a bitvec operator: an array unchanged, a Python integer as a 0-d array of `dtype`.

    Of the integer in two's complement, the bits that fit `dtype` are kept.
    """
    if not isinstance(value, int):
        return value
    width = 8 * dtype.itemsize
    bits = int(value) & ((1 << width) - 1)
    return np.array(bits, np.dtype(f"u{dtype.itemsize}")).view(dtype)


def _bits(ufunc: np.ufunc) -> Callable[..., NDArray[Any]]:
    def function(x: Any, y: Any) -> NDArray[Any]:
        dtype = x.dtype if isinstance(x, np.ndarray) else y.dtype
        return ufunc(_raw(x, dtype), _raw(y, dtype))

    return function


def _shift(ufunc: np.ufunc) -> Callable[..., NDArray[Any]]:
    """Return a logical shift as a function of two operands.

    Zeros are shifted in, also for signed dtypes. A shift by the width of the dtype or more gives zero.
    """

    def function(x: Any, y: Any) -> NDArray[Any]:
        dtype = x.dtype if isinstance(x, np.ndarray) else y.dtype
        unsigned = np.dtype(f"u{dtype.itemsize}")
        return ufunc(_raw(x, dtype).view(unsigned), _raw(y, dtype).view(unsigned)).view(dtype)

    return function


def _if_extended(hardware: Hardware) -> bool:
    return hardware.alu_extended_operators


_VECTOR = frozenset({"vector"})
_EVERYWHERE = frozenset({"vector", "gpsimd", "scalar"})
_INF = float("inf")


def _arithmetic(
    name: str,
    function: Callable[..., NDArray[Any]],
    *,
    arity: int = 2,
    reduce: Reduction | None = None,
    identity: float | None = None,
    reducible: bool | None = None,
    engines: frozenset[str] = _VECTOR,
    exists_on: Callable[[Hardware], bool] = _on_every_chip,
) -> AluOperator:
    listed = reduce is not None if reducible is None else reducible
    family = OperatorFamily.arithmetic
    return AluOperator(name, function, family, arity, listed, reduce, identity, engines, exists_on)


def _bitvec(
    name: str,
    function: Callable[..., NDArray[Any]],
    *,
    arity: int = 2,
    reduce: Reduction | None = None,
    identity: int | None = None,
) -> AluOperator:
    family = OperatorFamily.bitvec
    return AluOperator(
        name, function, family, arity, reduce is not None, reduce, identity, _VECTOR, _on_every_chip
    )


def _and_or_xor(name: str, ufunc: np.ufunc, identity: int) -> AluOperator:
    return _bitvec(name, _bits(ufunc), reduce=_bit_reduction(ufunc), identity=identity)


def _logical(name: str, ufunc: np.ufunc, identity: float) -> AluOperator:
    return _arithmetic(name, _truth(ufunc), reduce=_logical_reduction(ufunc), identity=identity)


_MAGNITUDE_MAX = _magnitude_reduction(np.argmax, 0.0)
_MAGNITUDE_MIN = _magnitude_reduction(np.argmin, _INF)

_OPERATORS = (
    _bitvec("invert", np.invert, arity=1),
    _and_or_xor("bitwise_and", np.bitwise_and, -1),
    _and_or_xor("bitwise_or", np.bitwise_or, 0),
    _and_or_xor("bitwise_xor", np.bitwise_xor, 0),
    _bitvec("left_shift", _shift(np.left_shift)),
    _bitvec("right_shift", _shift(np.right_shift)),
    _arithmetic("add", quiet(np.add), reduce=_float_reduction(np.add), identity=0.0, engines=_EVERYWHERE),
    _arithmetic("subtract", quiet(np.subtract), reduce=_reduce_subtract, identity=0.0),
    _arithmetic(
        "multiply",
        quiet(np.multiply),
        reduce=_float_reduction(np.multiply),
        identity=1.0,
        engines=_EVERYWHERE,
    ),
    _arithmetic("maximum", quiet(np.maximum), reduce=_float_reduction(np.maximum), identity=-_INF),
    _arithmetic("minimum", quiet(np.minimum), reduce=_float_reduction(np.minimum), identity=_INF),
    _arithmetic("equal", _truth(np.equal)),
    _arithmetic("not_equal", _truth(np.not_equal)),
    _arithmetic("greater_equal", _truth(np.greater_equal)),
    _arithmetic("greater", _truth(np.greater)),
    _arithmetic("less_equal", _truth(np.less_equal)),
    _arithmetic("less", _truth(np.less)),
    _logical("logical_and", np.logical_and, 1.0),
    _logical("logical_or", np.logical_or, 0.0),
    _logical("logical_xor", np.logical_xor, 0.0),
    _arithmetic("power", quiet(np.power), engines=frozenset({"gpsimd"})),
    _arithmetic(
        "abs_max", _abs_max, reduce=_MAGNITUDE_MAX, identity=0.0, reducible=False, exists_on=_if_extended
    ),
    _arithmetic(
        "abs_min", _abs_min, reduce=_MAGNITUDE_MIN, identity=_INF, reducible=False, exists_on=_if_extended
    ),
    _arithmetic("abs", quiet(np.abs), arity=1, engines=frozenset({"vector", "scalar"})),
    _arithmetic("square", _square, arity=1, exists_on=_if_extended),
    _arithmetic("relu", _relu, arity=1, exists_on=_if_extended),
    _arithmetic("rsqrt", _rsqrt, arity=1, engines=frozenset({"gpsimd", "scalar"})),
    _arithmetic("reciprocal", _reciprocal, arity=1, engines=frozenset({"vector", "scalar"})),
    _arithmetic("bypass", _bypass, arity=1, engines=frozenset({"scalar"}), exists_on=_if_extended),
    _arithmetic("average", _average, reduce=_reduce_average, engines=frozenset({"gpsimd"})),
)

ALU_OPERATORS: Mapping[str, AluOperator] = MappingProxyType({row.name: row for row in _OPERATORS})
"""Every ALU operator by the name of its `nki.language` function."""

_resolve = make_resolver(
    ALU_OPERATORS,
    "ALU operator of a NeuronCore",
    "pass a function of nki.language such as nl.add or nl.bitwise_and; there is no hardware divide or "
    "modulo, multiply by nl.reciprocal instead",
)


def alu_operator(op: object) -> AluOperator:
    """Return the row of the ALU operator that a kernel passed as `op`.

    Args:
        op: A function of nki.language such as nl.add, a NumPy function such as np.add, or a row itself.

    Raises:
        InvalidArgument: The object names no ALU operator (NKW-OPERATOR).
    """
    return _resolve(op)
