"""Scales of weights' columns in SBUF, in the layouts in which the sums of products lie.

`decode.block` loads those of w_qkv before caches and weights, and `decode.projected` multiplies sums by them.
`decode.feed_forward` loads those of w_down. The Scalar engine triggers all loads, because in the queue of caches and
weights they would arrive late.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.tiles import PARTITIONS, blocks, ranges

LINE_COLUMNS = 2048
"""Scales that are copied to other partitions at once: 8 KiB of each partition."""


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
        self.values = load_on_rows(scales[:, first_value : scales.shape[1]], sizes.tokens)


def load_on_rows(scales, rows):
    """Return scales [1, N] of HBM on each partition of a new float32 SBUF tile [rows, N].

    The first partition of each quadrant is loaded, and the Vector engine copies it to the others.
    """
    columns, quadrant = scales.shape[1], PARTITIONS // 4
    repeated = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.sbuf)
    if rows == 1:
        transfer(repeated, scales, SCALAR)
        return repeated
    for start, end in ranges(0, columns, LINE_COLUMNS):
        lines = nl.ndarray((rows, end - start), dtype=nl.float32, buffer=nl.sbuf)
        for first in range(0, rows, quadrant):
            transfer(lines[first : first + 1, :], scales[:, start:end], SCALAR)
        nisa.nc_stream_shuffle(dst=repeated[:, start:end], src=lines, shuffle_mask=[0] * quadrant)
    return repeated


def load_head_scales(scales, sizes):
    """Load scales of heads into a new SBUF tile [D in tile, tile, head] float32, see `ProjectionScales`.

    Scales of a head are neighbours in HBM, so heads are loaded as lines and transposed on the Tensor engine.

    Args:
        scales: [1, heads * D] float32 in HBM.
    """
    width, columns = sizes.together * sizes.depth, scales.shape[1]
    count, full = blocks(columns, width), columns // width
    table = nl.ndarray((min(width, PARTITIONS), sizes.depth_tiles, count), dtype=nl.float32, buffer=nl.sbuf)
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
            target = table[0 : stop - start, start // PARTITIONS, first:end]
            nisa.tensor_copy(dst=target, src=transposed)
    return table
