"""List the positions of nonzero elements."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def find_nonzero(x):
    """Return positions of the nonzero elements of x [1, N], then -1; the last element is their number."""
    columns = x.shape[1]
    positions = nl.ndarray((1, columns + 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.nonzero_with_count(dst=positions, src=nl.load(x))
    out = nl.ndarray(positions.shape, dtype=nl.int32, buffer=nl.shared_hbm)
    nl.store(out, positions)
    return out


x = np.array([[0, 5, 0, 0, 7, 1]], dtype=np.int32)
np.testing.assert_array_equal(find_nonzero(x), [[1, 4, 5, -1, -1, -1, 3]])
