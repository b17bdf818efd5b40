"""Gather elements of each row by indices of that row."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def take_along_rows(x, indices):
    gathered = nl.ndarray(indices.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.nc_n_gather(dst=gathered, data=nl.load(x), indices=nl.load(indices))
    out = nl.ndarray(indices.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, gathered)
    return out


rng = np.random.default_rng(0)
x = rng.standard_normal((8, 20)).astype(np.float32)
indices = rng.integers(0, 20, (8, 5)).astype(np.uint32)
np.testing.assert_array_equal(take_along_rows(x, indices), np.take_along_axis(x, indices, axis=1))
