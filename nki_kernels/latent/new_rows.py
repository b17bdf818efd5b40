"""Rows of the new tokens as a latent cache holds them, [latent | rotated key]: their computation and their store.

`latent_attention_decode` calls it.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.norms.row_tiles import normalise_rms
from nki_kernels.rope import rotate
from nki_kernels.tiles import broadcast_row, cast, load


def prepare_new_rows(kv, norm, positions, cos, sin):
    """Return cache rows [T, W] in SBUF for up to 128 new tokens: normalised latent, key rotated by its position.

    Args:
        kv: [T, W] in HBM: latent and key, neither normalised nor rotated.
        norm: the RMSNorm of the latent, a `Norm`.
        positions: [T, 1] int32 in HBM, row numbers in the tables.
        cos: [S, R/2] in HBM.
        sin: the same.
    """
    rows, width = kv.shape
    weight = broadcast_row(norm.weight, rows, kv.dtype, 0.0)
    rank = weight.shape[1]
    numbers = load(positions, nl.int32)
    tile = load(kv, kv.dtype)
    cosines, sines = load_rows(cos, numbers), load_rows(sin, numbers)
    result = nl.ndarray((rows, width), dtype=kv.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result[:, 0:rank], src=normalise_rms(tile[:, 0:rank], weight, norm.eps))
    rotate(result[:, rank:width], tile[:, rank:width], cosines, sines, width - rank)
    return result


def load_rows(table, numbers):
    """Load the rows of a table [S, half] in HBM that `numbers` [rows, 1] int32 in SBUF names: [rows, half] in SBUF."""
    return load(view_rows(table, numbers), table.dtype)


def view_rows(tensor, numbers):
    """Return a view [rows, n] of a tensor [S, n] in HBM, whose rows `numbers` [rows, 1] int32 names at run time.

    A single row is named by a scalar, so that GpSimd makes no descriptors.
    """
    rows, width = numbers.shape[0], tensor.shape[1]
    pattern = [[width, rows], [1, width]]
    if rows == 1:
        return tensor.ap(pattern=pattern, scalar_offset=numbers, indirect_dim=0)
    return tensor.ap(pattern=pattern, vector_offset=numbers)


def write_rows(cache, rows, addresses):
    """Write rows in SBUF to a cache [., ., width] in HBM, cast to its dtype.

    Args:
        addresses: [rows, 1] int32 in SBUF, which counts rows from the start of the cache.
    """
    flat = cache.reshape((cache.shape[0] * cache.shape[1], cache.shape[2]))
    nisa.dma_copy(dst=view_rows(flat, addresses), src=cast(rows, cache.dtype))
