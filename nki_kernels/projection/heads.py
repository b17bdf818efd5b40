"""What is done to the heads of queries, keys and values when they leave PSUM: scale, bias, norm per head, rotation.

`qkv_projection` describes it in a record Heads; the loops of `normed` call `Heads.deliver` for each finished
tile of the product. Such a tile [rows, columns] has tokens on the partitions and whole heads of D elements
along the free dim. q, k, v and gates are column ranges of one wide matrix [q | k | v | gate].
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, transfer
from nki_kernels.norms.row_tiles import normalise_heads
from nki_kernels.projection.sequence import RowSource, map_to_sequence
from nki_kernels.rope import gather, rotate
from nki_kernels.tiles import copy_bank, shuffle_row


@dataclass
class AngleTables(nl.NKIObject):
    """Operands of the rotation of heads @ HBM; all None if nothing rotates.

    positions: [T, 1] int32, the row of the tables for each token. cos, sin: [S, R/2] float32.
    """

    positions: nl.NkiTensor | None
    cos: nl.NkiTensor | None
    sin: nl.NkiTensor | None


@dataclass
class HeadNorm(nl.NKIObject):
    """RMSNorm of each head in columns first_column … end_column - 1 of [q | k | v | gate].

    weight: [row, D] float32 in SBUF, the same on every row, or None for a norm without a weight.
    """

    first_column: int
    end_column: int
    weight: nl.NkiTensor | None


@dataclass
class Heads(nl.NKIObject):
    """How the columns of [q | k | v | gate] are finished and stored.

    outputs: matrices [T, columns] @ HBM, whose columns side by side are those of [q | k | v | gate]. source:
    RowSource of the rows of x that this core multiplies. first_row, rank_rows: each rank has rank_rows rows
    of x, of which the source has those from first_row on. head: D, or 0 if no head is normalised or rotated.
    turned: number of leading columns that are normalised or rotated. rotated: number of leading columns that
    are rotated, if there are angles. norms: list of HeadNorms. eps: of these norms, [row, 1] float32 in SBUF.
    bias: [row, column] float32 in SBUF, or None. scales: [1, column] float32 @ HBM, those of the weight's columns;
    None for a plain weight. column_scales: [row, column] float32 in SBUF, the scales of the columns that
    `load_scales` loaded last, on every row; None before, and for a plain weight. loaded_angles: what `load_angles`
    returned for the next tile, if its angles are loaded before the product, else None. rotation_engine, bias_engine:
    Vector or GpSimd; the latter adds biases to scaled sums. queue: queue of `dma` on which results are stored.
    """

    outputs: list
    source: RowSource
    first_row: int
    rank_rows: int
    head: int
    turned: int
    rotated: int
    norms: list
    eps: nl.NkiTensor
    bias: nl.NkiTensor | None
    angles: AngleTables
    scales: nl.NkiTensor | None = None
    column_scales: nl.NkiTensor | None = None
    loaded_angles: tuple | None = None
    rotation_engine: nisa.engine = nisa.engine.vector
    bias_engine: nisa.engine = nisa.engine.vector
    queue: tuple = COMPILER

    def load_angles_ahead(self, rows):
        """Load the angles of `rows` rows, all that there are, if heads are rotated; `deliver` loads none then."""
        if self.angles.cos is not None:
            self.loaded_angles = self.load_angles(self.load_row_numbers(0, rows))

    def load_scales(self, columns, rows):
        """Load the scales of columns (first, end), if there are any, onto `rows` partitions."""
        if self.scales is not None:
            self.column_scales = shuffle_row(self.scales[:, columns[0] : columns[1]], rows)

    def deliver(self, row, left, right, sums, panels, scale):
        """Apply scales, bias, norms of heads and rotation to a tile of the product, and store it to the outputs in HBM.

        Args:
            row: the first row of the tile, counted within the rows of `source`.
            left, right: the tile has columns left … right - 1 of [q | k | v | gate], whose scales are loaded.
            sums: list of PSUM tiles [row, column], one for each panel.
            panels: ranges (start, end) of columns, counted from `left`.
            scale: float32 [row, 1] in SBUF that multiplies the rows, such as 1 / rms, or None.
        """
        rows = sums[0].shape[0]
        runs = map_to_sequence(self.source, self.rank_rows, self.first_row, row, rows)
        finished = nl.ndarray((rows, right - left), dtype=self.outputs[0].dtype, buffer=nl.sbuf)
        turned, rotated = max(0, min(self.turned, right) - left), max(0, min(self.rotated, right) - left)
        bias = None if self.bias is None else self.bias[0:rows, left:right]
        column_scales = None if self.column_scales is None else self.column_scales[0:rows, :]
        if self.angles.cos is None:
            rotated = 0
        if rotated > 0:
            cosines, sines = (
                self.load_angles(self.load_row_numbers(row, rows))
                if self.loaded_angles is None
                else self.loaded_angles
            )
        wide = finished
        if turned > 0:
            # Norm and rotation read the sums in float32, so that these columns are rounded once, at the end.
            wide = nl.ndarray((rows, turned), dtype=nl.float32, buffer=nl.sbuf)
        for panel in range(len(panels)):
            start, end = panels[panel]
            middle = max(start, min(end, turned))
            if middle > start:
                columns = sums[panel][:, 0 : middle - start]
                copy_scaled(wide, start, middle, columns, scale, column_scales, bias, panel, self.bias_engine)
            if end > middle:
                columns = sums[panel][:, middle - start : end - start]
                copy_scaled(
                    finished, middle, end, columns, scale, column_scales, bias, panel, self.bias_engine
                )
        for norm in self.norms:
            start, end = max(norm.first_column, left) - left, min(norm.end_column, right) - left
            if start < end:
                weight = None if norm.weight is None else norm.weight[0:rows, :]
                normalise_heads(wide[:, start:end], weight, self.head, self.eps)
        if rotated > 0:
            rotate(
                finished[:, 0:rotated], wide[:, 0:rotated], cosines, sines, self.head, self.rotation_engine
            )
        if rotated < turned:
            nisa.tensor_copy(dst=finished[:, rotated:turned], src=wide[:, rotated:turned])
        self.store(finished, runs, left)

    def load_row_numbers(self, first, rows):
        """Load the positions of `rows` rows of the source from row `first` on: a new SBUF tile [row, 1] int32."""
        row_numbers = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
        for start, row, count in map_to_sequence(self.source, self.rank_rows, self.first_row, first, rows):
            nisa.dma_copy(
                dst=row_numbers[start : start + count, :], src=self.angles.positions[row : row + count, :]
            )
        return row_numbers

    def load_angles(self, row_numbers):
        """Gather the cosines and the sines of positions [row, 1] in SBUF into two new SBUF tiles [row, R/2] float32."""
        return gather(self.angles.cos, row_numbers), gather(self.angles.sin, row_numbers)

    def store(self, tile, runs, first_column):
        """Store an SBUF tile [row, column] to the outputs in HBM, a DMA for each output and each run of rows.

        runs: list of (index, row, rows): `rows` consecutive tokens from `row` on in the sequence are those of
        the tile from `index` on. first_column: the column of [q | k | v | gate] at which the tile begins.
        """
        left = 0
        for output in self.outputs:
            right = left + output.shape[1]
            start, end = max(left, first_column), min(right, first_column + tile.shape[1])
            if start < end:
                # Gathered rows lie in the order of pieces, so each run of consecutive rows takes a DMA of its own.
                for first, row, count in runs:
                    columns = tile[first : first + count, start - first_column : end - first_column]
                    transfer(output[row : row + count, start - left : end - left], columns, self.queue)
            left = right


def copy_scaled(target, start, end, source, scale, column_scales, bias, panel, bias_engine):
    """Write source * scale * column_scales + bias to columns start … end - 1 of `target` in SBUF.

    With a bias or column scales the Vector engine does so; without them the Scalar engine does for even `panel` and
    the Vector engine for odd.

    Args:
        target: SBUF tile [row, column].
        source: PSUM tile [row, end - start].
        scale: float32 [row, 1] in SBUF that multiplies the rows, or None.
        column_scales: float32 in SBUF with the rows and columns of `target`, or None.
        bias: as column_scales, or None.
        panel: index of the source among the panels of a tile.
        bias_engine: Vector or GpSimd, which adds a bias to sums times column_scales.
    """
    columns = target[:, start:end]
    if column_scales is not None:
        scaled = columns
        if bias is not None:
            scaled = nl.ndarray(source.shape, dtype=nl.float32, buffer=nl.sbuf)
        copy_bank(scaled, source, panel, 1, scale, column_scales[:, start:end])
        if bias is not None:
            nisa.tensor_tensor(
                dst=columns, data1=scaled, data2=bias[:, start:end], op=nl.add, engine=bias_engine
            )
    elif bias is None:
        copy_bank(columns, source, panel + 1, 2, scale)
    elif scale is None:
        nisa.tensor_tensor(dst=columns, data1=source, data2=bias[:, start:end], op=nl.add)
    else:
        nisa.scalar_tensor_tensor(
            dst=columns, data=source, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=bias[:, start:end]
        )
