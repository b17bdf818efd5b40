"""Steps that the kernels share: a load, a store, and a copy out of PSUM on the Scalar engine."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

PARTITIONS = 128
BANK = 512


def load(source, mode="none", other=False):
    """Load a tile from HBM into SBUF; `mode` is the dge_mode, `other` asks for the second hardware queue."""
    tile = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.sbuf)
    engine = nisa.scalar_engine if other and mode == "hwdge" else nisa.unknown_engine
    nisa.dma_copy(dst=tile, src=source, dge_mode=getattr(nisa.dge_mode, mode), engine=engine)
    return tile


def store(target, tile, mode="none"):
    """Store a tile of SBUF to HBM; `mode` is the dge_mode."""
    nisa.dma_copy(dst=target, src=tile, dge_mode=getattr(nisa.dge_mode, mode))


def load_repeated(row, rows):
    """Load a row [1, n] of HBM into an SBUF tile [rows, n], the same row on each partition."""
    columns = row.shape[1]
    tile = nl.ndarray((rows, columns), dtype=row.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=row.ap(pattern=[[0, rows], [1, columns]]))
    return tile


def evacuate(source, dtype):
    """Copy a PSUM tile to SBUF on the Scalar engine, as public traces show it, and return the copy."""
    tile = nl.ndarray(source.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=tile, op=nl.copy, data=source)
    return tile


def sbuf(shape, dtype):
    """Allocate a tile in SBUF."""
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def psum(shape, dtype=nl.float32):
    """Allocate a tile in PSUM."""
    return nl.ndarray(shape, dtype=dtype, buffer=nl.psum)


def constant(shape, value):
    """Fill a new float32 tile in SBUF with one value: a bias that every chip takes."""
    tile = sbuf(shape, nl.float32)
    nisa.memset(dst=tile, value=value)
    return tile


def broadcast(row, ones):
    """Broadcast a row [1, n] of SBUF, at most a bank wide, to all partitions of PSUM by a matmul with ones [1, 128]."""
    bank = psum((ones.shape[1], row.shape[1]))
    nisa.nc_matmul(dst=bank, stationary=ones, moving=row)
    return bank


def ones_row(dtype):
    """Build the tile of ones [1, 128] that is the stationary operand of `broadcast`."""
    tile = sbuf((1, PARTITIONS), dtype)
    nisa.memset(dst=tile, value=1.0)
    return tile
