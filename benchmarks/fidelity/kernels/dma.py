"""Transfers between HBM and SBUF, by where they are triggered and who writes their descriptors."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import PARTITIONS, sbuf


def loads(sources, mode="none"):
    """Each of `sources` [128, n] @ HBM into a tile; an instruction that waits for the last one comes behind."""
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
    """Load x [128, n] @ HBM `count` times, each time into a tile of its own, as a loop that streams does."""
    for _ in range(count):
        nisa.dma_copy(dst=sbuf(x.shape, x.dtype), src=x, dge_mode=getattr(nisa.dge_mode, mode))
    return nl.ndarray((1, 1), dtype=x.dtype, buffer=nl.shared_hbm)


def stores(x, count, mode="none"):
    """Store a tile of x's shape and dtype to HBM `count` times."""
    tile = sbuf(x.shape, x.dtype)
    nisa.memset(dst=tile, value=0)
    out = nl.ndarray((count, *x.shape), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in range(count):
        nisa.dma_copy(dst=out[i], src=tile, dge_mode=getattr(nisa.dge_mode, mode))
    return out


def load_pieces(x, width, mode="none"):
    """Load the first `width` columns of x [128, n, .]: n separate pieces per partition."""
    tile = sbuf((x.shape[0], x.shape[1], width), x.dtype)
    nisa.dma_copy(dst=tile, src=x[:, :, 0:width], dge_mode=getattr(nisa.dge_mode, mode))
    return nl.ndarray((1, 1), dtype=x.dtype, buffer=nl.shared_hbm)


def load_tiles(x):
    """All 128 x 128 tiles of a matrix, one DMA each."""
    rows, columns = x.shape
    for row in range(0, rows, PARTITIONS):
        for column in range(0, columns, PARTITIONS):
            tile = sbuf((PARTITIONS, PARTITIONS), x.dtype)
            nisa.dma_copy(dst=tile, src=x[row : row + PARTITIONS, column : column + PARTITIONS])
    return nl.ndarray((1, 1), dtype=x.dtype, buffer=nl.shared_hbm)


def gathers(table, rows, count):
    """`count` indirect loads of some rows each of table [V, n], row numbers in rows [up to 128, 1]."""
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
    """`count` indirect stores of 128 rows of 4 bytes each, into places of their own."""
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
