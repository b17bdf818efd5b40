"""Scales of w_qkv in SBUF, in the layouts in which the sums of queries, keys and values lie.

`decode.block` loads them before caches and weights, and `decode.projected` multiplies sums by them.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.tiles import PARTITIONS, blocks, broadcast_row, ranges, shuffle_row


class ProjectionScales(nl.NKIObject):
    """Scales of the columns of w_qkv, float32 in SBUF.

    heads: of query heads, then key heads, [D in tile, tile, head]; of heads of 32 or 64 elements `sizes.together`
    neighbours share the partitions, and the last axis counts such sets. values: [token, Hk * D], the same on every
    partition.

    Args:
        scales: [1, q_size + 2 * kv_size] float32 in HBM.
    """

    def __init__(self, scales, sizes):
        first_value = (sizes.heads + sizes.kv_heads) * sizes.depth
        self.heads = load_head_scales(scales[:, 0:first_value], sizes)
        rows, values = sizes.tokens, scales[:, first_value : scales.shape[1]]
        # The Vector engine copies a row to few partitions, the Tensor engine to many.
        if rows > PARTITIONS // 2:
            self.values = broadcast_row(values, rows, nl.float32, 0.0)
        else:
            self.values = shuffle_row(values, rows)


def load_head_scales(scales, sizes):
    """Load scales of heads into a new SBUF tile [D in tile, tile, head] float32, see `ProjectionScales`.

    Scales of a head are neighbours in HBM, so heads are loaded as lines and transposed on the Tensor engine.

    Args:
        scales: [1, heads * D] float32 in HBM.
    """
    width, columns = sizes.together * sizes.depth, scales.shape[1]
    count, full = blocks(columns, width), columns // width
    result = nl.ndarray((min(width, PARTITIONS), sizes.depth_tiles, count), dtype=nl.float32, buffer=nl.sbuf)
    for first, end in ranges(0, count):
        lines = nl.ndarray((end - first, width), dtype=nl.float32, buffer=nl.sbuf)
        last = min(end, full)
        if last < end:
            # On gen2 a transpose is a product, in which a NaN behind the short line would spread to other elements.
            nisa.memset(dst=lines, value=0.0, engine=nisa.engine.gpsimd)
            transfer(
                lines[last - first : end - first, 0 : columns - full * width],
                scales[:, full * width :],
                SCALAR,
            )
        if last > first:
            source = scales[:, first * width : last * width].reshape((last - first, width))
            transfer(lines[0 : last - first, :], source, SCALAR)
        for start, stop in ranges(0, width):
            transposed = nl.ndarray((stop - start, end - first), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_transpose(dst=transposed, data=lines[:, start:stop])
            target = result[0 : stop - start, start // PARTITIONS, first:end]
            nisa.tensor_copy(dst=target, src=transposed)
    return result
