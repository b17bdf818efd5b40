"""Indices of experts and tokens, which DMAs read at run time."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl


def load_indices(source):
    """Load indices [rows, columns] int32 @ HBM to SBUF."""
    tile = nl.ndarray(source.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source)
    return tile


def rows_at(table, indices):
    """View the rows of a table [N, columns] @ HBM that indices [rows, 1] in SBUF name."""
    columns = table.shape[1]
    return table.ap(pattern=[[columns, indices.shape[0]], [1, columns]], vector_offset=indices)
