"""The new tokens of a decode step: their queries and keys, normed, rotated, and transposed for the Tensor engine.

Heads of tokens lie on the partitions, one row [D] each, so that a norm, a rotation and a transpose take the same few
instructions for one token as for many. Queries and keys share them where all rows fit on 128 partitions.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.scales import round_to_cache, scale_column
from nki_kernels.dma import COMPILER, SCALAR, STATIC, transfer
from nki_kernels.tiles import PARTITIONS, blocks, cast, rms_normalised

BLOCKS_AHEAD = 4
"""Blocks of rows that are loaded ahead."""


class NewTokens(nl.NKIObject):
    """Blocks of rows of the queries and keys of all new tokens, and their angles: the first few are loaded."""

    def __init__(self, sizes, step):
        self.heads = sizes.own_heads, 0 if sizes.stored else sizes.kv_heads
        self.sources = None
        self.step = step
        self.first_positions = load_first_positions(step.positions, sizes.sequences, sizes.kv_heads)
        self.segments = row_blocks(sizes.tokens, self.heads, step.scales is None)
        self.angles = []
        self.loaded = []


def expect_tokens(sizes, step):
    """Begin to load what depends on the positions alone, while queries and keys may still be projected."""
    tokens = NewTokens(sizes, step)
    for _ in range(BLOCKS_AHEAD):
        load_next_angles(tokens)
    return tokens


def load_tokens(tokens, q, k, sizes):
    """Begin to load queries and keys."""
    tokens.sources = q, k
    for _ in range(BLOCKS_AHEAD):
        load_next_rows(tokens, sizes)


def load_next_angles(tokens):
    """Load the angles of one more block of rows, if there is one."""
    block = len(tokens.angles)
    if block < len(tokens.segments):
        step = tokens.step
        tables = step.cos, step.sin
        tokens.angles.append(
            load_angles(tokens.segments[block], tokens.heads, step.angle_rows, tables, queue_of(block))
        )


def queue_of(block):
    """Return the queue of a block's loads: the first BLOCKS_AHEAD come before the bulk loads."""
    return STATIC if block < BLOCKS_AHEAD else SCALAR


def load_next_rows(tokens, sizes):
    """Load one more block of rows, if there is one."""
    block = len(tokens.loaded)
    if block < len(tokens.segments):
        tokens.loaded.append(load_rows(tokens.sources, sizes.depth, tokens.segments[block], queue_of(block)))


def transposed_tokens(tokens, sizes):
    """Return queries and keys [D in part, part, token, head] of all tokens, normed and rotated.

    Also the rows of the keys before they were transposed, [rows, D] of at most 128 rows each. Without new keys these
    are None and no rows.
    """
    step = tokens.step
    heads, depth, dtype = tokens.heads, sizes.depth, sizes.dtype
    results, key_rows = [], []
    for count in heads:
        if count == 0:
            results.append(None)
            continue
        shape = (min(depth, PARTITIONS), sizes.parts, sizes.tokens, count)
        results.append(nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf))
    for block in range(len(tokens.segments)):
        segments = tokens.segments[block]
        rows, (cosines, sines) = tokens.loaded[block], tokens.angles[block]
        load_next_angles(tokens)
        load_next_rows(tokens, sizes)
        if step.q_norm is not None:
            rows = normed(rows, heads, segments, (step.q_norm, step.k_norm), step.eps)
        if cosines is not None:
            rows = rotated(rows, cosines, sines, dtype)
        rows = cast(rows, dtype)
        if step.scales is not None:
            take_scales(rows, heads, segments, step.scales)
        place_transposed(results, rows, heads, segments)
        which, first, last, at = segments[-1]
        if which == 1:
            key_rows.append(rows[at : at + (last - first) * heads[1], :])
    return results[0], results[1], key_rows


def key_heights(tokens, sizes):
    """Rows of keys in each tile that `transposed_tokens` returns."""
    heights = []
    for segments in tokens.segments:
        which, first, last, _ = segments[-1]
        if which == 1:
            heights.append((last - first) * sizes.kv_heads)
    return heights


def row_blocks(tokens, heads, alike):
    """The rows of one block each: segments (0: queries or 1: keys, first token, last token, first partition).

    alike: whether queries and keys take the same instructions, so that they may share a block.
    """
    if alike and heads[1] > 0 and tokens * (heads[0] + heads[1]) <= PARTITIONS:
        return [[(0, 0, tokens, 0), (1, 0, tokens, tokens * heads[0])]]
    result = []
    for which in range(2 if heads[1] > 0 else 1):
        together = PARTITIONS // heads[which]
        for first in range(0, tokens, together):
            result.append([(which, first, min(tokens, first + together), 0)])
    return result


