"""A softmax kernel for the benchmark of replays, in one pass over tiles of 128 rows."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def softmax(x):
    """Return the softmax of each row of x [T, H] in HBM, T a multiple of 128, with x's dtype; sums are float32."""
    tokens, columns = x.shape
    y = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for first in range(0, tokens, 128):
        tile = nl.ndarray((128, columns), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x[first : first + 128, :])
        largest = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=largest, op=nl.maximum, data=tile, axis=1, negate=True)
        total = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
        weights = nl.ndarray((128, columns), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(
            dst=weights,
            op=nl.exp,
            data=tile,
            bias=largest,
            reduce_op=nl.add,
            reduce_res=total,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
        inverse = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.reciprocal(dst=inverse, data=total)
        result = nl.ndarray((128, columns), dtype=x.dtype, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=result, data=weights, op0=nl.multiply, operand0=inverse)
        nisa.dma_copy(dst=y[first : first + 128, :], src=result)
    return y
