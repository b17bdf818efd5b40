"""Transpose a tile on the Tensor engine, through PSUM."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def transpose(x):
    rows, columns = x.shape
    transposed = nl.ndarray((columns, rows), dtype=x.dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=transposed, data=nl.load(x))
    tile = nl.ndarray((columns, rows), dtype=x.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=tile, src=transposed)
    out = nl.ndarray((columns, rows), dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


x = np.random.default_rng(0).standard_normal((64, 100)).astype(np.float32)
np.testing.assert_array_equal(transpose(x), x.T)
