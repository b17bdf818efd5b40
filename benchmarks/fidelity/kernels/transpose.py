"""A matrix transposed tile by tile on the Tensor engine."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import PARTITIONS, evacuate, load, psum


def by_tiles(x):
    """Return the transpose of x [M, N] in HBM: 128 x 128 tiles are loaded, transposed into PSUM, copied out and stored.

    The Scalar engine copies from PSUM.
    """
    rows, columns = x.shape
    out = nl.ndarray((columns, rows), dtype=x.dtype, buffer=nl.shared_hbm)
    for row in range(0, rows, PARTITIONS):
        for column in range(0, columns, PARTITIONS):
            bank = psum((PARTITIONS, PARTITIONS), x.dtype)
            nisa.nc_transpose(dst=bank, data=load(x[row : row + PARTITIONS, column : column + PARTITIONS]))
            result = evacuate(bank, x.dtype)
            nisa.dma_copy(dst=out[column : column + PARTITIONS, row : row + PARTITIONS], src=result)
    return out
