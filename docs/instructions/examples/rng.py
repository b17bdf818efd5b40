"""Fill a tile with random bits; equal seeds give equal bits."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def random_bits(seed):
    nisa.set_rng_seed(nl.load(seed))
    bits = nl.ndarray((128, 16), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.rng(dst=bits)
    out = nl.ndarray(bits.shape, dtype=nl.uint32, buffer=nl.shared_hbm)
    nl.store(out, bits)
    return out


first, repeated, second = (random_bits(np.array([[seed]], dtype=np.uint32)) for seed in (1, 1, 2))
np.testing.assert_array_equal(first, repeated)
assert (first != second).mean() > 0.99
