"""`nki.language`: dtypes, memories, allocation, loops, and functions that name operators.

A function such as `nl.add` is two things: the operator argument of instructions (`op=nl.add`), and, called with tiles,
a function that allocates a result and issues one instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nkw.errors import InvalidArgument, RuleViolation, rule
from simulate.isa.rules import is_tensor
from simulate.memory import MemoryRegion, NKIObject, NkiTensor
from simulate.nki import isa
from simulate.nki.affine import AffineRange
from simulate.nki.arguments import (
    axis_of_expanded_shape,
    judge,
    lies_in_hbm,
    lies_in_memory,
    prints_a_tensor,
    range_is_of_integers,
    resolve_dtype,
    slice_has_a_size,
)
from simulate.nki.grids import (
    NkiBlockGrid,
    NkiGrid,
    NkiTileGrid,
    alloc_blocks,
    alloc_tiles,
    blocks,
    tiles,
)
from simulate.nki.loops import dynamic_range, fori_loop, while_loop
from simulate.nki.missing import not_yet
from simulate.nki.operators import OPERATORS
from simulate.nki.reductions import all, max, mean, min, prod, rms_norm, softmax, sum, var
from simulate.nki.tile_functions import (
    broadcast_to,
    dropout,
    gather_flattened,
    load_transpose2d,
    matmul,
    no_reorder,
    rand,
    random_seed,
    shared_constant,
    transpose,
    where,
)
from simulate.nki.tile_size import tile_size
from simulate.numerics import DTYPES, DType, int64
from simulate.run import current_core, running_level

globals().update(DTYPES)
# Not in the reference; public kernels write nl.bool for nl.bool_ and nl.range for range.
globals().update(bool=DTYPES["bool_"], range=range)

sbuf = MemoryRegion.sbuf
psum = MemoryRegion.psum
private_hbm = MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm
hbm = MemoryRegion.private_hbm


def is_hbm(buffer: Any) -> bool:
    """Return whether a memory is HBM."""
    return buffer in (MemoryRegion.private_hbm, MemoryRegion.shared_hbm)


def is_on_chip(buffer: Any) -> bool:
    """Return whether a memory is SBUF or PSUM."""
    return is_sbuf(buffer) or is_psum(buffer)


def is_psum(buffer: Any) -> bool:
    """Return whether a memory is PSUM."""
    return buffer is MemoryRegion.psum


def is_sbuf(buffer: Any) -> bool:
    """Return whether a memory is SBUF."""
    return buffer is MemoryRegion.sbuf


def ndarray(
    shape: Any, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "", address: Any = None
) -> NkiTensor:
    """Allocate an uninitialised tensor in `buffer`; reading an element before it is written is refused.

    Args:
        shape: Shape; on chip dim 0 is the partition dim.
        dtype: Dtype of the elements.
        buffer: Memory.
        name: Name for reports.
        address: (partition, byte) on chip; None if the compiler places it.

    Raises:
        InvalidArgument: The dtype or the shape is invalid.
        RuleViolation: The memory cannot hold such a tensor.
    """
    return current_core().allocate(shape, dtype, buffer, name, address)


def zeros(shape: Any, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """Allocate a tile in `buffer`, SBUF or PSUM, and fill it with zeros; RuleViolation for HBM."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Any, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """Allocate a tile in `buffer`, SBUF or PSUM, and fill it with ones; RuleViolation for HBM."""
    return full(shape, 1, dtype, buffer, name)


def full(shape: Any, fill_value: Any, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """Allocate a tile in `buffer`, SBUF or PSUM, and fill it with `fill_value` by memset; RuleViolation for HBM."""
    tile = ndarray(shape, dtype, buffer, name)
    if not is_on_chip(buffer):
        on_chip_fill(tile)
    isa.memset(dst=tile, value=fill_value)
    return tile


def zeros_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    """Allocate a tile of zeros with the shape of x; by default in SBUF and of x's dtype."""
    is_tensor("x", x)
    return zeros(x.shape, resolve_dtype(x, dtype), sbuf if buffer is None else buffer, name)


def empty_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    """Allocate an uninitialised tensor with the shape of x; dtype and memory are those of x by default."""
    is_tensor("x", x)
    return ndarray(x.shape, resolve_dtype(x, dtype), x.buffer if buffer is None else buffer, name)


