"""Multiply two matrices whose inner dimension takes two passes."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def matmul(a_transposed, b):
    """Return a @ b: a_transposed [K, M], b [K, N]; matmuls accumulate over K in PSUM."""
    inner, rows = a_transposed.shape
    columns = b.shape[1]
    total = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.psum)
    for start in range(0, inner, 128):
        nisa.nc_matmul(
            dst=total,
            stationary=nl.load(a_transposed[start : start + 128]),
            moving=nl.load(b[start : start + 128]),
        )
    tile = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=tile, src=total)
    out = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


rng = np.random.default_rng(0)
a, b = rng.standard_normal((64, 256), np.float32), rng.standard_normal((256, 32), np.float32)
np.testing.assert_allclose(matmul(a.T.copy(), b), a @ b, rtol=1e-4, atol=1e-4)
