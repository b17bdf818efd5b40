"""tile_by_tile: c = a_t.T @ b, the plain triple loop over tiles. The first rung of the ladder.

Dimensions:
    M   rows of c, a multiple of 128; N columns of c, a multiple of 512; K the contraction, a multiple of 128.

Arguments:
    a_t        [K, M] @ HBM, float32 or bfloat16
    b          [K, N] @ HBM, a_t's dtype
    returns c  [M, N] @ HBM, a_t's dtype

Layout
    K on the partitions of both operands, which nc_matmul contracts; c has rows on the partitions.

Tiling
    for 128 rows of c
        for 512 columns of c, which accumulate in one PSUM bank
            for 128 of K: load [128, 128] of a_t, load [128, 512] of b, one nc_matmul

Cost
    HBM: a_t N/512 times, b M/128 times, c once. Bound: HBM, by far: a tile of b is used for 128 rows only.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.ladder.tiles import COLUMNS, PARTITIONS, allocate_bank, expect_whole_tiles, load, store


@nki.jit
def tile_by_tile(a_t, b):
    """Return a_t.T @ b, [M, N] in a_t's dtype in shared HBM; both operands are loaded anew for every matmul.

    AssertionError unless K and M are multiples of 128 and N of 512.
    """
    depth, rows, columns = expect_whole_tiles(a_t, b)
    c = nl.ndarray((rows, columns), dtype=a_t.dtype, buffer=nl.shared_hbm)
    for m in range(0, rows, PARTITIONS):
        for n in range(0, columns, COLUMNS):
            bank = allocate_bank()
            for k in range(0, depth, PARTITIONS):
                stationary = load(a_t[k : k + PARTITIONS, m : m + PARTITIONS])
                moving = load(b[k : k + PARTITIONS, n : n + COLUMNS])
                nisa.nc_matmul(dst=bank, stationary=stationary, moving=moving, accumulate=k > 0)
            store(c[m : m + PARTITIONS, n : n + COLUMNS], bank)
    return c
