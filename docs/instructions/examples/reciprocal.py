"""Divide each row by its sum."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def normalise_rows(x):
    tile = nl.load(x)
    sums = nl.ndarray((x.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=tile, axis=1)
    nisa.reciprocal(dst=sums, data=sums)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=sums)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


x = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
np.testing.assert_allclose(normalise_rows(x), x / x.sum(axis=1, keepdims=True), rtol=1e-6)
