"""Tensors of Beta 1 kernels: tiles that instructions return, and tensors with block dims.

A `Tile` is a tensor, a part of one, or the result of an instruction that has not been issued yet. A
`BlockTensor` is what `nl.ndarray((4, nl.par_dim(128), 512), …)` makes on chip: a list of tiles under one
name, one per block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import Any, TypeVar

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.beta1.indices import Index
from simulate.beta1.masks import Box, normalise_mask
from simulate.beta1.program import Pending, current, issue, remark, running
from simulate.beta1.region import Region, cut_pieces, select_by_index, select_by_slices
from simulate.isa import rules
from simulate.memory import MemoryRegion, NKIObject, NkiTensor
from simulate.memory.indexing import fill_ellipsis, normalise_index
from simulate.memory.validity import EMPTY
from simulate.numerics import DType, as_dtype
from simulate.run.location import kernel_line

_Tile = TypeVar("_Tile", bound="Tile")


class Tile(NKIObject):
    """Tensor, part of a tensor, or result of an instruction that waits for its target; without Python's operators."""

    __slots__ = ("_pending", "_region", "buffer", "dtype", "shape")

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        buffer: MemoryRegion,
        region: Region | None = None,
        pending: Pending | None = None,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.buffer = buffer
        self._region = region
        self._pending = pending

    @classmethod
    def from_region(cls: type[_Tile], region: Region) -> _Tile:
        """Return a tile that is a region of a tensor."""
        return cls(region.shape, region.tensor.dtype, region.tensor.buffer, region)

    @property
    def pending(self) -> Pending | None:
        """Instruction that will write the tile, None if there is none or it was issued."""
        pending = self._pending
        return pending if pending is None or pending.region is None else None

    @property
    def region(self) -> Region:
        """Part of a tensor that the tile is; reading it issues an instruction that waits to write the tile."""
        region, pending = self._region, self._pending
        if region is None and pending is not None:
            if pending.region is None:
                current().settle()
            region = self._region = pending.region
        assert region is not None
        return region

    @property
    def tensor(self) -> NkiTensor:
        """The tile as a tensor of the instruction book; reading it issues the instruction that waits to write it."""
        return self.region.view()

    @property
    def operand(self) -> NkiTensor:
        """The tile as a tensor that an instruction reads: elements that a mask left out are defined first."""
        return current().readable(self.region)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize

    # -- indexing --------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Tile:
        return type(self).from_region(self._select_region(key))

    def _select_region(self, key: Any) -> Region:
        """Return the region `tile[key]`: by slices and integers, by index expressions, or by a tile of row numbers.

        Raises RuleViolation or OutOfBounds for a key of another form or outside of the tile; index expressions are
        checked later.
        """
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(element, EllipsisType) for element in keys):
            if len(keys) == 1:
                return self.region
            keys = fill_ellipsis(keys, self.ndim)
        if any(isinstance(element, (Index, Tile)) for element in keys):
            plain = tuple(element.operand if isinstance(element, Tile) else element for element in keys)
            return select_by_index(self.tensor, plain)
        return select_by_slices(self.tensor, keys) or Region.from_tensor(self.tensor[keys])

    def __setitem__(self, key: Any, value: Any) -> None:
        if (
            isinstance(value, Tile)
            and value.pending is None
            and value.region.covers(self._select_region(key))
        ):
            return  # `t[key] += x` has written in place, and Python assigns the result to t[key]
        assign(self._select_region(key), value)

    # -- views -----------------------------------------------------------------------------------------------

    def reshape(self, shape: Sequence[int]) -> Tile:
        """Return a view of the same elements in another shape; gives a remark if a filled tile gets more free dims."""
        tensor = self.tensor
        other = tensor.reshape(tuple(shape))
        filled = tensor.buffer.on_chip and tensor.storage.validity.uniform != EMPTY
        if filled and _count_wide_dims(other.shape[1:]) > _count_wide_dims(tensor.shape[1:]) > 0:
            remark("NKW-BETA1-RESHAPE", f"{tensor.describe()} is filled, and reshaped to {other.shape}")
        return type(self).from_region(Region.from_tensor(other))

    def expand_dims(self, axis: int) -> Tile:
        """Return a view with a dim of size 1 before `axis`; -1 appends it."""
        return type(self).from_region(
            Region.from_tensor(self.tensor.expand_dim(axis if axis >= 0 else self.ndim + 1 + axis))
        )

    def view(self, dtype: Any) -> Tile:
        """Return a view of the same bytes as elements of another dtype."""
        return type(self).from_region(
            Region.from_tensor(self.tensor.view(current().core.stored_dtype(as_dtype(dtype))))
        )

    bitcast = view

    def __repr__(self) -> str:
        return (
            repr(self.tensor) if self.pending is None or running() else f"<result {self.shape} {self.dtype}>"
        )


