"""`neuronxcc.nki.language`: dtypes, memories, index expressions, loops, and functions on tiles.

Functions that return a tile issue their instruction once its target is known: the tile to which the result is
assigned, else a fresh one. `**_` takes options of the compiler that change no value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nkw.errors import InvalidArgument
from simulate.beta1 import arithmetic, elementwise, reductions
from simulate.beta1.derived import gather_flattened
from simulate.beta1.elementwise import copy
from simulate.beta1.indices import arange, mgrid
from simulate.beta1.isa_matmul import nc_transpose
from simulate.beta1.loops import (
    affine_range,
    nc,
    num_programs,
    program_id,
    program_ndim,
    sequential_range,
    spmd_dim,
    static_range,
)
from simulate.beta1.missing import not_in_beta1
from simulate.beta1.movement import (
    load,
    load_transpose2d,
    loop_reduce,
    matmul,
    mean_square_norm,
    shared_constant,
    store,
)
from simulate.beta1.operators import BINARY, UNARY
from simulate.beta1.program import current
from simulate.beta1.region import Region
from simulate.beta1.tile import BlockTensor, Tile, allocate_blocks
from simulate.memory import MemoryRegion
from simulate.nki.language import ds, tile_size
from simulate.nki.language import rand as uniform
from simulate.nki.operators import name_operator
from simulate.numerics import ALU_OPERATORS, DTYPES, as_dtype

globals().update(DTYPES)

sbuf = MemoryRegion.sbuf
psum = MemoryRegion.psum
private_hbm = MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm
hbm = MemoryRegion.private_hbm
rms_norm = mean_square_norm
where = arithmetic.where
softmax = reductions.softmax
var = reductions.variance


class par_dim(int):
    """Size of the partition dim in a shape; the dims before it are block dims, each block a tile of its own."""


def ndarray(shape: Any, dtype: Any, *, buffer: Any = sbuf, name: str = "", **_: Any) -> Tile | BlockTensor:
    """Allocate an uninitialised tensor: a Tile, or on chip with dims before nl.par_dim a BlockTensor.

    `buffer` is a memory, or a placement of `nki.compiler`, of which only the memory counts.

    Raises:
        InvalidArgument: The shape is no tuple of positive integers, or has more than one nl.par_dim.
        RuleViolation: The memory cannot hold the shape.
    """
    memory = getattr(buffer, "memory", buffer)
    try:
        sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        marked = [dim for dim, size in enumerate(sizes) if isinstance(size, par_dim)]
        numbers = tuple(int(size) for size in sizes)
    except (TypeError, ValueError):
        raise InvalidArgument("NKW-SHAPE", f"shape {shape!r:.80} is not a tuple of integers") from None
    if len(marked) > 1:
        raise InvalidArgument(
            "NKW-SHAPE", f"shape {shape!r:.80} has more than one nl.par_dim; mark the partition dim only"
        )
    on_chip = isinstance(memory, MemoryRegion) and memory.on_chip
    axis = marked[0] if marked and on_chip else 0
    program = current()
    program.settle()
    return allocate_blocks(numbers, axis, lambda tile: program.fresh(tile, dtype, memory, name))


def zeros(shape: Any, dtype: Any, *, buffer: Any = sbuf, name: str = "", **_: Any) -> Tile | BlockTensor:
    """Allocate a tensor of zeros in SBUF or PSUM: a Tile, or with dims before nl.par_dim a BlockTensor.

    In PSUM nothing is written: the first matmul overwrites the elements, and a memset is issued if another
    instruction reads them before. Raises RuleViolation for a tensor in HBM, and InvalidArgument for a wrong shape.
    """
    tensor = ndarray(shape, dtype, buffer=buffer, name=name)
    if tensor.buffer is not MemoryRegion.psum:
        return _fill_tensor(tensor, 0)
    for tile in tensor.tiles if isinstance(tensor, BlockTensor) else [tensor]:
        current().start_at_zero(tile.tensor)
    return tensor


def ones(shape: Any, dtype: Any, *, buffer: Any = sbuf, name: str = "", **_: Any) -> Tile | BlockTensor:
    """Allocate a tensor in SBUF or PSUM, filled with 1 by memset: a Tile, or with dims before nl.par_dim a BlockTensor.

    Raises RuleViolation for a tensor in HBM, and InvalidArgument for a wrong shape.
    """
    return full(shape, 1, dtype, buffer=buffer, name=name)


def full(
    shape: Any, fill_value: Any, dtype: Any, *, buffer: Any = sbuf, name: str = "", **_: Any
) -> Tile | BlockTensor:
    """Allocate a tensor in SBUF or PSUM and fill it by memset: a Tile, or with dims before nl.par_dim a BlockTensor.

    Raises RuleViolation for a tensor in HBM, and InvalidArgument for a wrong shape.
    """
    return _fill_tensor(ndarray(shape, dtype, buffer=buffer, name=name), fill_value)


def _fill_tensor(tensor: Tile | BlockTensor, value: Any) -> Tile | BlockTensor:
    """Assign a number to all elements of a tensor, and return the tensor."""
    tensor[...] = value
    return tensor


def zeros_like(a: Any, dtype: Any = None, *, buffer: Any = None, name: str = "", **_: Any) -> Any:
    """Allocate a tensor of zeros with the shape of `a`, and its dtype and memory unless they are given; not in HBM."""
    return zeros(_get_shape(a), dtype or a.dtype, buffer=buffer or a.buffer, name=name)


def empty_like(a: Any, dtype: Any = None, *, buffer: Any = None, name: str = "", **_: Any) -> Any:
    """Allocate an uninitialised tensor with the shape of `a`, and its dtype and memory unless they are given."""
    return ndarray(_get_shape(a), dtype or a.dtype, buffer=buffer or a.buffer, name=name)


def _get_shape(a: Any) -> tuple[int, ...]:
    """Return the shape of a tensor as `ndarray` takes it, with par_dim after block dims."""
    if not isinstance(a, BlockTensor):
        return a.shape
    axis = len(a.blocks)
    return (*a.shape[:axis], par_dim(a.shape[axis]), *a.shape[axis + 1 :])


def expand_dims(data: Tile, axis: int) -> Tile:
    """Return a view of data with a dim of size 1 before `axis`; -1 appends it."""
    return data.expand_dims(axis)


def broadcast_to(src: Tile, *, shape: Any, **_: Any) -> Tile:
    """Return src repeated to `shape`: along free dims as a view, over partitions by a copy."""
    return elementwise.broadcast_to(src, tuple(shape))


def transpose(x: Tile, *, dtype: Any = None, mask: Any = None, **_: Any) -> Tile:
    """Return a 2-D tile transposed, in PSUM, by the Tensor engine."""
    return nc_transpose(x, mask=mask, dtype=dtype)


def dropout(x: Tile, rate: Any, *, dtype: Any = None, mask: Any = None, **_: Any) -> Tile:
    """Return a copy of x in which each element is 0 with probability `rate`."""
    return elementwise.elementwise("dropout", {"data": x}, {"prob": rate}, {}, dtype, mask)


def rand(shape: Any, dtype: Any = "float32", **_: Any) -> Tile:
    """Return a tile of uniform numbers in [0, 1) from nl.rand's generator of NKI 0.6; the bits are not Beta 1's."""
    program = current()
    program.settle()
    return program.tile.from_region(Region.from_tensor(uniform(shape, dtype)))


def static_cast(value: Any, dtype: Any) -> Any:
    """Return a value as a NumPy array in a dtype of this module; a tile as a copy in that dtype."""
    if isinstance(value, Tile):
        return copy(value, dtype=dtype)
    return np.asarray(value).astype(as_dtype(dtype).storage)


def shared_identity_matrix(n: int, dtype: Any = "uint8", **_: Any) -> Tile:
    """Return an n x n identity matrix as a constant tensor in HBM."""
    return shared_constant(np.identity(n, np.float32), dtype)


def device_print(prefix: str, x: Any, **_: Any) -> None:
    """Print a prefix and a tensor's values to stdout while the kernel runs, after issuing a waiting instruction."""
    current().settle()
    print(f"{prefix} {x!r}")


