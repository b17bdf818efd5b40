"""Functions of `nki.language` that name operators: `op=nl.add` in an instruction, `nl.add(a, b)` on tiles.

Called with tiles, a function allocates a result in SBUF and issues the instructions for it. Functions that no engine
has are composed of operators that exist; each docstring says how.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.isa.immediates import is_number
from simulate.isa.rules import is_tensor, repeated_row
from simulate.level import BROADCASTING
from simulate.memory import NKIObject, NkiTensor
from simulate.nki import isa
from simulate.nki.arguments import dtype_or_that_of, one_is_a_tile
from simulate.numerics import ACTIVATION_FUNCTIONS, ALU_OPERATORS
from simulate.run import current_core, running_level

Function = Callable[..., NkiTensor]
F = TypeVar("F", bound=Callable[..., Any])

# 2 pi in three parts: the first two have so few bits that their products with a whole number of turns are exact.
_TURN_PARTS = (6.28125, 0.00193500518798828125, 3.019916e-7)
_WHOLE_FROM = 2.0**23  # float32 numbers of this magnitude and above are integers
_PI = float(np.nextafter(np.float32(math.pi), np.float32(0)))


def new_tile(like: NkiTensor, dtype: Any = None, shape: tuple[int, ...] | None = None) -> NkiTensor:
    """Return a fresh SBUF tile with the shape and the dtype of the tile `like`, unless others are given.

    Raises RuleViolation where `like`, the function's argument, is no tile.
    """
    is_tensor("x", like)
    return current_core().allocate(shape or like.shape, dtype_or_that_of(like, dtype))


class Operator(NKIObject):
    """An operator argument that cannot be called: `nl.bypass`, `nl.prelu`, `nl.average`."""

    def __init__(self, name: str) -> None:
        self.nki_operator = self.__name__ = name

    def __repr__(self) -> str:
        return f"nl.{self.nki_operator}"


# Their examples in the reference give y one value per partition; the others' text excludes broadcasting.
_WITH_COLUMN = ("abs_max", "abs_min")


def named(function: F, name: str, doc: str) -> F:
    """A function of `nki.language` under its name, by which an instruction takes it as an operator."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    function.nki_operator = name  # type: ignore[attr-defined]
    return function


