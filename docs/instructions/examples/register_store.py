"""Copy one element through a register."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def copy_element(x):
    """Return x[0, 0]; integers keep their value."""
    register = nisa.register_alloc()
    nisa.register_load(register, nl.load(x)[:, 0:1])
    tile = nl.ndarray((1, 1), dtype=x.dtype, buffer=nl.sbuf)
    nisa.register_store(tile, register)
    out = nl.ndarray((1, 1), dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


np.testing.assert_array_equal(copy_element(np.array([[-5, 7]], dtype=np.int32)), [[-5]])
