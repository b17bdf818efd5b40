"""Tiles that a loop reuses, and fills less for its last, shorter block."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


@fault("NKW-STALE", ramp(12, 4), ramp(12, 4), answer=lambda a, b: a.T @ b)
def cleared_before_the_loop_only(a, b, sick):
    """Both tiles are cleared once before the loop, so the last block finds the rows of the block before."""
    left, right = nl.zeros((8, 4), dtype=nl.float32), nl.zeros((8, 4), dtype=nl.float32)
    sums = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.psum)
    for first in range(0, 12, 8):
        rows = min(8, 12 - first)
        if rows < 8 and not sick:
            nisa.memset(left, value=0.0)
            nisa.memset(right, value=0.0)
        nisa.dma_copy(dst=left[0:rows], src=a[first : first + rows])
        nisa.dma_copy(dst=right[0:rows], src=b[first : first + rows])
        nisa.nc_matmul(dst=sums, stationary=left, moving=right, accumulate=first > 0)  # blamed
    return copied_out(sums)


@fault("NKW-STALE", ramp(12, 4), answer=lambda a: (a * a).sum(0, keepdims=True))
def squares_of_old_rows(a, sick):
    """The tile is squared as a whole and summed over its partitions, also for the last 4 of 12 rows."""
    tile, squares = nl.ndarray((8, 4), dtype=nl.float32), nl.ndarray((8, 4), dtype=nl.float32)
    block_sum, total = nl.ndarray((1, 4), dtype=nl.float32), nl.zeros((1, 4), dtype=nl.float32)
    for first in range(0, 12, 8):
        rows = min(8, 12 - first)
        nisa.dma_copy(dst=tile[0:rows], src=a[first : first + rows])
        nisa.activation(dst=squares, op=nl.square, data=tile)
        used = 8 if sick else rows
        nisa.tensor_partition_reduce(dst=block_sum, op=nl.add, data=squares[0:used])  # blamed
        nisa.tensor_tensor(dst=total, data1=total, data2=block_sum, op=nl.add)
    return copied_out(total)


@fault("NKW-STALE", ramp(4, 12), answer=lambda a: np.stack([a[:, 0:8].max(1), a[:, 8:].max(1)], 1))
def widest_column_of_the_block_before(a, sick):
    """Two lines load the tile, one for whole blocks and one for the last; the maximum covers all columns."""
    tile, most = nl.ndarray((4, 8), dtype=nl.float32), nl.ndarray((4, 2), dtype=nl.float32)
    half = nl.ndarray((4, 8), dtype=nl.bfloat16)
    for block in range(2):
        if block == 0:
            nisa.dma_copy(dst=tile, src=a[:, 0:8])
        else:
            nisa.dma_copy(dst=tile[:, 0:4], src=a[:, 8:12])
        nisa.tensor_copy(dst=half, src=tile)
        used = 8 if sick or block == 0 else 4
        nisa.tensor_reduce(  # blamed
            dst=most[:, block : block + 1], data=half[:, 0:used], op=nl.maximum, axis=1
        )
    return copied_out(most)


@fault("NKW-STALE", ramp(12, 8), answer=lambda a: np.concatenate([a + 1, np.zeros((4, 8), np.float32)]))
def old_rows_stored(a, sick):
    """The output has whole blocks; the last store writes rows of the block before into its end."""
    out = nl.ndarray((16, 8), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    tile, raised = nl.ndarray((8, 8), dtype=nl.float32), nl.ndarray((8, 8), dtype=nl.float32)
    for first in range(0, 16, 8):
        rows = min(8, 12 - first)
        nisa.dma_copy(dst=tile[0:rows], src=a[first : first + rows])
        nisa.tensor_scalar(dst=raised, data=tile, op0=nl.add, operand0=1.0)
        if rows < 8 and not sick:
            zeros = nl.zeros((4, 8), dtype=nl.float32)
            nisa.dma_copy(dst=out[12:16], src=zeros)
            raised = raised[0:rows]
        nisa.dma_copy(dst=out[first : first + raised.shape[0]], src=raised)  # blamed
    return out


@fault("NKW-STALE", ramp(4, 12), answer=lambda a: np.array([[a[:, 0:8].sum(0).max(), a[:, 8:].sum(0).max()]]))
def columns_of_a_product(a, sick):
    """The old columns of a tile become columns of a product, whose maximum covers them."""
    tile, ones = nl.ndarray((4, 8), dtype=nl.float32), nl.full((4, 1), 1.0, dtype=nl.float32)
    most = nl.ndarray((1, 2), dtype=nl.float32)
    for block in range(2):
        columns = min(8, 12 - block * 8)
        nisa.dma_copy(dst=tile[:, 0:columns], src=a[:, block * 8 : block * 8 + columns])
        sums = nl.ndarray((1, 8), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=sums, stationary=ones, moving=tile)
        used = 8 if sick else columns
        nisa.tensor_reduce(  # blamed
            dst=most[:, block : block + 1], data=sums[:, 0:used], op=nl.maximum, axis=1
        )
    return copied_out(most)


@fault("NKW-STALE", ramp(24, 4), answer=lambda a: a[0:24])
def second_half_of_a_short_block(a, sick):
    """Blocks of 16 rows are stored in halves of 8; the last block has 8 rows, and its second half is old."""
    out = nl.ndarray((32 if sick else 24, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    tile = nl.ndarray((16, 4), dtype=nl.float32)
    for first in (0, 16):
        rows = min(16, 24 - first)
        nisa.dma_copy(dst=tile[0:rows], src=a[first : first + rows])
        for half in range(2 if sick or rows == 16 else 1):
            start = half * 8
            nisa.dma_copy(dst=out[first + start : first + start + 8], src=tile[start : start + 8])  # blamed
    return out


@fault("NKW-STALE", ramp(4, 12), answer=lambda a: a[:, 0:4] + a[:, 4:8] + a[:, 8:12])
def right_half_of_the_columns_before(a, sick):
    """The sums of 4 columns each are taken from both halves of a tile that was filled by half."""
    tile, total = nl.ndarray((4, 8), dtype=nl.float32), nl.zeros((4, 4), dtype=nl.float32)
    half_sum = nl.ndarray((4, 4), dtype=nl.float32)
    for first in (0, 8):
        columns = min(8, 12 - first)
        nisa.dma_copy(dst=tile[:, 0:columns], src=a[:, first : first + columns])
        for half in range(2 if sick or columns == 8 else 1):
            taken = tile[:, half * 4 : half * 4 + 4].reshape((4, 4, 1))
            nisa.tensor_reduce(dst=half_sum, data=taken, op=nl.add, axis=2)  # blamed
            nisa.tensor_tensor(dst=total, data1=total, data2=half_sum, op=nl.add)
    return copied_out(total)


@fault("NKW-STALE", ramp(96, 4), answer=lambda a: a.sum(0, keepdims=True))
def sum_of_rows_that_were_not_filled(a, sick):
    """Both halves of a tile of 64 rows are summed in both rounds; the second block has 32 rows."""
    tile, total = nl.ndarray((64, 4), dtype=nl.float32), nl.zeros((1, 4), dtype=nl.float32)
    half_sum = nl.ndarray((1, 4), dtype=nl.float32)
    for first in (0, 64):
        rows = min(64, 96 - first)
        nisa.dma_copy(dst=tile[0:rows], src=a[first : first + rows])
        for start in (0, 32) if sick or rows == 64 else (0,):
            nisa.tensor_partition_reduce(dst=half_sum, op=nl.add, data=tile[start : start + 32])  # blamed
            nisa.tensor_tensor(dst=total, data1=total, data2=half_sum, op=nl.add)
    return copied_out(total)


@fault("NKW-STALE", ramp(48, 4), ramp(48, 4), answer=lambda a, b: a.T @ b)
def upper_half_of_the_partitions(a, b, sick):
    """The operands of a product begin at partition 32, and the last block fills 16 of their 32 rows."""
    left, right = nl.zeros((64, 4), dtype=nl.float32), nl.zeros((64, 4), dtype=nl.float32)
    sums = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.psum)
    for first in (0, 32):
        rows = min(32, 48 - first)
        if rows < 32 and not sick:
            nisa.memset(left[32:64], value=0.0)
            nisa.memset(right[32:64], value=0.0)
        nisa.dma_copy(dst=left[32 : 32 + rows], src=a[first : first + rows])
        nisa.dma_copy(dst=right[32 : 32 + rows], src=b[first : first + rows])
        nisa.nc_matmul(  # blamed
            dst=sums, stationary=left[32:64], moving=right[32:64], accumulate=first > 0
        )
    return copied_out(sums)
