"""Add three tensors while they move from HBM to SBUF."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def add_three(a, b, c):
    total = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf)
    nisa.dma_compute(dst=total, srcs=[a, b, c], reduce_op=nl.add)
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(out, total)
    return out


a, b, c = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
np.testing.assert_array_equal(add_three(a, b, c), a + b + c)
