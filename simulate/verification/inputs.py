"""Arguments of the trials: random, large and zero values, NaN, and sizes one less and one more.

Float arrays are filled anew for each trial; only their shapes and dtypes are taken from the caller. Integers
are often indices, so a trial keeps the values of an integer array and changes their order. A kernel that
ignores an index then gives wrong results. The functions return a new Call and leave the arrays of theirs
unchanged; arguments that are not arrays are passed on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from nkw.errors import NoVerdict

_LARGE_EXPONENT = 10  # normal values times 2**10: exp of them overflows, their squares and sums do not
_NORMAL_EXPONENT = 3  # normal values lie below 2**3, but for one of 10**15
_AXES_TRIED = 3  # extents that are made one less and one more


@dataclass(frozen=True)
class Call:
    """Arguments of one call of a kernel and of its reference, by position and by keyword."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def arrays(self) -> list[np.ndarray]:
        """Arrays among the arguments, in order."""
        return [
            argument for argument in (*self.args, *self.keywords.values()) if isinstance(argument, np.ndarray)
        ]

    @property
    def floats(self) -> list[np.ndarray]:
        """Arrays of floats among the arguments, in order."""
        return [array for array in self.arrays if is_float(array)]

    def map_arrays(self, change: Callable[[np.ndarray, int], np.ndarray]) -> Call:
        """Return the call with each array replaced by what `change` returns for it.

        Args:
            change: Gets an array and its index among `arrays`.
        """
        positions = iter(range(len(self.arrays)))

        def new(value: Any) -> Any:
            return change(value, next(positions)) if isinstance(value, np.ndarray) else value

        return Call(tuple(map(new, self.args)), {name: new(value) for name, value in self.keywords.items()})

    def copy_arrays(self) -> Call:
        """Return the call with copies of its arrays, so that a kernel may write to them."""
        return self.map_arrays(lambda array, _: array.copy())

    def widen_floats(self) -> Call:
        """Return the call with its float arrays in float64 and copies of its other arrays."""
        return self.map_arrays(lambda array, _: array.astype(np.float64) if is_float(array) else array.copy())

    def __str__(self) -> str:
        return " ".join("x".join(map(str, array.shape)) for array in self.arrays)


def is_float(array: np.ndarray) -> bool:
    """Return whether an array has a float dtype, including the narrow ones of ml_dtypes; not bool or integers."""
    return array.dtype.kind not in "biu"


def draw_random(call: Call, seed: int) -> Call:
    """Return the call with floats drawn from the standard normal distribution, and integers in random order.

    Equal seeds give equal values.
    """

    def fill(array: np.ndarray, position: int) -> np.ndarray:
        generator = np.random.default_rng((seed, position))
        if is_float(array):
            return generator.standard_normal(array.shape).astype(array.dtype)
        return generator.permutation(array.reshape(-1)).reshape(array.shape)

    return call.map_arrays(fill)


def draw_large(call: Call) -> Call:
    """Return the call with normally distributed floats times 2**10, and integers in reversed order.

    The factor is smaller for dtypes in which squares of such values would overflow.
    """

    def fill(array: np.ndarray, position: int) -> np.ndarray:
        if not is_float(array):
            return array.reshape(-1)[::-1].reshape(array.shape)
        most = math.floor(math.log2(float(ml_dtypes.finfo(array.dtype).max)) / 2) - _NORMAL_EXPONENT
        values = np.random.default_rng(position).standard_normal(array.shape)
        return (values * 2.0 ** min(_LARGE_EXPONENT, max(most, 0))).astype(array.dtype)

    return call.map_arrays(fill)


def fill_zeros(call: Call) -> Call:
    """Return the call with zeros in all arrays, integers included."""
    return call.map_arrays(lambda array, _: np.zeros(array.shape, array.dtype))


def clear_half(call: Call) -> Call:
    """Return the call with zeros in place of about half of its floats, so that comparisons with 0 go both ways.

    Integers are unchanged.
    """

    def fill(array: np.ndarray, position: int) -> np.ndarray:
        keeps = np.random.default_rng(position).integers(0, 2, array.shape)
        return array * keeps.astype(array.dtype) if is_float(array) else array

    return call.map_arrays(fill)


def add_nan(call: Call) -> Call:
    """Return the call with a NaN in the middle element of every float array."""

    def fill(array: np.ndarray, position: int) -> np.ndarray:
        return _replace_element(array, array.size // 2, np.nan) if is_float(array) else array

    return call.map_arrays(fill)


def vary_extents(call: Call) -> Iterator[tuple[str, Call]]:
    """Yield (new extent, call) for each of the first three extents of the arrays, one less and one more.

    The extent is changed in all arrays that have it. Extents of 1 stay, so that what is broadcast stays
    broadcast. Floats are zeros, to be filled; integers repeat their lowest values, so that indices stay
    valid.
    """
    extents = list(dict.fromkeys(size for array in call.arrays for size in array.shape if size > 1))
    for extent in extents[:_AXES_TRIED]:
        for size in (extent - 1, extent + 1):
            yield f"{size}", call.map_arrays(lambda array, _: _resize(array, extent, size))  # noqa: B023


def _resize(array: np.ndarray, extent: int, size: int) -> np.ndarray:
    shape = tuple(size if length == extent else length for length in array.shape)
    if is_float(array):
        return np.zeros(shape, array.dtype)
    if shape == array.shape:
        return array
    lowest = np.sort(array.reshape(-1))[: min(array.size, math.prod(shape))]
    return np.resize(lowest, shape)


def poison(call: Call, position: int, element: int) -> Call:
    """Return the call with NaN in one element of one array, which must be a float array.

    Args:
        call: The call.
        position: The index among the arrays of the call.
        element: The index of the element in C order.
    """
    return call.map_arrays(
        lambda array, index: _replace_element(array, element, np.nan) if index == position else array
    )


def nudge(call: Call, by: float, seed: int) -> Call:
    """Return the call with every float multiplied by 1 + `by` or 1 - `by`, at random; integers are unchanged."""

    def fill(array: np.ndarray, position: int) -> np.ndarray:
        if not is_float(array):
            return array
        signs = np.random.default_rng((seed, position)).integers(0, 2, array.shape) * 2 - 1
        return array * (1 + by * signs)

    return call.map_arrays(fill)


def _replace_element(array: np.ndarray, element: int, value: float) -> np.ndarray:
    changed = array.copy()
    changed.reshape(-1)[element] = value
    return changed


class NotArrays(NoVerdict):
    """Error for a result of a kernel or a reference that is neither an array nor a number."""


def convert_results(returned: Any, callee: str = "kernel") -> Sequence[np.ndarray]:
    """Return the results of a call as arrays, several if it returned a tuple or a list.

    Args:
        returned: What the call returned.
        callee: What was called, for the message: "kernel" or "reference".

    Raises:
        NotArrays: A result is neither an array of real numbers nor a number.
    """
    several = returned if isinstance(returned, (tuple, list)) else (returned,)
    arrays = []
    for result in several:
        try:
            array = np.asarray(result)
        except (ValueError, TypeError, RuntimeError):  # rows of different lengths, a tensor of a device
            array = np.empty(0, object)
        if array.dtype.kind in "OSUmMc" or (array.dtype.kind == "V" and array.dtype.names is not None):
            seen = "None" if result is None else f"a {type(result).__name__}"
            sentence = f"the {callee} returns {seen}; return an array of real numbers, or a tuple of arrays"
            raise NotArrays("NKW-VERIFY", sentence)
        arrays.append(array)
    return arrays
