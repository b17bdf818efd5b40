"""Gather rows of a table by indices that are known at run time."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def embed(table, ids):
    """Return table[ids]: one row of the table for each id, ids [N, 1] uint32."""
    index = nl.load(ids)
    rows = nl.ndarray((ids.shape[0], table.shape[1]), dtype=table.dtype, buffer=nl.sbuf)
    width = table.shape[1]
    nisa.dma_copy(
        dst=rows,
        src=table.ap([[width, ids.shape[0]], [1, width]], vector_offset=index, indirect_dim=0),
    )
    out = nl.ndarray(rows.shape, dtype=table.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=rows)
    return out


table = np.arange(40, dtype=np.float32).reshape(10, 4)
ids = np.array([[7], [0], [9]], dtype=np.uint32)
np.testing.assert_array_equal(embed(table, ids), table[ids[:, 0]])