@dataclass(frozen=True, slots=True)
class FloatLimits:
    """Smallest and largest finite value of a float dtype."""

    min: float
    max: float


def finfo(dtype: Any) -> FloatLimits:
    """Return the finite limits of a float dtype. Raises InvalidArgument for other dtypes."""
    element = as_dtype(dtype)
    if not element.is_float:
        raise InvalidArgument("NKW-DTYPE", f"nl.finfo({element}); it takes a floating-point dtype")
    return FloatLimits(-element.max, element.max)


fp32 = finfo("float32")


def _build_binary(name: str) -> Callable[..., Tile]:
    """Return the function of `nki.language` for a binary operator by name."""

    def function(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, **_: Any) -> Tile:
        return arithmetic.apply_binary(name, x, y, dtype, mask)

    return name_operator(
        function, name, f"x {name} y, element by element with broadcasting; also an operator argument."
    )


def _build_unary(name: str) -> Callable[..., Tile]:
    """Return the function of `nki.language` for a unary function by name."""

    def function(x: Tile, *, dtype: Any = None, mask: Any = None, **_: Any) -> Tile:
        return arithmetic.apply_unary(name, x, dtype, mask)

    return name_operator(function, name, f"{name}(x), element by element; also an operator argument.")


def _build_reduction(name: str, operator: str) -> Callable[..., Tile]:
    """Return the function of `nki.language` that reduces free dims.

    Args:
        name: The name of the reduction in its docstring.
        operator: The ALU operator.
    """

    def function(
        x: Tile, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False, **_: Any
    ) -> Tile:
        return reductions.reduce(ALU_OPERATORS[operator], x, axis, dtype, mask, keepdims=keepdims)

    return name_operator(function, operator, f"The {name} over free dims; also an operator argument.")


