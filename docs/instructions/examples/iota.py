"""Number the elements of a tile in row-major order."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def number_elements():
    tile = nl.ndarray((4, 8), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=tile, pattern=[[1, 8]], offset=100, channel_multiplier=8)
    out = nl.ndarray((4, 8), dtype=nl.int32, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


np.testing.assert_array_equal(number_elements(), 100 + np.arange(32).reshape(4, 8))
