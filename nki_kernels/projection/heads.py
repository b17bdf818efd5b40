"""What is done to the heads of queries, keys and values when they leave PSUM: scale, bias, norm per head, rotation.

A row tile [rows, heads * D] has tokens on the partitions and heads along the free dim; q, k, v and gates are column
ranges of one wide matrix [q | k | v | gate].
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, transfer
from nki_kernels.norms.row_tiles import normalise_heads
from nki_kernels.projection.sequence import RowSource, sequence_rows
from nki_kernels.rope import gather, rotate
from nki_kernels.tiles import copy_bank


@dataclass
class AngleTables(nl.NKIObject):
    """Rotation of heads @ HBM: positions [T, 1] int32, and cos and sin [S, R/2] float32; None where nothing rotates."""

    positions: nl.NkiTensor | None
    cos: nl.NkiTensor | None
    sin: nl.NkiTensor | None


@dataclass
class HeadNorm(nl.NKIObject):
    """Norm of the heads in a range of columns. weight: [row, D] float32 in SBUF, or None."""

    first_column: int
    end_column: int
    weight: nl.NkiTensor | None


@dataclass
class Heads(nl.NKIObject):
    """How the columns of [q | k | v | gate] are finished and stored.

    outputs: matrices [T, columns] @ HBM side by side. source: rows of x, which start at row `first_row` of the
    `rank_rows` rows of each rank. head: D, or 0 where no head is normalised or rotated. turned, rotated: numbers of
    leading columns that are normalised or rotated, and that are rotated. norms: HeadNorm of column ranges.
    eps: [row, 1] float32. bias: [row, column] float32 in SBUF, or None.
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

    def deliver(self, row, left, right, sums, panels, scale):
        """Finish columns left … right - 1 of the row tile that begins at `row` of the source, and store them.

        sums: PSUM tiles of the columns left + start … left + end for each (start, end) of panels. scale: [row, 1]
        float32, by which rows are multiplied, or None.
        """
        rows = sums[0].shape[0]
        runs = sequence_rows(self.source, self.rank_rows, self.first_row, row, rows)
        finished = nl.ndarray((rows, right - left), dtype=self.outputs[0].dtype, buffer=nl.sbuf)
        turned, rotated = max(0, min(self.turned, right) - left), max(0, min(self.rotated, right) - left)
        bias = None if self.bias is None else self.bias[0:rows, left:right]
        if self.angles.cos is None:
            rotated = 0
        if rotated > 0:
            cosines, sines = self.load_angles(runs, rows)
        wide = finished
        if turned > 0:
            # Norm and rotation read the sums in float32, so that these columns are rounded once, at the end.
            wide = nl.ndarray((rows, turned), dtype=nl.float32, buffer=nl.sbuf)
        for panel in range(len(panels)):
            start, end = panels[panel]
            middle = max(start, min(end, turned))
            if middle > start:
                scaled(wide, start, middle, sums[panel][:, 0 : middle - start], scale, bias, panel)
            if end > middle:
                columns = sums[panel][:, middle - start : end - start]
                scaled(finished, middle, end, columns, scale, bias, panel)
        for norm in self.norms:
            start, end = max(norm.first_column, left) - left, min(norm.end_column, right) - left
            if start < end:
                weight = None if norm.weight is None else norm.weight[0:rows, :]
                normalise_heads(wide[:, start:end], weight, self.head, self.eps)
        if rotated > 0:
            rotate(finished[:, 0:rotated], wide[:, 0:rotated], cosines, sines, self.head)
        if rotated < turned:
            nisa.tensor_copy(dst=finished[:, rotated:turned], src=wide[:, rotated:turned])
        self.store(finished, runs, left)

    def load_angles(self, runs, rows):
        """Load the cosines and sines [row, R/2] of rows of the sequence, see `sequence_rows`."""
        row_numbers = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
        for start, row, count in runs:
            nisa.dma_copy(
                dst=row_numbers[start : start + count, :], src=self.angles.positions[row : row + count, :]
            )
        return gather(self.angles.cos, row_numbers), gather(self.angles.sin, row_numbers)

    def store(self, tile, runs, first_column):
        """Store a tile, which begins at `first_column` of the outputs side by side, to rows of the sequence."""
        left = 0
        for output in self.outputs:
            right = left + output.shape[1]
            start, end = max(left, first_column), min(right, first_column + tile.shape[1])
            if start < end:
                # Gathered rows lie in the order of pieces, so each run of consecutive rows takes a DMA of its own.
                for first, row, count in runs:
                    columns = tile[first : first + count, start - first_column : end - first_column]
                    transfer(output[row : row + count, start - left : end - left], columns, COMPILER)
            left = right


def scaled(target, start, end, source, scale, bias, panel):
    """Copy columns start … end of `target` from PSUM, times one number for each row, plus the bias of each column.

    scale: [row, 1], bias: [row, column], or None. Without a bias the Scalar engine can do it as well as
    the Vector engine.
    """
    columns = target[:, start:end]
    if bias is None:
        copy_bank(columns, source, panel + 1, 2, scale)
    elif scale is None:
        nisa.tensor_tensor(dst=columns, data1=source, data2=bias[:, start:end], op=nl.add)
    else:
        nisa.scalar_tensor_tensor(
            dst=columns, data=source, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=bias[:, start:end]
        )