class BlockTensor(NKIObject):
    """On-chip tensor with block dims before the partition dim; each block is a tile of its own.

    blocks: sizes of the block dims. tiles: one tile per block, in row-major order. shape: block dims and tile dims.
    """

    __slots__ = ("blocks", "dtype", "shape", "tiles")

    def __init__(self, blocks: tuple[int, ...], tiles: list[Tile]) -> None:
        self.blocks = blocks
        self.tiles = tiles
        self.shape = blocks + tiles[0].shape
        self.dtype = tiles[0].dtype

    @property
    def ndim(self) -> int:
        """Number of dims, block dims included."""
        return len(self.shape)

    @property
    def buffer(self) -> MemoryRegion:
        """Memory of the tiles."""
        return self.tiles[0].buffer

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(element, EllipsisType) for element in keys):
            keys = fill_ellipsis(keys, self.ndim)
        block: Any = self
        depth = 0
        for name in keys[: len(self.blocks)]:
            if all(isinstance(other, slice) and other == slice(None) for other in keys[depth:]):
                return block
            block_by_number(name)
            block = block._select_block(normalise_index(name, self.blocks[depth], depth))
            depth += 1
        return block[keys[depth:]] if keys[depth:] else block

    def _select_block(self, number: int) -> Any:
        """Return block `number` of the first block dim: a BlockTensor of the remaining block dims, or a tile."""
        per_block = len(self.tiles) // self.blocks[0]
        tiles = self.tiles[number * per_block : (number + 1) * per_block]
        return BlockTensor(self.blocks[1:], tiles) if self.blocks[1:] else tiles[0]

    def __setitem__(self, key: Any, value: Any) -> None:
        block = self[key]
        if not isinstance(block, BlockTensor):
            block[...] = value
            return
        if isinstance(value, BlockTensor) and value.blocks == block.blocks:
            for target, source in zip(block.tiles, value.tiles):
                target[...] = source
            return
        for target in block.tiles:
            target[...] = value

    def __iter__(self) -> Iterator[Any]:
        return (self._select_block(number) for number in range(self.blocks[0]))

    def __repr__(self) -> str:
        return f"<{self.blocks} blocks of {self.tiles[0].shape} {self.dtype} in {self.buffer.value}>"


def _count_wide_dims(shape: Sequence[int]) -> int:
    """Return the number of dims with more than one element."""
    return sum(size > 1 for size in shape)


def allocate_blocks(
    shape: tuple[int, ...], partition_dim: int, allocate: Callable[[tuple[int, ...]], Region]
) -> Tile | BlockTensor:
    """Allocate a tile, or a BlockTensor if there are dims before the partition dim.

    Args:
        shape: The shape with block dims.
        partition_dim: The index of the partition dim in `shape`.
        allocate: Allocates one tile of the shape that it gets.
    """
    blocks, tile = shape[:partition_dim], shape[partition_dim:]
    tiles = [
        current().tile.from_region(allocate(tile))
        for _ in itertools.product(*(range(count) for count in blocks))
    ]
    return BlockTensor(blocks, tiles) if blocks else tiles[0]


def assign(target: Region, value: Any) -> None:
    """Write `value` to a region on chip, for `t[...] = value`.

    A number is written by memset. A pending result is written by its own instruction, if that can write the target
    directly. Any other tile is copied by tensor_copy, repeated along dims of size 1.

    Raises:
        RuleViolation: The target is in HBM, the value is neither a tile nor a number, or the shapes do not fit.
    """
    program = current()
    dims_max = program.core.hardware.dims_max
    if not isinstance(value, Tile):
        program.settle()
        on_chip_target(target)
        assignable(value)
        for (piece,) in cut_pieces((target,), dims_max):
            _fill_region(piece, value)
        return
    on_chip_target(target)
    pending = value.pending
    if pending is not None and pending is program.waiting and _can_write_target(target, pending):
        fitted = target.reshaped(value.shape)
        if fitted is not None:
            pending.complete(fitted)
            return
    source = value.region.repeated(target.shape) if _needs_repetition(target, value) else value.region
    target_fits(target, source)
    same = target.shape == source.shape
    for to, piece in cut_pieces((target, source), dims_max) if same else [(target, source)]:
        issue("tensor_copy", dst=to.view(), src=program.readable(piece))


def _fill_region(piece: Region, number: Any) -> None:
    """Fill a region by memset; at a start partition that no engine accepts, by DMA from a scratch tile in SBUF."""
    program, view = current(), piece.view()
    if view.buffer is not MemoryRegion.sbuf or rules.can_start_at_partition(program.core.hardware, view):
        issue("memset", dst=view, value=number)
        return
    scratch = program.fresh(piece.shape, view.dtype, MemoryRegion.sbuf).view()
    issue("memset", dst=scratch, value=number)
    issue("dma_copy", dst=view, src=scratch)


def _can_write_target(target: Region, pending: Pending) -> bool:
    """Return whether a pending instruction can write directly to a target: memory and, with `dtype=`, dtype fit.

    Always True if the instruction needs a target.
    """
    if pending.target_needed:
        return True
    right_dtype = not pending.dtype_given or pending.dtype == target.tensor.dtype
    return right_dtype and target.tensor.buffer in pending.memories


