"""Rows of a latent cache on their way to SBUF, with a mask for each new token, and their transposes.

Beside the key of a row stands a mask for each new token: 0 where the token sees the position, else far below any score.
Transposed, it is one more element of the contraction, so the product adds it to the scores. Keys are copied for that:
rows that lie together in SBUF as in the cache take the fewest descriptors.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.latent.sizes import heights
from nki_kernels.tiles import MASKED, PARTITIONS

BY_VECTOR = 3
"""Of so many transposed chunks the Vector engine copies one, the Scalar engine the others."""

KEYS_AHEAD = 3
"""The keys of chunks that are transposed together are put beside masks so many chunks before: later ones would keep the
Tensor engine waiting, earlier ones the copies that the Vector engine makes of chunks that are there already."""

TOGETHER = 4
"""Chunks of transposed keys that one copy moves."""


def bring(work, number):
    """Load the rows of an item."""
    sizes, item = work.sizes, work.items[number]
    _, chunks, height = sizes.pieces[item.piece]
    item.rows = work.row_tiles[number % sizes.buffers][0:height, 0:chunks, :]
    item.beside = work.beside_tiles[number % 2][0:height, 0:chunks, :]
    item.transposed = work.transposed_tiles[number % 2]
    work.cache.load_item(item, sizes.pieces[item.piece])


def set_beside(work, item, first, last):
    """Put the keys of chunks first … last beside masks: [row, chunk, key and mask of each new token]."""
    sizes = work.sizes
    height = item.rows.shape[0]
    at = work.first_chunks[item.piece]
    for i in range(sizes.new):
        token = item.sequence * sizes.new + i
        nisa.tensor_scalar(
            dst=item.beside[:, first:last, sizes.rope + i],
            data=work.keys_at[0:height, at + first : at + last],
            op0=nl.greater,
            operand0=work.tokens_at[0:height, token : token + 1],
            op1=nl.multiply,
            operand1=MASKED,
        )
    keys = item.rows[:, first:last, sizes.rank : sizes.width]
    nisa.tensor_copy(dst=item.beside[:, first:last, 0 : sizes.rope], src=keys)


def transpose_chunk(work, item, chunk):
    """Transpose a chunk of rows: latents to [latent in part, part, row], keys and masks to [element, row].

    Behind the last chunk there is nothing to do.
    """
    if chunk >= item.rows.shape[1]:
        return
    sizes = work.sizes
    rows = item.rows[:, chunk, :]
    height = rows.shape[0]
    latent = item.transposed[0]
    by_vector = chunk % BY_VECTOR == 0
    first = chunk // TOGETHER * TOGETHER
    last = min(first + TOGETHER, item.rows.shape[1])
    if chunk == max(first, last - KEYS_AHEAD):
        set_beside(work, item, first, last)
    for start, end, part_height in heights(sizes.rank):
        bank = nl.ndarray((part_height, end - start, height), dtype=sizes.dtype, buffer=nl.psum)
        for part in range(start, end):
            column = part * PARTITIONS
            nisa.nc_transpose(dst=bank[:, part - start, :], data=rows[:, column : column + part_height])
        copy_out(latent[0:part_height, chunk, start:end, 0:height], bank, by_vector)
    if chunk + 1 == last:
        transpose_beside(sizes, item, first, last)


def transpose_beside(sizes, item, first, last):
    """Transpose keys and masks of chunks first … last, behind their latents: these begin while keys are copied."""
    height = item.rows.shape[0]
    bank = nl.ndarray((sizes.beside, last - first, height), dtype=sizes.dtype, buffer=nl.psum)
    for chunk in range(first, last):
        nisa.nc_transpose(dst=bank[:, chunk - first, :], data=item.beside[:, chunk, :])
    copy_out(item.transposed[1][:, first:last, 0:height], bank, False)


def copy_out(target, bank, by_vector):
    """Copy transposed rows from PSUM."""
    if by_vector:
        nisa.tensor_copy(dst=target, src=bank, engine=nisa.engine.vector)
    else:
        nisa.activation(dst=target, op=nl.copy, data=bank)