def load_rows(sources, depth, segments, queue):
    """Load the rows of one block on a queue of `dma`."""
    tokens = sources[0].shape[0]
    which, first, last, at = segments[-1]
    rows = at + (last - first) * (sources[which].shape[1] // depth)
    tile = nl.ndarray((rows, depth), dtype=sources[0].dtype, buffer=nl.sbuf)
    for which, first, last, at in segments:
        heads = sources[which].shape[1] // depth
        source = sources[which].reshape((tokens, heads, depth))[first:last]
        transfer(tile[at : at + (last - first) * heads, :], source, queue)
    return tile


def load_angles(segments, heads, angle_rows, tables, queue=STATIC):
    """The cosines and sines of one block's rows, from rows of the tables for each token; or two Nones."""
    if tables[0] is None:
        return None, None
    which, first, last, at = segments[-1]
    rows = at + (last - first) * heads[which]
    numbers = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    for which, first, last, at in segments:
        repeated = angle_rows[first:last].broadcast(1, heads[which])
        transfer(numbers[at : at + (last - first) * heads[which], :], repeated, queue)
    found = []
    for table in tables:
        half = table.shape[1]
        entries = nl.ndarray((rows, half), dtype=table.dtype, buffer=nl.sbuf)
        if angle_rows.shape[0] == 1:
            # One row for all partitions: hardware finds the address, GpSimd has nothing to do.
            source = table.ap(pattern=[[0, rows], [1, half]], scalar_offset=numbers[0:1, :], indirect_dim=0)
            transfer(entries, source, SCALAR)
        else:
            source = table.ap(pattern=[[half, rows], [1, half]], vector_offset=numbers)
            transfer(entries, source, COMPILER)
        found.append(entries)
    return found[0], found[1]


def normed(rows, heads, segments, weights, eps):
    """Each row divided by its root mean square and multiplied by the weight of its kind, in the dtype of the rows."""
    scales = nl.ndarray(rows.shape, dtype=nl.float32, buffer=nl.sbuf)
    for which, first, last, at in segments:
        end = at + (last - first) * heads[which]
        nisa.dma_copy(
            dst=scales[at:end, :],
            src=weights[which].ap(pattern=[[0, end - at], [1, rows.shape[1]]]),
        )
    return rms_normalised(rows, scales, eps)


def rotated(rows, cosines, sines, dtype):
    """Rows [rows, D] turned by the angles of cosines and sines [rows, R/2]; what follows the first R stays."""
    count, depth = rows.shape
    half = cosines.shape[1]
    shape = (count, 2, half)
    pairs = rows[:, 0 : 2 * half].reshape(shape)
    with_cos = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    with_sin = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    repeated = (
        cosines.reshape((count, 1, half)).broadcast(1, 2),
        sines.reshape((count, 1, half)).broadcast(1, 2),
    )
    nisa.tensor_tensor(dst=with_cos, data1=pairs, data2=repeated[0], op=nl.multiply)
    nisa.tensor_tensor(dst=with_sin, data1=pairs, data2=repeated[1], op=nl.multiply)
    result = nl.ndarray((count, depth), dtype=dtype, buffer=nl.sbuf)
    first, second = result[:, 0:half], result[:, half : 2 * half]
    nisa.tensor_tensor(dst=first, data1=with_cos[:, 0, :], data2=with_sin[:, 1, :], op=nl.subtract)
    nisa.tensor_tensor(dst=second, data1=with_cos[:, 1, :], data2=with_sin[:, 0, :], op=nl.add)
    if 2 * half < depth:
        nisa.tensor_copy(dst=result[:, 2 * half : depth], src=rows[:, 2 * half : depth])
    return result


def take_scales(rows, heads, segments, scales):
    """Multiply rows [rows, D] of queries by the scales of their keys, or round rows of keys to the cache."""
    which, first, last, _ = segments[0]
    together = heads[which] // scales.keys.shape[1]
    if which == 0:
        column = scale_column(scales.keys, last - first, together)
        nisa.tensor_scalar(dst=rows, data=rows, op0=nl.multiply, operand0=column)
        return
    column = scale_column(scales.inverse_keys, last - first, together)
    round_to_cache(rows, column, scales.dtype)


def place_transposed(results, rows, heads, segments):
    """Transpose rows [rows, D] and copy their segments to the queries and keys, [D in part, part, token, head]."""
    count, depth = rows.shape
    for part in range(blocks(depth)):
        start, end = part * PARTITIONS, min(depth, (part + 1) * PARTITIONS)
        bank = nl.ndarray((end - start, count), dtype=rows.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=bank, data=rows[:, start:end])
        for which, first, last, at in segments:
            stop = at + (last - first) * heads[which]
            nisa.tensor_copy(dst=results[which][0 : end - start, part, first:last, :], src=bank[:, at:stop])


def load_first_positions(positions, sequences, kv_heads):
    """The position of the first new token of each sequence, in float32, for each of its kv heads: [128, B * Hk]."""
    new = positions.shape[0] // sequences
    numbers = nl.ndarray((PARTITIONS, sequences, kv_heads), dtype=nl.int32, buffer=nl.sbuf)
    transfer(
        numbers,
        positions.reshape((1, sequences, new, 1))[:, :, 0, :].broadcast(0, PARTITIONS).broadcast(2, kv_heads),
        STATIC,
    )
    return cast(numbers.reshape((PARTITIONS, sequences * kv_heads)), nl.float32)