def _needs_repetition(target: Region, value: Tile) -> bool:
    """Return whether a tile has to be repeated along free dims of size 1 to fill a target with as many partitions."""
    wider = len(target.shape) >= value.ndim and value.shape[0] == target.shape[0]
    pairs = zip(target.shape[::-1], value.shape[::-1])
    return (
        wider and target.shape != value.shape and all(v in (1, t) for t, v in list(pairs)[: value.ndim - 1])
    )


@rule("NKW-BETA1-ASSIGN-MEMORY")
def on_chip_target(target: Region) -> None:
    """An assignment writes to SBUF or PSUM; HBM is written by nl.store or nisa.dma_copy.

    Raises RuleViolation if the target is in HBM.
    """
    if not target.tensor.buffer.on_chip:
        raise RuleViolation(
            on_chip_target, f"an assignment to {target.tensor.describe()}", hint="nl.store(x[...], value)"
        )


@rule("NKW-BETA1-ASSIGN-VALUE")
def assignable(value: Any) -> None:
    """The value assigned to a tile is a tile or a number.

    Raises RuleViolation for anything but a Python or NumPy number. Called for values that are no tiles.
    """
    if not isinstance(value, (int, float, np.number, np.bool_)):
        raise RuleViolation(assignable, f"{type(value).__name__} {value!r:.60}")


@rule("NKW-BETA1-ASSIGN-SHAPE")
def target_fits(target: Region, source: Region) -> None:
    """A tile is assigned to a target with as many partitions and as many elements per partition.

    Raises RuleViolation if the numbers differ; the dims may.
    """
    size, wanted = (int(np.prod(shape[1:], dtype=np.int64)) for shape in (source.shape, target.shape))
    if size != wanted or source.shape[0] != target.shape[0]:
        raise RuleViolation(target_fits, f"a {source.shape} tile to a target of shape {target.shape}")


@rule("NKW-BETA1-BLOCK")
def block_by_number(key: Any) -> None:
    """A block dim is indexed with an integer: each block is a tile of its own.

    Raises RuleViolation for a slice, an Index, a Tile or an ellipsis.
    """
    if isinstance(key, (slice, Index, Tile, EllipsisType)):
        raise RuleViolation(
            block_by_number, f"{type(key).__name__} on a block dim", hint="loop over the blocks"
        )


def defer(
    shape: tuple[int, ...],
    dtype: Any,
    emit: Callable[[Region], None],
    memory: MemoryRegion = MemoryRegion.sbuf,
    memories: tuple[MemoryRegion, ...] = (MemoryRegion.sbuf, MemoryRegion.psum),
    dtype_given: Any = None,
    mask: Any = None,
    accumulate: Callable[[Region], None] | None = None,
    target_needed: bool = False,
) -> Tile:
    """Return the tile that an instruction will write once its target is known; the one that waited before is issued.

    Args:
        shape: The shape of the result.
        dtype: The dtype of the result if `dtype_given` is None.
        emit: Issues the instruction into a region of that shape.
        memory: The memory of a fresh tile.
        memories: The memories of targets that the instruction can write directly.
        dtype_given: The `dtype=` of the call, or None.
        mask: Anything but None if the instruction may leave elements out.
        accumulate: Issues a matmul so that it adds to its target.
        target_needed: Whether the result must be assigned to a tile.
    """
    program = current()
    program.settle()
    element = program.core.stored_dtype(as_dtype(dtype if dtype_given is None else dtype_given))
    pending = program.waiting = Pending(
        shape,
        element,
        memory,
        emit,
        kernel_line(),
        memories,
        dtype_given is not None,
        mask is not None,
        accumulate,
        target_needed,
    )
    tile: Tile = program.tile(shape, element, memory, pending=pending)
    return tile


def defer_masked(
    shape: tuple[int, ...],
    dtype: Any,
    run: Callable[[Region, Box], None],
    mask: Any,
    dtype_given: Any = None,
    memory: MemoryRegion = MemoryRegion.sbuf,
    target_needed: bool = False,
) -> Tile:
    """Return the tile of which an instruction will write the elements that `mask` selects, once its target is known.

    Args:
        shape: The shape of the result.
        dtype: The dtype of the result if `dtype_given` is None.
        run: Issues the instruction into a region for a box of the result, see `Program.divide`.
        mask: The `mask=` of the call.
        dtype_given: The `dtype=` of the call, or None.
        memory: The memory of a fresh tile.
        target_needed: Whether the result must be assigned to a tile.

    Raises:
        RuleViolation: The mask is no mask.
    """
    selected = normalise_mask(mask)

    def emit(dst: Region) -> None:
        current().divide(selected, dst, run)

    return defer(
        shape, dtype, emit, memory, dtype_given=dtype_given, mask=selected, target_needed=target_needed
    )


def read_operand(value: Any) -> Any:
    """Return a tile as a tensor that an instruction reads, and any other value unchanged."""
    return value.operand if isinstance(value, Tile) else value


__all__ = ["BlockTensor", "Tile", "allocate_blocks", "assign", "defer", "defer_masked", "read_operand"]
