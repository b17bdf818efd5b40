"""Subtract a maximum and multiply in one instruction."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def center_and_weight(x, mean, weight):
    """Return (x - mean) * weight, mean [P, 1], weight as x."""
    tile = nl.load(x)
    nisa.scalar_tensor_tensor(
        dst=tile,
        data=tile,
        op0=nl.subtract,
        operand0=nl.load(mean),
        op1=nl.multiply,
        operand1=nl.load(weight),
    )
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


x, weight = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
mean = x.mean(axis=1, keepdims=True)
np.testing.assert_allclose(center_and_weight(x, mean, weight), (x - mean) * weight, rtol=1e-6)
