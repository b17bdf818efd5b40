"""Outputs of a chip against those expected: the first tile and element that differ, by how much, and whether it may."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

from nkw.errors import InvalidArgument
from simulate.bundle.manifest import Case, Output
from simulate.bundle.reading import bits_of
from simulate.bundle.result import CaseResult, Values, expected_of, values_of
from simulate.bundle.run import tile_digests, tiles
from simulate.bundle.run_chain import float_errors


class Agreement(Enum):
    """How an output agrees with the expected one.

    equal: the same bytes. within: the difference is one that two right kernels can have. unbounded: different, and
    nothing says by how much it may be: there is no reference, or only digests came back. wrong: beyond the bound, or of
    another shape or dtype. missing: it did not come back or cannot be read.
    """

    equal = "equal"
    within = "within the bound"
    unbounded = "different"
    wrong = "wrong"
    missing = "missing"


@dataclass(frozen=True)
class Place:
    """One element: its tile as (row of tiles, column of tiles), its index, what was seen and expected, ulps between.

    ulps counts the values of the dtype that lie between; None where one of them is NaN and the other is not.
    """

    tile: tuple[int, int]
    index: tuple[int, ...]
    seen: float
    expected: float
    ulps: int | None


@dataclass(frozen=True)
class OutputComparison:
    """One output: how it agrees, the first element that decides it, and how much of it differs.

    first: the first element beyond the bound, else the first that differs. tile: of the first tile that differs, also
    where only digests came back. beyond: elements beyond the bound; differing: elements with other bytes.
    """

    name: str
    agreement: Agreement
    why: str = ""
    tile: tuple[int, int] | None = None
    first: Place | None = None
    wrong_tiles: int = 0
    tiles: int = 0
    beyond: int = 0
    differing: int = 0
    size: int = 0
    error: float | None = None
    allowed: float | None = None
    most_ulps: int | None = None


def compare_case(folder: Path, case: Case, result: CaseResult) -> tuple[OutputComparison, ...]:
    """Every output of a case that ran against the expected one. Raises InvalidArgument where that cannot be read."""
    found = {each.name: each for each in result.outputs}
    compared = [
        _compared(folder, output, found[output.name], _expected(folder, case, number))
        if output.name in found
        else OutputComparison(output.name, Agreement.missing, "it did not come back")
        for number, output in enumerate(case.outputs)
    ]
    more = [name for name in found if name not in {each.name for each in case.outputs}]
    unexpected = [OutputComparison(name, Agreement.wrong, "the kernel should not return it") for name in more]
    return (*compared, *unexpected)


def _expected(folder: Path, case: Case, number: int) -> np.ndarray | None:
    """What output `number` should be; None where only its digests are in the bundle."""
    return expected_of(folder, case, number) if case.outputs[number].file else None


def _compared(folder: Path, output: Output, values: Values, expected: np.ndarray | None) -> OutputComparison:
    if (values.shape, values.dtype) != (output.shape, output.dtype):
        why = f"it is {values.dtype}{list(values.shape)}, expected is {output.dtype}{list(output.shape)}"
        return OutputComparison(output.name, Agreement.wrong, why, allowed=_allowed(output))
    if values.stray is not None:
        why = f"at {values.stray} it is not as it was, where the kernel should write nothing"
        return OutputComparison(output.name, Agreement.wrong, why, allowed=_allowed(output))
    if values.file is None or expected is None:
        return _by_digests(output, values, expected)
    try:
        seen = values_of(folder, values)
    except InvalidArgument as unread:
        return OutputComparison(output.name, Agreement.missing, unread.message)
    return compare_arrays(output, seen, expected)


def _allowed(output: Output) -> float | None:
    return None if output.tolerance is None else output.tolerance.allowed


def _by_digests(output: Output, values: Values, expected: np.ndarray | None) -> OutputComparison:
    """By the digests of tiles, which tell that a tile differs but not by how much."""
    wanted, size = list(output.tiles), math.prod(output.shape)
    if expected is not None:
        wanted = tile_digests(expected.view(bits_of(expected.dtype)), *output.tile)
    if values.tiles is None or len(values.tiles) != len(wanted):
        return OutputComparison(
            output.name, Agreement.missing, "neither values nor digests of its tiles came back"
        )
    differing = [number for number, (one, other) in enumerate(zip(values.tiles, wanted)) if one != other]
    if not differing:
        return OutputComparison(output.name, Agreement.equal, tiles=len(wanted), size=size)
    across = -(-_columns(output.shape) // output.tile[1])
    return OutputComparison(
        output.name,
        Agreement.unbounded,
        "only digests came back" if expected is not None else "only its digests are in the bundle",
        divmod(differing[0], across),
        wrong_tiles=len(differing),
        tiles=len(wanted),
        size=size,
        allowed=_allowed(output),
    )


def compare_arrays(output: Output, seen: np.ndarray, expected: np.ndarray) -> OutputComparison:
    """Two arrays of the output's dtype and shape."""
    dtype = expected.dtype
    errors, same, same_bits = float_errors(seen, expected)
    with np.errstate(invalid="ignore", over="ignore"):
        wide, exact = seen.astype(np.float64), expected.astype(np.float64)
    ulps = ulps_between(seen, expected)
    bound = 0.0 if dtype.kind in "biu" else _allowed(output)
    beyond = ~same if bound is None else errors > bound
    decides = beyond if beyond.any() else ~same_bits
    total = sum(1 for _ in tiles(same_bits, *output.tile))
    if not decides.any():
        return OutputComparison(
            output.name, Agreement.equal, tiles=total, size=expected.size, error=0.0, allowed=bound
        )
    wrong = [
        (row // output.tile[0], column // output.tile[1], row, column, part)
        for row, column, part in tiles(decides, *output.tile)
        if part.any()
    ]
    tile_row, tile_column, row, column, part = wrong[0]
    at_row, at_column = (int(each) for each in np.argwhere(part)[0])
    flat = (row + at_row) * _columns(output.shape) + column + at_column
    index = tuple(int(each) for each in np.unravel_index(flat, output.shape)) if output.shape else ()
    comparable = np.isfinite(wide) & np.isfinite(exact)
    place = Place(
        (tile_row, tile_column),
        index,
        float(wide[index]),
        float(exact[index]),
        int(ulps[index]) if comparable[index] else None,
    )
    if bound is None and beyond.any():
        agreement = Agreement.unbounded
    else:
        agreement = Agreement.wrong if beyond.any() else Agreement.within
    return OutputComparison(
        output.name,
        agreement,
        output.why if bound is None else "",
        place.tile,
        place,
        len(wrong),
        total,
        int(np.count_nonzero(beyond)) if bound is not None else 0,
        int(np.count_nonzero(~same_bits)),
        expected.size,
        float(errors.max(initial=0.0)),
        bound,
        int(ulps[comparable].max(initial=0)),
    )


def _columns(shape: Sequence[int]) -> int:
    return shape[-1] if shape else 1


def ulps_between(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """How many steps from value to value of the dtype lie between two arrays' elements, as uint64.

    Floats are numbered by their bits, so that -0 and 0 are equal and the number of a value grows with it; NaN and
    infinities have numbers as well, which mean nothing. Integers are their own numbers.
    """
    numbers, others = _numbers(one), _numbers(other)
    # The difference of two int64 fits into uint64, whose subtraction is modulo 2**64.
    return np.maximum(numbers, others).astype(np.uint64) - np.minimum(numbers, others).astype(np.uint64)


def _numbers(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind in "biu":
        return array.astype(np.int64)
    width = 8 * array.dtype.itemsize
    bits = _bits(array).astype(np.int64)
    magnitude = bits & np.int64(2 ** (width - 1) - 1)
    return np.where(bits == magnitude, magnitude, -magnitude)


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"uint{8 * array.dtype.itemsize}").reshape(array.shape)
