"""blocked: c = a_t.T @ b, in blocks of both operands that stay in SBUF. The third rung of the ladder.

Dimensions, arguments and layout as in `tile_by_tile`; M and N multiples of the block as well, or smaller than it.

Tiling
    for 512 rows of c: load [128, 512] of a_t for all of K, one DMA per 128 of K
        for 1024 columns of c: load [128, 1024] of b for all of K, one DMA per 128 of K
            for 128 rows and 512 columns inside the block: K/128 nc_matmuls into one PSUM bank

Limits:
    K up to 4096: the blocks take K/128 * (512 + 1024) elements per partition, twice where loading runs ahead.

Cost
    HBM: a_t once, b M/512 times, c once. Bound: the Tensor engine from 512 rows on.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.ladder.tiles import COLUMNS, PARTITIONS, allocate_bank, expect_whole_tiles, load, store

BLOCK_ROWS = 512
BLOCK_COLUMNS = 1024


@nki.jit
def blocked(a_t, b):
    """Return a_t.T @ b, [M, N] in a_t's dtype in shared HBM; each loaded tile serves several output tiles.

    AssertionError unless K and M are multiples of 128 and N of 512.
    """
    depth, rows, columns = expect_whole_tiles(a_t, b)
    c = nl.ndarray((rows, columns), dtype=a_t.dtype, buffer=nl.shared_hbm)
    for first_row in range(0, rows, BLOCK_ROWS):
        high = min(BLOCK_ROWS, rows - first_row)
        left = []
        for k in range(0, depth, PARTITIONS):
            left.append(load(a_t[k : k + PARTITIONS, first_row : first_row + high]))
        for first_column in range(0, columns, BLOCK_COLUMNS):
            wide = min(BLOCK_COLUMNS, columns - first_column)
            right = []
            for k in range(0, depth, PARTITIONS):
                right.append(load(b[k : k + PARTITIONS, first_column : first_column + wide]))
            for m in range(0, high, PARTITIONS):
                for n in range(0, wide, COLUMNS):
                    bank = allocate_bank()
                    for k in range(len(left)):
                        nisa.nc_matmul(
                            dst=bank,
                            stationary=left[k][:, m : m + PARTITIONS],
                            moving=right[k][:, n : n + COLUMNS],
                            accumulate=k > 0,
                        )
                    row, column = first_row + m, first_column + n
                    store(c[row : row + PARTITIONS, column : column + COLUMNS], bank)
    return c
