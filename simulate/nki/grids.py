"""Grids of tiles and of blocks (0.7): `nl.tiles`, `nl.blocks`, `nl.alloc_tiles`, `nl.alloc_blocks`.

A grid is a view: it selects tiles of a tensor, its source, by coordinate, allocates nothing and issues nothing. A block
is a box of several tiles. An on-chip grid that `alloc_tiles` made has one backing allocation, in which every tile has
room for its full shape: tiles lie one after another along the free dim, in row-major order of their coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

from nkw.errors import InvalidArgument, OutOfBounds, RuleViolation, rule
from simulate.isa.book import CallError
from simulate.memory import MemoryRegion, NKIObject, NkiTensor
from simulate.memory.indexing import fill_ellipsis
from simulate.numerics import DType
from simulate.run import current_core, running_level


@dataclass(frozen=True)
class _Dim:
    """Selected part of one dim of a grid's source.

    Attributes:
        first: First selected element.
        end: End of the selected elements.
        unit: Elements per grid coordinate.
        tile: Elements of a tile along the dim; None for a dim before the tiled ones.
        indexed: Whether a coordinate was given, so that the grid has no coordinate for this dim any more.
    """

    first: int
    end: int
    unit: int
    tile: int | None
    indexed: bool = False

    @property
    def elements(self) -> int:
        return self.end - self.first

    @property
    def coordinates(self) -> int:
        return -(-self.elements // self.unit)

    def select(self, start: int, stop: int) -> _Dim:
        """Return the dim reduced to the coordinates start to stop - 1."""
        first = self.first + start * self.unit
        return replace(self, first=first, end=min(self.end, self.first + stop * self.unit))


@dataclass(frozen=True)
class _Packed:
    """Backing of an on-chip allocation.

    Attributes:
        backing: View (partitions, number of tiles, elements of a tile per partition).
        counts: Number of tiles along every dim.
    """

    backing: NkiTensor
    counts: tuple[int, ...]

    def view(self, dims: tuple[_Dim, ...]) -> NkiTensor | None:
        """Return the tensor of a selection: one tile, or a 2D tensor of tiles that are side by side along the last dim.

        None for any other selection, which no access pattern can express.
        """
        tiled = [dim for dim in dims if dim.tile is not None]
        coordinates = [dim.first // (dim.tile or 1) for dim in dims]
        several = [dim for dim in dims if dim.elements > (dim.tile or 1)]
        index = 0
        for coordinate, count in zip(coordinates, self.counts):
            index = index * count + coordinate
        rows, capacity = tiled[0].elements, self.backing.shape[2]
        if not several:
            sizes = [dim.elements for dim in tiled[1:]]
            tile = self.backing[0:rows, index].reshape((rows, *(dim.tile or 1 for dim in tiled[1:])))
            tile_slices = (slice(None), *(slice(0, size) for size in sizes))
            return tile[tile_slices]
        if several == [dims[-1]] and len(tiled) == 2:
            side_by_side = self.backing.flatten_dims(1, 2)
            return side_by_side[0:rows, index * capacity : index * capacity + dims[-1].elements]
        return None


class NkiGrid(NKIObject):
    """Base class of tile and block grids; `nl.tiles`, `nl.blocks` and their allocating forms make grids.

    `grid[i, j]` is the grid of a coordinate or of slices with step 1.
    """

    def __init__(
        self,
        source: NkiTensor,
        dims: tuple[_Dim, ...],
        tile_shape: tuple[int, ...],
        packed: _Packed | None = None,
    ) -> None:
        self._source = source
        self._dims = dims
        self._packed = packed
        self.tile_shape = tile_shape

    @property
    def buffer(self) -> MemoryRegion:
        """Memory of the source tensor."""
        return self._source.buffer

    @property
    def dtype(self) -> DType:
        """Dtype of the source tensor."""
        return self._source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of coordinates along every dim that is not indexed yet."""
        return tuple(dim.coordinates for dim in self._dims if not dim.indexed)

    @property
    def element_shape(self) -> tuple[int, ...]:
        """Number of selected elements along every source dim, without dims before the tiled ones that are indexed."""
        return tuple(dim.elements for dim in self._dims if not (dim.indexed and dim.tile is None))

    @property
    def index_step_elements(self) -> tuple[int, ...]:
        """Number of source elements in one step of each coordinate, for every dim that is not indexed yet."""
        return tuple(dim.unit for dim in self._dims if not dim.indexed)

    @property
    def is_remainder(self) -> bool:
        """Whether the selection ends in a tile that is smaller than tile_shape in some dim."""
        return any(dim.tile is not None and dim.elements % dim.tile for dim in self._dims)

    @property
    def is_data_representable(self) -> bool:
        """Whether one access pattern can express the selection, so that `data` returns a tensor."""
        return self._view() is not None

    @property
    def data(self) -> NkiTensor:
        """Selection as one tensor, a view of the source.

        Raises RuleViolation if no access pattern can express it.
        """
        view = self._view()
        if view is None:
            raise RuleViolation(
                one_operand,
                f"tiles {self.shape} of {self.tile_shape} elements in {self.buffer.value}",
                hint="index one tile, or tiles side by side along the last dim",
            )
        return view

    def _view(self) -> NkiTensor | None:
        if self._packed is not None:
            return self._packed.view(self._dims)
        keys = (
            dim.first if dim.indexed and dim.tile is None else slice(dim.first, dim.end) for dim in self._dims
        )
        return self._source[tuple(keys)]

    def _selected(self, dims: tuple[_Dim, ...]) -> NkiGrid:
        return type(self)(self._source, dims, self.tile_shape, self._packed)

    def __getitem__(self, key: Any) -> NkiGrid:
        free = [number for number, dim in enumerate(self._dims) if not dim.indexed]
        keys = key if type(key) is tuple else (key,)
        if Ellipsis in keys:
            keys = fill_ellipsis(keys, len(free))
        if len(keys) > len(free):
            raise OutOfBounds(
                coordinate_in_grid, f"{len(keys)} coordinates of a grid of {self.shape}", limit=f"{len(free)}"
            )
        dims = list(self._dims)
        for number, entry in zip(free, keys):
            dims[number] = _chosen(dims[number], entry, number)
        return self._selected(tuple(dims))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.shape} of {self.tile_shape} over {self._source.describe()}>"


