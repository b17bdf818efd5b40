"""Scale a tile and sum each row in one instruction."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def scaled_sums(x):
    rows = x.shape[0]
    tile = nl.load(x)
    sums = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar_reduce(
        dst=tile,
        data=tile,
        op0=nl.multiply,
        operand0=0.5,
        reduce_op=nl.add,
        reduce_res=sums,
    )
    out = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    nl.store(out, sums)
    return out


x = np.arange(12, dtype=np.float32).reshape(3, 4)
np.testing.assert_array_equal(scaled_sums(x), 0.5 * x.sum(axis=1, keepdims=True))
