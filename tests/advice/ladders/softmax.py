"""exp(x) / sum over each row of x [rows, columns] float32, step by step.

piecewise  rows in pieces of 64 columns, each with DMAs and instructions of its own; one tile for all rows
rotated    a tile of its own for every 128 rows
whole      one instruction for a whole row, DMAs as before
merged     one DMA for the rows of a tile
"""

from __future__ import annotations

from typing import Any

from simulate.nki import isa as nisa
from simulate.nki import language as nl

PIECE = 64


def _pieces(x: Any) -> list[slice]:
    return [slice(first, first + PIECE) for first in range(0, x.shape[1], PIECE)]


def _loaded(tile: Any, x: Any, rows: Any) -> None:
    for columns in _pieces(x):
        nisa.dma_copy(dst=tile[:, columns], src=x[rows, columns])


def _stored(y: Any, tile: Any, rows: Any) -> None:
    for columns in _pieces(y):
        nisa.dma_copy(dst=y[rows, columns], src=tile[:, columns])


def _scales(tile: Any, column_slices: list[slice]) -> Any:
    """Return the exponentials of x in the tile, and one over the sum of each row."""
    sums = nl.ndarray((128, len(column_slices)), dtype=nl.float32)
    for number, columns in enumerate(column_slices):
        reset = nisa.reduce_cmd.reset_reduce
        piece = tile[:, columns]
        total = sums[:, number : number + 1]
        nisa.activation(piece, nl.exp, piece, reduce_op=nl.add, reduce_res=total, reduce_cmd=reset)
    total_of_row = nl.ndarray((128, 1), dtype=nl.float32)
    nisa.tensor_reduce(dst=total_of_row, op=nl.add, data=sums, axis=1)
    scale = nl.ndarray((128, 1), dtype=nl.float32)
    nisa.reciprocal(dst=scale, data=total_of_row)
    return scale


def _scaled(tile: Any, scale: Any, column_slices: list[slice]) -> None:
    for columns in column_slices:
        piece = tile[:, columns]
        nisa.tensor_scalar(dst=piece, data=piece, op0=nl.multiply, operand0=scale)


def _softmax(x: Any, rotates: bool, by_row: bool, merged: bool) -> Any:
    y = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    column_slices = [slice(0, x.shape[1])] if by_row else _pieces(x)
    tile = nl.ndarray((128, x.shape[1]), dtype=nl.float32)
    for first in range(0, x.shape[0], 128):
        rows = slice(first, first + 128)
        if rotates and first:
            tile = nl.ndarray((128, x.shape[1]), dtype=nl.float32)
        if merged:
            nisa.dma_copy(dst=tile, src=x[rows])
        else:
            _loaded(tile, x, rows)
        _scaled(tile, _scales(tile, column_slices), column_slices)
        if merged:
            nisa.dma_copy(dst=y[rows], src=tile)
        else:
            _stored(y, tile, rows)
    return y


def piecewise(x):
    """Use one tile for all rows."""
    return _softmax(x, rotates=False, by_row=False, merged=False)


def rotated(x):
    """Use a tile for each 128 rows."""
    return _softmax(x, rotates=True, by_row=False, merged=False)


def whole_rows(x):
    """Take whole rows in one instruction."""
    return _softmax(x, rotates=True, by_row=True, merged=False)


def merged(x):
    """Take whole rows in one DMA as well."""
    return _softmax(x, rotates=True, by_row=True, merged=True)
