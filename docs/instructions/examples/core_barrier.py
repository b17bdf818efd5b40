"""Read on each core of a logical core what the other core wrote (NEURON_LOGICAL_NC_CONFIG=2)."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def swap_through_hbm(x):
    """Store row `core`, wait, and load the row of the other core."""
    core = nl.program_id(0)
    exchange = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(exchange[core : core + 1], nl.load(x[core : core + 1]))
    nisa.core_barrier(exchange, cores=(0, 1))
    nl.store(out[core : core + 1], nl.load(exchange[1 - core : 2 - core]))
    return out


x = np.arange(8, dtype=np.float32).reshape(2, 4)
np.testing.assert_array_equal(swap_through_hbm(x), x[::-1])
