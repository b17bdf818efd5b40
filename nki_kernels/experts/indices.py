"""Rows of tables whose indices DMAs read at run time."""

from __future__ import annotations


def rows_at(table, indices):
    """View the rows of a table [N, columns] @ HBM that indices [rows, 1] in SBUF name."""
    columns = table.shape[1]
    return table.ap(pattern=[[columns, indices.shape[0]], [1, columns]], vector_offset=indices)
