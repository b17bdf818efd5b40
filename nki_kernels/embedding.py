"""embedding: the rows of a table that token ids name.

Dimensions
    T   tokens; V rows of the table (the vocabulary); H its width (the hidden size).

Arguments
    ids        [T, 1] @ HBM, int32, 0 <= id < V
    table      [V, H] @ HBM, float32 or bfloat16
    dtype      compile-time nl.float32 or nl.bfloat16: the activations'
    returns x  [T, H] @ HBM, dtype

Layout
    Tokens on the partitions: an indirect DMA fetches one row per partition, by the row number in that partition of
    the id tile. The same DMA casts to dtype.

Tiling
    for 128 tokens: load ids, gather rows, store rows.

Limits
    H up to 32768 (a row of float32 in one partition). An id outside the table is refused where addresses are checked.

Cost
    HBM: ids once, T * H elements of the table read, T * H of dtype written. Three DMAs for 128 tokens. Bound: DMA
    latency for one token.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.tiles import PARTITIONS, expect_dims, load


@nki.jit
def embedding(ids, table, dtype=nl.float32):
    """The rows of a table that token ids name, in a dtype."""
    expect_dims(2, ids, "ids [T, 1]")
    expect_dims(2, table, "table [V, H]")
    tokens = ids.shape[0]
    width = table.shape[1]
    assert ids.shape == (tokens, 1), f"ids are [T, 1], not {ids.shape}"
    x = nl.ndarray((tokens, width), dtype=dtype, buffer=nl.shared_hbm)
    for first in range(0, tokens, PARTITIONS):
        last = min(tokens, first + PARTITIONS)
        rows = last - first
        row_numbers = load(ids[first:last, :], nl.int32)
        tile = nl.ndarray((rows, width), dtype=dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=table.ap(pattern=[[width, rows], [1, width]], vector_offset=row_numbers))
        nisa.dma_copy(dst=x[first:last, :], src=tile)
    return x


def embedding_reference(ids: np.ndarray, table: np.ndarray, dtype: object = np.float32) -> np.ndarray:
    """numpy's row indexing."""
    return table[ids[:, 0]].astype(np.dtype(dtype))
