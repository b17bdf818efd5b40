"""Operands that the simulator takes and that the vendor's compiler refuses, by public reports."""

from __future__ import annotations

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault

HALVES = ramp(32, 16).astype(ml_dtypes.bfloat16)


@fault("NKW-DMA-PARTITIONS", ramp(4, 8), answer=lambda x: x + 1)
def row_to_a_column_on_chip(x, sick):
    """A DMA brings sums that lie in one partition to one partition each. Healthy, it goes by way of HBM."""
    row, column = nl.ndarray((1, 32), dtype=nl.float32), nl.ndarray((4, 8), dtype=nl.float32)
    nisa.dma_copy(dst=row, src=x.reshape((1, 32)))
    nisa.tensor_scalar(dst=row, data=row, op0=nl.add, operand0=1.0)
    if sick:
        nisa.dma_copy(dst=column, src=row)  # blamed
    else:
        scratch = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.private_hbm)
        nisa.dma_copy(dst=scratch.reshape((1, 32)), src=row)
        nisa.dma_copy(dst=column, src=scratch)
    return copied_out(column)


@fault("NKW-DMA-PARTITIONS", ramp(8, 4), answer=lambda x: (x * 2).reshape(4, 8))
def rows_joined_in_pairs(x, sick):
    """One DMA joins rows of 8 partitions in pairs. Healthy, two DMAs bring the even and the odd partitions over."""
    tile, pairs = nl.load(x), nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    if sick:
        nisa.dma_copy(dst=pairs, src=tile)  # blamed
    else:
        for half in range(2):
            nisa.dma_copy(dst=pairs[:, half * 4 : half * 4 + 4], src=tile[half:8:2])
    return copied_out(pairs)


@fault("NKW-DMA-PARTITIONS", ramp(16, 2), answer=lambda x: x.reshape(2, 16) - 3)
def statistics_gathered_in_a_loop(x, sick):
    """In each round 8 partitions of 2 numbers become one partition of 16. Healthy, the load from HBM does that."""
    gathered = nl.ndarray((2, 16), dtype=nl.float32)
    for block in range(2):
        rows = slice(block * 8, block * 8 + 8)
        if sick:
            tile = nl.load(x[rows])
            nisa.dma_copy(dst=gathered[block : block + 1], src=tile)  # blamed
        else:
            nisa.dma_copy(dst=gathered[block : block + 1], src=x[rows].reshape((1, 16)))
    nisa.tensor_scalar(dst=gathered, data=gathered, op0=nl.subtract, operand0=3.0)
    return copied_out(gathered)


@fault("NKW-PSUM-HALF-START", HALVES[0:3], answer=lambda x: np.concatenate([x.T, x.T], 1))
def transposes_of_odd_rows_share_a_bank(x, sick):
    """Two transposes of 3 rows of bfloat16 lie side by side, so that the second starts at byte 6."""
    tile, width = nl.load(x), 3 if sick else 4
    slots = nl.ndarray((16, 2, width), dtype=nl.bfloat16, buffer=nl.psum)
    out = nl.ndarray((16, 6), dtype=nl.bfloat16)
    for slot in range(2):
        nisa.nc_transpose(dst=slots[:, slot, 0:3], data=tile)  # blamed
        nisa.tensor_copy(dst=out[:, slot * 3 : slot * 3 + 3], src=slots[:, slot, 0:3])
    return copied_out(out)


@fault("NKW-PSUM-HALF-START", HALVES[0:4], answer=lambda x: x.T)
def transpose_behind_one_column(x, sick):
    """A transpose leaves the first column of a bfloat16 tile in PSUM free."""
    tile, first = nl.load(x), 1 if sick else 2
    slot = nl.ndarray((16, 6), dtype=nl.bfloat16, buffer=nl.psum)
    nisa.nc_transpose(dst=slot[:, first : first + 4], data=tile)  # blamed
    return copied_out(slot[:, first : first + 4])


