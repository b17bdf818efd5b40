"""Scales of blocks of 128 rows and 128 columns of a weight of 8 bits, and the two ways in which they are applied.

    y[r, n] = sum over K blocks b of scales[b, n // 128] * (sum over k in block b of x[r, k] * elements[k, n])

`widen_blocks` multiplies loaded elements, 128 of each partition for a pair of blocks, in prompts. `copy_scaled_rows`
multiplies copies of few rows instead, one element for each row and pair of blocks; the elements then go to the Tensor
engine as they are. Both round to the dtype of the rows. One element of each partition takes the Vector engine 1.04 ns;
reading a pair of blocks takes 46 ns on trn2 at 358 GB/s, in bfloat16 92 ns.

Scales are in SBUF as [partition, K block, column block], the same on every partition.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.tiles import PARTITIONS, blocks


def load_block_scales(scales):
    """Load block scales [K block, column block] @ HBM onto all partitions: [128, K block, column block] in SBUF."""
    depth, columns = scales.shape
    count = depth * columns
    tile = nl.ndarray((PARTITIONS, depth, columns), dtype=nl.float32, buffer=nl.sbuf)
    # The DMA reads the same numbers for each partition: 3 % of the bytes of the weight.
    transfer(tile.reshape((PARTITIONS, count)), scales.ap(pattern=[[0, PARTITIONS], [1, count]]), SCALAR)
    return tile


def choose_engine(index, share):
    """Return the engine of work number `index`: GpSimd takes one of `share`, the Vector engine the others."""
    # On gen2 GpSimd and the Vector engine wait for each other at their port.
    gen2 = nisa.get_nc_version() == nisa.nc_version.gen2
    return nisa.engine.gpsimd if index % share == 1 and not gen2 else nisa.engine.vector


def widen_blocks(dst, elements, scales, first_column):
    """Write elements of a weight times their block scales to `dst`, both SBUF tiles [k in block, K block, column].

    The Vector engine multiplies one half of the columns, GpSimd the other.

    Args:
        scales: float32 [128, K block, column block] in SBUF, of the blocks that the tiles have.
        first_column: position of the tiles' first column in its block.
    """
    width = elements.shape[2]
    half = blocks(first_column + width) // 2 * PARTITIONS - first_column
    if half <= 0:
        half = width
    multiply_blocks(dst[:, :, 0:half], elements[:, :, 0:half], scales, first_column, choose_engine(0, 2))
    if half < width:
        # The second half begins with a block.
        last = (first_column + half) // PARTITIONS
        right = slice(half, width)
        multiply_blocks(dst[:, :, right], elements[:, :, right], scales[:, :, last:], 0, choose_engine(1, 2))


def multiply_blocks(dst, elements, scales, first_column, engine):
    """Write elements times their block scales to `dst` on one engine; other arguments are those of `widen_blocks`."""
    height, width = elements.shape[0], elements.shape[2]
    factors = scales[0:height, :, :]
    start = 0
    for block, end, count in list_column_runs(first_column, width):
        shape = (count, (end - start) // count)
        nisa.tensor_tensor(
            dst=dst[:, :, start:end].reshape_dim(2, shape),
            data1=elements[:, :, start:end].reshape_dim(2, shape),
            data2=factors[:, :, block : block + count].expand_dim(3).broadcast(3, shape[1]),
            op=nl.multiply,
            engine=engine,
        )
        start = end


def list_column_runs(first_column, width):
    """Return runs (block, end, count) that cover `width` columns: a short first block, whole blocks, and a short last.

    block: index of the run's first block of columns. end: column at which the run ends, from the first column
    on. count: number of equal blocks in the run.

    first_column: position of the first column in its block.
    """
    runs = []
    start, block = 0, 0
    if first_column > 0:
        start, block = min(width, PARTITIONS - first_column), 1
        runs.append((0, start, 1))
    full = (width - start) // PARTITIONS
    if full > 0:
        runs.append((block, start + full * PARTITIONS, full))
    if start + full * PARTITIONS < width:
        runs.append((block + full, width, 1))
    return runs


def copy_scaled_rows(x, scales, k_heights, engine, copies=None):
    """Return rows times scales, a copy for each block of columns: [k in block, K block, column block, row] @ SBUF.

    Args:
        x: SBUF tile [k in block, K block, row], whose dtype the copies have.
        scales: float32 [128, K block, column block] in SBUF, of the same K blocks.
        k_heights: number of partitions of each K block; all but the last are equal.
        engine: that makes the copies, see `choose_engine`.
        copies: a tile for the result, whose further rows stay as they are; None for a new tile.
    """
    count, columns, rows = len(k_heights), scales.shape[2], x.shape[2]
    if copies is None:
        copies = nl.ndarray((k_heights[0], count, columns, rows), dtype=x.dtype, buffer=nl.sbuf)
    # Partitions behind a short last block are undefined, so that block is copied apart.
    full = count if k_heights[count - 1] == k_heights[0] else count - 1
    for first, end in ((0, full), (full, count)):
        if end > first:
            height = k_heights[first]
            source = x[0:height, first:end, :].expand_dim(2).broadcast(2, columns)
            factor = scales[0:height, first:end, :].expand_dim(3).broadcast(3, rows)
            nisa.tensor_tensor(
                dst=copies[0:height, first:end, :, 0:rows],
                data1=source,
                data2=factor,
                op=nl.multiply,
                engine=engine,
            )
    return copies
