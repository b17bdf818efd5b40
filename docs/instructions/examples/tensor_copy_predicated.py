"""Overwrite the elements that a mask selects."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def overwrite(x, replacement, mask):
    tile = nl.load(x)
    nisa.tensor_copy_predicated(dst=tile, src=nl.load(replacement), predicate=nl.load(mask))
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


x = np.arange(12, dtype=np.float32).reshape(3, 4)
mask = (x % 3 == 0).astype(np.uint8)
np.testing.assert_array_equal(overwrite(x, -x, mask), np.where(mask, -x, x))
