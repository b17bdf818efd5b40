"""Hypothesis strategies for dtypes, tile shapes, arrays and views.

This module needs hypothesis; nothing else of the simulator does. Limits are asked of the chip's record, and
shapes lean towards its borders: one partition, one below, at and above a power of two, all partitions, a full bank.
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
    """Return a strategy of dtypes that a host array can have: float32 to float8, integers of 8 to 32 bits."""
    chosen = [
        dtype
        for dtype in DTYPES.values()
        if not dtype.is_packed
        and dtype not in _NO_NUMBERS
        and ((floats and dtype.is_float) or (integers and not dtype.is_float and dtype != "bool_"))
    ]
    return st.sampled_from(chosen)


def partitions(target: str | None = None, most: int | None = None) -> st.SearchStrategy[int]:
    """Return a strategy of partition counts of a chip, 1 to 128 or to `most`, with limits drawn more often."""
    return _leaning(min(most or 128, target_hardware(target).partitions))


def tile_shapes(
    dtype: Any = "float32",
    target: str | None = None,
    buffer: MemoryRegion = MemoryRegion.sbuf,
    most_free: int = 1024,
) -> st.SearchStrategy[tuple[int, int]]:
    """Return a strategy of shapes (partitions, free) that fit into SBUF, or into one bank of PSUM.

    A shape has at most `most_free` columns.
    """
    chip = target_hardware(target)
    return st.tuples(
        _leaning(chip.partitions), _leaning(min(most_free, _free_limit(chip, as_dtype(dtype), buffer)))
    )


def _free_limit(chip: Hardware, dtype: DType, buffer: MemoryRegion) -> int:
    limit = chip.psum_bank_bytes if buffer is MemoryRegion.psum else capacity_bytes(chip, buffer)
    return limit // dtype.itemsize


def _leaning(most: int) -> st.SearchStrategy[int]:
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
    """Draw a host array for a tile, with values up to `largest`; `integral` draws integers.

    The default shape fits SBUF.

    The values come from a drawn seed, so that large arrays are cheap; they shrink to zeros. `whole` is a deprecated
    name of `integral`.
    """
    if "whole" in renamed:
        warnings.warn("tiles(whole=…) is deprecated; write integral=…", DeprecationWarning, stacklevel=2)
        integral = renamed.pop("whole")
    if renamed:
        raise TypeError(f"tiles has no argument {next(iter(renamed))!r}")
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
    """Draw an index of slices, one per dim, with 1 element or more and a step of 1 to `steps` (1 on partitions)."""
    index = []
    for dim, extent in enumerate(shape):
        start = draw(st.integers(0, extent - 1))
        stop = draw(st.integers(start + 1, extent))
        step = draw(st.integers(1, steps)) if dim else 1
        index.append(slice(start, stop, step))
    return tuple(index)
