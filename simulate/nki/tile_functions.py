"""Functions of `nki.language` that select, move, transpose, multiply or fill tiles, and `no_reorder`.

Results are new SBUF tiles unless a docstring says otherwise; `dtype` is the result's, by default that of the first
tile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from nkw.errors import InvalidArgument, RuleViolation, Unsupported, rule
from simulate.isa.rules import is_flag, is_tensor, lies_in
from simulate.memory import MemoryRegion, NkiTensor, Storage
from simulate.nki import isa
from simulate.nki.arguments import (
    constant_has_a_supported_dtype,
    constants_of_cores_agree,
    judge,
    lies_in_hbm,
    moving_columns_within_limit,
    resolve_dtype,
    selects_between_tiles,
)
from simulate.nki.operators import new_tile, repeat_partition, same_shape
from simulate.numerics import ALU_OPERATORS, as_dtype, cast
from simulate.run import current_core
from simulate.run.location import kernel_line
from simulate.run.machine import as_shape
from simulate.run.stream import Block, Constant, Stream

_SBUF, _PSUM = MemoryRegion.sbuf, MemoryRegion.psum


def where(condition: NkiTensor, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Return a new SBUF tile with x where the condition tile is not zero, else y.

    x and y are tiles of the condition's shape or numbers. The result has the dtype of the first tile of the two, else
    of the condition.

    Raises:
        RuleViolation: The shapes differ. Under the rules of the chip also: the condition is no float tile.
    """
    tiles = [value for value in (x, y) if isinstance(value, NkiTensor)]
    is_tensor("condition", condition)
    judge("where", (selects_between_tiles, condition, x, y))
    dst_dtype = resolve_dtype(tiles[0] if tiles else condition, dtype)
    for tile in tiles:
        same_shape(condition, tile)
    condition_mask = new_tile(condition, "uint8")
    isa.tensor_scalar(dst=condition_mask, data=condition, op0=ALU_OPERATORS["not_equal"], operand0=0.0)
    result = new_tile(condition, dst_dtype)
    if isinstance(y, NkiTensor):
        isa.tensor_copy(dst=result, src=y)
    else:
        isa.memset(dst=result, value=y)
    if isinstance(x, NkiTensor):
        x = _cast(x, dst_dtype)
    isa.tensor_copy_predicated(dst=result, src=x, predicate=condition_mask)
    return result


def dropout(x: NkiTensor, rate: Any, dtype: Any = None) -> NkiTensor:
    """Return a new SBUF tile with elements of x replaced by zero with probability `rate`; the others are not scaled."""
    result = new_tile(x)
    isa.dropout(dst=result, data=x, prob=rate)
    return _cast(result, resolve_dtype(x, dtype))


def random_seed(seed: NkiTensor) -> None:
    """Seed the Vector engine's random generator, from which `rand` draws, with a (1, 1) tile of a 32-bit dtype."""
    isa.set_rng_seed(src_seeds=seed)


def rand(shape: Any, dtype: Any, buffer: MemoryRegion = _SBUF, name: str = "") -> NkiTensor:
    """Return a new tile of `buffer` with uniform random numbers, float32 in [0, 1) before the cast to dtype.

    They come from rand2 if the chip has it, else from 24 bits of rng. Both use the Vector engine, so that random_seed
    has an effect on every chip.
    """
    core = current_core()
    result = core.allocate(shape, dtype, buffer, name)
    if core.hardware.rand2:
        isa.rand2(dst=result, min=0.0, max=1.0)
        return result
    bits = new_tile(result, "uint32")
    isa.rng(dst=bits)
    isa.tensor_scalar(dst=bits, data=bits, op0=ALU_OPERATORS["right_shift"], operand0=8)
    isa.tensor_scalar(dst=result, data=bits, op0=ALU_OPERATORS["multiply"], operand0=2.0**-24)
    return result


def broadcast_to(x: NkiTensor, shape: Sequence[int], dtype: Any = None) -> NkiTensor:
    """Return x with dims of size 1 repeated to `shape`, of the same rank, as a new SBUF tile.

    Returns x itself if shape and dtype do not change. A single partition is repeated by nc_stream_shuffle, a quadrant
    at a time.

    Raises:
        RuleViolation: x is not on chip, or a dim is neither of size 1 nor of the new size.
    """
    is_tensor("x", x)
    lies_in("x", x, _SBUF, _PSUM)
    sizes, dst_dtype = as_shape(shape), resolve_dtype(x, dtype)
    repeatable(x, sizes)
    if sizes == x.shape:
        return _cast(x, dst_dtype)
    view = x
    for dim in range(1, x.ndim):
        if x.shape[dim] != sizes[dim]:
            view = view.broadcast(dim, sizes[dim])
    if x.shape[0] == sizes[0]:
        result = new_tile(x, dst_dtype, sizes)
        isa.tensor_copy(dst=result, src=view)
        return result
    return _cast(repeat_partition(view, sizes[0]), dst_dtype)


