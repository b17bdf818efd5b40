"""Functions of `nki.language` that select, move, transpose, multiply or fill tiles, and `no_reorder`."""

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
    dtype_or_that_of,
    judge,
    lies_in_hbm,
    moving_columns_within_limit,
    selects_between_tiles,
)
from simulate.nki.operators import new_tile, repeated_partition, same_shape
from simulate.numerics import ALU_OPERATORS, as_dtype, cast
from simulate.run import current_core
from simulate.run.location import kernel_line
from simulate.run.machine import as_shape
from simulate.run.stream import Block, Constant, Stream

_SBUF, _PSUM = MemoryRegion.sbuf, MemoryRegion.psum


def where(condition: NkiTensor, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """x where the condition tile is not zero, else y; x and y are tiles or numbers."""
    tiles = [value for value in (x, y) if isinstance(value, NkiTensor)]
    is_tensor("condition", condition)
    judge("where", (selects_between_tiles, condition, x, y))
    kind = dtype_or_that_of(tiles[0] if tiles else condition, dtype)
    for tile in tiles:
        same_shape(condition, tile)
    chosen = new_tile(condition, "uint8")
    isa.tensor_scalar(dst=chosen, data=condition, op0=ALU_OPERATORS["not_equal"], operand0=0.0)
    result = new_tile(condition, kind)
    if isinstance(y, NkiTensor):
        isa.tensor_copy(dst=result, src=y)
    else:
        isa.memset(dst=result, value=y)
    if isinstance(x, NkiTensor):
        x = _cast(x, kind)
    isa.tensor_copy_predicated(dst=result, src=x, predicate=chosen)
    return result


def dropout(x: NkiTensor, rate: Any, dtype: Any = None) -> NkiTensor:
    """x with elements replaced by zero with probability `rate`, not scaled."""
    result = new_tile(x)
    isa.dropout(dst=result, data=x, prob=rate)
    return _cast(result, dtype_or_that_of(x, dtype))


def random_seed(seed: NkiTensor) -> None:
    """Seed the Vector engine's generator with a (1, 1) tile of 32 bits; `rand` draws from it."""
    isa.set_rng_seed(src_seeds=seed)


def rand(shape: Any, dtype: Any, buffer: MemoryRegion = _SBUF, name: str = "") -> NkiTensor:
    """A tile of uniform numbers, float32 in [0, 1) before the cast to dtype.

    rand2 where the chip has it, else 24 of rng's bits; both in the Vector engine, so that random_seed has an effect on
    every chip.
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
    """x with dims of size 1 repeated to `shape`, of the same rank; x itself if nothing changes.

    A single partition is repeated by nc_stream_shuffle, a quadrant at a time.
    """
    is_tensor("x", x)
    lies_in("x", x, _SBUF, _PSUM)
    sizes, kind = as_shape(shape), dtype_or_that_of(x, dtype)
    repeatable(x, sizes)
    if sizes == x.shape:
        return _cast(x, kind)
    view = x
    for dim in range(1, x.ndim):
        if x.shape[dim] != sizes[dim]:
            view = view.broadcast(dim, sizes[dim])
    if x.shape[0] == sizes[0]:
        result = new_tile(x, kind, sizes)
        isa.tensor_copy(dst=result, src=view)
        return result
    return _cast(repeated_partition(view, sizes[0]), kind)


def transpose(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A 2D SBUF tile with partitions and free dim swapped, in PSUM, on the Tensor engine."""
    is_tensor("x", x)
    core = current_core()
    shape = (x.shape[-1], x.shape[0])
    turned = core.allocate(shape, x.dtype, _PSUM)
    isa.nc_transpose(dst=turned, data=x, engine=isa.engine.tensor)
    if dtype is None or as_dtype(dtype) == x.dtype:
        return turned
    result = core.allocate(shape, dtype, _PSUM)
    isa.tensor_copy(dst=result, src=turned)
    return result


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False) -> NkiTensor:
    """x @ y in PSUM; x is (M, K), or (K, M) with `transpose_x`, which saves the transpose."""
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
    """Instructions of a `with` block run in program order; values never depend on it, only time does."""
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
    """A 2D HBM tensor, transposed on its way into a new SBUF tile."""
    is_tensor("src", src)
    judge("load_transpose2d", lies_in_hbm("src", src))
    tile = current_core().allocate((src.shape[-1], src.shape[0]), src.dtype)
    isa.dma_transpose(dst=tile, src=src)
    return _cast(tile, dtype_or_that_of(src, dtype))


def gather_flattened(data: NkiTensor, indices: NkiTensor, axis: int = 0, dtype: Any = None) -> NkiTensor:
    """data[p, indices[p, ...]] over flattened free dims, by nc_n_gather; indices are uint32, or int32 bits.

    What an `axis` other than 0 means is not documented.
    """
    if axis != 0:
        raise Unsupported("NKW-UNSUPPORTED", f"nl.gather_flattened(axis={axis!r}): only axis=0 is documented")
    is_tensor("data", data)
    is_tensor("indices", indices)
    result = new_tile(data, None, indices.shape)
    numbers = indices.view("uint32") if indices.dtype == "int32" else indices
    isa.nc_n_gather(dst=result, data=data, indices=numbers)
    return _cast(result, dtype_or_that_of(data, dtype))


def shared_constant(constant: Any) -> NkiTensor:
    """A shared HBM tensor that holds a numpy array, or the array in a .npy file, from the start of the kernel."""
    core = current_core()
    array = _array(constant)
    dtype = as_dtype(array.dtype)
    index = core.take_constant()
    judge(
        "shared_constant",
        (constant_has_a_supported_dtype, dtype),
        (constants_of_cores_agree, core.rank, core.number, index, array),
    )
    kept = core.stored_dtype(dtype)
    shape = array.shape or (1,)
    held = np.empty(0, np.uint8) if core.dry else np.array(cast(np.ascontiguousarray(array), dtype, kept))
    storage = Storage(shape, kept, MemoryRegion.shared_hbm, "constant", array=held)
    core.rank.tensors.add(storage)
    if core.dry:
        core.rank.values.add_argument(storage, array)
    else:
        constants = core.rank.tensors.constants
        constants[storage.serial] = Constant(held, from_file=not isinstance(constant, np.ndarray))
    return NkiTensor(shape, kept, storage)


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
    """broadcast_to keeps the rank, and every dim keeps its size or is repeated from size 1."""
    if len(shape) != x.ndim or any(have not in (1, want) for have, want in zip(x.shape, shape)):
        raise RuleViolation(repeatable, f"{x.shape} to {shape}", hint="expand_dims first, or reshape")
