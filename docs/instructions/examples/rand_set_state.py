"""Give each partition a state of its own."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def draw(seeds):
    """Return random bits [P, 4]; seeds [P, 6] uint32 are the states of GpSimd's generators."""
    nisa.rand_set_state(nl.load(seeds))
    bits = nl.ndarray((seeds.shape[0], 4), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.rng(dst=bits, engine=nisa.engine.gpsimd)
    out = nl.ndarray(bits.shape, dtype=nl.uint32, buffer=nl.shared_hbm)
    nl.store(out, bits)
    return out


seeds = np.arange(1, 97, dtype=np.uint32).reshape(16, 6)
seeds[1] = seeds[0]
bits = draw(seeds)
np.testing.assert_array_equal(bits[0], bits[1])  # equal states, equal numbers
assert (bits[0] != bits[2]).any()
