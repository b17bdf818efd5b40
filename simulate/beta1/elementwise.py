"""Instructions with one result element for each element of their tiles: broadcasting, masks, many dims.

A region is a part of a tensor; a box is (start, end) on every axis of a result (`simulate.beta1.region`, `masks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nkw.errors import RuleViolation, rule
from simulate.beta1.indices import broadcast
from simulate.beta1.masks import Box
from simulate.beta1.program import current, issue
from simulate.beta1.region import Region, cut_pieces
from simulate.beta1.tile import Tile, defer, defer_masked, read_operand
from simulate.memory import MemoryRegion

_QUADRANT = 32


def elementwise(
    instruction: str,
    tiles: Mapping[str, Any],
    columns: Mapping[str, Any],
    attributes: Mapping[str, Any],
    dtype: Any = None,
    mask: Any = None,
    natural: Any = None,
    buffer: MemoryRegion = MemoryRegion.sbuf,
) -> Tile:
    """Return the tile that an instruction computes, element by element; the instruction waits for its target.

    Args:
        instruction: Its name in the instruction book.
        tiles: Tiles by parameter. They are repeated along free dims of size 1; a (P, 1) tile next to tiles of more
            dims has one value per partition.
        columns: Numbers or (P, 1) tiles, by parameter.
        attributes: Further arguments.
        dtype: The dtype of the result, or None.
        mask: The `mask=` of the call, which leaves out elements of the result.
        natural: The dtype if `dtype` is None; None is the first tile's.
        buffer: The memory of the result without a target.

    Raises:
        RuleViolation: An operand is no tile on chip, or shapes do not broadcast.
    """
    for name, tile in tiles.items():
        is_tile(name, tile)
    rank = max(tile.ndim for tile in tiles.values())
    shape: tuple[int, ...] = ()
    for tile in tiles.values():
        sizes = tile.shape if tile.size > tile.shape[0] else (*tile.shape[:1], *(1,) * (rank - 1))
        shape = broadcast(shape, sizes) if shape else sizes
    first = next(iter(tiles.values()))
    program = current()

    def run(region: Region, box: Box) -> None:
        streams = [tile.region.repeated(shape).cut(box) for tile in tiles.values()]
        rows = {name: _cut_rows(value, box) for name, value in columns.items()}
        dims_max = program.core.hardware.dims_max
        if len(region.shape) > dims_max:
            one_pass(instruction, rows)
        for dst, *sources in cut_pieces((region, *streams), dims_max):
            operands = {name: program.readable(source) for name, source in zip(tiles, sources)}
            issue(instruction, dst=dst.view(), **operands, **rows, **attributes)

    return defer_masked(shape, first.dtype if natural is None else natural, run, mask, dtype, buffer)


def copy(src: Tile, *, mask: Any = None, dtype: Any = None, **_: Any) -> Tile:
    """Return a copy of a tile, made by tensor_copy; it is in SBUF unless it is assigned to a tile."""
    return elementwise("tensor_copy", {"src": src}, {}, {}, dtype, mask)


def issue_once(
    instruction: str,
    tiles: Mapping[str, Any],
    attributes: Mapping[str, Any],
    shape: Callable[[], tuple[int, ...]],
    natural: Any = None,
    dtype: Any = None,
) -> Tile:
    """Return the tile that one instruction on whole tiles computes; the instruction waits for its target.

    Args:
        instruction: Its name in the instruction book.
        tiles: Tiles by parameter; None is passed on.
        attributes: Further arguments.
        shape: Returns the shape of the result; called after the tiles are checked.
        natural: The dtype if `dtype` is None; None is the first tile's.
        dtype: The dtype of the result, or None.
    """
    for name, tile in tiles.items():
        if tile is not None:
            is_tile(name, tile)

    def emit(dst: Region) -> None:
        operands = {name: read_operand(tile) for name, tile in tiles.items()}
        issue(instruction, dst=dst.view(), **operands, **attributes)

    first = next(iter(tiles.values()))
    return defer(shape(), first.dtype if natural is None else natural, emit, dtype_given=dtype)


def _cut_rows(value: Any, box: Box) -> Any:
    """Return the part of a (P, 1) tile in the partitions of a box, as an operand; a number unchanged."""
    if not isinstance(value, Tile):
        return value
    region = value.region
    if region.shape[0] > 1:
        region = region.cut((box[0], *((0, size) for size in region.shape[1:])))
    return current().readable(region)


def partition_broadcast(tile: Tile, partitions: int) -> Tile:
    """Return a tile with the (1, …) tile in each of `partitions` partitions; it is in SBUF.

    nc_stream_shuffle with a mask of zeros writes 32 partitions at a time.
    """

    def emit(dst: Region) -> None:
        source = tile.operand
        for start in range(0, partitions, _QUADRANT):
            end = min(start + _QUADRANT, partitions)
            region = dst.cut(((start, end), *((0, size) for size in dst.shape[1:])))
            issue("nc_stream_shuffle", dst=region.view(), src=source, shuffle_mask=[0] * _QUADRANT)

    shape = (partitions, *tile.shape[1:])
    return defer(shape, tile.dtype, emit, memories=(MemoryRegion.sbuf,), dtype_given=tile.dtype)


def broadcast_to(tile: Tile, shape: tuple[int, ...]) -> Tile:
    """Return a tile repeated to `shape`: along free dims as a view with stride 0, over partitions by a copy."""
    if tile.shape[0] == 1 and shape[0] > 1:
        tile = partition_broadcast(tile, shape[0])
    return type(tile).from_region(tile.region.repeated(tuple(shape)))


@rule("NKW-BETA1-TILE")
def is_tile(name: str, value: Any) -> None:
    """An operand that is streamed is a tile in SBUF or PSUM.

    Raises RuleViolation for another value or a tile in HBM; `name` is the parameter, for the message.
    """
    if not isinstance(value, Tile) or not value.buffer.on_chip:
        seen = f"{value.shape} in {value.buffer.value}" if isinstance(value, Tile) else f"{value!r:.60}"
        raise RuleViolation(is_tile, f"{name} is {seen}", hint="nl.load it first")


@rule("NKW-BETA1-PASSES")
def one_pass(instruction: str, rows: Mapping[str, Any]) -> None:
    """An access of more than five dims takes several instructions, which must not depend on each other.

    Raises RuleViolation for an instruction with `reduce_res`, and for tensor_tensor_scan. Called for an access of
    more than five dims.
    """
    if rows.get("reduce_res") is not None or instruction == "tensor_tensor_scan":
        raise RuleViolation(one_pass, f"{instruction} over more dims", hint="use at most five dims")
