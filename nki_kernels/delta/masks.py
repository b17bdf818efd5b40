"""Constant tiles of a chunk of 128 tokens: triangles, identities, and the second blocks of the inverse's levels.

`gated_delta` builds them once. They select tokens in sums and scores, add tiles in PSUM, and begin the
inverse of a chunk's triangle. A level of the inverse joins neighbouring diagonal blocks of a half (64 tokens)
in pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.delta.block_inverse import BLOCK, HALF
from nki_kernels.tiles import MASKED, PARTITIONS, filled

LEVELS = (16, 32)
"""Rows of the blocks that each level of the inverse joins in pairs, within a half of a chunk."""


def build_triangle(dtype, value, fill, comparison):
    """Return a new SBUF tile [128, 128]: `value` where (column - row) `comparison` 0, and `fill` elsewhere.

    Args:
        comparison: a comparison of `nl`, such as nl.greater_equal for columns from the diagonal on.
    """
    tile = filled((PARTITIONS, PARTITIONS), value, dtype)
    nisa.affine_select(
        dst=tile,
        pattern=[[1, PARTITIONS]],
        channel_multiplier=-1,
        on_true_tile=tile,
        on_false_value=fill,
        cmp_op=comparison,
    )
    return tile


@dataclass
class ChunkConstants(nl.NKIObject):
    """Constant SBUF tiles [128, 128] of a chunk; t, i and j are tokens.

    until, after: [t, i] float32, ones where t <= i and where t > i, zeros elsewhere. ones: float32. visible:
    [j, i], zeros where j <= i, else `MASKED`. identity: in the dtype of products; wide_identity: float32.
    unit_block, second_blocks: see `build_unit_blocks` and `build_second_blocks`.
    """

    until: nl.NkiTensor
    after: nl.NkiTensor
    ones: nl.NkiTensor
    visible: nl.NkiTensor
    identity: nl.NkiTensor
    wide_identity: nl.NkiTensor
    unit_block: nl.NkiTensor
    second_blocks: list


def build_chunk_constants(dtype):
    """Return new ChunkConstants: triangles, identities and masks in SBUF that all chunks of 128 tokens share.

    Args:
        dtype: of the operands of products.
    """
    return ChunkConstants(
        until=build_triangle(nl.float32, 1.0, 0.0, nl.greater_equal),
        after=build_triangle(nl.float32, 1.0, 0.0, nl.less),
        ones=build_triangle(nl.float32, 1.0, 1.0, nl.equal),
        visible=build_triangle(dtype, 0.0, MASKED, nl.greater_equal),
        identity=build_triangle(dtype, 1.0, 0.0, nl.equal),
        wide_identity=build_triangle(nl.float32, 1.0, 0.0, nl.equal),
        unit_block=build_unit_blocks(),
        second_blocks=build_second_blocks(dtype),
    )


def build_unit_blocks():
    """Return an identity matrix [16, 16] on each partition: a new float32 SBUF tile [128, 16, 16]."""
    tile = filled((PARTITIONS, BLOCK, BLOCK), 1.0)
    nisa.affine_select(
        dst=tile,
        pattern=[[1, BLOCK], [-1, BLOCK]],
        channel_multiplier=0,
        on_true_tile=tile,
        on_false_value=0.0,
        cmp_op=nl.equal,
    )
    return tile


def build_second_blocks(dtype):
    """Return for each of LEVELS a new SBUF tile [128, pair], ones in the rows of the second block of each pair.

    A level has blocks of 16 or 32 rows. The 64 rows of each half are cut into pairs of these blocks. An
    element is 1 if the row is in the second block of that pair of its half, else 0.
    """
    levels = []
    for size in LEVELS:
        pairs = HALF // (2 * size)
        tile = filled((PARTITIONS, pairs), 1.0, dtype)
        for half in range(2):
            rows = tile[half * HALF : half * HALF + HALF, :]
            for least, comparison in ((size, nl.greater_equal), (2 * size - 1, nl.less_equal)):
                # The row of the half less the first one of the pair lies in size ... 2 * size - 1.
                nisa.affine_select(
                    dst=rows,
                    pattern=[[-2 * size, pairs]],
                    offset=-least,
                    channel_multiplier=1,
                    on_true_tile=rows,
                    on_false_value=0.0,
                    cmp_op=comparison,
                )
        levels.append(tile)
    return levels
