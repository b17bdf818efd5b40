"""Exponentiate scores less the maximum of their row, and sum them."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def exponentiate(scores):
    rows = scores.shape[0]
    tile = nl.load(scores)
    largest = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    sums = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=tile, axis=1)
    nisa.exponential(
        dst=tile,
        src=tile,
        max_value=largest,
        reduce_res=sums,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    out = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    nl.store(out, sums)
    return out


scores = np.linspace(0, 50, 12, dtype=np.float32).reshape(3, 4)
expected = np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)
np.testing.assert_allclose(exponentiate(scores), expected, rtol=1e-5)
