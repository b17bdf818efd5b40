"""Find the positions of the eight largest elements."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def positions_of_largest(x):
    tile = nl.load(x)
    largest = nl.ndarray((x.shape[0], 8), dtype=x.dtype, buffer=nl.sbuf)
    positions = nl.ndarray((x.shape[0], 8), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.max8(dst=largest, src=tile)
    nisa.nc_find_index8(dst=positions, data=tile, vals=largest)
    out = nl.ndarray(positions.shape, dtype=nl.uint32, buffer=nl.shared_hbm)
    nl.store(out, positions)
    return out


x = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)
np.testing.assert_array_equal(positions_of_largest(x), np.argsort(-x, axis=1)[:, :8])
