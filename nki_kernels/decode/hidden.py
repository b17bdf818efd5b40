"""The hidden states of a decode step in SBUF: from HBM, as operands of products, and back.

They lie in runs (see `projection/rows`): with C = ceil(H / 128) partition p holds elements p * C … of every row, as
[partition, row, element]. So the norm of a row and the sum with the residual take 128 lanes for few rows too, and what
leaves one product is the operand of the next one without a transpose.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, STATIC, transfer
from nki_kernels.projection.rows import column_of, constant, in_block, inverse_root
from nki_kernels.tiles import PARTITIONS, blocks

HIDDEN_BYTES = 8192
"""Bytes per partition of hidden states that stay in SBUF beside the caches."""


def hidden_fits(rows, hidden, dtype):
    """Return whether rows of hidden states can stay in SBUF in this layout."""
    bytes_each = 4 if dtype == nl.float32 else 2
    return rows <= PARTITIONS and rows * blocks(hidden) * bytes_each <= HIDDEN_BYTES


def hidden_tile(rows, hidden, dtype):
    """Return an empty tile for hidden states [rows, H]."""
    shape = (in_block(hidden, 0, True), rows, blocks(hidden))
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def load_hidden(x):
    """Load hidden states [T, H] of HBM as a tile [partition, T, C]; what the last partition lacks becomes 0."""
    rows, hidden = x.shape
    tile = hidden_tile(rows, hidden, x.dtype)
    count = blocks(hidden)
    full = hidden // count
    if full < tile.shape[0]:
        nisa.memset(dst=tile, value=0.0)
        last = tile[full : full + 1, :, 0 : hidden - full * count]
        transfer(last, x[:, full * count : hidden], STATIC)
    source = x[:, 0 : full * count].reshape_dim(1, (full, count)).permute((1, 0, 2))
    transfer(tile[0:full, :, :], source, STATIC)
    return tile


def store_hidden(y, tile):
    """Write a tile of hidden states to rows [T, H] of HBM."""
    hidden = y.shape[1]
    count = blocks(hidden)
    full = hidden // count
    target = y[:, 0 : full * count].reshape_dim(1, (full, count)).permute((1, 0, 2))
    transfer(target, tile[0:full, :, :], COMPILER)
    if full < tile.shape[0]:
        last = tile[full : full + 1, :, 0 : hidden - full * count]
        transfer(y[:, full * count : hidden], last, COMPILER)


def weighted_blocks(tile, norm_weight):
    """Return hidden states times the norm's weight, as an operand of products: [partition, C, row]."""
    height, rows, count = tile.shape
    weight = column_of(norm_weight, 0.0, True)
    result = nl.ndarray((height, count, rows), dtype=tile.dtype, buffer=nl.sbuf)
    factor = weight.expand_dim(2).broadcast(2, rows)
    nisa.tensor_tensor(dst=result, data1=tile.permute((0, 2, 1)), data2=factor, op=nl.multiply)
    return result


def reciprocal_roots(tile, hidden, eps):
    """Return 1 / rms of each row, float32: as [128, rows], the same on every partition, and as a column [rows, 1]."""
    height, rows, _ = tile.shape
    squares = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=squares, op=nl.square, data=tile)
    sums = nl.ndarray((height, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=squares, axis=2)
    ones = nl.ndarray((height, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    everywhere = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=everywhere, stationary=ones, moving=sums)
    by_row = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=by_row, stationary=sums, moving=ones[:, 0:1])
    eps_column = constant(PARTITIONS, eps)
    return inverse_root(everywhere, 1.0 / hidden, eps_column), inverse_root(by_row, 1.0 / hidden, eps_column)