@fault("NKW-PSUM-HALF-START", ramp(4, 8), answer=lambda x: x.astype(np.float16))
def copy_to_odd_columns(x, sick):
    """The Vector engine converts two halves of a tile to float16 in PSUM, the second from the fifth element on."""
    tile, step = nl.load(x), 5 if sick else 6
    narrow, out = nl.ndarray((4, 12), dtype=nl.float16, buffer=nl.psum), nl.ndarray((4, 8), dtype=nl.float16)
    nisa.tensor_copy(dst=narrow[:, 0:4], src=tile[:, 0:4])
    nisa.tensor_copy(dst=narrow[:, step : step + 4], src=tile[:, 4:8])  # blamed
    nisa.tensor_copy(dst=out[:, 0:4], src=narrow[:, 0:4])
    nisa.tensor_copy(dst=out[:, 4:8], src=narrow[:, step : step + 4])
    return copied_out(out)


@fault("NKW-DMA-TRANSPOSE-STRIDE", HALVES[0:12], answer=lambda x: x.T)
def transpose_of_twelve_rows(x, sick):
    """A DMA transposes 12 rows of bfloat16 into a tile of 12 columns, whose rows are 24 bytes apart."""
    tile = nl.ndarray((16, 12 if sick else 16), dtype=nl.bfloat16)
    nisa.dma_transpose(dst=tile[:, 0:12], src=x)  # blamed
    return copied_out(tile[:, 0:12])


@fault("NKW-DMA-TRANSPOSE-STRIDE", ramp(9, 4), answer=lambda x: x.T + 1)
def transpose_into_a_part_of_a_tile(x, sick):
    """Eight rows of float32 are transposed into a tile with one more column for the sums."""
    tile = nl.ndarray((4, 9 if sick else 16), dtype=nl.float32)
    nisa.dma_transpose(dst=tile[:, 0:8], src=x[0:8])  # blamed
    nisa.dma_copy(dst=tile[:, 8:9], src=x[8:9].reshape((4, 1)))
    out = nl.ndarray((4, 9), dtype=nl.float32)
    nisa.tensor_scalar(dst=out, data=tile[:, 0:9], op0=nl.add, operand0=1.0)
    return copied_out(out)


@fault("NKW-DMA-TRANSPOSE-STRIDE", HALVES[0:20], answer=lambda x: x.T)
def blocks_transposed_side_by_side(x, sick):
    """Blocks of 4 rows are transposed into one tile of 20 columns, 40 bytes in each partition."""
    tile = nl.ndarray((16, 20 if sick else 32), dtype=nl.bfloat16)
    for block in range(5):
        rows = slice(block * 4, block * 4 + 4)
        nisa.dma_transpose(dst=tile[:, rows], src=x[rows])  # blamed
    return copied_out(tile[:, 0:20])


@fault("NKW-PARTITION-STEP-ZERO", ramp(1, 8), answer=lambda x: x + 1)
def row_by_a_pattern_of_step_zero(x, sick):
    """A row of one partition is read by a pattern that steps by 0 over its one partition."""
    tile, out = nl.load(x), nl.ndarray((1, 8), dtype=nl.float32)
    view = tile.ap(pattern=[[0 if sick else 8, 1], [1, 8]])
    nisa.tensor_scalar(dst=out, data=view, op0=nl.add, operand0=1.0)  # blamed
    return copied_out(out)


@fault("NKW-PARTITION-STEP-ZERO", ramp(4, 8), answer=lambda x: x.sum(1, keepdims=True)[0:1])
def last_block_of_one_token(x, sick):
    """A pattern whose partition step is that of a broadcast writes the result of one token."""
    tile, out = nl.load(x), nl.ndarray((1, 1), dtype=nl.float32)
    sums = nl.ndarray((4, 4), dtype=nl.float32)
    view = sums.ap(pattern=[[0 if sick else 4, 1], [1, 1]])
    nisa.tensor_reduce(dst=view, data=tile[0:1], op=nl.add, axis=1)  # blamed
    nisa.tensor_copy(dst=out, src=sums[0:1, 0:1])
    return copied_out(out)


@fault("NKW-PARTITION-STEP-ZERO", ramp(1, 8), answer=lambda x: x.reshape(4, 2).T[0:1])
def stored_by_a_pattern_of_step_zero(x, sick):
    """A DMA stores every second element of a row of one partition."""
    tile, out = nl.load(x), nl.ndarray((1, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(dst=out, src=tile.ap(pattern=[[0 if sick else 8, 1], [2, 4]]))  # blamed
    return out
