"""Convert a tile from float32 to bfloat16."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def to_bfloat16(x):
    tile = nl.ndarray(x.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_copy(dst=tile, src=nl.load(x))
    out = nl.ndarray(x.shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
np.testing.assert_array_equal(to_bfloat16(x), x.astype(nl.bfloat16))