def load(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Copy `src` from HBM to a new SBUF tile by dma_copy, and return the tile; its dtype is src's by default."""
    is_tensor("src", src)
    judge("load", lies_in_hbm("src", src))
    tile = ndarray(src.shape, resolve_dtype(src, dtype))
    isa.dma_copy(dst=tile, src=src)
    return tile


def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Copy the SBUF tile `value` to `dst` in HBM by dma_copy, cast to dst's dtype."""
    judge("store", lies_in_hbm("dst", dst), (lies_in_memory, "value", value, sbuf))
    isa.dma_copy(dst=dst, src=value)


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    """Return a view of x with a new dim of size 1 at position `axis` of the new shape; -1 is the last position.

    Raises:
        RuleViolation: The axis is out of range, or 0 on chip, where the partition dim stays first.
    """
    is_tensor("x", x)
    axis_of_expanded_shape(axis, x.ndim)
    return x.expand_dim(axis if axis >= 0 else x.ndim + 1 + axis)


def ds(start: int, size: int) -> slice:
    """Return the slice of `size` elements from index `start` on; a negative start counts from the end of the dim.

    Raises:
        RuleViolation: The size is no integer of 1 or more, or the start is no integer.
    """
    slice_has_a_size(start, size)
    end = start + size
    return slice(start, None if end == 0 else end)


def affine_range(start: int, stop: int | None = None, step: int = 1) -> Sequence[int]:
    """Return the range of a loop whose iterations are independent; Python runs it unrolled, like `range`.

    Gives a DeprecationWarning from level 0.7 on. Raises RuleViolation if a bound is no integer or step is 0.
    """
    running_level().notice("nl.affine_range")
    range_is_of_integers(start, stop, step)
    return AffineRange(start) if stop is None else AffineRange(start, stop, step)


def sequential_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """Return the range of a loop whose iterations depend on earlier ones; Python runs it unrolled, like `range`.

    Gives a DeprecationWarning from level 0.7 on. Raises RuleViolation if a bound is no integer or step is 0.
    """
    running_level().notice("nl.sequential_range")
    range_is_of_integers(start, stop, step)
    return range(start) if stop is None else range(start, stop, step)


def static_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """Return the range of an unrolled loop, like `range`.

    Gives a DeprecationWarning from level 0.7 on. Raises RuleViolation if a bound is no integer or step is 0.
    """
    running_level().notice("nl.static_range")
    range_is_of_integers(start, stop, step)
    return range(start) if stop is None else range(start, stop, step)


def program_id(axis: int = 0) -> int:
    """Return the number of this physical core in its logical core, 0 or 1; InvalidArgument for an axis other than 0."""
    if axis != 0:
        raise InvalidArgument("NKW-GRID", f"program_id(axis={axis}); the launch grid has one dim, axis 0")
    return current_core().number


def num_programs(axes: int = 0) -> int:
    """Return the number of physical cores that run this kernel together, 1 or 2.

    Raises:
        InvalidArgument: `axes` is not 0, (0,) or None.
    """
    if axes not in (0, (0,), None):
        raise InvalidArgument("NKW-GRID", f"num_programs(axes={axes}); the launch grid has one dim, axis 0")
    return current_core().rank.logical_core_size


def program_ndim() -> int:
    """Return 1 if the kernel was launched with a grid, else 0."""
    return 1 if current_core().has_grid else 0


def shared_identity_matrix(n: int, dtype: Any = DTYPES["uint8"], dst: NkiTensor | None = None) -> NkiTensor:
    """Return an n x n identity matrix, made in SBUF by memset and affine_select.

    Args:
        n: Rows and columns.
        dtype: Dtype of a new tile.
        dst: (n, n) tile that is filled and returned; None allocates one.
    """
    if dst is not None:
        is_tensor("dst", dst)
    tile = dst if dst is not None else ndarray((n, n), dtype)
    fill = ones((n, n), tile.dtype)
    isa.affine_select(
        dst=tile, pattern=[[-1, n]], channel_multiplier=1, on_true_tile=fill, on_false_value=0.0
    )
    return tile


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """Print a prefix and a tensor's values to stdout while the kernel runs; a dry launch prints no values."""
    judge("device_print", (prints_a_tensor, print_prefix, tensor))
    if current_core().dry and isinstance(tensor, NkiTensor):
        print(f"{print_prefix} {tensor.summary()} (dry run: no values)")
    else:
        print(f"{print_prefix} {tensor!r}")


@rule("NKW-FILL")
def on_chip_fill(tile: NkiTensor) -> None:
    """zeros, ones and full fill tiles in SBUF or PSUM; HBM is filled by a DMA from such a tile.

    Raises RuleViolation at every call: the caller has found that the rule is broken.
    """
    raise RuleViolation(
        on_chip_fill, f"buffer={tile.buffer!r}", hint="fill an SBUF tile and nisa.dma_copy it"
    )


globals().update(OPERATORS)


def __getattr__(name: str) -> Any:
    return not_yet("nki.language", name)


__all__ = [
    "DType",
    "MemoryRegion",
    "NKIObject",
    "NkiBlockGrid",
    "NkiGrid",
    "NkiTensor",
    "NkiTileGrid",
    "all",
    "alloc_blocks",
    "alloc_tiles",
    "blocks",
    "broadcast_to",
    "ds",
    "dropout",
    "dynamic_range",
    "fori_loop",
    "gather_flattened",
    "int64",
    "load",
    "load_transpose2d",
    "matmul",
    "max",
    "mean",
    "min",
    "ndarray",
    "no_reorder",
    "np",
    "prod",
    "rand",
    "random_seed",
    "rms_norm",
    "shared_constant",
    "softmax",
    "store",
    "sum",
    "tile_size",
    "tiles",
    "transpose",
    "var",
    "where",
    "while_loop",
    *DTYPES,
    *OPERATORS,
]
