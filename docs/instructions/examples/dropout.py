"""Drop half of the elements of a tile."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def drop_half(x, seed):
    tile = nl.load(x)
    nisa.set_rng_seed(nl.load(seed))
    nisa.dropout(dst=tile, data=tile, prob=0.5)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


x = np.ones((128, 64), dtype=np.float32)
dropped = drop_half(x, np.array([[42]], dtype=np.uint32))
assert set(np.unique(dropped)) == {0.0, 1.0}  # kept elements are not scaled
assert 0.45 < dropped.mean() < 0.55
