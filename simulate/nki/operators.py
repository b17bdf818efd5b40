"""Functions of `nki.language` that name operators: `op=nl.add` in an instruction, `nl.add(a, b)` on tiles.

Called with tiles, a function allocates a result in SBUF, issues the instructions for it and returns the result.
Functions that no engine has are composed of operators that exist; each docstring says how. `dtype` is the result's, by
default that of the first tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.isa.immediates import is_number
from simulate.isa.rules import format_row_hint, is_tensor
from simulate.level import BROADCASTING
from simulate.memory import NKIObject, NkiTensor
from simulate.nki import isa
from simulate.nki.arguments import one_is_a_tile, resolve_dtype
from simulate.numerics import ACTIVATION_FUNCTIONS, ALU_OPERATORS
from simulate.run import current_core, running_level

Function = Callable[..., NkiTensor]
F = TypeVar("F", bound=Callable[..., Any])

# 2 pi in three parts: the first two have so few bits that their products with a whole number of turns are exact.
_TURN_PARTS = (6.28125, 0.00193500518798828125, 3.019916e-7)
_INTEGERS_FROM = 2.0**23  # float32 numbers of this magnitude and above are integers
_PI = float(np.nextafter(np.float32(math.pi), np.float32(0)))


def new_tile(like: NkiTensor, dtype: Any = None, shape: tuple[int, ...] | None = None) -> NkiTensor:
    """Return a new, uninitialised SBUF tile with the shape and the dtype of the tile `like`, unless others are given.

    Raises RuleViolation if `like`, which is the argument of a function of nki.language, is no tile.
    """
    is_tensor("x", like)
    return current_core().allocate(shape or like.shape, resolve_dtype(like, dtype))


class Operator(NKIObject):
    """Operator argument that cannot be called, such as `nl.bypass`, `nl.prelu` or `nl.average`."""

    def __init__(self, name: str) -> None:
        self.nki_operator = self.__name__ = name

    def __repr__(self) -> str:
        return f"nl.{self.nki_operator}"


# Their examples in the reference give y one value per partition; the others' text excludes broadcasting.
_WITH_COLUMN = ("abs_max", "abs_min")


def name_operator(function: F, name: str, doc: str) -> F:
    """Set a function's name, docstring and `nki_operator`, by which an instruction recognises it; return it."""
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
            x, y = broadcast_operands(x, y)
            result = result if result.shape == x.shape else new_tile(x, dtype)
            isa.tensor_tensor(dst=result, data1=x, data2=y, op=operator)
        else:
            number = y if isinstance(x, NkiTensor) else x
            isa.tensor_scalar(dst=result, data=tile, op0=operator, operand0=number, reverse0=tile is y)
        return result

    return name_operator(
        operator, name, f"Compute x {name} y by element, into a new SBUF tile; also an operator argument."
    )


def _unary(name: str) -> Function:
    def operator(x: NkiTensor, dtype: Any = None) -> NkiTensor:
        result = new_tile(x, dtype)
        isa.activation(dst=result, op=operator, data=x)
        return result

    return name_operator(
        operator,
        name,
        f"Compute {name}(x) on the Scalar engine, into a new SBUF tile; also an operator argument.",
    )


