"""Subtract the mean of each row and scale."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def shift_and_scale(x, mean):
    """Return (x - mean) * 0.5, mean [P, 1]."""
    tile = nl.load(x)
    nisa.tensor_scalar(
        dst=tile,
        data=tile,
        op0=nl.subtract,
        operand0=nl.load(mean),
        op1=nl.multiply,
        operand1=0.5,
    )
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


x = np.arange(12, dtype=np.float32).reshape(3, 4)
mean = x.mean(axis=1, keepdims=True)
np.testing.assert_allclose(shift_and_scale(x, mean), (x - mean) * 0.5, rtol=1e-6)
