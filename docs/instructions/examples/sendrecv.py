"""Exchange a tile with the other core of a logical core (NEURON_LOGICAL_NC_CONFIG=2)."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def add_rows_of_both_cores(x):
    """Return x[0] + x[1] on both cores: a reduction without HBM."""
    core = nl.program_id(0)
    local = nl.load(x[core : core + 1])
    received = nl.ndarray(local.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.sendrecv(src=local, dst=received, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
    nisa.tensor_tensor(dst=local, data1=local, data2=received, op=nl.add)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out[core : core + 1], local)
    return out


x = np.arange(8, dtype=np.float32).reshape(2, 4)
np.testing.assert_array_equal(add_rows_of_both_cores(x), np.broadcast_to(x.sum(axis=0), (2, 4)))
