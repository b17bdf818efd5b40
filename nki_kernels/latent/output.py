"""From weighted latents to outputs: divided by the sums of the weights, times the value projection."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.latent.sizes import list_tile_ranges
from nki_kernels.tiles import BANK, PARTITIONS

GROUP_ELEMENTS = 8192
"""Elements per partition of the weights of a group of heads."""


def create_output_tile(sizes):
    """Return a tile for the weighted latents of all tokens: [latent in tile, tile, token, head]."""
    shape = (min(sizes.rank, PARTITIONS), sizes.latent_tiles, sizes.tokens, sizes.heads)
    return nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)


def place_divided(result, mixed, total, sequence, sizes):
    """Write weighted latents of a sequence, divided by the sums of its weights, to those of all sequences."""
    inverse = nl.ndarray(total.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=total)
    first = sequence * sizes.new
    for start, end, height in list_tile_ranges(sizes.rank):
        rows = mixed[0:height, start:end, :]
        target = result[0:height, start:end, first : first + sizes.new, :]
        nisa.tensor_tensor(
            dst=target,
            data1=rows.reshape_dim(2, (sizes.new, sizes.heads)),
            data2=inverse[0:height, :]
            .reshape((height, sizes.new, sizes.heads))
            .expand_dim(1)
            .broadcast(1, end - start),
            op=nl.multiply,
        )


def project_values(latents, w_uv, o, sizes):
    """Multiply weighted latents [latent in tile, tile, token, head] by the value projection of each head, to HBM."""
    group = max(1, min(sizes.heads, GROUP_ELEMENTS // (sizes.latent_tiles * sizes.value)))
    for first in range(0, sizes.heads, group):
        last = min(sizes.heads, first + group)
        weights = load_columns(w_uv, first * sizes.value, last * sizes.value, sizes)
        rows = nl.ndarray((sizes.tokens, (last - first) * sizes.value), dtype=sizes.dtype, buffer=nl.sbuf)
        project_heads(rows, latents, weights, first, sizes)
        nisa.dma_copy(dst=o[:, first * sizes.value : last * sizes.value], src=rows)


def load_columns(w_uv, first, last, sizes):
    """Load columns of the value projection, in the activations' dtype: [latent in tile, tile, column]."""
    shape = (min(sizes.rank, PARTITIONS), sizes.latent_tiles, last - first)
    tile = nl.ndarray(shape, dtype=w_uv.dtype, buffer=nl.sbuf)
    result = tile
    if w_uv.dtype != sizes.dtype:
        result = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)
    for start, end, height in list_tile_ranges(sizes.rank):
        row = start * PARTITIONS
        source = w_uv[row : row + (end - start) * height, first:last].reshape_dim(0, (end - start, height))
        nisa.dma_copy(dst=tile[0:height, start:end, :], src=source.permute((1, 0, 2)))
        if w_uv.dtype != sizes.dtype:
            nisa.tensor_copy(dst=result[0:height, start:end, :], src=tile[0:height, start:end, :])
    return result


def project_heads(rows, latents, weights, first, sizes):
    """Write the outputs of some heads, from head `first` on, to rows [token, head * value]."""
    heads = rows.shape[1] // sizes.value
    together = max(1, BANK // sizes.value)
    for start in range(0, heads, together):
        end = min(heads, start + together)
        bank = nl.ndarray((sizes.tokens, end - start, sizes.value), dtype=nl.float32, buffer=nl.psum)
        for head in range(start, end):
            column = head * sizes.value
            for begin, stop, height in list_tile_ranges(sizes.rank):
                for tile in range(begin, stop):
                    # Latents are the stationary operand, so outputs come with tokens on the partitions, as rows of o.
                    nisa.nc_matmul(
                        dst=bank[:, head - start, :],
                        stationary=latents[0:height, tile, :, first + head],
                        moving=weights[0:height, tile, column : column + sizes.value],
                        accumulate=tile > 0,
                    )
        nisa.tensor_copy(dst=rows[:, start * sizes.value : end * sizes.value], src=bank)