def copy(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Return x copied to a new SBUF tile by tensor_copy, cast to `dtype`; also an operator argument."""
    result = new_tile(x, dtype)
    isa.tensor_copy(dst=result, src=x)
    return result


def rsqrt(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Return 1 / sqrt(x), computed on GpSimd, more precise than the Scalar engine's table; also an operator."""
    result = new_tile(x, dtype)
    isa.tensor_scalar(dst=result, data=x, op0=rsqrt, operand0=0.0)
    return result


def invert(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Return an integer tile with every bit inverted, as XOR with all ones; also an operator argument."""
    result = new_tile(x, dtype)
    isa.tensor_scalar(dst=result, data=x, op0=ALU_OPERATORS["bitwise_xor"], operand0=-1)
    return result


def logical_not(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Return x XOR 1, as documented: correct for elements that are 0 or 1; use nl.equal(x, 0) for others."""
    return apply_scalar(x, "logical_xor", 1.0, dtype)


def negative(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Return -x, computed as a multiplication by -1."""
    return apply_scalar(x, "multiply", -1.0, dtype)


def floor(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Return the largest integer <= each element: rounded through int32, then 1 subtracted where that rounded up."""
    return _round_to_integer(x, "greater", "subtract", dtype)


def ceil(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Return the smallest integer >= each element: rounded through int32, then 1 added where that rounded down."""
    return _round_to_integer(x, "less", "add", dtype)


def trunc(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Return each element without its fraction: the floor of its positive and the ceiling of its negative part."""
    positive, negative_part = (apply_scalar(x, side, 0.0, "float32") for side in ("maximum", "minimum"))
    return apply_pair(floor(positive), ceil(negative_part), "add", resolve_dtype(x, dtype))


def divide(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Return x / y, computed as x * (1 / y): no engine divides, so a quotient may be off by a unit in its last place.

    One of x and y may be a number. Dims of size 1 are repeated at levels that broadcast.
    """
    one_is_a_tile(x, y)
    if not isinstance(y, NkiTensor):
        is_number("y", y)
        return apply_scalar(x, "multiply", 1 / y if y else math.copysign(math.inf, y), dtype)
    inverse = new_tile(y, "float32")
    isa.reciprocal(dst=inverse, data=y)
    if isinstance(x, NkiTensor):
        return apply_pair(*broadcast_operands(x, inverse), "multiply", resolve_dtype(x, dtype))
    return apply_scalar(inverse, "multiply", x, resolve_dtype(y, dtype))


def fmod(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Return the remainder of x / y with the sign of x, exact while the quotient times y fits 24 bits.

    The quotient comes from a reciprocal, so the remainder of magnitudes is moved once into 0 to |y|. One of x and y may
    be a number.
    """
    one_is_a_tile(x, y)
    result_dtype = resolve_dtype(x if isinstance(x, NkiTensor) else y, dtype)
    dividend, divisor = _float32_tiles(x, y)
    size, step = (apply_scalar(tile, "abs", None, "float32") for tile in (dividend, divisor))
    remainder = apply_pair(size, apply_pair(floor(divide(size, step)), step, "multiply"), "subtract")
    remainder = apply_pair(
        remainder, apply_pair(apply_scalar(remainder, "less", 0.0), step, "multiply"), "add"
    )
    remainder = apply_pair(
        remainder, apply_pair(apply_pair(remainder, step, "greater_equal"), step, "multiply"), "subtract"
    )
    sign = new_tile(dividend, "float32")
    isa.activation(dst=sign, op=ACTIVATION_FUNCTIONS["sign"], data=dividend)
    return apply_pair(remainder, sign, "multiply", result_dtype)


def mod(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Return the remainder of x / y with the sign of y: fmod, plus y where the signs differ; x or y may be a number."""
    one_is_a_tile(x, y)
    result_dtype = resolve_dtype(x if isinstance(x, NkiTensor) else y, dtype)
    dividend, divisor = _float32_tiles(x, y)
    remainder = fmod(dividend, divisor, "float32")
    signs_differ = apply_scalar(apply_pair(remainder, divisor, "multiply"), "less", 0.0)
    return apply_pair(remainder, apply_pair(signs_differ, divisor, "multiply"), "add", result_dtype)


def sin(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Return the sine of x; whole turns are subtracted first, since the engine's sine is valid from -pi to pi only.

    Also an operator argument, which then is the engine's own function, without that subtraction. Turns are exact up to
    2^16 of them.
    """
    return _sine(x, 0.0, dtype)


def cos(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Return the cosine of x, computed as the sine of x + pi / 2; whole turns are subtracted first."""
    return _sine(x, 0.25, dtype)


def tan(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Return the tangent of x, computed as its sine divided by its cosine."""
    is_tensor("x", x)
    return divide(sin(x, "float32"), cos(x, "float32"), resolve_dtype(x, dtype))


def apply_scalar(x: NkiTensor, operator: str, number: Any, dtype: Any = None) -> NkiTensor:
    """Return a new SBUF tile with operator(x, number), by tensor_scalar.

    Args:
        x: The tile.
        operator: Name of an ALU operator.
        number: A number, a (P, 1) tile with one value per partition, or None for an operator of one operand.
        dtype: Dtype of the result, by default x's.
    """
    result = new_tile(x, dtype)
    isa.tensor_scalar(dst=result, data=x, op0=ALU_OPERATORS[operator], operand0=number)
    return result


def apply_pair(x: NkiTensor, y: NkiTensor, operator: str, dtype: Any = None) -> NkiTensor:
    """Return a new SBUF tile with operator(x, y), by tensor_tensor; `operator` is the name of an ALU operator.

    The tiles have one shape; the result has x's dtype by default.
    """
    result = new_tile(x, dtype)
    isa.tensor_tensor(dst=result, data1=x, data2=y, op=ALU_OPERATORS[operator])
    return result


def _float32_tiles(x: Any, y: Any) -> tuple[NkiTensor, NkiTensor]:
    """Return both operands as float32 SBUF tiles of one shape; a number fills a tile of the other operand's shape."""
    tiles = []
    for value, other in ((x, y), (y, x)):
        if isinstance(value, NkiTensor):
            tiles.append(copy(value, "float32"))
        else:
            tiles.append(new_tile(other, "float32"))
            isa.memset(dst=tiles[-1], value=value)
    return broadcast_operands(*tiles)


def _round_to_integer(x: NkiTensor, wrong_side: str, correct: str, dtype: Any) -> NkiTensor:
    nearest = copy(copy(x, "int32"), "float32")
    corrected = apply_pair(nearest, apply_pair(nearest, x, wrong_side), correct)
    small = new_tile(x, "uint8")
    isa.tensor_scalar(
        dst=small,
        data=x,
        op0=ALU_OPERATORS["abs"],
        operand0=None,
        op1=ALU_OPERATORS["less"],
        operand1=_INTEGERS_FROM,
    )
    result = copy(x, "float32")
    isa.tensor_copy_predicated(dst=result, src=corrected, predicate=small)
    result_dtype = resolve_dtype(x, dtype)
    return result if result_dtype == "float32" else copy(result, result_dtype)


def _sine(x: NkiTensor, quarter: float, dtype: Any) -> NkiTensor:
    """Return sin(x + quarter * 2 pi) as a new SBUF tile; whole turns are subtracted first."""
    turns = new_tile(x, "float32")
    multiply, add = ALU_OPERATORS["multiply"], ALU_OPERATORS["add"]
    isa.tensor_scalar(dst=turns, data=x, op0=multiply, operand0=0.5 / math.pi, op1=add, operand1=quarter)
    whole_turns = copy(copy(turns, "int32"), "float32")
    angle = x
    for turn_part in _TURN_PARTS:
        reduced = new_tile(x, "float32")
        isa.scalar_tensor_tensor(
            dst=reduced, data=whole_turns, op0=multiply, operand0=-turn_part, op1=add, operand1=angle
        )
        angle = reduced
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


def broadcast_operands(x: NkiTensor, y: NkiTensor) -> tuple[NkiTensor, NkiTensor]:
    """Return both operands with one shape.

    At levels that broadcast, dims of size 1 are repeated by NumPy's rule: free dims by a view, a single partition by
    nc_stream_shuffle. At other levels tiles of different shapes are refused.

    Raises:
        RuleViolation: The shapes differ and cannot be broadcast (NKW-NL-SHAPES).
    """
    if not (_broadcast_together(x, y) and running_level().has(BROADCASTING)):
        same_shape(x, y)
        return x, y
    shape = tuple(map(max, x.shape, y.shape))
    first, second = (repeat_to(tile, shape) for tile in (x, y))
    return first, second


def _broadcast_together(x: NkiTensor, y: NkiTensor) -> bool:
    """Return whether two shapes of one rank differ, and in dims only of which one has size 1."""
    return (
        x.shape != y.shape
        and x.ndim == y.ndim
        and all(1 in sizes or sizes[0] == sizes[1] for sizes in zip(x.shape, y.shape))
    )


def repeat_to(x: NkiTensor, shape: tuple[int, ...]) -> NkiTensor:
    """Return a tile with dims of size 1 repeated to `shape`, of the same rank.

    Free dims are repeated by a view, a single partition by `repeat_partition`.
    """
    rows = x if x.shape[0] == shape[0] else repeat_partition(x, shape[0])
    for dim in range(1, len(shape)):
        if rows.shape[dim] != shape[dim]:
            rows = rows.broadcast(dim, shape[dim])
    return rows


def repeat_partition(x: NkiTensor, partitions: int) -> NkiTensor:
    """Return a new SBUF tile with the one partition of x repeated over `partitions` ones, by nc_stream_shuffle."""
    rows = new_tile(x, None, (partitions, *x.shape[1:]))
    quadrant = current_core().hardware.partitions_per_quadrant
    for start in range(0, partitions, quadrant):
        end = min(start + quadrant, partitions)
        isa.nc_stream_shuffle(dst=rows[start:end], src=x, shuffle_mask=[0] * quadrant)
    return rows


@rule("NKW-NL-SHAPES")
def same_shape(x: NkiTensor, y: NkiTensor) -> None:
    """nki.language operators take tiles of one shape; there is no broadcasting from level 0.4 on.

    Raises RuleViolation if the shapes differ.
    """
    if x.shape != y.shape:
        because = f"; {running_level().lack_of(BROADCASTING)}" if _broadcast_together(x, y) else ""
        raise RuleViolation(
            same_shape,
            f"{x.shape} and {y.shape}{because}",
            hint=format_row_hint("an operand", max(x.shape[0], y.shape[0]))
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
