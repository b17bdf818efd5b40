"""Transpose a matrix on its way from HBM to SBUF."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def transpose(x):
    rows, columns = x.shape
    tile = nl.ndarray((columns, rows), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_transpose(dst=tile, src=x, axes=(1, 0))
    out = nl.ndarray((columns, rows), dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


x = np.arange(12, dtype=np.float32).reshape(3, 4)
np.testing.assert_array_equal(transpose(x), x.T)
