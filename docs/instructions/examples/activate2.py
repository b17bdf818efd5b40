"""Apply multiply, add and a function in one instruction."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def sigmoid_of_line(x):
    tile = nl.load(x)
    nisa.activate2(dst=tile, op=nl.sigmoid, data=tile, imm0=0.5, imm1=1.0, op0=nl.multiply, op1=nl.add)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


x = np.linspace(-4, 4, 12, dtype=np.float32).reshape(3, 4)
np.testing.assert_allclose(sigmoid_of_line(x), 1 / (1 + np.exp(-(0.5 * x + 1))), rtol=1e-5)
