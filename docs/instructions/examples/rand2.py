"""Draw uniform numbers from a range."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def draw(seed):
    nisa.set_rng_seed(nl.load(seed))
    numbers = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.rand2(dst=numbers, min=-1.0, max=3.0)
    out = nl.ndarray(numbers.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nl.store(out, numbers)
    return out


numbers = draw(np.array([[1]], dtype=np.uint32))
assert numbers.min() >= -1 and numbers.max() <= 3
assert abs(numbers.mean() - 1) < 0.05
