"""Save the state of GpSimd's generators and continue from it."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def draw_again(seeds):
    """Return two draws from one saved state; seeds [P, 6] uint32."""
    lanes = seeds.shape[0]
    nisa.rand_set_state(nl.load(seeds))
    state = nl.ndarray((lanes, 6), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.rand_get_state(state)
    out = nl.ndarray((2, lanes, 4), dtype=nl.uint32, buffer=nl.shared_hbm)
    for draw in range(2):
        nisa.rand_set_state(state)
        bits = nl.ndarray((lanes, 4), dtype=nl.uint32, buffer=nl.sbuf)
        nisa.rng(dst=bits, engine=nisa.engine.gpsimd)
        nl.store(out[draw], bits)
    return out


draws = draw_again(np.arange(1, 97, dtype=np.uint32).reshape(16, 6))
np.testing.assert_array_equal(draws[0], draws[1])
