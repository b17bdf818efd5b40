"""DMAs that read or write bytes which they write themselves."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


def _answer_of_added_twice(x, table, indices):
    sums = table.copy()
    sums[indices[:, 0]] += x
    return sums


@fault(
    "NKW-SCATTER-TWICE",
    ramp(3, 3) + 1,
    ramp(4, 3),
    np.array([[3], [1], [0]], np.int32),
    answer=_answer_of_added_twice,
)
def added_twice(x, table, indices, sick):
    """dma_compute adds two rows to one, against the promise of unique row numbers."""
    sums = nl.ndarray((4, 3), dtype=nl.float32, buffer=nl.shared_hbm, name="sums")
    nisa.dma_copy(dst=sums, src=nl.load(table))
    index = nl.load(indices)
    if sick:
        nisa.tensor_scalar(dst=index, data=index, op0=nl.minimum, operand0=1)
    rows = sums.vector_select(0, index)
    nisa.dma_compute(dst=rows, srcs=[rows, nl.load(x)], reduce_op=nl.add)  # blamed
    return sums


def _answer_of_columns_onto_rows(x):
    table = x.copy()
    table[0, 1:] = x[1:, 0]
    return table


@fault("NKW-DMA-OVERLAP", ramp(4, 4), answer=_answer_of_columns_onto_rows)
def columns_onto_rows(x, sick):
    """A row of a table in HBM is overwritten with a column that crosses it."""
    table = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="table")
    nisa.dma_copy(dst=table, src=nl.load(x))
    rows = nl.ds(0, 4) if sick else nl.ds(1, 3)
    row = table[0:1, rows]
    nisa.dma_copy(dst=row, src=table[rows, 0:1])  # blamed
    return table


@fault("NKW-DMA-OVERLAP", ramp(4, 8), answer=lambda x: np.concatenate([x[:, 0:4], x[:, 0:4]], axis=1))
def reversed_columns(x, sick):
    """Columns of a tile are moved right within the tile."""
    tile = nl.load(x)
    start = 2 if sick else 4
    nisa.dma_copy(dst=tile[:, start : start + 4], src=tile[:, 0:4])  # blamed
    return copied_out(tile)


@fault("NKW-SCATTER-TWICE", ramp(8, 4), answer=lambda x: 2 * x)
def rows_over_each_other(x, sick):
    """A store whose pattern steps by 0 puts every row of a tile on the first one of the output."""
    rows, columns = x.shape
    out = nl.ndarray((rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nisa.dma_copy(dst=out, src=tile)
    nisa.tensor_scalar(dst=tile, data=nl.load(out), op0=nl.multiply, operand0=2.0)
    step = 0 if sick else columns
    nisa.dma_copy(dst=out.ap(pattern=[[step, rows], [1, columns]]), src=tile)  # blamed
    return out


def _answer_of_rows_scattered_twice(x, indices):
    cache = np.zeros((4, 3), np.float32)
    cache[indices[:, 0]] = x
    return cache


@fault(
    "NKW-SCATTER-TWICE",
    ramp(3, 3) + 1,
    np.array([[3], [1], [0]], np.int32),
    answer=_answer_of_rows_scattered_twice,
)
def rows_scattered_twice(x, indices, sick):
    """Two tokens are scattered to the same row of the cache."""
    cache = nl.ndarray((4, 3), dtype=nl.float32, buffer=nl.shared_hbm, name="cache")
    nisa.dma_copy(dst=cache, src=nl.zeros((4, 3), dtype=nl.float32))
    index = nl.load(indices)
    if sick:
        nisa.tensor_scalar(dst=index, data=index, op0=nl.minimum, operand0=1)
    nisa.dma_copy(dst=cache.vector_select(0, index), src=nl.load(x))  # blamed
    return cache


@fault("NKW-DMA-OVERLAP", ramp(8, 4), answer=lambda x: np.concatenate([x[1:], x[7:]]))
def shifted_rows(x, sick):
    """A cache is shifted by one row with one DMA."""
    cache = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="cache")
    nisa.dma_copy(dst=cache, src=nl.load(x))
    if sick:
        nisa.dma_copy(dst=cache[0:7], src=cache[1:8])  # blamed
    else:
        rows = nl.load(cache[1:8])
        nisa.dma_copy(dst=cache[0:7], src=rows)
    return cache


@fault("NKW-DMA-OVERLAP", ramp(4, 4), answer=lambda x: x.T)
def transposed_in_place(x, sick):
    """A square is transposed onto itself by an access pattern."""
    square = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="square")
    nisa.dma_copy(dst=square, src=nl.load(x))
    turned = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="turned")
    target = square if sick else turned
    nisa.dma_copy(dst=target, src=square.ap(pattern=[[1, 4], [4, 4]]))  # blamed
    nisa.dma_copy(dst=turned, src=square) if sick else None
    return turned
