"""Find the largest elements of a list that 16 partitions hold."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def largest(x):
    """Return the 16 largest elements of x [16, N] bfloat16 and their positions, both ascending."""
    partitions, columns = x.shape
    values = nl.ndarray((partitions, 16), dtype=nl.bfloat16, buffer=nl.sbuf)
    positions = nl.ndarray((partitions, 16), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.memset(dst=values, value=0.0)
    nisa.memset(dst=positions, value=0)
    nisa.topk(val_dst=values, idx_dst=positions, src=nl.load(x), n=partitions * columns)
    out = nl.ndarray((partitions, 1), dtype=nl.uint32, buffer=nl.shared_hbm)
    nl.store(out, positions[:, 0:1])
    return out


x = np.random.default_rng(0).permutation(128).astype(nl.bfloat16).reshape(16, 8)
elements = np.float32(x).T.reshape(-1)  # element j is in partition j % 16, column j // 16
np.testing.assert_array_equal(largest(x)[:, 0], np.argsort(elements)[-16:])
