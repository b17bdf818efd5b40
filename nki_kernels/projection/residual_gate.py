"""The gate of a residual: factors of what is added to it, one row for all rows of an image, see `image_rows`.

    y = residual + gate * (product + bias)

A gate is linear, so it multiplies the product of each rank before the sum over ranks, where an engine reads the product
out of PSUM. Or it multiplies the columns of a weight that stays in SBUF. The bias is multiplied by itself, and added
once, as without a gate.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.image_rows import check_image_rows, list_image_runs, load_image_rows
from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.tiles import ACCUMULATOR_BANKS, BANK, count_block_partitions, load_repeated, ranges

CHUNK_ELEMENTS = ACCUMULATOR_BANKS * BANK
"""Elements of each partition of a chunk of y."""

MOST_KEPT_COLUMNS = 4096
"""Widest gate of an image that stays in SBUF for all row tiles of the image."""


@dataclass
class GateTile(nl.NKIObject):
    """Factors of some columns of a row tile, and what is added after the sum over ranks.

    image: index of the image of all rows. first_column: the first column. factors: [row, column] in SBUF, the gate
    times the scales of the weight's columns, if there are any. bias: [row, column] in SBUF, gate * bias, or None.
    """

    image: int
    first_column: int
    factors: nl.NkiTensor
    bias: nl.NkiTensor | None


@dataclass
class ResidualGate(nl.NKIObject):
    """The gate of a residual for the rows and columns that a core computes.

    rows: [N, column] @ HBM, a row for each image. image_rows: rows of an image. first_row: index of the core's first
    row among the rows of all images. kept: GateTiles that stay in SBUF, all of one image.
    """

    rows: nl.NkiTensor
    image_rows: int
    first_row: int
    kept: list

    def select(self, first_row, rows, columns, scales, bias):
        """Return the GateTile of a row tile and of columns (first, end); load it unless it is kept.

        Args:
            first_row: the row tile's first row, counted from the core's first row.
            rows: rows of the tile.
            columns: (first, end).
            scales: float32 [row, column] in SBUF, those of the weight's columns, equal on all rows, or None.
            bias: [row, column] in SBUF, equal on all rows, or None.
        """
        row, first, end = self.first_row + first_row, columns[0], columns[1]
        runs = list_image_runs(row, rows, self.image_rows)
        is_single = len(runs) == 1 and runs[0][3] == 1
        for tile in self.kept:
            # Groups of fewer rows have chunks of more columns.
            is_covered = tile.factors.shape[0] >= rows and tile.factors.shape[1] >= end - first
            if is_single and tile.image == runs[0][2] and tile.first_column == first and is_covered:
                return tile
        gate = load_image_rows(self.rows[:, first:end], row, rows, self.image_rows)
        factors, added = gate, None
        if scales is not None:
            factors = nl.ndarray(gate.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=factors, data1=scales[0:rows, :], data2=gate, op=nl.multiply)
        if bias is not None:
            # Of rows that are cut over ranks, the bias is added to one rank's.
            height = min(rows, bias.shape[0])
            added = nl.ndarray((height, gate.shape[1]), dtype=bias.dtype, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=added, data1=bias[0:height, :], data2=gate[0:height, :], op=nl.multiply)
        tile = GateTile(runs[0][2], first, factors, added)
        if is_single and self.rows.shape[1] <= MOST_KEPT_COLUMNS:
            if len(self.kept) > 0 and self.kept[0].image != tile.image:
                self.kept = []
            self.kept.append(tile)
        return tile


def count_gate_bytes(gate, bias, scales, chunks):
    """Return the most bytes of each partition that the GateTiles of chunks of y take; 0 if `gate` is None.

    Factors are free once a chunk leaves PSUM, when those of the next one may be loaded; its bias stays until the sum
    over ranks is stored.

    Args:
        gate: ResidualGate, or None.
        bias: [row, column] in SBUF, or None.
        scales: [1, column] @ HBM, those of the weight's columns, or None.
        chunks: most chunks that SBUF holds at one time, whose row tiles are those of several images.
    """
    if gate is None:
        return 0
    images, columns = gate.rows.shape
    factor_bytes = item_bytes(gate.rows.dtype if scales is None else nl.float32)
    bias_bytes = 0 if bias is None else item_bytes(bias.dtype)
    kept_bytes = columns * (factor_bytes + bias_bytes) if columns <= MOST_KEPT_COLUMNS else 0
    chunk_bytes = min(2, chunks) * factor_bytes + chunks * bias_bytes
    loaded_bytes = 0 if scales is None else item_bytes(gate.rows.dtype)
    if images == 1 and columns <= MOST_KEPT_COLUMNS:
        chunk_bytes = 0
    return max(kept_bytes, CHUNK_ELEMENTS * chunk_bytes) + CHUNK_ELEMENTS * loaded_bytes


def load_gates(gate, chunk, first_row, rows, tile_rows):
    """Load the GateTiles of an OutputChunk, one for each row tile, unless that is done or `gate` is None.

    Args:
        gate: ResidualGate, or None.
        chunk: the OutputChunk.
        first_row: its first row, counted from the core's first row.
        rows: its rows, those of all ranks together.
        tile_rows: rows of a full row tile.
    """
    if gate is None or chunk.gates is not None:
        return
    chunk.gates = []
    for start, end in ranges(0, rows, tile_rows):
        tile = gate.select(first_row + start, end - start, chunk.columns, chunk.column_scales, chunk.bias)
        chunk.gates.append(tile)


def multiply_columns(tile, gate, depth):
    """Multiply the columns of a weight by `gate` [1, column] @ HBM, in place.

    tile: a weight [depth, column] in SBUF, [k in block, block, column].
    """
    factors = load_repeated(gate, tile.shape[0])
    for block in range(tile.shape[1]):
        used = count_block_partitions(depth, block, False)
        rows = tile[0:used, block, :]
        nisa.tensor_tensor(dst=rows, data1=rows, data2=factors[0:used, :], op=nl.multiply)


def create_residual_gate(rows, tokens, core_rows, core_columns):
    """Return the ResidualGate of `rows` [N, H] @ HBM for a core; None for None.

    tokens: rows of all images. core_rows, core_columns: ranges (first, end) of the rows and columns of the core.
    """
    if rows is None:
        return None
    return ResidualGate(rows[:, core_columns[0] : core_columns[1]], tokens // rows.shape[0], core_rows[0], [])


def check_residual_gate(rows, tokens, hidden, residual, sequence_ranks):
    """Raise AssertionError if a gate `rows` does not fit [tokens, hidden], or comes without a residual.

    Also if it has rows of several images while rows are cut over ranks. None is no gate. residual: whether there is a
    residual.
    """
    if rows is None:
        return
    check_image_rows("residual_gate", rows, tokens, hidden)
    assert residual, "residual_gate is given without a residual; it multiplies what is added to the residual"
    assert rows.shape[0] == 1 or sequence_ranks == 1, (
        f"residual_gate has a row for each of {rows.shape[0]} images, and rows are cut over {sequence_ranks} ranks; "
        "sequence_ranks takes one row"
    )
