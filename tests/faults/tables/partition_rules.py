"""Partitions: their number, first partition and stride, and views that change the partition dim."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


@fault("NKW-PARTITIONS-AGREE", ramp(8, 6), ramp(1, 6), answer=lambda x, bias: x + bias)
def bias_row(x, bias, sick):
    """A bias per column is added to every row; a row does not spread over partitions."""
    tile = nl.load(x)
    row = nl.load(bias)
    added = row if sick else nl.broadcast_to(row, (8, 6))
    nisa.tensor_tensor(dst=tile, data1=tile, data2=added, op=nl.add)  # blamed
    return copied_out(tile)


@fault("NKW-BROADCAST", ramp(1, 4), answer=lambda x: np.broadcast_to(x[:, None], (1, 3, 4)))
def broadcast_a_row(x, sick):
    """A view broadcasts one row over 128 partitions."""
    row = nl.load(x)
    wide = row.expand_dim(1).broadcast(0 if sick else 1, 3)  # blamed
    return copied_out(wide)


@fault("NKW-PARTITIONS-AGREE", ramp(8, 4), ramp(8, 4), answer=lambda x, y: x + y)
def different_partitions(x, y, sick):
    """The operands of an addition have 8 and 4 partitions."""
    left, right = nl.load(x), nl.load(y)
    total = nl.ndarray((8, 4), dtype=nl.float32)
    if not sick:
        nisa.dma_copy(dst=total, src=y)
    other = right[0:4] if sick else total
    nisa.tensor_tensor(dst=total, data1=left, data2=other, op=nl.add)  # blamed
    return copied_out(total)


@fault("NKW-PARTITION-STRIDE", ramp(64, 4), answer=lambda x: x[::2] + 1)
def every_other_partition(x, sick):
    """An engine reads every other partition of a tile; only a DMA can do that."""
    rows = nl.load(x) if sick else nl.load(x[0:64:2])
    result = nl.ndarray((32, 4), dtype=nl.float32)
    even = rows[0:64:2] if sick else rows
    nisa.tensor_scalar(dst=result, data=even, op0=nl.add, operand0=1.0)  # blamed
    return copied_out(result)


@fault("NKW-PARTITION-START", ramp(2, 16, 4), answer=lambda x: 2 * x)
def heads_of_16(x, sick):
    """Sixteen rows per head: the second head begins inside a quadrant."""
    height = 16 if sick else 32
    tile = nl.zeros((64, 4), dtype=nl.float32)
    for head in range(2):
        nisa.dma_copy(dst=tile[head * height : head * height + 16], src=x[head])
    out = nl.ndarray((2, 16, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    for head in range(2):
        rows = tile[head * height : head * height + 16]
        nisa.tensor_scalar(dst=rows, data=rows, op0=nl.multiply, operand0=2.0)  # blamed
        nisa.dma_copy(dst=out[head], src=rows)
    return out


@fault("NKW-TILE-SHAPE", ramp(16), answer=lambda x: x.reshape(16, 1))
def one_dim(x, sick):
    """A vector on chip without a partition dim."""
    tile = nl.ndarray((16,) if sick else (16, 1), dtype=nl.float32)  # blamed
    nisa.dma_copy(dst=tile, src=x)
    return copied_out(tile)


@fault("NKW-AP-PARTITION", ramp(8, 8), answer=lambda x: x[0:4])
def partition_step(x, sick):
    """An access pattern on chip that takes every second partition."""
    tile = nl.load(x)
    view = tile.ap(pattern=[[16 if sick else 8, 4], [1, 8]])  # blamed
    return copied_out(view)


@fault("NKW-PARTITION-FIRST", ramp(4, 2, 3), answer=lambda x: x.transpose(0, 2, 1))
def permuted_partitions(x, sick):
    """A transpose by permute would move the partition dim."""
    tile = nl.load(x)
    turned = tile.permute((1, 0, 2) if sick else (0, 2, 1))  # blamed
    return copied_out(turned)


@fault("NKW-REDUCE-AXIS", ramp(8, 8), answer=lambda x: x.sum(axis=1, keepdims=True))
def reduce_over_partitions(x, sick):
    """tensor_reduce along the partition dim."""
    tile = nl.load(x)
    sums = nl.ndarray((8, 1), dtype=nl.float32)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=tile, axis=0 if sick else 1)  # blamed
    return copied_out(sums)


@fault("NKW-PARTITION-FIRST", ramp(4, 8), answer=lambda x: x.reshape(4, 2, 4))
def reshaped_partitions(x, sick):
    """A reshape on chip joins partitions with the free dim."""
    tile = nl.load(x)
    view = tile.reshape((2, 16) if sick else (4, 2, 4))  # blamed
    return copied_out(view)


@fault("NKW-PARTITION-START", ramp(128, 4), answer=lambda x: x + (np.arange(128)[:, None] >= 64))
def start_partition(x, sick):
    """64 rows that begin at partition 32."""
    tile = nl.load(x)
    start = 32 if sick else 64
    rows = tile[start : start + 64]
    nisa.tensor_scalar(dst=rows, data=rows, op0=nl.add, operand0=1.0)  # blamed
    return copied_out(tile)


@fault("NKW-TILE-SHAPE", ramp(129, 4), answer=lambda x: x[0:128])
def too_many_partitions(x, sick):
    """A tile of 129 rows."""
    rows = 129 if sick else 128
    tile = nl.ndarray((rows, 4), dtype=nl.float32)  # blamed
    nisa.dma_copy(dst=tile, src=x[0:rows])
    return copied_out(tile)
