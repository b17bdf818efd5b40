"""Rows of a latent cache in SBUF, with a mask for each new token, and their transposes for the score product.

`latent.decode_items` calls `transpose_chunk`. A *row* is [latent | rotated key] of one position; a *chunk* is 128
rows.

The key of a row gets a mask for each new token: 0 where the token sees the position, else far below any score.
Transposed, the mask is one more element of the contraction, so the product adds it to the scores. Keys are copied for
that: rows that are neighbours in SBUF as in the cache take the fewest descriptors.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.pages import transpose_rows
from nki_kernels.latent.sizes import list_tile_ranges
from nki_kernels.tiles import MASKED, PARTITIONS

BY_VECTOR = 3
"""The Vector engine copies one of so many transposed chunks, the Scalar engine the others."""

KEYS_AHEAD = 3
"""Chunks by which the copy of keys beside masks precedes the transpose of the keys.

Later copies would keep the Tensor engine waiting. Earlier ones would delay the Vector engine's copies of chunks that
are there already.
"""

TOGETHER = 4
"""Chunks whose transposed keys one copy moves from PSUM to SBUF."""


def set_mask_keys(launch, item, first, last):
    """Write the keys and masks of chunks `first` … `last` - 1 to `item.mask_keys` [row, chunk, R + new] in SBUF.

    A mask is 0 where the new token sees the row's position, else MASKED. A chunk is 128 positions; an item is one
    piece of a sequence.

    Args:
        launch: `LatentDecode`.
        item: an `Item` whose rows are loaded.
    """
    sizes = launch.sizes
    height = item.rows.shape[0]
    chunk = launch.first_chunks[item.piece]
    for i in range(sizes.new):
        token = item.sequence * sizes.new + i
        nisa.tensor_scalar(
            dst=item.mask_keys[:, first:last, sizes.rope + i],
            data=launch.key_positions[0:height, chunk + first : chunk + last],
            op0=nl.greater,
            operand0=launch.token_positions[0:height, token : token + 1],
            op1=nl.multiply,
            operand1=MASKED,
        )
    keys = item.rows[:, first:last, sizes.rank : sizes.width]
    nisa.tensor_copy(dst=item.mask_keys[:, first:last, 0 : sizes.rope], src=keys)


def transpose_chunk(launch, item, chunk):
    """Transpose the latents of one chunk of an item to `item.latents`; do nothing beyond its last chunk.

    Keys and masks are copied and transposed for up to TOGETHER chunks at once: to `item.mask_keys` KEYS_AHEAD chunks
    before, and to `item.keys` after the last of them. A chunk is 128 positions; an item is one piece of a sequence.

    Args:
        launch: `LatentDecode`.
        item: an `Item` whose rows are loaded.
        chunk: number of the chunk.
    """
    if chunk >= item.rows.shape[1]:
        return
    sizes = launch.sizes
    rows = item.rows[:, chunk, :]
    height = rows.shape[0]
    by_vector = chunk % BY_VECTOR == 0
    first = chunk // TOGETHER * TOGETHER
    last = min(first + TOGETHER, item.rows.shape[1])
    if chunk == max(first, last - KEYS_AHEAD):
        set_mask_keys(launch, item, first, last)
    for start, end, tile_height in list_tile_ranges(sizes.rank):
        dtype = sizes.dtype if launch.identity is None else nl.float32
        bank = nl.ndarray((tile_height, end - start, height), dtype=dtype, buffer=nl.psum)
        for tile in range(start, end):
            column = tile * PARTITIONS
            transpose_rows(bank[:, tile - start, :], rows[:, column : column + tile_height], launch.identity)
        copy_out(item.latents[0:tile_height, chunk, start:end, 0:height], bank, by_vector)
    if chunk + 1 == last:
        transpose_mask_keys(sizes, item, first, last)


def transpose_mask_keys(sizes, item, first, last):
    """Transpose keys and masks of chunks `first` … `last` - 1 to `item.keys` [R + new, chunk, row] in SBUF.

    They come from `item.mask_keys`. The call follows the transposes of their latents, which begin while keys are
    copied. A chunk is 128 positions.
    """
    height = item.rows.shape[0]
    bank = nl.ndarray((sizes.score_rows, last - first, height), dtype=sizes.dtype, buffer=nl.psum)
    for chunk in range(first, last):
        nisa.nc_transpose(dst=bank[:, chunk - first, :], data=item.mask_keys[:, chunk, :])
    copy_out(item.keys[:, first:last, 0:height], bank, False)


def copy_out(target, bank, by_vector):
    """Copy transposed rows from `bank` in PSUM to `target` in SBUF, on the Vector or else the Scalar engine."""
    if by_vector:
        nisa.tensor_copy(dst=target, src=bank, engine=nisa.engine.vector)
    else:
        nisa.activation(dst=target, op=nl.copy, data=bank)
