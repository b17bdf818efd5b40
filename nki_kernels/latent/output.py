"""From weighted latents to outputs: divided by the sums of the weights, times the value projection.

`latent.decode_items` calls `place_divided`, and `latent_attention_decode` calls `project_values`. Latents are tiles
[latent in tile, tile, …]: element l is on partition l % 128 of tile l // 128.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.latent.sizes import list_tile_ranges
from nki_kernels.tiles import BANK, PARTITIONS

GROUP_ELEMENTS = 8192
"""Elements per partition of the value projection of as many heads as are loaded together."""


def create_output_tile(sizes):
    """Return an uninitialised SBUF tile for the weighted latents of all tokens: [latent in tile, tile, token, head]."""
    shape = (min(sizes.rank, PARTITIONS), sizes.latent_tiles, sizes.tokens, sizes.heads)
    return nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)


def place_divided(result, mixed, total, sequence, sizes, scales):
    """Write a sequence's weighted latents, divided by its sums of weights, to its tokens in `result`.

    Args:
        result: [latent in tile, tile, token, head] in SBUF, all sequences.
        mixed: weighted latents [latent in tile, tile, query] float32 in SBUF.
        total: sums of weights [128, query] float32 in SBUF, the same on every partition.
        sequence: number of the sequence.
        scales: `RowScales` of the cache, whose scale of latents multiplies the result, or None.
    """
    inverse = nl.ndarray(total.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=total)
    if scales is not None:
        nisa.tensor_scalar(dst=inverse, data=inverse, op0=nl.multiply, operand0=scales.latent)
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
    """Write outputs to `o` [T, Hq * V] in HBM: weighted latents times the value projection of each head.

    Args:
        latents: [latent in tile, tile, token, head] in SBUF, divided by the sums of weights.
        w_uv: [L, Hq * V] in HBM.
        sizes: `Sizes` of `latent.sizes`.
    """
    group = max(1, min(sizes.heads, GROUP_ELEMENTS // (sizes.latent_tiles * sizes.value)))
    for first in range(0, sizes.heads, group):
        last = min(sizes.heads, first + group)
        weights = load_columns(w_uv, first * sizes.value, last * sizes.value, sizes)
        rows = nl.ndarray((sizes.tokens, (last - first) * sizes.value), dtype=sizes.dtype, buffer=nl.sbuf)
        project_heads(rows, latents, weights, first, sizes)
        nisa.dma_copy(dst=o[:, first * sizes.value : last * sizes.value], src=rows)


def load_columns(w_uv, first, last, sizes):
    """Load columns `first` … `last` - 1 of the value projection into SBUF, cast to `sizes.dtype`.

    The result is [latent in tile, tile, column].

    Args:
        w_uv: [L, Hq * V] in HBM.
        sizes: an object with `rank`, `latent_tiles` and `dtype`: `Sizes` or `Expansion`.
    """
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
    """Write the outputs of some heads to `rows` [token, head * V] in SBUF.

    Args:
        latents: [latent in tile, tile, token, head] in SBUF, all heads.
        weights: value projection of these heads, [latent in tile, tile, head * V] in SBUF.
        first: number of the first head in `latents`.
        sizes: `Sizes` of `latent.sizes`.
    """
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
