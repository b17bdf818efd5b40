"""Queries of latent attention: their plain elements times the key projection, so that they meet latents.

`latent_attention_decode` calls `load_group` and `absorb_queries`. A head of a query is [R rotated elements | P plain
elements]; a latent l has L elements.

q . (w_uk l) = (w_uk^T q) . l
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.latent.sizes import list_tile_ranges
from nki_kernels.tiles import BANK, PARTITIONS, allocate_psum_slots, cast, load, ranges

GROUP_ELEMENTS = 8192
"""Elements per partition of the key projection of as many heads as are loaded together."""


def divide_heads(sizes):
    """Return ranges (first head, end) whose projections are loaded together; their queries fit into one PSUM bank."""
    tokens = sizes.tokens
    most = max(1, min(GROUP_ELEMENTS // sizes.rank, BANK // (sizes.latent_tiles * tokens), BANK // tokens))
    return ranges(0, sizes.heads, most)


def load_group(q, w_uk, group, sizes):
    """Load the queries of a group of heads, [T, head, R + P], and their key projection, [P, head, L], into SBUF.

    The projection takes another DMA queue than the queries, which are needed first. It keeps its dtype.

    Args:
        q: [T, Hq * (R + P)] in HBM.
        w_uk: [Hq * P, L] in HBM.
        group: (first head, end).
    """
    first, last = group
    width = sizes.rope + sizes.plain
    tile = load(q.reshape((sizes.tokens, sizes.heads, width))[:, first:last, :], q.dtype)
    weights = nl.ndarray((sizes.plain, last - first, sizes.rank), dtype=w_uk.dtype, buffer=nl.sbuf)
    rows = w_uk.reshape((sizes.heads, sizes.plain, sizes.rank))[first:last]
    transfer(weights, rows.permute((1, 0, 2)), SCALAR)
    return tile, weights


def absorb_queries(q, w_uk, loaded, sizes, scales):
    """Return the queries as score products take them, two SBUF tiles.

    Returns:
        The absorbed plain elements, w_uk^T q: [latent in tile, tile, token, head]. Then [R + new, token, head]: the
        rotated elements, and 1 at the mask of the token's own index in its sequence, else 0.

    Args:
        q: [T, Hq * (R + P)] in HBM.
        w_uk: [Hq * P, L] in HBM.
        loaded: the first group of heads, as `load_group` returned it; the others are loaded here.
        scales: `RowScales` of the cache, by which queries are multiplied, or None.
    """
    tokens, heads = sizes.tokens, sizes.heads
    height = min(sizes.rank, PARTITIONS)
    latent = nl.ndarray((height, sizes.latent_tiles, tokens, heads), dtype=sizes.dtype, buffer=nl.sbuf)
    turned = nl.ndarray((sizes.rope + sizes.new, tokens, heads), dtype=sizes.dtype, buffer=nl.sbuf)
    selectors = mark_tokens(sizes)
    for first, last in divide_heads(sizes):
        tile, weights = loaded if first == 0 else load_group(q, w_uk, (first, last), sizes)
        transpose_turned(turned[:, :, first:last], tile, selectors, sizes, scales)
        plain = transpose_plain(tile, sizes)
        absorb(latent[:, :, :, first:last], plain, cast(weights, sizes.dtype), sizes, scales)
    return latent, turned


def mark_tokens(sizes):
    """Return 1 where a token has index i in its sequence, else 0: [T, i] in SBUF, in the activations' dtype.

    The second axis has an entry for each new token of a sequence.
    """
    result = nl.ndarray((sizes.tokens, sizes.new), dtype=sizes.dtype, buffer=nl.sbuf)
    if sizes.new == 1:
        nisa.memset(dst=result, value=1.0)
        return result
    shape = (1, sizes.sequences, sizes.new, sizes.new)
    distance = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=distance, pattern=[[0, sizes.sequences], [1, sizes.new], [-1, sizes.new]])
    row = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=row, data=distance, op0=nl.equal, operand0=0.0)
    # A row's number within its sequence is no affine function of its partition, so DMA spreads one long row.
    nisa.dma_copy(dst=result, src=row)
    return result


def transpose_turned(result, tile, selectors, sizes, scales):
    """Write the rotated elements of some heads' queries, and the selectors of their masks, to `result` in SBUF.

    Args:
        result: [R + new, token, head].
        tile: queries [T, head, R + P] in SBUF.
        selectors: [T, new], see `mark_tokens`.
        scales: `RowScales` of the cache, or None.
    """
    tokens, heads, _ = tile.shape
    height = sizes.rope + sizes.new
    rows = nl.ndarray((tokens, heads, height), dtype=tile.dtype, buffer=nl.sbuf)
    copy_scaled(
        rows[:, :, 0 : sizes.rope],
        tile[:, :, 0 : sizes.rope],
        None if scales is None else scales.key[0:tokens, :],
    )
    # GpSimd copies the selectors, so that they take no time of the Vector engine.
    nisa.tensor_copy(
        dst=rows[:, :, sizes.rope : height],
        src=selectors.expand_dim(1).broadcast(1, heads),
        engine=nisa.engine.gpsimd,
    )
    bank = allocate_psum_slots(height, heads, tokens, tile.dtype)
    for head in range(heads):
        nisa.nc_transpose(dst=bank[:, head, :], data=rows[:, head, :])
    nisa.tensor_copy(dst=result, src=bank.permute((0, 2, 1)))


def copy_scaled(target, source, scale):
    """Copy a tile to `target` in SBUF, multiplied by `scale`, [partitions, 1] in SBUF, unless it is None."""
    if scale is None:
        nisa.tensor_copy(dst=target, src=source)
    else:
        nisa.tensor_scalar(dst=target, data=source, op0=nl.multiply, operand0=scale)


def transpose_plain(tile, sizes):
    """Return the elements of some heads' queries that are not rotated, transposed: [P, head, token] in SBUF.

    Args:
        tile: queries [T, head, R + P] in SBUF.
    """
    tokens, heads, _ = tile.shape
    bank = allocate_psum_slots(sizes.plain, heads, tokens, tile.dtype)
    for head in range(heads):
        nisa.nc_transpose(dst=bank[:, head, :], data=tile[:, head, sizes.rope : sizes.rope + sizes.plain])
    result = nl.ndarray(bank.shape, dtype=tile.dtype, buffer=nl.sbuf)
    # The Scalar engine evicts these, while the Vector engine evicts the rotated elements.
    nisa.activation(dst=result, op=nl.copy, data=bank)
    return result


def absorb(result, plain, weights, sizes, scales):
    """Write elements of queries that are not rotated, times the key projection, to `result` in SBUF.

    Args:
        result: [latent in tile, tile, token, head].
        plain: [P, head, token] in SBUF.
        weights: key projection [P, head, L] in SBUF.
        scales: `RowScales` of the cache, or None.
    """
    heads, tokens = plain.shape[1], plain.shape[2]
    bank = nl.ndarray((result.shape[0], sizes.latent_tiles, heads, tokens), dtype=nl.float32, buffer=nl.psum)
    for start, end, height in list_tile_ranges(sizes.rank):
        for tile in range(start, end):
            first = tile * PARTITIONS
            for head in range(heads):
                # The projection is stationary, so queries have latents on the partitions, over which scores contract.
                nisa.nc_matmul(
                    dst=bank[0:height, tile, head, :],
                    stationary=weights[:, head, first : first + height],
                    moving=plain[:, head, :],
                    accumulate=False,
                )
        copy_scaled(
            result[0:height, start:end, :, :],
            bank[0:height, start:end, :, :].permute((0, 1, 3, 2)),
            None if scales is None else scales.latent[0:height, :],
        )
