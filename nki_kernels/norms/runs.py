"""RMSNorm of the hidden states of a decode step, which lie in runs: [partition, row, element], see `decode.hidden`.

With C = ceil(H / 128) partition p holds the run of elements p * C … p * C + C - 1 of every row, so that the norm uses
128 partitions even for one row. The weight is loaded in the same runs. What H lacks of 128 * C is 0 in both, and adds
nothing to sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.norms.blocks import load_column
from nki_kernels.norms.norm import compute_inverse_root
from nki_kernels.tiles import PARTITIONS, filled


@dataclass
class RowFactors(nl.NKIObject):
    """The factors 1 / rms of rows, for products of rows that are multiplied by the norm's weight alone.

    Products may start before the factors are known, and are multiplied by them afterwards.

    square_sums: float32 [partition, row] in SBUF, the sums of squares of each partition's elements. hidden: H,
    elements of a row. eps: number that is added to the mean of the squares. factors: once `compute` has run, float32
    [128, row] in SBUF, equal on every partition; None before.
    """

    square_sums: nl.NkiTensor
    hidden: int
    eps: float
    factors: nl.NkiTensor | None = None

    def compute(self):
        """Return `factors`; the first call computes them, on the Tensor and the Scalar engine."""
        if self.factors is None:
            height, rows = self.square_sums.shape
            everywhere = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(
                dst=everywhere, stationary=filled((height, PARTITIONS), 1.0), moving=self.square_sums
            )
            self.factors = compute_inverse_root(
                everywhere, 1.0 / self.hidden, filled((PARTITIONS, 1), self.eps)
            )
        return self.factors

    def compute_column(self, width, copies):
        """Return the factors as a new column, float32 [copy * width + row, 1] in SBUF.

        The Tensor and the Scalar engine compute them. width: columns of the PE array that each copy takes, 32 or 64, if
        there are several; `square_sums` has as many columns then.
        """
        column = sum_to_column(self.square_sums, width, copies)
        return compute_inverse_root(column, 1.0 / self.hidden, filled(column.shape, self.eps))


def sum_to_column(sums, width, copies):
    """Return the sums over the partitions of a float32 SBUF tile [partition, row]: PSUM column [copy * width + row, 1].

    width: columns of the PE array that each copy takes, 32 or 64, if there are several copies; `sums` has as many
    columns then.
    """
    height, rows = sums.shape
    # With the sums stationary, the product is a column without a transpose.
    column = nl.ndarray(((copies - 1) * width + rows, 1), dtype=nl.float32, buffer=nl.psum)
    ones = filled((height, 1), 1.0)
    for first in range(0, copies * width, width):
        nisa.nc_matmul(
            dst=column[first : first + rows, :],
            stationary=sums,
            moving=ones,
            tile_position=(0, first),
            tile_size=(PARTITIONS, width),
        )
    return column


def sum_squares(tile, sums):
    """Write the sums of squares of hidden states [partition, row, C] to `sums`, float32 [partition, row] in SBUF."""
    squares = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=squares, op=nl.square, data=tile)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=squares, axis=2)


def write_weighted(dst, rows, weight, paired=False):
    """Write rows [partition, C, row] times a weight [partition, C] to `dst` in SBUF; without a weight copy them.

    paired: whether rows and weight lie in paired runs. Their halves alternate in `dst` then, as products take them.
    """
    if paired:
        count = rows.shape[1]
        for half in range(2):
            blocks_range = slice(half * count // 2, (half + 1) * count // 2)
            factor = None if weight is None else weight[:, blocks_range]
            write_weighted(dst[:, half:count:2, :], rows[:, blocks_range, :], factor)
        return
    if weight is None:
        nisa.tensor_copy(dst=dst, src=rows)
    else:
        factor = weight.expand_dim(2).broadcast(2, rows.shape[2])
        nisa.tensor_tensor(dst=dst, data1=rows, data2=factor, op=nl.multiply)


def weight_runs(tile, norm, paired=False):
    """Return hidden states times the norm's weight, not normalised: [partition, C, row] of tile's dtype in SBUF.

    `compute_reciprocal_roots` has the factors that are still missing; products of the result are multiplied by them.

    Args:
        tile: hidden states [partition, row, C]: partition p holds elements p * C … p * C + C - 1 of each row.
        norm: `Norm` with a weight in HBM; its offset and bias are not applied.
        paired: whether the hidden states lie in paired runs, see `write_weighted`.
    """
    height, rows, count = tile.shape
    weight = load_column(norm.weight, 0.0, True, paired)  # adds 0 to the weight, in runs
    weighted = nl.ndarray((height, count, rows), dtype=tile.dtype, buffer=nl.sbuf)
    write_weighted(weighted, tile.permute((0, 2, 1)), weight, paired)
    return weighted


def compute_reciprocal_roots(tile, hidden, norm):
    """Return 1 / rms of each row, float32 in SBUF: [128, rows], the same on every partition, and a column [rows, 1].

    Args:
        tile: hidden states [partition, row, C] with C = ceil(H / 128); what H lacks of 128 * C is 0.
        hidden: H, elements of a row.
        norm: `Norm`, of which eps is used.
    """
    height, rows, _ = tile.shape
    sums = nl.ndarray((height, rows), dtype=nl.float32, buffer=nl.sbuf)
    sum_squares(tile, sums)
    ones = filled((height, PARTITIONS), 1.0)
    everywhere = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=everywhere, stationary=ones, moving=sums)
    # With the operands exchanged, the product gives the sums as a column without a transpose.
    by_row = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=by_row, stationary=sums, moving=ones[:, 0:1])
    eps = filled((PARTITIONS, 1), norm.eps)
    return compute_inverse_root(everywhere, 1.0 / hidden, eps), compute_inverse_root(
        by_row, 1.0 / hidden, eps
    )


def normalise_runs(tile, hidden, norm, weight):
    """Return the RMSNorm of hidden states, tile * weight / rms of the row, as [partition, C, row] in SBUF.

    Args:
        tile: hidden states [partition, row, C]: partition p holds elements p * C … p * C + C - 1 of each row.
        hidden: H, elements of a row.
        norm: `Norm`, of which eps is used.
        weight: [partition, C] float32 in SBUF, in the layout of the tile.
    """
    height, rows, count = tile.shape
    weighted = nl.ndarray((height, count, rows), dtype=nl.float32, buffer=nl.sbuf)
    factor = weight.expand_dim(2).broadcast(2, rows)
    nisa.tensor_tensor(dst=weighted, data1=tile.permute((0, 2, 1)), data2=factor, op=nl.multiply)
    roots = compute_reciprocal_roots(tile, hidden, norm)[0]
    normalised = nl.ndarray(weighted.shape, dtype=tile.dtype, buffer=nl.sbuf)
    scale = roots[0:height, :].expand_dim(1).broadcast(1, count)
    nisa.tensor_tensor(dst=normalised, data1=weighted, data2=scale, op=nl.multiply)
    return normalised
