"""Constant tiles of a chunk of 128 tokens: triangles, identities, and the second blocks of the inverse's levels."""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.delta.block_inverse import BLOCK, HALF
from nki_kernels.tiles import MASKED, PARTITIONS, filled

LEVELS = (16, 32)
"""Sizes of the blocks that a level joins two by two, inside a half."""


def triangle(dtype, value, fill, comparison):
    """Return a tile [128, 128] of `value` where column - row compares with 0, and of `fill` elsewhere."""
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
    """Constant tiles [128, 128] of a chunk; t, i and j are tokens.

    until, after: ones where t <= i and where t > j, float32. ones: float32. visible: zeros where j <= i, else `MASKED`.
    identity: in the dtype of products; wide_identity: float32. unit_block, second_blocks: see the functions.
    """

    until: nl.NkiTensor
    after: nl.NkiTensor
    ones: nl.NkiTensor
    visible: nl.NkiTensor
    identity: nl.NkiTensor
    wide_identity: nl.NkiTensor
    unit_block: nl.NkiTensor
    second_blocks: list


def chunk_constants(dtype):
    """Return the constant tiles for products of a dtype."""
    return ChunkConstants(
        until=triangle(nl.float32, 1.0, 0.0, nl.greater_equal),
        after=triangle(nl.float32, 1.0, 0.0, nl.less),
        ones=triangle(nl.float32, 1.0, 1.0, nl.equal),
        visible=triangle(dtype, 0.0, MASKED, nl.greater_equal),
        identity=triangle(dtype, 1.0, 0.0, nl.equal),
        wide_identity=triangle(nl.float32, 1.0, 0.0, nl.equal),
        unit_block=unit_block(),
        second_blocks=second_blocks(dtype),
    )


def unit_block():
    """Return the identity of a block on each partition, [., row, column] float32."""
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


def second_blocks(dtype):
    """Return for each level ones in rows of a half in the second block of a pair: [row of both halves, pair]."""
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
