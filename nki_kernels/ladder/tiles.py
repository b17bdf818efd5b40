"""Helpers of the rungs: whole tiles of 128 partitions and 512 columns, loaded, accumulated and stored."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

PARTITIONS = 128
COLUMNS = 512  # of float32: one PSUM bank of a partition, and the widest moving tile of nc_matmul


def expect_whole_tiles(a_t, b):
    """Return (K, M, N) of a_t [K, M] and b [K, N], or raise AssertionError if they do not fill whole tiles.

    K and M have to be multiples of 128, N of 512, and K the same in both.
    """
    depth, rows = a_t.shape
    columns = b.shape[1]
    assert b.shape[0] == depth, f"a_t [K, M] and b [K, N] differ in K: {depth} and {b.shape[0]}"
    assert depth % PARTITIONS == 0, f"K has to be a multiple of {PARTITIONS}, not {depth}"
    assert rows % PARTITIONS == 0, f"M has to be a multiple of {PARTITIONS}, not {rows}"
    assert columns % COLUMNS == 0, f"N has to be a multiple of {COLUMNS}, not {columns}"
    return depth, rows, columns


def load(source):
    """Load a view of HBM into a new SBUF tile."""
    tile = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source)
    return tile


def allocate_bank():
    """Allocate a float32 tile [128, 512] in PSUM, one bank, for sums of matmuls."""
    return nl.ndarray((PARTITIONS, COLUMNS), dtype=nl.float32, buffer=nl.psum)


def store(destination, bank):
    """Copy a PSUM tile `bank` to `destination` in HBM, rounded to the destination's dtype."""
    result = nl.ndarray(bank.shape, dtype=destination.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=bank)
    nisa.dma_copy(dst=destination, src=result)
