"""Transfers between HBM and SBUF, whose phases are timed. `mode` names the dge_mode: what writes the descriptors.

Most kernels return an output that is never written, because only the transfers are timed.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import PARTITIONS, sbuf


def loads(sources, mode="none"):
    """Load each of `sources` [128, n] in HBM into a tile of its own, then copy the last tile on the Vector engine.

    The copy waits for the last load, which shows when the load has completed.
    """
    tiles = []
    for source in sources:
        tile = sbuf(source.shape, source.dtype)
        nisa.dma_copy(dst=tile, src=source, dge_mode=getattr(nisa.dge_mode, mode))
        tiles.append(tile)
    out = nl.ndarray(tiles[-1].shape, dtype=tiles[-1].dtype, buffer=nl.shared_hbm)
    copy = sbuf(tiles[-1].shape, tiles[-1].dtype)
    nisa.tensor_copy(dst=copy, src=tiles[-1], engine=nisa.vector_engine)
    return out


def streaming(x, count, mode):
    """Load x [128, n] in HBM `count` times, each time into a tile of its own, as a streaming loop does."""
    for _ in range(count):
        nisa.dma_copy(dst=sbuf(x.shape, x.dtype), src=x, dge_mode=getattr(nisa.dge_mode, mode))
    return nl.ndarray((1, 1), dtype=x.dtype, buffer=nl.shared_hbm)


def stores(x, count, mode="none"):
    """Store an SBUF tile of zeros, of x's shape and dtype, `count` times, and return the output [count, *x.shape]."""
    tile = sbuf(x.shape, x.dtype)
    nisa.memset(dst=tile, value=0)
    out = nl.ndarray((count, *x.shape), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in range(count):
        nisa.dma_copy(dst=out[i], src=tile, dge_mode=getattr(nisa.dge_mode, mode))
    return out


def load_pieces(x, width, mode="none"):
    """Load the first `width` columns of x [P, n, columns] in HBM in one DMA: n separate pieces per partition."""
    tile = sbuf((x.shape[0], x.shape[1], width), x.dtype)
    nisa.dma_copy(dst=tile, src=x[:, :, 0:width], dge_mode=getattr(nisa.dge_mode, mode))
    return nl.ndarray((1, 1), dtype=x.dtype, buffer=nl.shared_hbm)


def load_tiles(x):
    """Load all 128 x 128 tiles of a matrix in HBM, one DMA each."""
    rows, columns = x.shape
    for row in range(0, rows, PARTITIONS):
        for column in range(0, columns, PARTITIONS):
            tile = sbuf((PARTITIONS, PARTITIONS), x.dtype)
            nisa.dma_copy(dst=tile, src=x[row : row + PARTITIONS, column : column + PARTITIONS])
    return nl.ndarray((1, 1), dtype=x.dtype, buffer=nl.shared_hbm)


def gathers(table, rows, count):
    """Load rows of table [V, n] `count` times by indirect DMA; `rows` [up to 128, 1] has their indices."""
    row_numbers = sbuf(rows.shape, rows.dtype)
    nisa.dma_copy(dst=row_numbers, src=rows)
    for _ in range(count):
        tile = sbuf((rows.shape[0], table.shape[1]), table.dtype)
        nisa.dma_copy(
            dst=tile,
            src=table.ap(
                pattern=[[table.shape[1], rows.shape[0]], [1, table.shape[1]]],
                vector_offset=row_numbers,
                indirect_dim=0,
            ),
        )
    return nl.ndarray((1, 1), dtype=table.dtype, buffer=nl.shared_hbm)


def scatters(x, rows, count):
    """Store 128 rows of one element of x's dtype `count` times by indirect DMA, each time to a buffer of its own.

    Return x. `rows` [128, 1] has the row indices.
    """
    row_numbers = sbuf(rows.shape, rows.dtype)
    nisa.dma_copy(dst=row_numbers, src=rows)
    tile = sbuf((PARTITIONS, 1), x.dtype)
    nisa.memset(dst=tile, value=0)
    for _ in range(count):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)
        nisa.dma_copy(
            dst=out.ap(pattern=[[1, PARTITIONS], [1, 1]], vector_offset=row_numbers, indirect_dim=0),
            src=tile,
        )
    return x
