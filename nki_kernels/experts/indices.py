"""Rows of tables whose indices DMAs read at run time.

`experts.row_blocks` gathers rows of tokens, and `experts.weighted_sums` results and biases.
"""

from __future__ import annotations


def view_rows(table, indices):
    """View the rows of a table [N, columns] @ HBM whose numbers a tile [rows, 1] int32 @ SBUF has: [rows, columns]."""
    columns = table.shape[1]
    return table.ap(pattern=[[columns, indices.shape[0]], [1, columns]], vector_offset=indices)
