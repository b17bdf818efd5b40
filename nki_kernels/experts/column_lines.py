"""Scales and biases of an expert's weights, one number for each column: loaded, and laid out as the sums are.

Sums of gate and up have their columns on the partitions. The numbers of a block of 128 columns lie together in HBM, so
they are loaded as *lines*, [block, column], and transposed on the Tensor engine. Sums of down have rows on the
partitions in `experts_prefill`, so that the numbers are repeated on all partitions.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import PARTITIONS, blocks, ranges
from nki_kernels.weights import view_expert

QUADRANT = PARTITIONS // 4
"""Partitions among which one shuffle copies."""

REPEATED_COLUMNS = 2048
"""Most columns whose numbers one shuffle repeats, which bounds the SBUF of what it reads."""


@dataclass
class ColumnLines(nl.NKIObject):
    """Numbers of the columns of some arrays in SBUF.

    lines: list of tiles [array * block, column in block], each with whole arrays. blocks: number of blocks of an array.
    columns: float32 [column in block, array, block] once `transpose` has run; None before.
    """

    lines: list
    blocks: int
    columns: nl.NkiTensor | None = None

    def transpose(self):
        """Return `columns`; the first call transposes the lines, on the Tensor and the Vector engine."""
        if self.columns is None:
            height, total = self.lines[0].shape[1], 0
            for tile in self.lines:
                total += tile.shape[0]
            flat = nl.ndarray((height, total), dtype=nl.float32, buffer=nl.sbuf)
            first = 0
            for tile in self.lines:
                bank = nl.ndarray((height, tile.shape[0]), dtype=tile.dtype, buffer=nl.psum)
                nisa.nc_transpose(dst=bank, data=tile)
                # Not the Scalar engine, which would load its table of functions again.
                nisa.tensor_copy(dst=flat[:, first : first + tile.shape[0]], src=bank)
                first += tile.shape[0]
            self.columns = flat.reshape((height, total // self.blocks, self.blocks))
        return self.columns


@dataclass
class ColumnFactors(nl.NKIObject):
    """What multiplies the sums of gate and up, and what is added after that.

    columns: float32 [column in block, array, block] @ SBUF. scales, biases: for gate and for up the index of its array
    in `columns`, or None. up_offset: number that is added to up beside its biases.
    """

    columns: nl.NkiTensor
    scales: list
    biases: list
    up_offset: float

    def apply(self, sums, side, first, end):
        """Return sums [column in block, block, row] of blocks first … end - 1 times scales, plus biases.

        The result is float32 @ SBUF. sums: PSUM tile, maybe with fewer partitions than a block has columns. side: 0 for
        gate, 1 for up.
        """
        height, _, rows = sums.shape
        scaled = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf)
        for index, op in ((self.scales[side], nl.multiply), (self.biases[side], nl.add)):
            if index is not None:
                factors = self.columns[0:height, index, first:end].expand_dim(2).broadcast(2, rows)
                nisa.tensor_tensor(dst=scaled, data1=sums, data2=factors, op=op)
                sums = scaled
        if side == 1 and self.up_offset != 0.0:
            nisa.tensor_scalar(dst=scaled, data=sums, op0=nl.add, operand0=self.up_offset)
            sums = scaled
        return sums


def load_lines(arrays, expert, first, end):
    """Load columns first … end - 1 of an expert's row in each of some arrays into SBUF, and return the `ColumnLines`.

    arrays: list of arrays [E, N] or [E, 1, N] @ HBM. expert: `ExpertIndex`.
    """
    width = end - first
    count, height = blocks(width), min(PARTITIONS, width)
    full = width // height
    lines = []
    for start, stop in ranges(0, len(arrays), max(1, PARTITIONS // count)):
        tile = nl.ndarray(((stop - start) * count, height), dtype=nl.float32, buffer=nl.sbuf)
        if full < count:
            # On gen2 a transpose is a product, in which a NaN behind a short line would spread to other elements.
            nisa.memset(dst=tile, value=0.0, engine=nisa.engine.gpsimd)
        for i in range(start, stop):
            line = (i - start) * count
            source = view_expert(arrays[i], expert, [[height, full], [1, height]], first)
            nisa.dma_copy(dst=tile[line : line + full, :], src=source)
            if full < count:
                short = width - full * height
                source = view_expert(arrays[i], expert, [[short, 1], [1, short]], first + full * height)
                nisa.dma_copy(dst=tile[line + full : line + count, 0:short], src=source)
        lines.append(tile)
    return ColumnLines(lines, count)


def load_down_lines(scales, expert):
    """Load an expert's scales of down, a row of [E, 1, H] @ HBM, onto the first partition of each quadrant in SBUF.

    Returns a list of float32 tiles [128, column], each with up to REPEATED_COLUMNS columns. expert: `ExpertIndex`.
    """
    lines = []
    for first, end in ranges(0, scales.shape[2], REPEATED_COLUMNS):
        tile = nl.ndarray((PARTITIONS, end - first), dtype=nl.float32, buffer=nl.sbuf)
        for line in range(0, PARTITIONS, QUADRANT):
            source = view_expert(scales, expert, [[end - first, 1], [1, end - first]], first)
            nisa.dma_copy(dst=tile[line : line + 1, :], src=source)
        lines.append(tile)
    return lines


def repeat_down_lines(lines, hidden):
    """Return scales of down on every partition, float32 [128, H] in SBUF, from the list of `load_down_lines`.

    The Vector engine copies a row within quadrants of 32 partitions. hidden: H.
    """
    repeated = nl.ndarray((PARTITIONS, hidden), dtype=nl.float32, buffer=nl.sbuf)
    first = 0
    for tile in lines:
        end = first + tile.shape[1]
        nisa.nc_stream_shuffle(dst=repeated[:, first:end], src=tile, shuffle_mask=[0] * QUADRANT)
        first = end
    return repeated
