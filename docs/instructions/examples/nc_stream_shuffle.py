"""Broadcast one partition to 32."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def broadcast_row(x):
    """Return 32 copies of x [1, N]."""
    tile = nl.ndarray((32, x.shape[1]), dtype=x.dtype, buffer=nl.sbuf)
    nisa.nc_stream_shuffle(dst=tile, src=nl.load(x), shuffle_mask=[0] * 32)
    out = nl.ndarray(tile.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


x = np.arange(6, dtype=np.float32).reshape(1, 6)
np.testing.assert_array_equal(broadcast_row(x), np.broadcast_to(x, (32, 6)))
