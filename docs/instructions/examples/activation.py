"""Compute SiLU with a scale, and sum each row on the way."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def silu_with_sums(x):
    tile = nl.load(x)
    sums = nl.ndarray((x.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=tile,
        op=nl.silu,
        data=tile,
        scale=2.0,
        reduce_op=nl.add,
        reduce_res=sums,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    activated = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    row_sums = nl.ndarray((x.shape[0], 1), dtype=nl.float32, buffer=nl.shared_hbm)
    nl.store(activated, tile)
    nl.store(row_sums, sums)
    return activated, row_sums


x = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)
activated, row_sums = silu_with_sums(x)
expected = 2 * x / (1 + np.exp(-2 * x))
np.testing.assert_allclose(activated, expected, rtol=1e-5)
np.testing.assert_allclose(row_sums, expected.sum(axis=1, keepdims=True), rtol=1e-5)
