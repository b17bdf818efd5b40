"""The matmul ladder: one product, tuned step by step, which shows where the time of a kernel goes.

    tile_by_tile    both operands loaded anew for every nc_matmul
    hoisted         a's tiles loaded once per row of output tiles
    blocked         blocks of a and b stay in SBUF and are used for several output tiles

Every rung computes c = a_t.T @ b for whole tiles. `nki_kernels.matmul(a_t, b, a_transposed=True)` does it for any size,
in blocks like the last rung, with fewer and wider DMAs.
"""

from nki_kernels.ladder.blocked import blocked
from nki_kernels.ladder.hoisted import hoisted
from nki_kernels.ladder.tile_by_tile import tile_by_tile

__all__ = ["blocked", "hoisted", "tile_by_tile"]
