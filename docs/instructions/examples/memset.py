"""Pad a tile with zeros."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def pad_columns(x):
    """Return x with four columns of zeros appended."""
    rows, columns = x.shape
    tile = nl.ndarray((rows, columns + 4), dtype=x.dtype, buffer=nl.sbuf)
    nisa.memset(dst=tile[:, columns:], value=0.0)
    nisa.dma_copy(dst=tile[:, :columns], src=x)
    out = nl.ndarray(tile.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


x = np.arange(12, dtype=np.float32).reshape(3, 4)
np.testing.assert_array_equal(pad_columns(x), np.pad(x, [(0, 0), (0, 4)]))