class NkiTileGrid(NkiGrid):
    """Tensor in tile coordinates: `g[i, j]` is a grid of one tile, `g[i, j].data` its tensor."""


class NkiBlockGrid(NkiGrid):
    """Tensor in block coordinates; `nl.tiles(g[i, j])` is the grid of the tiles of one block."""

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Number of tiles per block along every tiled dim."""
        return tuple(dim.unit // dim.tile for dim in self._dims if dim.tile is not None)


def tiles(source: Any, *, tile_shape: tuple[int, ...] | None = None) -> NkiTileGrid:
    """Return the tiles of a tensor, of a tile grid's selection or of a block: a view, which issues no instruction.

    Args:
        source: A tensor or a grid.
        tile_shape: Elements of a tile along the trailing dims; None for that of the source, which then is a grid.

    Raises:
        TypeError: The source is no tensor and no grid, or the shape is no tuple of Python ints.
        ValueError: tile_shape is missing, has a size below 1, or does not fit the source.
        RuleViolation: The selection of a grid is not one tensor.
    """
    running_level().require("nl.tiles")
    return NkiTileGrid(*_split(source, tile_shape, None))


def blocks(
    source: Any, *, tile_shape: tuple[int, ...] | None = None, block_shape: tuple[int, ...]
) -> NkiBlockGrid:
    """Return blocks of tiles of a tensor or of a grid's selection: a view, which issues no instruction.

    Args:
        source: A tensor or a grid.
        tile_shape: Elements of a tile along the trailing dims; None for that of the source, which then is a grid.
        block_shape: Tiles of a block along the same dims.

    Raises:
        TypeError: The source is no tensor and no grid, or a shape is no tuple of Python ints.
        ValueError: A shape is missing, has a size below 1, or does not fit the source.
        RuleViolation: The selection of a grid is not one tensor.
    """
    running_level().require("nl.blocks")
    return NkiBlockGrid(*_split(source, tile_shape, block_shape))


def alloc_tiles(
    *,
    tile_shape: tuple[int, ...],
    element_shape: tuple[int, ...],
    buffer: MemoryRegion,
    dtype: Any,
    address: tuple[int, int] | None = None,
    name: str = "",
) -> NkiTileGrid:
    """Allocate an uninitialised tensor as a grid of tiles.

    In HBM it has `element_shape`; on chip all tiles are side by side along the free dim of one allocation.

    Args:
        tile_shape: Elements of a tile along the trailing dims.
        element_shape: Elements along all dims.
        buffer: nl.sbuf, nl.psum or nl.shared_hbm.
        dtype: Dtype of the elements.
        address: (partition, byte) of the allocation; None if the compiler places it.
        name: Name of the allocation.

    Raises:
        TypeError: A shape is no tuple of Python ints, or the buffer is no memory.
        ValueError: A size is below 1, or the ranks of the shapes do not fit.
        AssertionError: The memory cannot hold the tensor.
    """
    running_level().require("nl.alloc_tiles")
    return NkiTileGrid(*_allocate(tile_shape, None, element_shape, buffer, dtype, address, name))


def alloc_blocks(
    *,
    tile_shape: tuple[int, ...],
    block_shape: tuple[int, ...],
    element_shape: tuple[int, ...],
    buffer: MemoryRegion,
    dtype: Any,
    address: tuple[int, int] | None = None,
    name: str = "",
) -> NkiBlockGrid:
    """Allocate an uninitialised tensor as a grid of blocks of tiles; blocks do not change the order of tiles.

    Args:
        tile_shape: Elements of a tile along the trailing dims.
        block_shape: Tiles of a block along the same dims.
        element_shape: Elements along all dims.
        buffer: nl.sbuf, nl.psum or nl.shared_hbm.
        dtype: Dtype of the elements.
        address: (partition, byte) of the allocation; None if the compiler places it.
        name: Name of the allocation.

    Raises:
        TypeError: A shape is no tuple of Python ints, or the buffer is no memory.
        ValueError: A size is below 1, or the ranks of the shapes do not fit.
        AssertionError: The memory cannot hold the tensor.
    """
    running_level().require("nl.alloc_blocks")
    return NkiBlockGrid(*_allocate(tile_shape, block_shape, element_shape, buffer, dtype, address, name))


_GridArguments = tuple[NkiTensor, tuple[_Dim, ...], tuple[int, ...], "_Packed | None"]


def _allocate(
    tile_shape: Any, block_shape: Any, element_shape: Any, buffer: Any, dtype: Any, address: Any, name: str
) -> _GridArguments:
    _check_shape("element_shape", element_shape)
    _tile_shape(tile_shape, len(element_shape))
    if not isinstance(buffer, MemoryRegion):
        raise CallError(
            "NKW-GRID-SHAPE", f"buffer={buffer!r:.40} is no memory; give nl.sbuf, nl.psum or nl.shared_hbm"
        )
    dims = _dims(element_shape, tile_shape, block_shape)
    core = current_core()
    if not buffer.on_chip:
        return core.allocate(element_shape, dtype, buffer, name, address), dims, tile_shape, None
    counts = tuple(-(-dim.elements // (dim.tile or 1)) for dim in dims)
    capacity = (tile_shape[0], prod(counts) * prod(tile_shape[1:]))
    backing = core.allocate(capacity, dtype, buffer, name, address)
    packed = _Packed(backing.reshape_dim(1, (prod(counts), prod(tile_shape[1:]))), counts)
    return backing, dims, tile_shape, packed


def _split(source: Any, tile_shape: Any, block_shape: Any) -> _GridArguments:
    if isinstance(source, NkiGrid):
        new_shape = source.tile_shape if tile_shape is None else tile_shape
        if source._packed is not None:
            if new_shape != source.tile_shape:
                raise InvalidArgument(
                    "NKW-GRID-SHAPE",
                    f"tile_shape={new_shape} on tiles that were allocated as {source.tile_shape}; keep their shape",
                )
            dims = tuple(replace(dim, indexed=False) for dim in source._dims)
            return source._source, _units(dims, block_shape), new_shape, source._packed
        source, tile_shape = source.data, new_shape
    if not isinstance(source, NkiTensor):
        raise CallError("NKW-GRID-SHAPE", f"a grid of {type(source).__name__}; give a tensor or a grid")
    if tile_shape is None:
        raise InvalidArgument("NKW-GRID-SHAPE", "a grid of a tensor needs tile_shape")
    _tile_shape(tile_shape, source.ndim)
    return source, _dims(source.shape, tile_shape, block_shape), tile_shape, None


def _dims(elements: tuple[int, ...], tile_shape: tuple[int, ...], block_shape: Any) -> tuple[_Dim, ...]:
    before = len(elements) - len(tile_shape)
    leading = tuple(_Dim(0, size, 1, None) for size in elements[:before])
    tiled = tuple(_Dim(0, size, tile, tile) for size, tile in zip(elements[before:], tile_shape))
    return _units((*leading, *tiled), block_shape)


def _units(dims: tuple[_Dim, ...], block_shape: Any) -> tuple[_Dim, ...]:
    tiled = [dim for dim in dims if dim.tile is not None]
    if block_shape is not None:
        _check_shape("block_shape", block_shape)
        if len(block_shape) != len(tiled):
            raise InvalidArgument(
                "NKW-GRID-SHAPE",
                f"block_shape={block_shape} for tiles of {len(tiled)} dims; give one count per dim",
            )
    counts = iter(block_shape or (1,) * len(tiled))
    return tuple(dim if dim.tile is None else replace(dim, unit=dim.tile * next(counts)) for dim in dims)


def _check_shape(name: str, shape: Any) -> None:
    if not isinstance(shape, tuple) or any(type(size) is not int for size in shape):
        raise CallError("NKW-GRID-SHAPE", f"{name}={shape!r:.60} is not a tuple of Python ints")
    if not shape or min(shape) < 1:
        raise InvalidArgument("NKW-GRID-SHAPE", f"{name}={shape}; every size is 1 or more")


def _tile_shape(tile_shape: Any, rank: int) -> None:
    _check_shape("tile_shape", tile_shape)
    if not 2 <= len(tile_shape) <= rank:
        raise InvalidArgument(
            "NKW-GRID-SHAPE",
            f"tile_shape={tile_shape} of a tensor of {rank} dims; a tile has 2 to {rank} dims",
        )


def _chosen(dim: _Dim, key: Any, number: int) -> _Dim:
    count = dim.coordinates
    if isinstance(key, slice):
        start, stop, step = key.indices(count)
        inside = (key.start or 0) >= 0 and (key.stop is None or 0 <= key.stop <= count)
        if step == 1 and inside and start < stop:
            return dim.select(start, stop)
    elif type(key) is int and 0 <= key < count:
        return replace(dim.select(key, key + 1), indexed=True)
    raise OutOfBounds(
        coordinate_in_grid,
        f"coordinate {key!r:.40} of dim {number}",
        limit=f"0 to {count - 1}, or a slice with step 1",
    )


@rule("NKW-GRID-COORDINATE", hint="index with Python ints or slices of step 1 within grid.shape")
def coordinate_in_grid() -> None:
    """A coordinate of a grid is a Python int or a slice inside its shape.

    Carries the rule's sentence and does nothing when called; callers raise OutOfBounds with it.
    """


@rule("NKW-GRID-DATA")
def one_operand() -> None:
    """data stands for a selection that one access pattern can express.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


__all__ = ["NkiBlockGrid", "NkiGrid", "NkiTileGrid", "alloc_blocks", "alloc_tiles", "blocks", "tiles"]