def _binary(name: str) -> Function:
    def operator(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
        one_is_a_tile(x, y)
        tile = x if isinstance(x, NkiTensor) else y
        result = new_tile(tile, dtype)
        column = name in _WITH_COLUMN and isinstance(y, NkiTensor) and y.shape == (tile.shape[0], 1)
        if isinstance(x, NkiTensor) and isinstance(y, NkiTensor) and not column:
            x, y = aligned(x, y)
            result = result if result.shape == x.shape else new_tile(x, dtype)
            isa.tensor_tensor(dst=result, data1=x, data2=y, op=operator)
        else:
            number = y if isinstance(x, NkiTensor) else x
            isa.tensor_scalar(dst=result, data=tile, op0=operator, operand0=number, reverse0=tile is y)
        return result

    return named(
        operator, name, f"x {name} y element by element, into a new SBUF tile; also an operator argument."
    )


def _unary(name: str) -> Function:
    def operator(x: NkiTensor, dtype: Any = None) -> NkiTensor:
        result = new_tile(x, dtype)
        isa.activation(dst=result, op=operator, data=x)
        return result

    return named(
        operator, name, f"{name}(x) on the Scalar engine, into a new SBUF tile; also an operator argument."
    )


def copy(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A copy of x in a new SBUF tile, by tensor_copy; also an operator argument."""
    result = new_tile(x, dtype)
    isa.tensor_copy(dst=result, src=x)
    return result


def rsqrt(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """1 / sqrt(x) on GpSimd, which is more precise than the Scalar engine's table; also an operator argument."""
    result = new_tile(x, dtype)
    isa.tensor_scalar(dst=result, data=x, op0=rsqrt, operand0=0.0)
    return result


def invert(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Every bit of an integer tile inverted, as XOR with all ones; also an operator argument."""
    result = new_tile(x, dtype)
    isa.tensor_scalar(dst=result, data=x, op0=ALU_OPERATORS["bitwise_xor"], operand0=-1)
    return result


def logical_not(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """XOR with 1, as documented: right for elements that are 0 or 1; use nl.equal(x, 0) for others."""
    return scalar(x, "logical_xor", 1.0, dtype)


def negative(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """-x, as a multiplication by -1."""
    return scalar(x, "multiply", -1.0, dtype)


def floor(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """The largest integer not above each element: rounded through int32, then 1 less where that rounded up."""
    return _whole(x, "greater", "subtract", dtype)


def ceil(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """The smallest integer not below each element: rounded through int32, then 1 more where that rounded down."""
    return _whole(x, "less", "add", dtype)


def trunc(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Each element without its fraction: the floor of its positive and the ceiling of its negative part."""
    positive, negative_part = (scalar(x, side, 0.0, "float32") for side in ("maximum", "minimum"))
    return pair(floor(positive), ceil(negative_part), "add", dtype_or_that_of(x, dtype))


def divide(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """x / y as x * (1 / y): no engine divides, so a quotient may be off by a unit in its last place."""
    one_is_a_tile(x, y)
    if not isinstance(y, NkiTensor):
        is_number("y", y)
        return scalar(x, "multiply", 1 / y if y else math.copysign(math.inf, y), dtype)
    inverse = new_tile(y, "float32")
    isa.reciprocal(dst=inverse, data=y)
    if isinstance(x, NkiTensor):
        return pair(*aligned(x, inverse), "multiply", dtype_or_that_of(x, dtype))
    return scalar(inverse, "multiply", x, dtype_or_that_of(y, dtype))


def fmod(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """The remainder of x / y with the sign of x, exact while the quotient times y fits 24 bits.

    The quotient comes from a reciprocal, so the remainder of magnitudes is moved once into 0 to |y|.
    """
    one_is_a_tile(x, y)
    result_dtype = dtype_or_that_of(x if isinstance(x, NkiTensor) else y, dtype)
    dividend, divisor = _tiles(x, y)
    size, step = (scalar(tile, "abs", None, "float32") for tile in (dividend, divisor))
    rest = pair(size, pair(floor(divide(size, step)), step, "multiply"), "subtract")
    rest = pair(rest, pair(scalar(rest, "less", 0.0), step, "multiply"), "add")
    rest = pair(rest, pair(pair(rest, step, "greater_equal"), step, "multiply"), "subtract")
    sign = new_tile(dividend, "float32")
    isa.activation(dst=sign, op=ACTIVATION_FUNCTIONS["sign"], data=dividend)
    return pair(rest, sign, "multiply", result_dtype)


def mod(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """The remainder of x / y with the sign of y: fmod, plus y where the signs differ."""
    one_is_a_tile(x, y)
    result_dtype = dtype_or_that_of(x if isinstance(x, NkiTensor) else y, dtype)
    dividend, divisor = _tiles(x, y)
    rest = fmod(dividend, divisor, "float32")
    apart = scalar(pair(rest, divisor, "multiply"), "less", 0.0)
    return pair(rest, pair(apart, divisor, "multiply"), "add", result_dtype)


def sin(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """sin(x), with whole turns taken off first, since the engine's sine is valid from -pi to pi only.

    Also an operator argument, which then is the engine's own function. Turns are exact up to 2^16 of them.
    """
    return _sine(x, 0.0, dtype)


def cos(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """cos(x) = sin(x + pi / 2), with whole turns taken off first."""
    return _sine(x, 0.25, dtype)


def tan(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """tan(x) = sin(x) / cos(x)."""
    is_tensor("x", x)
    return divide(sin(x, "float32"), cos(x, "float32"), dtype_or_that_of(x, dtype))


def scalar(x: NkiTensor, operator: str, number: Any, dtype: Any = None) -> NkiTensor:
    """A fresh SBUF tile of an ALU operator's results for x and a number, or a tile of one element per partition."""
    result = new_tile(x, dtype)
    isa.tensor_scalar(dst=result, data=x, op0=ALU_OPERATORS[operator], operand0=number)
    return result


def pair(x: NkiTensor, y: NkiTensor, operator: str, dtype: Any = None) -> NkiTensor:
    """A fresh SBUF tile of an ALU operator's results for two tiles of one shape."""
    result = new_tile(x, dtype)
    isa.tensor_tensor(dst=result, data1=x, data2=y, op=ALU_OPERATORS[operator])
    return result


def _tiles(x: Any, y: Any) -> tuple[NkiTensor, NkiTensor]:
    """Both operands as float32 tiles; a number fills one of the other's shape."""
    tiles = []
    for value, other in ((x, y), (y, x)):
        if isinstance(value, NkiTensor):
            tiles.append(copy(value, "float32"))
        else:
            tiles.append(new_tile(other, "float32"))
            isa.memset(dst=tiles[-1], value=value)
    return aligned(*tiles)


def _whole(x: NkiTensor, wrong_side: str, correct: str, dtype: Any) -> NkiTensor:
    nearest = copy(copy(x, "int32"), "float32")
    moved = pair(nearest, pair(nearest, x, wrong_side), correct)
    small = new_tile(x, "uint8")
    isa.tensor_scalar(
        dst=small,
        data=x,
        op0=ALU_OPERATORS["abs"],
        operand0=None,
        op1=ALU_OPERATORS["less"],
        operand1=_WHOLE_FROM,
    )
    result = copy(x, "float32")
    isa.tensor_copy_predicated(dst=result, src=moved, predicate=small)
    result_dtype = dtype_or_that_of(x, dtype)
    return result if result_dtype == "float32" else copy(result, result_dtype)


def _sine(x: NkiTensor, quarter: float, dtype: Any) -> NkiTensor:
    """sin(x + quarter * 2 pi)."""
    turns = new_tile(x, "float32")
    multiply, add = ALU_OPERATORS["multiply"], ALU_OPERATORS["add"]
    isa.tensor_scalar(dst=turns, data=x, op0=multiply, operand0=0.5 / math.pi, op1=add, operand1=quarter)
    whole = copy(copy(turns, "int32"), "float32")
    angle = x
    for part in _TURN_PARTS:
        rest = new_tile(x, "float32")
        isa.scalar_tensor_tensor(dst=rest, data=whole, op0=multiply, operand0=-part, op1=add, operand1=angle)
        angle = rest
    inside = new_tile(x, "float32")
    isa.tensor_scalar(dst=inside, data=angle, op0=add, operand0=quarter * 2 * math.pi)
    isa.tensor_scalar(
        dst=inside,
        data=inside,
        op0=ALU_OPERATORS["minimum"],
        operand0=_PI,
        op1=ALU_OPERATORS["maximum"],
        operand1=-_PI,
    )
    result = new_tile(x, dtype)
    isa.activation(dst=result, op=ACTIVATION_FUNCTIONS["sin"], data=inside)
    return result


def aligned(x: NkiTensor, y: NkiTensor) -> tuple[NkiTensor, NkiTensor]:
    """Both operands with one shape. Where the level broadcasts, dims of size 1 are repeated by numpy's rule.

    Free dims are repeated by a view, a single partition by nc_stream_shuffle.
    """
    if not (_broadcast_together(x, y) and running_level().has(BROADCASTING)):
        same_shape(x, y)
        return x, y
    shape = tuple(map(max, x.shape, y.shape))
    first, second = (repeated(tile, shape) for tile in (x, y))
    return first, second


def _broadcast_together(x: NkiTensor, y: NkiTensor) -> bool:
    """Whether shapes of one rank differ in dims of size 1 only."""
    return (
        x.shape != y.shape
        and x.ndim == y.ndim
        and all(1 in pair or pair[0] == pair[1] for pair in zip(x.shape, y.shape))
    )


def repeated(x: NkiTensor, shape: tuple[int, ...]) -> NkiTensor:
    """A tile with dims of size 1 repeated to `shape`, of the same rank."""
    rows = x if x.shape[0] == shape[0] else repeated_partition(x, shape[0])
    for dim in range(1, len(shape)):
        if rows.shape[dim] != shape[dim]:
            rows = rows.broadcast(dim, shape[dim])
    return rows


def repeated_partition(x: NkiTensor, partitions: int) -> NkiTensor:
    """A tile on one partition repeated over `partitions` ones by nc_stream_shuffle, a quadrant at a time."""
    rows = new_tile(x, None, (partitions, *x.shape[1:]))
    quadrant = current_core().hardware.partitions_per_quadrant
    for start in range(0, partitions, quadrant):
        end = min(start + quadrant, partitions)
        isa.nc_stream_shuffle(dst=rows[start:end], src=x, shuffle_mask=[0] * quadrant)
    return rows


@rule("NKW-NL-SHAPES")
def same_shape(x: NkiTensor, y: NkiTensor) -> None:
    """nki.language operators take tiles of one shape; there is no broadcasting from level 0.4 on."""
    if x.shape != y.shape:
        because = f"; {running_level().lack_of(BROADCASTING)}" if _broadcast_together(x, y) else ""
        raise RuleViolation(
            same_shape,
            f"{x.shape} and {y.shape}{because}",
            hint=repeated_row("an operand", max(x.shape[0], y.shape[0]))
            if 1 in (x.shape[0], y.shape[0])
            else "nisa.tensor_scalar for a (P, 1) operand, or .broadcast",
        )


_COMPOSED = (
    *(copy, rsqrt, invert, logical_not, negative, floor, ceil, trunc),
    *(divide, fmod, mod, sin, cos, tan),
)
for _function in (copy, rsqrt, invert, sin):
    _function.nki_operator = _function.__name__  # type: ignore[attr-defined]

OPERATORS: dict[str, Any] = {
    **{name: Operator(name) for name in ("average", "bypass", "prelu")},
    **{name: _unary(name) for name in ACTIVATION_FUNCTIONS if name != "prelu"},
    **{name: _binary(name) for name, op in ALU_OPERATORS.items() if op.arity == 2 and name != "average"},
    **{function.__name__: function for function in _COMPOSED},
}
"""Every operator of `nki.language` by its name."""
