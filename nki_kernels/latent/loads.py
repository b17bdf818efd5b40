"""Rows of a latent cache on their way to SBUF, with a mask for each new token, and their transposes.

The key of a row has a mask beside it for each new token: 0 where the token sees the position, else far below any score.
Transposed, it is one more element of the contraction, so the product adds it to the scores. Keys are copied for that:
rows that lie together in SBUF as in the cache take the fewest descriptors.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.latent.sizes import list_tile_ranges
from nki_kernels.tiles import MASKED, PARTITIONS

BY_VECTOR = 3
"""Of so many transposed chunks the Vector engine copies one, the Scalar engine the others."""

KEYS_AHEAD = 3
"""The keys of chunks that are transposed together are copied beside masks so many chunks before. Later ones would keep
the Tensor engine waiting, earlier ones the copies that the Vector engine makes of chunks that are there already."""

TOGETHER = 4
"""Chunks of transposed keys that one copy moves."""


def set_mask_keys(launch, item, first, last):
    """Copy the keys of chunks first … last beside masks: [row, chunk, key and mask of each new token]."""
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
    """Transpose a chunk of rows: latents to [latent in tile, tile, row], keys and masks to [element, row].

    Behind the last chunk there is nothing to do.
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
        bank = nl.ndarray((tile_height, end - start, height), dtype=sizes.dtype, buffer=nl.psum)
        for tile in range(start, end):
            column = tile * PARTITIONS
            nisa.nc_transpose(dst=bank[:, tile - start, :], data=rows[:, column : column + tile_height])
        copy_out(item.latents[0:tile_height, chunk, start:end, 0:height], bank, by_vector)
    if chunk + 1 == last:
        transpose_mask_keys(sizes, item, first, last)


def transpose_mask_keys(sizes, item, first, last):
    """Transpose keys and masks of chunks first … last, behind their latents: these begin while keys are copied."""
    height = item.rows.shape[0]
    bank = nl.ndarray((sizes.score_rows, last - first, height), dtype=sizes.dtype, buffer=nl.psum)
    for chunk in range(first, last):
        nisa.nc_transpose(dst=bank[:, chunk - first, :], data=item.mask_keys[:, chunk, :])
    copy_out(item.keys[:, first:last, 0:height], bank, False)


def copy_out(target, bank, by_vector):
    """Copy transposed rows from PSUM."""
    if by_vector:
        nisa.tensor_copy(dst=target, src=bank, engine=nisa.engine.vector)
    else:
        nisa.activation(dst=target, op=nl.copy, data=bank)