def transpose(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Return the 2D SBUF tile x of shape (P, F) as a new PSUM tile (F, P), transposed on the Tensor engine."""
    is_tensor("x", x)
    core = current_core()
    shape = (x.shape[-1], x.shape[0])
    transposed = core.allocate(shape, x.dtype, _PSUM)
    isa.nc_transpose(dst=transposed, data=x, engine=isa.engine.tensor)
    if dtype is None or as_dtype(dtype) == x.dtype:
        return transposed
    result = core.allocate(shape, dtype, _PSUM)
    isa.tensor_copy(dst=result, src=transposed)
    return result


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False) -> NkiTensor:
    """Return x @ y as a new float32 PSUM tile; x is (M, K), or (K, M) with `transpose_x`, which saves the transpose.

    y is (K, N) with K on its partitions and N up to 512.
    """
    is_tensor("x", x)
    is_tensor("y", y)
    judge("matmul", (is_flag, "transpose_x", transpose_x), (moving_columns_within_limit, y))
    stationary = x
    if not transpose_x:
        stationary = new_tile(x, None, (x.shape[-1], x.shape[0]))
        isa.tensor_copy(dst=stationary, src=transpose(x))
    result = current_core().allocate((stationary.free_size, y.free_size), "float32", _PSUM)
    isa.nc_matmul(dst=result, stationary=stationary, moving=y)
    return result


def no_reorder() -> AbstractContextManager[None]:
    """Return a context manager: instructions of its `with` block run in program order.

    This changes the predicted time only, not values.
    """
    core = current_core()
    block = Block(kernel_line())
    core.stream.blocks.append(block)
    return _in_order(core.stream, block)


@contextmanager
def _in_order(stream: Stream, block: Block) -> Iterator[None]:
    first = len(stream)
    block.entered = True
    stream.open_blocks += 1
    try:
        yield
    finally:
        stream.open_blocks -= 1
    stream.requested.extend((index - 1, index) for index in range(first + 1, len(stream)))


def load_transpose2d(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Return a 2D HBM tensor (M, N) as a new SBUF tile (N, M), transposed on its way by dma_transpose."""
    is_tensor("src", src)
    judge("load_transpose2d", lies_in_hbm("src", src))
    tile = current_core().allocate((src.shape[-1], src.shape[0]), src.dtype)
    isa.dma_transpose(dst=tile, src=src)
    return _cast(tile, resolve_dtype(src, dtype))


def gather_flattened(data: NkiTensor, indices: NkiTensor, axis: int = 0, dtype: Any = None) -> NkiTensor:
    """Return data[p, indices[p, ...]] over flattened free dims as a new SBUF tile of indices' shape, by nc_n_gather.

    indices are uint32, or int32, whose bits are taken as uint32.

    Raises:
        Unsupported: `axis` is not 0; the reference documents nothing else.
    """
    if axis != 0:
        raise Unsupported("NKW-UNSUPPORTED", f"nl.gather_flattened(axis={axis!r}): only axis=0 is documented")
    is_tensor("data", data)
    is_tensor("indices", indices)
    result = new_tile(data, None, indices.shape)
    numbers = indices.view("uint32") if indices.dtype == "int32" else indices
    isa.nc_n_gather(dst=result, data=data, indices=numbers)
    return _cast(result, resolve_dtype(data, dtype))


def shared_constant(constant: Any) -> NkiTensor:
    """Return a shared HBM tensor that has the contents of a NumPy array, or of a .npy file, when the kernel starts.

    An array without dims gives shape (1,).

    Raises:
        InvalidArgument: The constant is no array with elements, or the file cannot be read.
        RuleViolation: The dtype is not in the reference's list, or the cores of a logical core give different arrays.
    """
    core = current_core()
    array = _array(constant)
    dtype = as_dtype(array.dtype)
    index = core.take_constant()
    judge(
        "shared_constant",
        (constant_has_a_supported_dtype, dtype),
        (constants_of_cores_agree, core.rank, core.number, index, array),
    )
    stored_dtype = core.stored_dtype(dtype)
    shape = array.shape or (1,)
    contents = (
        np.empty(0, np.uint8)
        if core.dry
        else np.array(cast(np.ascontiguousarray(array), dtype, stored_dtype))
    )
    storage = Storage(shape, stored_dtype, MemoryRegion.shared_hbm, "constant", array=contents)
    core.rank.tensors.add(storage)
    if core.dry:
        core.rank.values.add_argument(storage, array)
    else:
        constants = core.rank.tensors.constants
        constants[storage.serial] = Constant(contents, from_file=not isinstance(constant, np.ndarray))
    return NkiTensor(shape, stored_dtype, storage)


def _array(constant: Any) -> np.ndarray:
    if isinstance(constant, (str, os.PathLike)):
        try:
            return np.load(constant, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InvalidArgument("NKW-CONSTANT", f"shared_constant of {constant}: {error}") from None
    if not isinstance(constant, np.ndarray) or constant.size == 0:
        raise InvalidArgument(
            "NKW-CONSTANT",
            f"shared_constant of {type(constant).__name__}; give a numpy array with elements, or a .npy path",
        )
    return constant


def _cast(x: NkiTensor, dtype: Any) -> NkiTensor:
    if as_dtype(dtype) == x.dtype:
        return x
    result = new_tile(x, dtype)
    isa.tensor_copy(dst=result, src=x)
    return result


@rule("NKW-NL-BROADCAST")
def repeatable(x: NkiTensor, shape: tuple[int, ...]) -> None:
    """broadcast_to keeps the rank, and every dim keeps its size or is repeated from size 1.

    Raises RuleViolation otherwise.
    """
    if len(shape) != x.ndim or any(have not in (1, want) for have, want in zip(x.shape, shape)):
        raise RuleViolation(repeatable, f"{x.shape} to {shape}", hint="expand_dims first, or reshape")
