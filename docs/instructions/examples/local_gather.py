"""Gather elements by a list that 16 partitions share."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def gather(x, index):
    """Return x[:, list]: the list is `index` [16, 2], read column by column."""
    tile = nl.load(x)
    gathered = nl.ndarray((16, 32), dtype=x.dtype, buffer=nl.sbuf)
    nisa.local_gather(dst=gathered, src_buffer=tile, index=nl.load(index))
    out = nl.ndarray((16, 32), dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, gathered)
    return out


x = np.arange(16 * 64, dtype=np.float32).reshape(16, 64)
index = np.random.default_rng(0).integers(0, 64, (16, 2)).astype(np.uint16)
np.testing.assert_array_equal(gather(x, index), x[:, index.T.reshape(-1)])