def mean(
    x: Tile, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False, **_: Any
) -> Tile:
    """Return the mean over the free dims `axis`, summed in float32; with a mask, over the selected elements."""
    return reductions.mean(x, axis, dtype, mask, keepdims)


def negative(x: Tile, *, dtype: Any = None, mask: Any = None, **_: Any) -> Tile:
    """Return -x as a tile, by a multiplication with -1."""
    return arithmetic.apply_binary("multiply", x, -1.0, dtype, mask)


def logical_not(x: Tile, *, dtype: Any = None, mask: Any = None, **_: Any) -> Tile:
    """Return a tile with 1 where x is 0, else 0, of dtype bool unless `dtype` is given."""
    return arithmetic.apply_binary("equal", x, 0, dtype, mask)


globals().update({name: _build_binary(name) for name in BINARY})
globals().update({name: _build_unary(name) for name in (*UNARY, "invert") if name != "copy"})
copy.nki_operator = "copy"  # type: ignore[attr-defined]
sum = _build_reduction("sum", "add")
prod = _build_reduction("product", "multiply")
max = _build_reduction("maximum", "maximum")
min = _build_reduction("minimum", "minimum")
all = _build_reduction("logical and", "logical_and")


def __getattr__(name: str) -> Any:
    return not_in_beta1("neuronxcc.nki.language", name)


__all__ = [
    "BlockTensor",
    "Tile",
    "affine_range",
    "arange",
    "broadcast_to",
    "copy",
    "ds",
    "gather_flattened",
    "load",
    "load_transpose2d",
    "loop_reduce",
    "matmul",
    "mgrid",
    "nc",
    "ndarray",
    "num_programs",
    "par_dim",
    "program_id",
    "program_ndim",
    "sequential_range",
    "shared_constant",
    "spmd_dim",
    "static_range",
    "store",
    "tile_size",
]
