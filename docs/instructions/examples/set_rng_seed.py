"""Repeat a sequence of random numbers within a kernel."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def draw_twice(seed):
    """Return two draws after the same seed."""
    out = nl.ndarray((2, 128, 4), dtype=nl.uint32, buffer=nl.shared_hbm)
    for draw in range(2):
        nisa.set_rng_seed(nl.load(seed))
        bits = nl.ndarray((128, 4), dtype=nl.uint32, buffer=nl.sbuf)
        nisa.rng(dst=bits)
        nl.store(out[draw], bits)
    return out


draws = draw_twice(np.array([[7]], dtype=np.uint32))
np.testing.assert_array_equal(draws[0], draws[1])
assert np.unique(draws[0]).size > 500  # each partition has a generator of its own
