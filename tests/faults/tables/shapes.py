"""Shapes and counts of elements that do not fit one another."""

from __future__ import annotations

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


@fault("NKW-BN-AGGR-TRIPLES", np.full((4, 8), 3, np.float32), answer=lambda x: np.full((4, 1), 3, np.float32))
def aggregated_triples(x, sick):
    """bn_aggr gets means and variances; it takes triples of count, mean and variance."""
    statistics = nl.ndarray((4, 2, 6), dtype=nl.float32)
    tile = nl.load(x)
    for chunk in range(2):
        nisa.bn_stats(dst=statistics[:, chunk], data=tile[:, chunk * 4 : chunk * 4 + 4])
    joined = nl.ndarray((4, 2), dtype=nl.float32)
    nisa.bn_aggr(dst=joined, data=statistics[:, :, 1:3] if sick else statistics)  # blamed
    return copied_out(joined[:, 0:1])


@fault("NKW-NL-SHAPES", ramp(4, 4), ramp(4, 1), answer=lambda x, column: x + column)
def broadcast_in_nl(x, column, sick):
    """nl.add of a tile and a column: the short forms do not broadcast."""
    tile, bias = nl.load(x), nl.load(column)
    wide = bias if sick else bias.broadcast(1, 4)
    return copied_out(nl.add(tile, wide))  # blamed


@fault("NKW-PARTITIONS-AGREE", ramp(5, 4), ramp(5, 6), answer=lambda a, b: a.T @ b)
def contraction_differs(a, b, sick):
    """The operands of a matmul contract 5 and 4 partitions."""
    left, right = nl.load(a), nl.load(b)
    depth = 4 if sick else 5
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left[0:depth], moving=right)  # blamed
    return copied_out(sums)


@fault("NKW-DMA-COUNT", ramp(4, 9), answer=lambda x: x[:, 0:8])
def dma_count(x, sick):
    """A DMA reads more elements than it writes."""
    tile = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.dma_copy(dst=tile, src=x if sick else x[:, 0:8])  # blamed
    return copied_out(tile)


@fault("NKW-ELEMENTS-AGREE", ramp(4, 16), answer=lambda x: x[:, 0:8] + x[:, 8:16])
def elements_differ(x, sick):
    """A tile of 16 columns is added to one of 8."""
    tile = nl.load(x)
    total = nl.ndarray((4, 8), dtype=nl.float32)
    other = tile if sick else tile[:, 8:16]
    nisa.tensor_tensor(dst=total, data1=tile[:, 0:8], data2=other, op=nl.add)  # blamed
    return copied_out(total)


@fault("NKW-AFFINE-COUNT", ramp(4, 12, dtype=np.int32), answer=lambda x: x + np.arange(12, dtype=np.int32))
def iota_count(x, sick):
    """The pattern of an iota gives fewer numbers than the tile has elements."""
    positions = nl.ndarray((4, 12), dtype=nl.int32)
    pattern = [[1, 4]] if sick else [[4, 3], [1, 4]]
    nisa.iota(dst=positions, pattern=pattern, offset=0)  # blamed
    total = nl.ndarray((4, 12), dtype=nl.int32)
    nisa.tensor_tensor(dst=total, data1=positions, data2=nl.load(x), op=nl.add)
    return copied_out(total)


@fault("NKW-MATMUL-SHAPE", ramp(5, 4), ramp(5, 6), answer=lambda a, b: a.T @ b)
def matmul_result(a, b, sick):
    """The result of a matmul has the dims of the transposed one."""
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((6, 4) if sick else (4, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)  # blamed
    return copied_out(sums)


@fault("NKW-REDUCE-COUNT", ramp(4, 3, 5), answer=lambda x: x.sum(axis=2))
def reduced_size(x, sick):
    """The destination of a reduction keeps the dim that is reduced."""
    tile = nl.load(x)
    sums = nl.ndarray((4, 3, 5) if sick else (4, 3), dtype=nl.float32)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=tile, axis=2)  # blamed
    return copied_out(sums)


@fault("NKW-BROADCAST", ramp(4, 2, 3), answer=lambda keys: np.repeat(keys, 4, axis=1))
def repeated_heads(keys, sick):
    """Key heads are repeated for grouped queries by broadcasting a dim that has two already."""
    tile = nl.load(keys)
    repeated = nl.ndarray((4, 8, 3), dtype=nl.float32)
    heads = tile if sick else tile.expand_dim(2)
    wide = heads.broadcast(1, 8) if sick else heads.broadcast(2, 4)  # blamed
    nisa.tensor_copy(dst=repeated, src=wide)
    return copied_out(repeated)


@fault("NKW-RESHAPE-SIZE", ramp(4, 8), answer=lambda x: x.reshape(4, 2, 4))
def reshape_loses_elements(x, sick):
    """A reshape to fewer elements."""
    tile = nl.load(x)
    view = tile.reshape((4, 2, 3) if sick else (4, 2, 4))  # blamed
    return copied_out(view)


@fault("NKW-RESHAPE-LAYOUT", ramp(4, 3, 4), answer=lambda x: x[:, 0:2].reshape(4, 8))
def reshape_of_a_slice(x, sick):
    """Columns of a wider tile cannot be joined over rows of a third dim."""
    tile = nl.load(x)
    columns = tile[:, :, 0:2] if sick else tile[:, 0:2, :]
    view = columns.reshape((4, columns.size // 4))  # blamed
    return copied_out(view)


@fault("NKW-VECTOR-OPERAND", ramp(4, 4), ramp(4, 1), ramp(1, 4), answer=lambda x, column, row: x * column)
def row_vector_as_scalar(x, column, row, sick):
    """A (1, F) row is given where one value per partition is meant."""
    tile, good, bad = nl.load(x), nl.load(column), nl.load(row)
    factor = bad if sick else good
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor)  # blamed
    return copied_out(tile)


@fault("NKW-SHUFFLE-MASK", ramp(32, 4), answer=lambda x: x[[1, 0, 3, 2, 5, 4, 7, 6]])
def shuffle_mask(x, sick):
    """A shuffle mask for the rows that are there, instead of one for a quadrant."""
    tile = nl.load(x)
    swapped = nl.zeros((32, 4), dtype=nl.float32)
    mask = [1, 0, 3, 2, 5, 4, 7, 6]
    mask = mask if sick else mask + [255] * 24
    nisa.nc_stream_shuffle(dst=swapped, src=tile, shuffle_mask=mask)  # blamed
    return copied_out(swapped[0:8])


@fault("NKW-TRANSPOSE-SHAPE", ramp(4, 6), answer=lambda x: x.T)
def transpose(x, sick):
    """The destination of a transpose has the shape of its source."""
    tile = nl.load(x)
    turned = nl.ndarray((4, 6) if sick else (6, 4), dtype=nl.float32)
    nisa.nc_transpose(dst=turned, data=tile, engine=nisa.engine.vector)  # blamed
    return copied_out(turned)


@fault("NKW-DMA-TRANSPOSE-SHAPE", ramp(32, 16, dtype=ml_dtypes.bfloat16), answer=lambda x: x.T)
def transposed_by_a_dma(x, sick):
    """The destination of a DMA transpose keeps the dims of its source."""
    shape = (32, 16) if sick else (16, 32)
    tile = nl.ndarray(shape, dtype=nl.bfloat16)
    nisa.dma_transpose(dst=tile, src=x)  # blamed
    return copied_out(tile)
