"""Sum a tile over its partitions."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def sum_partitions(x):
    total = nl.ndarray((1, x.shape[1]), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_partition_reduce(dst=total, op=nl.add, data=nl.load(x))
    out = nl.ndarray((1, x.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    nl.store(out, total)
    return out


x = np.arange(24, dtype=np.float32).reshape(6, 4)
np.testing.assert_array_equal(sum_partitions(x), x.sum(axis=0, keepdims=True))
