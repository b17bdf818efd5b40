"""ALU operators of the Vector, GpSimd and Scalar engines, one row each.

Arithmetic operators take float32 arrays (or Python numbers with an array) and give float32; comparisons and logical
operators give 1.0 or 0.0. Bitvec operators take integer arrays of one dtype (or Python integers with an array, of which
the bits that fit count) and keep that dtype: raw bit patterns, no conversion.

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
from simulate.numerics.resolve import resolver

Axis = int | tuple[int, ...]
Reduction = Callable[[NDArray[Any], Axis], NDArray[Any]]


def _on_every_chip(_: Hardware) -> bool:
    return True


class OperatorFamily(Enum):
    """Family of operators; both operators of one instruction must belong to the same family."""

    arithmetic = "arithmetic"
    bitvec = "bitvec"


@dataclass(frozen=True, slots=True)
class AluOperator:
    """ALU operator.

    `reducible` tells whether the documentation lists it as a reduction operator; abs_max and abs_min are not listed,
    yet `activate2` accepts them, so they have a `reduce`. `reduce(array, axis)` drops the reduced axes. `identity` is
    the content of an accumulator register before the first element. Each of `engines` has the operator on some chip;
    `exists_on` tells whether some engine of a chip has it.
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


def _rows(array: NDArray[Any], axis: Axis) -> NDArray[Any]:
    """Return an array with the reduced axes moved to the end and joined, in streaming order."""
    axes = sorted(a % array.ndim for a in (axis if isinstance(axis, tuple) else (axis,)))
    kept = [a for a in range(array.ndim) if a not in axes]
    return array.transpose(kept + axes).reshape([array.shape[a] for a in kept] + [-1])


@quiet
def _reduce_subtract(array: NDArray[Any], axis: Axis) -> NDArray[Any]:
    """Return the first element minus all further ones. Not documented; folding x - y over the elements gives it."""
    rows = _rows(array, axis)
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
    """Return the reduction to the signed element of extreme magnitude; the first of equal elements is chosen.

    The register becomes op(element, register). A NaN compares with nothing and is therefore never taken.
    """
    never = np.float32(-np.inf if pick is np.argmax else np.inf)

    def reduce(array: NDArray[Any], axis: Axis) -> NDArray[Any]:
        rows = _rows(array, axis)
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
    """Return an operand of a bitvec operator; of a Python integer the bits that fit `dtype`."""
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
    """Return a logical shift: zeros come in, also for signed dtypes; a count of the width or more gives zero."""

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

_resolve = resolver(
    ALU_OPERATORS,
    "ALU operator of a NeuronCore",
    "pass a function of nki.language such as nl.add or nl.bitwise_and; there is no hardware divide or "
    "modulo, multiply by nl.reciprocal instead",
)


def alu_operator(op: object) -> AluOperator:
    """Return the ALU operator that a kernel passed: of nki.language, a NumPy function of that name, or a row.

    Raises:
        InvalidArgument: The object names no ALU operator.
    """
    return _resolve(op)
