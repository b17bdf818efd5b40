"""Find the maximum of the last two dimensions."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def maximum_of_heads(x):
    """Return the maximum of x [P, heads, columns] over heads and columns."""
    largest = nl.ndarray((x.shape[0], 1), dtype=x.dtype, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=nl.load(x), axis=(1, 2))
    out = nl.ndarray((x.shape[0], 1), dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, largest)
    return out


x = np.random.default_rng(0).standard_normal((4, 3, 5)).astype(np.float32)
np.testing.assert_array_equal(maximum_of_heads(x), x.max(axis=(1, 2))[:, None])
