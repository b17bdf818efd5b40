"""Find the eight largest elements of each row."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def eight_largest(x):
    largest = nl.ndarray((x.shape[0], 8), dtype=x.dtype, buffer=nl.sbuf)
    nisa.max8(dst=largest, src=nl.load(x))
    out = nl.ndarray((x.shape[0], 8), dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, largest)
    return out


x = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)
np.testing.assert_array_equal(eight_largest(x), np.sort(x, axis=1)[:, :-9:-1])
