"""Rows of fp8 whose neighbouring elements form pairs, and weights in the same order, for products at double rate.

The Tensor engine multiplies two K blocks of fp8 at once: operands are [partition, 2, column]. Here element k of the
contraction lies on partition k % 256 // 2, in block k // 256, as number k % 2 of its pair. Two neighbouring elements of
a row are then one element of 16 bits, which a DMA transposes as it is. A weight has two neighbouring rows on a
partition. A contraction of odd length is extended by an element of 0 on both sides.

A row tile becomes fp8 in four steps: its norm, the largest magnitude of each row, the division by the scale, and the
transpose. RMSNorm is not applied in full: rows are multiplied by the norm's weight and rounded to their dtype, and 1 /
rms multiplies their scales, because the elements of fp8 do not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.dma import STATIC, transfer
from nki_kernels.norms.norm import compute_inverse_root
from nki_kernels.norms.row_tiles import (
    SCRATCH_ELEMENTS,
    RowNorm,
    RowStatistics,
    compute_row_statistics,
    normalise,
    sum_rows,
)
from nki_kernels.precision import widened
from nki_kernels.projection.products import multiply_block_pair, transpose_block_range
from nki_kernels.projection.quantised_rows import (
    compute_scale,
    find_largest,
    quantise_rows_reference,
)
from nki_kernels.projection.row_maxima import reduce_maximum
from nki_kernels.tiles import PARTITIONS, allocate_aligned_tile, blocks, ranges

PAIR_BLOCK = 2 * PARTITIONS
"""Elements of the contraction in a block of pairs."""


@dataclass
class PairedRows(nl.NKIObject):
    """A row tile on its way to fp8 pairs, and what each stage leaves for later ones.

    rows: SBUF tile [row, H], None once it is divided. norm: RowNorm, or None for rows that need none. element:
    float8_e4m3 or float8_e4m3fn, to which rows are rounded. row_numbers, angles: the positions of the rows and their
    angles in SBUF, as `Heads` loads them; None if nothing is rotated.

    roots, statistics: of an RMSNorm 1 / rms, float32 [row, 1], or the RowStatistics of a LayerNorm, after `measure`.
    magnitudes: scratch tile [row, column] with the first magnitudes, between `normalise` and `find_largest`. largest:
    [row, 1], the largest magnitude of each row, after `find_largest`. scale, inverse: float32 [row, 1]
    after `choose_scale`. quantised: fp8 [row, H], between `divide` and `transpose`. transposed: fp8 [partition, block,
    2, row] after `transpose`.
    """

    rows: nl.NkiTensor | None
    norm: RowNorm | None
    element: object
    row_numbers: nl.NkiTensor | None = None
    angles: tuple | None = None
    roots: nl.NkiTensor | None = None
    statistics: RowStatistics | None = None
    magnitudes: nl.NkiTensor | None = None
    largest: nl.NkiTensor | None = None
    scale: nl.NkiTensor | None = None
    inverse: nl.NkiTensor | None = None
    quantised: nl.NkiTensor | None = None
    transposed: nl.NkiTensor | None = None

    def measure(self):
        """Compute 1 / rms of the rows for an RMSNorm, or the statistics for a LayerNorm."""
        if self.norm is not None and self.norm.bias is not None:
            self.statistics = compute_row_statistics(self.rows, self.norm)
        elif self.norm is not None:
            sums = nl.ndarray((self.rows.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
            sum_rows(sums, nl.square, self.rows, None, self.norm.scratch)
            self.roots = compute_inverse_root(sums, 1.0 / self.rows.shape[1], self.norm.eps)

    def normalise(self, scratch, in_place):
        """Multiply the rows by the norm's weight, or apply a LayerNorm; write the first magnitudes to `scratch`.

        in_place: whether the results overwrite the rows, piece by piece, as they are measured; else they take a tile of
        their own. scratch: SBUF tile [row, column] of the rows' dtype.
        """
        if self.norm is not None:
            results = self.rows
            if not in_place:
                results = nl.ndarray(self.rows.shape, dtype=self.rows.dtype, buffer=nl.sbuf)
            if self.norm.bias is not None:
                normalise(results, self.rows, self.statistics, self.norm)
            else:
                count, hidden = results.shape
                for first, end in ranges(0, hidden, SCRATCH_ELEMENTS if in_place else hidden):
                    nisa.tensor_tensor(
                        dst=results[:, first:end],
                        data1=self.rows[:, first:end],
                        data2=self.norm.weight[0:count, first:end],
                        op=nl.multiply,
                    )
            self.rows = results
        self.magnitudes = scratch[0 : self.rows.shape[0], :]
        self.take_magnitudes(0)

    def take_magnitudes(self, first):
        """Write the magnitudes of columns from `first` on to the scratch tile, as many as it has; return their view."""
        end = min(self.rows.shape[1], first + self.magnitudes.shape[1])
        view = self.magnitudes[:, 0 : end - first]
        nisa.tensor_scalar(dst=view, data=self.rows[:, first:end], op0=nl.abs, operand0=0.0)
        return view

    def find_largest(self):
        """Find the largest magnitude of each row, piece by piece of the row."""
        width = self.magnitudes.shape[1]
        self.largest = reduce_maximum(self.magnitudes)
        for first in range(width, self.rows.shape[1], width):
            largest = reduce_maximum(self.take_magnitudes(first))
            nisa.tensor_tensor(dst=self.largest, data1=self.largest, data2=largest, op=nl.maximum)
        self.magnitudes = None

    def choose_scale(self):
        """Compute the scale of each row and its inverse."""
        self.scale, self.inverse = compute_scale(self.largest, find_largest(self.element))

    def divide(self):
        """Divide the rows by their scales and round them to fp8; the rows themselves are needed no more."""
        count, depth = self.rows.shape
        self.quantised = nl.ndarray((count, depth + depth % 2), dtype=self.element, buffer=nl.sbuf)
        if depth % 2 > 0:
            nisa.memset(dst=self.quantised[:, depth : depth + 1], value=0.0)
        nisa.activation(dst=self.quantised[:, 0:depth], op=nl.copy, data=self.rows, scale=self.inverse)
        self.rows = None

    def transpose(self):
        """Transpose the fp8 rows by DMA."""
        count, depth = self.quantised.shape
        pairs = self.quantised.view(nl.uint16)
        shape = (min(PARTITIONS, depth // 2), blocks(depth, PAIR_BLOCK), count)
        tile = allocate_aligned_tile(shape, nl.uint16)
        transpose_block_range(tile, pairs, 0)
        self.transposed = tile.view(self.element).reshape_dim(2, (count, 2)).permute((0, 1, 3, 2))
        self.quantised = None

    def compute_row_factor(self):
        """Return what multiplies the rows of products, float32 [row, 1]: the scales, times 1 / rms with an RMSNorm."""
        if self.roots is not None:
            nisa.tensor_tensor(dst=self.scale, data1=self.scale, data2=self.roots, op=nl.multiply)
            self.roots = None
        return self.scale


def count_pair_partitions(depth, block):
    """Return how many partitions block number `block` of pairs takes of a contraction of `depth` elements."""
    return min(PARTITIONS, blocks(depth - block * PAIR_BLOCK, 2))


def load_weight_pairs(weight, first_block, end_block):
    """Load blocks first_block … end_block - 1 of a WeightMatrix [K, column] of fp8 @ HBM in pairs.

    Returns a new SBUF tile [partition, block, 2, column]. In an odd contraction the element behind the last one is 0.
    """
    elements = weight.elements
    depth, columns = elements.shape
    height = min(PARTITIONS, blocks(depth, 2))
    tile = nl.ndarray((height, end_block - first_block, 2, columns), dtype=elements.dtype, buffer=nl.sbuf)
    full = min(end_block, depth // PAIR_BLOCK)
    if full > first_block:
        rows = elements[first_block * PAIR_BLOCK : full * PAIR_BLOCK, :]
        source = rows.reshape_dim(0, (full - first_block, PARTITIONS, 2)).permute((1, 0, 2, 3))
        transfer(tile[:, 0 : full - first_block, :, :], source, STATIC)
    if end_block > full:
        short = tile[:, full - first_block, :, :]
        first = full * PAIR_BLOCK
        pairs = (depth - first) // 2
        if depth % 2 > 0:
            nisa.memset(dst=short, value=0.0)
            transfer(short[pairs : pairs + 1, 0, :], elements[depth - 1 : depth, :], STATIC)
        if pairs > 0:
            source = elements[first : first + 2 * pairs, :].reshape_dim(0, (pairs, 2))
            transfer(short[0:pairs, :, :], source, STATIC)
    return tile


def add_pair_products(sums, stationary, moving, panels, first, depth):
    """Add the products of blocks of pairs to the PSUM tiles `sums`, one for each panel; block 0 overwrites them.

    Args:
        sums: float32 tiles [row, column] in PSUM.
        stationary: fp8 [partition, block, 2, row] in SBUF with all blocks.
        moving: fp8 [partition, block, 2, column] in SBUF; its block 0 is block `first` of the contraction.
        panels: ranges (start, end) of columns.
        first: number of blocks before those of `moving`.
        depth: length K of the whole contraction.
    """
    for within in range(moving.shape[1]):
        block = first + within
        used = count_pair_partitions(depth, block)
        for panel in range(len(panels)):
            start, end = panels[panel]
            multiply_block_pair(
                sums[panel],
                stationary[0:used, block, :, :],
                moving[0:used, within, :, start:end],
                block > 0,
            )


def paired_rows_reference(
    x: np.ndarray,
    weight: np.ndarray | None,
    bias: np.ndarray | None,
    offset: float,
    eps: float,
    element: np.dtype,
) -> np.ndarray:
    """Return the numbers that products take for the rows norm(x), [T, H] float32 or float64: fp8 times row factors.

    Args:
        x: [T, H]. Rows times the weight of an RMSNorm, or rows of a whole LayerNorm, are rounded to its dtype.
        weight, bias: [1, H], or None; LayerNorm with both, RMSNorm with a weight alone.
        offset: number that is added to the weight.
        eps: number that is added to the mean of squares.
        element: float8_e4m3 or float8_e4m3fn.
    """
    rows, roots = widened(x), 1.0
    if bias is not None:
        rows = rows - rows.mean(axis=1, keepdims=True)
    if weight is not None:
        roots = 1 / np.sqrt((rows * rows).mean(axis=1, keepdims=True) + rows.dtype.type(eps))
        rows = rows * (widened(weight) + rows.dtype.type(offset))
    if bias is not None:
        rows, roots = rows * roots + widened(bias), 1.0
    codes, scales = quantise_rows_reference(rows, element, x.dtype)
    return codes * (scales * roots)
