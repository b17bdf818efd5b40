"""Comparison of a chip's outputs with the expected outputs: first difference, its size, and whether it is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

from nkw.errors import InvalidArgument
from simulate.bundle.manifest import Case, Output
from simulate.bundle.reading import get_storage_dtype
from simulate.bundle.result import CaseResult, Values, read_expected, read_output
from simulate.bundle.run import digest_tiles, split_tiles
from simulate.bundle.run_chain import compare_floats


class Agreement(Enum):
    """Agreement of an output with the expected output.

    equal: the bytes are equal. within: the difference is at most the bound, which two correct kernels can
    have. unbounded: they differ, and no bound is known, because there is no reference or only digests came
    back. wrong: beyond the bound, or another shape or dtype. missing: the output is absent or unreadable.
    """

    equal = "equal"
    within = "within the bound"
    unbounded = "different"
    wrong = "wrong"
    missing = "missing"


@dataclass(frozen=True)
class Element:
    """An element of an output that differs: its tile, its index, both numbers, and the ulps between them.

    `tile` is (row, column) in the grid of tiles, not of elements. `seen` is the chip's number. `ulps` counts
    steps between representable numbers of the dtype; None if either number is NaN or infinite.
    """

    tile: tuple[int, int]
    index: tuple[int, ...]
    seen: float
    expected: float
    ulps: int | None


@dataclass(frozen=True)
class OutputComparison:
    """Comparison of an output: its agreement, the first decisive element, and the extent of differences.

    `first` is the first element beyond the bound, else the first that differs, in the order of tiles. `tile`
    is the tile of the first difference, known from digests too. `wrong_tiles` counts tiles with a decisive
    element, of `tiles` in all. `beyond` counts elements beyond the bound, `differing` those with other bytes,
    of `size` in all. `error` is the largest absolute difference, `allowed` the bound, `most_ulps` the largest
    number of ulps. None means unknown.
    """

    name: str
    agreement: Agreement
    why: str = ""
    tile: tuple[int, int] | None = None
    first: Element | None = None
    wrong_tiles: int = 0
    tiles: int = 0
    beyond: int = 0
    differing: int = 0
    size: int = 0
    error: float | None = None
    allowed: float | None = None
    most_ulps: int | None = None


def compare_case(folder: Path, case: Case, result: CaseResult) -> tuple[OutputComparison, ...]:
    """Compare every output of a case that ran with the expected output.

    Outputs that the case does not have are wrong.

    Args:
        folder: Folder of the bundle, with the result in its folder `result`.

    Raises:
        InvalidArgument: If an expected output cannot be read.
    """
    returned = {output.name: output for output in result.outputs}
    comparisons = [
        _compare_output(folder, output, returned[output.name], _read_expected_output(folder, case, number))
        if output.name in returned
        else OutputComparison(output.name, Agreement.missing, "the result does not have it")
        for number, output in enumerate(case.outputs)
    ]
    unexpected_names = [name for name in returned if name not in {output.name for output in case.outputs}]
    unexpected = [
        OutputComparison(name, Agreement.wrong, "the kernel should not return it")
        for name in unexpected_names
    ]
    return (*comparisons, *unexpected)


def _read_expected_output(folder: Path, case: Case, number: int) -> np.ndarray | None:
    """Return the expected output with an index; None if the bundle has only its digests."""
    return read_expected(folder, case, number) if case.outputs[number].file else None


def _compare_output(
    folder: Path, output: Output, returned: Values, expected: np.ndarray | None
) -> OutputComparison:
    """Return the comparison of a returned output; an output that cannot be read is missing, without an error.

    Args:
        expected: The expected array, or None if the bundle has only digests of its tiles.
    """
    if (returned.shape, returned.dtype) != (output.shape, output.dtype):
        reason = (
            f"it is {returned.dtype}{list(returned.shape)}, expected is {output.dtype}{list(output.shape)}"
        )
        return OutputComparison(output.name, Agreement.wrong, reason, allowed=_get_allowed(output))
    if returned.stray is not None:
        reason = f"it was changed at index {returned.stray} of the written axis, where the kernel should write nothing"
        return OutputComparison(output.name, Agreement.wrong, reason, allowed=_get_allowed(output))
    if returned.file is None or expected is None:
        return _compare_digests(output, returned, expected)
    try:
        array = read_output(folder, returned)
    except InvalidArgument as unread:
        return OutputComparison(output.name, Agreement.missing, unread.message)
    return compare_arrays(output, array, expected)


def _get_allowed(output: Output) -> float | None:
    """Return the largest allowed absolute difference of an output, or None without a tolerance."""
    return None if output.tolerance is None else output.tolerance.allowed


def _compare_digests(output: Output, returned: Values, expected: np.ndarray | None) -> OutputComparison:
    """Compare the digests of tiles, which show the tiles that differ but not the size of differences.

    Without a difference the output is equal, else unbounded; without digests it is missing.
    """
    digests, size = list(output.tiles), math.prod(output.shape)
    if expected is not None:
        digests = digest_tiles(expected.view(get_storage_dtype(expected.dtype)), *output.tile)
    if returned.tiles is None or len(returned.tiles) != len(digests):
        return OutputComparison(
            output.name, Agreement.missing, "neither values nor digests of its tiles came back"
        )
    differing = [
        index
        for index, (digest, expected_digest) in enumerate(zip(returned.tiles, digests))
        if digest != expected_digest
    ]
    if not differing:
        return OutputComparison(output.name, Agreement.equal, tiles=len(digests), size=size)
    tiles_per_row = -(-_columns(output.shape) // output.tile[1])
    return OutputComparison(
        output.name,
        Agreement.unbounded,
        "only digests came back" if expected is not None else "only its digests are in the bundle",
        divmod(differing[0], tiles_per_row),
        wrong_tiles=len(differing),
        tiles=len(digests),
        size=size,
        allowed=_get_allowed(output),
    )


def compare_arrays(output: Output, seen: np.ndarray, expected: np.ndarray) -> OutputComparison:
    """Compare two arrays of the output's dtype and shape, element by element.

    Integers must be equal; floats may differ by the output's tolerance. Two NaN are equal in value.

    Args:
        output: The expected output, with tolerance and tile.
        seen: Array of the chip.
        expected: Array of the simulator.
    """
    dtype = expected.dtype
    errors, same, same_bits = compare_floats(seen, expected)
    with np.errstate(invalid="ignore", over="ignore"):
        seen_values, expected_values = seen.astype(np.float64), expected.astype(np.float64)
    ulps = ulps_between(seen, expected)
    bound = 0.0 if dtype.kind in "biu" else _get_allowed(output)
    beyond = ~same if bound is None else errors > bound
    is_decisive = beyond if beyond.any() else ~same_bits
    num_tiles = sum(1 for _ in split_tiles(same_bits, *output.tile))
    if not is_decisive.any():
        return OutputComparison(
            output.name, Agreement.equal, tiles=num_tiles, size=expected.size, error=0.0, allowed=bound
        )
    wrong = [
        (row // output.tile[0], column // output.tile[1], row, column, tile_mask)
        for row, column, tile_mask in split_tiles(is_decisive, *output.tile)
        if tile_mask.any()
    ]
    tile_row, tile_column, row, column, tile_mask = wrong[0]
    at_row, at_column = (int(axis_index) for axis_index in np.argwhere(tile_mask)[0])
    flat = (row + at_row) * _columns(output.shape) + column + at_column
    index = (
        tuple(int(axis_index) for axis_index in np.unravel_index(flat, output.shape)) if output.shape else ()
    )
    comparable = np.isfinite(seen_values) & np.isfinite(expected_values)
    element = Element(
        (tile_row, tile_column),
        index,
        float(seen_values[index]),
        float(expected_values[index]),
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
        element.tile,
        element,
        len(wrong),
        num_tiles,
        int(np.count_nonzero(beyond)) if bound is not None else 0,
        int(np.count_nonzero(~same_bits)),
        expected.size,
        float(errors.max(initial=0.0)),
        bound,
        int(ulps[comparable].max(initial=0)),
    )


def _columns(shape: Sequence[int]) -> int:
    """Return the number of columns of an array with its leading dims combined: the last dim, or 1 for a scalar."""
    return shape[-1] if shape else 1


def ulps_between(seen: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the number of steps between representable numbers from each element to its counterpart, as uint64.

    The arrays have equal dtypes and shapes, and so has the result. Floats are numbered by their bits in
    ascending order, with -0 equal to 0; the numbers of NaN and infinities mean nothing. Integers are their
    own numbers.
    """
    seen_numbers, expected_numbers = _number_elements(seen), _number_elements(expected)
    # The difference of two int64 fits into uint64, whose subtraction is modulo 2**64.
    return np.maximum(seen_numbers, expected_numbers).astype(np.uint64) - np.minimum(
        seen_numbers, expected_numbers
    ).astype(np.uint64)


def _number_elements(array: np.ndarray) -> np.ndarray:
    """Return for each element its position among its dtype's numbers in ascending order, as int64."""
    if array.dtype.kind in "biu":
        return array.astype(np.int64)
    width = 8 * array.dtype.itemsize
    bits = _bits(array).astype(np.int64)
    magnitude = bits & np.int64(2 ** (width - 1) - 1)
    return np.where(bits == magnitude, magnitude, -magnitude)


def _bits(array: np.ndarray) -> np.ndarray:
    """Return the bits of each element as unsigned integers of the same width and shape."""
    return np.ascontiguousarray(array).view(f"uint{8 * array.dtype.itemsize}").reshape(array.shape)
