"""Address a row by an index that is known at run time."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def pick_row(table, index):
    """Return table[index], index [1, 1] int32."""
    row = nisa.register_alloc()
    nisa.register_load(row, nl.load(index))
    width = table.shape[1]
    tile = nl.ndarray((1, width), dtype=table.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=table.ap([[width, 1], [1, width]], scalar_offset=row, indirect_dim=0))
    out = nl.ndarray((1, width), dtype=table.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


table = np.arange(40, dtype=np.float32).reshape(10, 4)
np.testing.assert_array_equal(pick_row(table, np.array([[6]], dtype=np.int32)), table[6:7])
