"""Compute running sums of each row."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def running_sums(x):
    tile = nl.load(x)
    nisa.tensor_scalar_cumulative(dst=tile, src=tile, op0=nl.multiply, op1=nl.add, imm0=1.0)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


x = np.arange(12, dtype=np.float32).reshape(3, 4)
np.testing.assert_array_equal(running_sums(x), x.cumsum(axis=1))
