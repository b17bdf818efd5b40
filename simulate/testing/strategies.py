"""Hypothesis strategies for dtypes, tile shapes, arrays and views.

This module needs hypothesis; nothing else of the simulator does. Limits come from the chip's record. Extents
near limits are drawn more often: one below, at and above each power of two and the largest extent.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from hypothesis import strategies as st

from simulate.hardware import Hardware
from simulate.memory import MemoryRegion
from simulate.numerics import DTYPES, DType, as_dtype
from simulate.run import target_hardware
from simulate.run.machine import capacity_bytes

_NO_NUMBERS = frozenset({"float8_e8m0fnu", "tfloat32"})


def dtypes(floats: bool = True, integers: bool = True) -> st.SearchStrategy[DType]:
    """Return a strategy of dtypes that a host array can have, without bool and packed dtypes.

    Args:
        floats: Whether to include floats, from float32 to 8-bit ones.
        integers: Whether to include integers of 8 to 32 bits.
    """
    chosen = [
        dtype
        for dtype in DTYPES.values()
        if not dtype.is_packed
        and dtype not in _NO_NUMBERS
        and ((floats and dtype.is_float) or (integers and not dtype.is_float and dtype != "bool_"))
    ]
    return st.sampled_from(chosen)


def partitions(target: str | None = None, most: int | None = None) -> st.SearchStrategy[int]:
    """Return a strategy of numbers of partitions, from 1 to the smallest of the chip's number, 128 and `most`.

    Values near powers of two and near the largest are drawn more often.
    """
    return _draw_near_limits(min(most or 128, target_hardware(target).partitions))


def tile_shapes(
    dtype: Any = "float32",
    target: str | None = None,
    buffer: MemoryRegion = MemoryRegion.sbuf,
    most_free: int = 1024,
) -> st.SearchStrategy[tuple[int, int]]:
    """Return a strategy of shapes (partitions, columns) that fit into SBUF, or into one bank of PSUM.

    Args:
        dtype: Dtype of the tile.
        target: The chip; None for the chip of the environment.
        buffer: SBUF or PSUM.
        most_free: Largest number of columns.
    """
    chip = target_hardware(target)
    return st.tuples(
        _draw_near_limits(chip.partitions),
        _draw_near_limits(min(most_free, _get_free_limit(chip, as_dtype(dtype), buffer))),
    )


def _get_free_limit(chip: Hardware, dtype: DType, buffer: MemoryRegion) -> int:
    limit = chip.psum_bank_bytes if buffer is MemoryRegion.psum else capacity_bytes(chip, buffer)
    return limit // dtype.itemsize


def _draw_near_limits(most: int) -> st.SearchStrategy[int]:
    powers = [2**n for n in range(most.bit_length())]
    borders = sorted(
        {near for power in [*powers, most] for near in (power - 1, power, power + 1) if 1 <= near <= most}
    )
    return st.one_of(st.sampled_from(borders), st.integers(1, most))


@st.composite
def tiles(
    draw: st.DrawFn,
    shape: st.SearchStrategy[tuple[int, ...]] | tuple[int, ...] | None = None,
    dtype: st.SearchStrategy[DType] | Any = "float32",
    largest: float = 8.0,
    integral: bool = False,
    **renamed: bool,
) -> np.ndarray:
    """Draw a host array for a tile, with values from -`largest` to `largest`, from 0 for unsigned dtypes.

    The values come from a drawn seed, so that large arrays are cheap; they shrink to zeros.

    Args:
        draw: Hypothesis passes it.
        shape: A shape or a strategy of shapes; None for shapes that fit SBUF.
        dtype: A dtype or a strategy of dtypes.
        largest: Largest magnitude, cut to the range of the dtype.
        integral: Whether floats are integers.
        renamed: `whole`, a deprecated name of `integral`.

    Raises:
        TypeError: An argument has another name.
    """
    if "whole" in renamed:
        warnings.warn("tiles(whole=…) is deprecated; write integral=…", DeprecationWarning, stacklevel=2)
        integral = renamed.pop("whole")
    if renamed:
        raise TypeError(
            f"tiles has no argument {next(iter(renamed))!r}; known are shape, dtype, largest and integral"
        )
    element = as_dtype(draw(dtype) if isinstance(dtype, st.SearchStrategy) else dtype)
    if shape is None:
        shape = tile_shapes(element)
    sizes = draw(shape) if isinstance(shape, st.SearchStrategy) else shape
    seed = draw(st.integers(0, 2**16))
    if not seed:
        return np.zeros(sizes, element.storage)
    random = np.random.default_rng(seed)
    most = min(largest, element.max)
    low = 0.0 if element in ("uint8", "uint16", "uint32") else -most
    if integral or not element.is_float:
        return random.integers(int(low), int(most) + 1, sizes).astype(element.storage)
    return random.uniform(low, most, sizes).astype(element.storage)


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...], steps: int = 4) -> tuple[slice, ...]:
    """Draw an index of slices into a tile, one for each dim, each with at least one element.

    Args:
        draw: Hypothesis passes it.
        shape: The shape of the tile.
        steps: Largest step of a slice; the step of dim 0, the partitions, is 1.
    """
    index = []
    for dim, extent in enumerate(shape):
        start = draw(st.integers(0, extent - 1))
        stop = draw(st.integers(start + 1, extent))
        step = draw(st.integers(1, steps)) if dim else 1
        index.append(slice(start, stop, step))
    return tuple(index)
