"""Steps that the kernels share: allocation, load, store, constants, broadcasts, and copies out of PSUM.

PARTITIONS is the number of SBUF and PSUM partitions, BANK the number of float32 elements of a PSUM bank's partition.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

PARTITIONS = 128
BANK = 512


def load(source, mode="none", other=False):
    """Load a tensor of HBM into a new SBUF tile of its shape and dtype, and return the tile.

    `mode` names the dge_mode. `other` selects the Scalar engine's queue if `mode` is "hwdge", and has no effect else.
    """
    tile = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.sbuf)
    engine = nisa.scalar_engine if other and mode == "hwdge" else nisa.unknown_engine
    nisa.dma_copy(dst=tile, src=source, dge_mode=getattr(nisa.dge_mode, mode), engine=engine)
    return tile


def store(target, tile, mode="none"):
    """Store an SBUF tile to `target` in HBM; `mode` names the dge_mode."""
    nisa.dma_copy(dst=target, src=tile, dge_mode=getattr(nisa.dge_mode, mode))


def load_repeated(row, rows):
    """Load a row [1, n] of HBM into a new SBUF tile [rows, n], the same row on each partition, and return the tile."""
    columns = row.shape[1]
    tile = nl.ndarray((rows, columns), dtype=row.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=row.ap(pattern=[[0, rows], [1, columns]]))
    return tile


def evacuate(source, dtype):
    """Copy a tile, usually of PSUM, to a new SBUF tile of `dtype` on the Scalar engine, and return the copy."""
    tile = nl.ndarray(source.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=tile, op=nl.copy, data=source)
    return tile


def sbuf(shape, dtype):
    """Allocate a tile in SBUF; its contents are undefined."""
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def psum(shape, dtype=nl.float32):
    """Allocate a tile in PSUM; its contents are undefined."""
    return nl.ndarray(shape, dtype=dtype, buffer=nl.psum)


def constant(shape, value):
    """Return a new float32 SBUF tile filled with one value; float32 biases are accepted on every chip."""
    tile = sbuf(shape, nl.float32)
    nisa.memset(dst=tile, value=value)
    return tile


def broadcast(row, ones):
    """Return a row [1, n] of SBUF on every partition of a new PSUM tile [128, n]; n is at most 512.

    The matmul has `ones` [1, 128], of the row's dtype, as its stationary operand.
    """
    bank = psum((ones.shape[1], row.shape[1]))
    nisa.nc_matmul(dst=bank, stationary=ones, moving=row)
    return bank


def ones_row(dtype):
    """Return a new SBUF tile [1, 128] of ones, the stationary operand of `broadcast`."""
    tile = sbuf((1, PARTITIONS), dtype)
    nisa.memset(dst=tile, value=1.0)
    return tile
