"""Compute a linear recurrence along each row."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def recurrence(decay, x):
    """Return s with s[:, i] = decay[:, i] * s[:, i - 1] + x[:, i]."""
    tile = nl.load(x)
    nisa.tensor_tensor_scan(
        dst=tile,
        data0=nl.load(decay),
        data1=tile,
        initial=0.0,
        op0=nl.multiply,
        op1=nl.add,
    )
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


decay, x = np.full((3, 5), 0.5, np.float32), np.arange(15, dtype=np.float32).reshape(3, 5)
expected, state = np.empty_like(x), np.zeros(3, np.float32)
for column in range(5):
    expected[:, column] = state = decay[:, column] * state + x[:, column]
np.testing.assert_array_equal(recurrence(decay, x), expected)
