"""A tensor as a notebook shows it: what it is, where it was allocated, and its values, undefined ones marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from nkw.parts import Hanging, as_html, table
from simulate.memory.validity import WRITTEN
from simulate.numerics import DType

_MOST = 8
"""Rows and columns of values that are shown; of more, the first and the last ones."""
_UNDEFINED = "undefined"


def html(head: str, why: str) -> str:
    """A tensor without values to look at, and why there are none."""
    return as_html([Hanging(head, style="bold"), why])


def html_of_values(
    head: str, values: np.ndarray, states: int | np.ndarray, dtype: DType, first_dim: str
) -> str:
    """A tensor with its values and the state of each of them; `first_dim` says what its rows are."""
    named = values.ndim > 1
    states = np.broadcast_to(states, values.shape)
    if not named:
        values, states = values.reshape(1, -1), states.reshape(1, -1)
    columns = _shown(values.size // len(values))
    heads = [first_dim if named else "", *("…" if each is None else str(each) for each in columns)]
    listed = [
        ["…"] * len(heads)
        if row is None
        else [str(row) if named else "", *_cells(values[row], states[row], columns, dtype)]
        for row in _shown(len(values))
    ]
    return as_html([Hanging(head, style="bold"), table("|".join(heads), listed, left=())])


def _shown(count: int) -> list[int | None]:
    """Indices that are shown; None stands for those that are left out."""
    if count <= _MOST:
        return list(range(count))
    half = _MOST // 2
    return [*range(half), None, *range(count - half, count)]


def _cells(
    values: np.ndarray, states: np.ndarray, columns: Sequence[int | None], dtype: DType
) -> Iterator[str]:
    values, states = values.reshape(-1), states.reshape(-1)
    for each in columns:
        if each is None:
            yield "…"
        elif not states[each] & WRITTEN:
            yield _UNDEFINED
        else:
            yield f"{float(values[each]):.6g}" if dtype.is_float else str(values[each])
