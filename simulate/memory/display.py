"""HTML of a tensor in a notebook: its description with the line that allocated it, and a table of its elements.

`TensorBytes._repr_html_` calls it. Of many rows or columns the first and the last are shown; an element whose bytes
were never written, or computed from such bytes, is shown as "undefined".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from nkw.report import Hanging, as_html, table
from simulate.memory.validity import WRITTEN
from simulate.numerics import DType

_MOST = 8
"""Largest number of rows and columns that are shown; of more, the first and the last half of that number."""
_UNDEFINED = "undefined"


def format_html(head: str, why: str) -> str:
    """Return the HTML of a tensor whose elements cannot be shown.

    Args:
        head: The description of the tensor.
        why: The reason why no elements are shown, such as a dry launch.
    """
    return as_html([Hanging(head, style="bold"), why])


def format_elements(
    head: str, values: np.ndarray, states: int | np.ndarray, dtype: DType, first_dim: str
) -> str:
    """Return the HTML of a tensor with a table of its elements, or of the first 4 and last 4 rows and columns.

    All dims after the first are flattened into columns; a tensor of one dim is one row without a heading.

    Args:
        head: The description of the tensor.
        values: The elements, in the storage dtype of `dtype`.
        states: Validity state (`simulate.memory.validity`) of all elements, or an array with that of each element.
        dtype: The dtype of the tensor.
        first_dim: Heading of the first dim, "partition" or "row".
    """
    named = values.ndim > 1
    states = np.broadcast_to(states, values.shape)
    if not named:
        values, states = values.reshape(1, -1), states.reshape(1, -1)
    columns = _choose_indices(values.size // len(values))
    heads = [first_dim if named else "", *("…" if column is None else str(column) for column in columns)]
    listed = [
        ["…"] * len(heads)
        if row is None
        else [str(row) if named else "", *_format_cells(values[row], states[row], columns, dtype)]
        for row in _choose_indices(len(values))
    ]
    return as_html([Hanging(head, style="bold"), table("|".join(heads), listed, left=())])


def _choose_indices(count: int) -> list[int | None]:
    """Return the indices of `count` rows or columns that are shown; one None stands for all that are left out."""
    if count <= _MOST:
        return list(range(count))
    half = _MOST // 2
    return [*range(half), None, *range(count - half, count)]


def _format_cells(
    values: np.ndarray, states: np.ndarray, columns: Sequence[int | None], dtype: DType
) -> Iterator[str]:
    values, states = values.reshape(-1), states.reshape(-1)
    for column in columns:
        if column is None:
            yield "…"
        elif not states[column] & WRITTEN:
            yield _UNDEFINED
        else:
            yield f"{float(values[column]):.6g}" if dtype.is_float else str(values[column])
