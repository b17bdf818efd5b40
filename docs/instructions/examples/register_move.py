"""Set a register to a number and store it."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def store_number():
    register = nisa.register_alloc()
    nisa.register_move(register, 42)
    tile = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.register_store(tile, register)
    out = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


np.testing.assert_array_equal(store_number(), [[42]])
