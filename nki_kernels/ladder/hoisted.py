"""hoisted: c = a_t.T @ b, with a's tiles loaded once per row of output tiles. The second rung of the ladder.

Dimensions, arguments and layout as in `tile_by_tile`.

Tiling
    for 128 rows of c
        load [128, 128] of a_t for all of K; they stay in SBUF
        for 512 columns of c, which accumulate in one PSUM bank
            for 128 of K: load [128, 512] of b, one nc_matmul

Limits:
    K up to 65536: the row tile holds K/128 * 128 elements per partition, in bfloat16 up to 128 KiB.

Cost
    HBM: a_t once, b M/128 times, c once. Bound: HBM, loading b.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.ladder.tiles import COLUMNS, PARTITIONS, allocate_bank, expect_whole_tiles, load, store


@nki.jit
def hoisted(a_t, b):
    """Return a_t.T @ b, [M, N] in a_t's dtype in shared HBM; a_t is loaded once, b for every 128 rows of it.

    AssertionError unless K and M are multiples of 128 and N of 512.
    """
    depth, rows, columns = expect_whole_tiles(a_t, b)
    c = nl.ndarray((rows, columns), dtype=a_t.dtype, buffer=nl.shared_hbm)
    for m in range(0, rows, PARTITIONS):
        row_tiles = []
        for k in range(0, depth, PARTITIONS):
            row_tiles.append(load(a_t[k : k + PARTITIONS, m : m + PARTITIONS]))
        for n in range(0, columns, COLUMNS):
            bank = allocate_bank()
            for k in range(0, depth, PARTITIONS):
                moving = load(b[k : k + PARTITIONS, n : n + COLUMNS])
                nisa.nc_matmul(
                    dst=bank, stationary=row_tiles[k // PARTITIONS], moving=moving, accumulate=k > 0
                )
            store(c[m : m + PARTITIONS, n : n + COLUMNS], bank)
    return c
