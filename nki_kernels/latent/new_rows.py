"""The rows of the new tokens, [latent | rotated key], as a latent cache holds them, on their way to it."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.norms.row_tiles import rms_normalised
from nki_kernels.rope import rotate
from nki_kernels.tiles import cast, load, on_every_row


def prepare_new_rows(kv, norm, positions, cos, sin):
    """Return rows [latent | key] of up to 128 tokens: the latent RMS-normalised, the key rotated by its position."""
    rows, width = kv.shape
    weight = on_every_row(norm.weight, rows, kv.dtype, 0.0)
    rank = weight.shape[1]
    numbers = load(positions, nl.int32)
    tile = load(kv, kv.dtype)
    cosines, sines = load_rows(cos, numbers), load_rows(sin, numbers)
    result = nl.ndarray((rows, width), dtype=kv.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result[:, 0:rank], src=rms_normalised(tile[:, 0:rank], weight, norm.eps))
    rotate(result[:, rank:width], tile[:, rank:width], cosines, sines, width - rank)
    return result


def load_rows(table, numbers):
    """Load rows of a table [S, half] in HBM by number: [rows, half]."""
    return load(view_rows(table, numbers), table.dtype)


def view_rows(tensor, numbers):
    """Return rows of a tensor [S, n] in HBM whose numbers [rows, 1] are known at run time: [rows, n].

    A single one is named by a scalar: GpSimd makes no descriptors for it.
    """
    rows, width = numbers.shape[0], tensor.shape[1]
    pattern = [[width, rows], [1, width]]
    if rows == 1:
        return tensor.ap(pattern=pattern, scalar_offset=numbers, indirect_dim=0)
    return tensor.ap(pattern=pattern, vector_offset=numbers)


def write_rows(cache, rows, addresses):
    """Write rows to a cache [., ., width] at addresses [rows, 1] int32, counted in its rows."""
    flat = cache.reshape((cache.shape[0] * cache.shape[1], cache.shape[2]))
    nisa.dma_copy(dst=view_rows(flat, addresses), src=cast(rows, cache.dtype))
