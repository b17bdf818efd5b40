"""Operands of products in MX formats: weights in HBM and SBUF, and rows that the Vector engine rounds to MXFP8.

In an MX format 32 neighbouring values of the contraction share a scale, a power of two. A *packed element* has four
values: 32 bits in MXFP8 (float8_e4m3fn), 16 bits in MXFP4 (float4_e2m1fn). A scale is a byte, the exponent plus 127.

A contraction of K values is cut into *tiles* of 512. Value 512 * t + 4 * p + q lies on partition p of tile t, as value
q of its packed element, so that 8 partitions have the values of one scale. The last tile is filled with zeros up to a
multiple of 128 values, 32 partitions. A weight [K, N] has *packed rows*: row r has values 4 * r … 4 * r + 3. Its scales
are [scale row, N] in HBM: row g has those of values 32 * g … 32 * g + 31.

The elements are [packed row, N] in HBM by their shape, and lie in *tile order*, so that a DMA reads long pieces. Panels
of 512 columns follow each other. A panel has first [partition, tile, column] of the full tiles, then [partition,
column] of a short last tile.

In SBUF the 16 scale rows of a tile lie on four partitions of each quadrant. Four tiles of a weight share a quadrant's
first 16 partitions, so that few loads fill them.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.dma import STATIC, transfer
from nki_kernels.tiles import BANK, PARTITIONS, blocks, ranges

VALUES = 4
"""Values in a packed element."""

SCALED = 32
"""Values that share a scale: those of 8 partitions."""

TILE = VALUES * PARTITIONS
"""Values of a full tile of the contraction."""

PANEL = BANK
"""Columns of a panel of a weight in tile order: those of the moving operand that a PSUM bank takes."""

QUADRANT = PARTITIONS // 4
"""Partitions of a quadrant, the smallest height of an operand."""

SCALE_ROWS = 4
"""Scale rows of a tile in each quadrant, and tiles of a weight whose scales share a slot."""

LARGEST_EXPONENT = 8
"""Exponent of the largest float8_e4m3fn number, 448."""

BIAS = 127
"""Byte of the scale 1."""


@dataclass
class MxMatrix(nl.NKIObject):
    """A weight [K, N] @ HBM in an MX format.

    elements: [packed row, N] of a packed dtype, in tile order. scales: uint8 [scale row, N]. depth: K, a multiple
    of 32.
    """

    elements: nl.NkiTensor
    scales: nl.NkiTensor
    depth: int


@dataclass
class MxOperand(nl.NKIObject):
    """An operand of products in SBUF.

    elements: [partition, tile, column] of a packed dtype. scales: uint8 [partition, slot, column]. depth: K.
    tiles_per_slot: how many tiles have their scales in one slot: 4 in a weight, 1 in rows. first_column: the column of
    the scales that belongs to the first column of the elements.
    """

    elements: nl.NkiTensor
    scales: nl.NkiTensor
    depth: int
    tiles_per_slot: int
    first_column: int = 0

    def view_elements(self, tile, columns):
        """Return the packed elements of a tile, [partition, column]. columns: (first, end, step)."""
        first, end, step = columns
        return self.elements[0 : count_partitions(self.depth, tile), tile, first:end:step]

    def view_scales(self, tile, columns):
        """Return the scales of a tile, from their first partition to their last one. columns: (first, end, step)."""
        first, end, step = columns
        first, end = first + self.first_column, end + self.first_column
        partition = SCALE_ROWS * (tile % self.tiles_per_slot)
        last = partition + count_partitions(self.depth, tile) - QUADRANT + SCALE_ROWS
        return self.scales[partition:last, tile // self.tiles_per_slot, first:end:step]


def stores_mx(elements):
    """Return whether the elements of a weight are packed elements of an MX format.

    elements: those @ HBM, integers of 32 or 16 bits for packed ones; or those of an MxMatrix.
    """
    packed = (nl.uint32, nl.uint16, nl.float8_e4m3fn_x4, nl.float4_e2m1fn_x4)
    return elements.dtype in packed


def count_tiles(depth):
    """Return how many tiles a contraction of `depth` values has."""
    return blocks(depth, TILE)


def count_partitions(depth, tile):
    """Return how many partitions a tile of a contraction has, those of the zeros behind it included: 32 to 128."""
    return min(PARTITIONS, QUADRANT * blocks(depth - tile * TILE, VALUES * QUADRANT))


def count_packed_rows(depth):
    """Return how many packed rows a weight of `depth` values has in HBM, those of the zeros behind them included."""
    return QUADRANT * blocks(depth, VALUES * QUADRANT)


def wrap_mx_matrix(name, elements, scales, depth, columns):
    """Return the MxMatrix of a weight's arguments; None for None.

    Raises AssertionError if they are not packed elements and scales of a weight [depth, columns], or if the Tensor
    engine multiplies no MX formats.

    name: of the elements in messages. elements: uint32 or uint16 @ HBM. scales: uint8 @ HBM.
    """
    if elements is None:
        assert scales is None, f"{name}_scales is given without {name}; leave it out"
        return None
    assert nisa.get_nc_version() > nisa.nc_version.gen3, (
        f"{name} has packed elements of an MX format, which only trn3 multiplies; widen the weights to bfloat16"
    )
    assert depth % SCALED == 0, (
        f"{name} has {depth} rows, not a multiple of {SCALED}, the rows that share a scale; widen it to bfloat16"
    )
    packed = count_packed_rows(depth)
    scale_rows = packed * VALUES // SCALED
    assert stores_mx(elements) and elements.shape == (packed, columns), (
        f"{name} in an MX format is uint32 (MXFP8) or uint16 (MXFP4) [{packed}, {columns}] for {depth} rows, "
        f"not {elements.dtype} {elements.shape}"
    )
    assert scales is not None and scales.dtype == nl.uint8 and scales.shape == (scale_rows, columns), (
        f"{name}_scales of an MX format is uint8 [{scale_rows}, {columns}] for {depth} rows of {name}, "
        f"not {'None' if scales is None else scales.dtype} {'' if scales is None else scales.shape}"
    )
    dtype = nl.float8_e4m3fn_x4 if elements.dtype == nl.uint32 else nl.float4_e2m1fn_x4
    return MxMatrix(elements.view(dtype), scales, depth)


def allocate_rows(depth, rows, tiles=0):
    """Return an MxOperand for `rows` rows of `depth` values in MXFP8; it is not initialised.

    tiles: number of tiles to allocate, if more than those of `depth`.
    """
    shape = (PARTITIONS, max(tiles, count_tiles(depth)), rows)
    elements = nl.ndarray(shape, dtype=nl.float8_e4m3fn_x4, buffer=nl.sbuf)
    return MxOperand(elements, nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf), depth, 1)


def quantise_tiles(operand, values, tiles, rows):
    """Round values of some tiles and rows of an MxOperand to MXFP8 on the Vector engine.

    Args:
        operand: MxOperand of rows.
        values: bfloat16 SBUF tile [partition, tile, row, value of the packed element] with these tiles and rows.
        tiles, rows: ranges (first, end) in the operand.
    """
    for first, end in split_by_height(operand.depth, tiles):
        height = count_partitions(operand.depth, first)
        nisa.quantize_mx(
            dst=operand.elements[0:height, first:end, rows[0] : rows[1]],
            src=values[0:height, first - tiles[0] : end - tiles[0], :, :],
            dst_scale=operand.scales[:, first:end, rows[0] : rows[1]],
        )


def split_by_height(depth, tiles):
    """Return ranges (first, end) of tiles that have the same number of partitions: full tiles, and a short last one."""
    first, end = tiles
    full = min(end, count_packed_rows(depth) // PARTITIONS)
    return ranges(first, full, max(1, full - first)) + ranges(max(first, full), end)


def load_scales(matrix, columns):
    """Load the scales of columns (first, end) of an MxMatrix; return them as an MxOperand of a weight has them.

    Each quadrant takes one DMA for the tiles of full slots, one for further full tiles, and one for a short tile.
    """
    depth, scales = matrix.depth, matrix.scales[:, columns[0] : columns[1]]
    tiles, tile_rows, quadrants = count_tiles(depth), TILE // SCALED, PARTITIONS // QUADRANT
    shape = (PARTITIONS, blocks(tiles, SCALE_ROWS), scales.shape[1])
    panel = nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf)
    full_tiles = scales.shape[0] // tile_rows
    slots = full_tiles // SCALE_ROWS
    further = full_tiles - slots * SCALE_ROWS
    for quadrant in range(quadrants):
        first = quadrant * QUADRANT
        if slots > 0:
            rows = scales[0 : slots * SCALE_ROWS * tile_rows, :]
            rows = rows.reshape_dim(0, (slots, SCALE_ROWS, quadrants, SCALE_ROWS))[:, :, quadrant, :, :]
            target = panel[first : first + SCALE_ROWS * SCALE_ROWS, 0:slots, :]
            transfer(target, rows.permute((1, 2, 0, 3)), STATIC)
        if further > 0:
            rows = scales[slots * SCALE_ROWS * tile_rows : full_tiles * tile_rows, :]
            rows = rows.reshape_dim(0, (further, quadrants, SCALE_ROWS))[:, quadrant, :, :]
            transfer(panel[first : first + SCALE_ROWS * further, slots, :], rows, STATIC)
        row = full_tiles * tile_rows + quadrant * SCALE_ROWS
        if row < scales.shape[0]:
            first += SCALE_ROWS * further
            transfer(panel[first : first + SCALE_ROWS, slots, :], scales[row : row + SCALE_ROWS, :], STATIC)
    return panel


def load_elements(matrix, first_column):
    """Load a panel of the packed elements of an MxMatrix into a new SBUF tile [partition, tile, column].

    first_column: the panel's, a multiple of 512.
    """
    packed, columns = matrix.elements.shape
    width = min(PANEL, columns - first_column)
    tile = nl.ndarray(
        (PARTITIONS, count_tiles(matrix.depth), width), dtype=matrix.elements.dtype, buffer=nl.sbuf
    )
    start = first_column * packed
    panel = matrix.elements.reshape((packed * columns,))[start : start + packed * width]
    full = packed // PARTITIONS
    size = full * PARTITIONS * width
    if full > 0:
        transfer(tile[:, 0:full, :], panel[0:size].reshape((PARTITIONS, full, width)), STATIC)
    short = packed - full * PARTITIONS
    if short > 0:
        source = panel[size : size + short * width].reshape((short, width))
        transfer(tile[0:short, full, :], source, STATIC)
    return tile


def add_mx_products(bank, stationary, stationary_columns, moving, moving_columns):
    """Write the product of two MxOperands over their whole contraction to a PSUM tile.

    bank: [stationary column, moving column], float32. stationary_columns, moving_columns: (first, end, step) of their
    columns; an even number of stationary ones.
    """
    for tile in range(count_tiles(stationary.depth)):
        nisa.nc_matmul_mx(
            dst=bank,
            stationary=stationary.view_elements(tile, stationary_columns),
            moving=moving.view_elements(tile, moving_columns),
            stationary_scale=stationary.view_scales(tile, stationary_columns),
            moving_scale=moving.view_scales(tile, moving_columns),
            accumulate=tile > 0,
        )


def round_to_mx_reference(rows: np.ndarray) -> np.ndarray:
    """Return rows [..., K] rounded to bfloat16 and then to MXFP8, in their dtype; K is a multiple of 32.

    The scale of 32 values is the power of two that brings the largest magnitude to 128 or more and below 256.
    """
    grouped = rows.astype(nl.bfloat16).astype(rows.dtype).reshape(*rows.shape[:-1], -1, SCALED)
    largest = np.abs(grouped).max(axis=-1, keepdims=True)
    exponents = np.frexp(largest)[1] - LARGEST_EXPONENT
    scales = np.ldexp(np.float32(1), np.where(largest > 0, np.maximum(exponents, -BIAS), -BIAS))
    codes = (grouped / scales).astype(nl.float8_e4m3fn)
    return (codes.astype(rows.dtype) * scales).reshape(rows.shape)


def widen_mx_reference(elements: np.ndarray, scales: np.ndarray | None, depth: int) -> np.ndarray:
    """Return the numbers [depth, N] of elements [packed row, N] in tile order and of their scales, float32."""
    assert scales is not None
    packed, columns = elements.shape
    full = packed // PARTITIONS * PARTITIONS
    panels = []
    for start, end in ranges(0, columns, PANEL):
        panel = elements.reshape(-1)[start * packed : end * packed].reshape(packed, end - start)
        tiles = panel[:full].reshape(PARTITIONS, -1, end - start).swapaxes(0, 1)
        panels.append(np.concatenate([tiles.reshape(full, end - start), panel[full:]]))
    elements = np.concatenate(panels, axis=1)
    if elements.dtype == np.uint32:
        octets = [(elements >> np.uint32(8 * q)).astype(np.uint8) for q in range(VALUES)]
        values = [octet.view(nl.float8_e4m3fn).astype(np.float32) for octet in octets]
    else:
        magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        nibbles = [(elements >> np.uint16(4 * q)) & 15 for q in range(VALUES)]
        values = [np.where(code < 8, 1, -1).astype(np.float32) * magnitudes[code & 7] for code in nibbles]
    wide = np.stack(values, axis=1).reshape(-1, columns)
    factors = np.ldexp(np.float32(1), scales.astype(np.int32) - BIAS)
    return (wide * np.repeat(factors, SCALED, axis=0))[:depth]
