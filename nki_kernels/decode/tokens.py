"""The new tokens of a decode step: their queries and keys, normed, rotated, and transposed for the Tensor engine.

`decode.attend` makes a `NewTokens`. Heads of tokens lie on the partitions, one row [D] each. So a norm, a rotation
and a transpose take the same few instructions for one token as for many. Up to 128 rows make a *block*. Queries and
keys share a block if all rows fit into it.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.scales import load_scale_column, round_to_cache
from nki_kernels.dma import COMPILER, SCALAR, STATIC, transfer
from nki_kernels.norms.row_tiles import normalise_rms
from nki_kernels.tiles import PARTITIONS, blocks, cast, ranges

BLOCKS_AHEAD = 4
"""Blocks of rows that are loaded before the first block is used."""


class Segment(nl.NKIObject):
    """Rows `row` … `end` - 1 of a block: the `heads` heads of tokens `first` … `last` - 1, ordered by token.

    `source`: 0 for queries, 1 for keys.
    """

    def __init__(self, source, first, last, heads, row=0):
        self.source, self.first, self.last, self.heads = source, first, last, heads
        self.row, self.end = row, row + (last - first) * heads


class NewTokens(nl.NKIObject):
    """Queries and keys of all new tokens in blocks of up to 128 rows [head of a token, D], loaded a few blocks ahead.

    When the object is made, the loads of positions and angles begin, while queries and keys may still be projected.
    `first_positions`: see `load_first_positions`. `blocks`: the segments of each block. `angles`, `loaded`: cosines
    and sines, and rows, of the blocks that are loaded so far. cache_dtype: of the cached keys.
    """

    def __init__(self, sizes, step, cache_dtype):
        self.sizes, self.step = sizes, step
        self.sources = None
        self.first_positions = load_first_positions(step.positions, sizes.sequences, sizes.kv_heads)
        # Keys of another dtype than the cache are converted by an engine, which takes partitions from 0 on.
        self.blocks = plan_row_blocks(sizes, step.scales is None and cache_dtype == sizes.dtype)
        self.angles, self.loaded = [], []
        for _ in range(BLOCKS_AHEAD):
            self.load_next_angles()

    def load(self, q, k):
        """Begin to load the first BLOCKS_AHEAD blocks of queries `q` [T, Hq * D] and keys `k` [T, Hk * D] from HBM."""
        self.sources = q, k
        for _ in range(BLOCKS_AHEAD):
            self.load_next_rows()

    def load_next_angles(self):
        """Load cosines and sines of the next block of rows and append them to `angles`; do nothing after the last."""
        block = len(self.angles)
        if block < len(self.blocks):
            self.angles.append(load_angles(self.blocks[block], self.step, choose_queue(block)))

    def load_next_rows(self):
        """Load the next block of rows of queries or keys and append it to `loaded`; do nothing after the last."""
        block = len(self.loaded)
        if block < len(self.blocks):
            self.loaded.append(
                load_rows(self.sources, self.sizes.depth, self.blocks[block], choose_queue(block))
            )

    def transpose_heads(self):
        """Return queries and keys of all tokens, [D in tile, tile, token, head] in SBUF, normed and rotated if asked.

        The third result is a list of the keys as rows [row, D] in SBUF, up to 128 rows (token, kv head) each. Without
        new keys the second result is None and the list is empty. With scales of the cache, queries are scaled and
        keys rounded to it.
        """
        sizes, step = self.sizes, self.step
        results, key_rows = [], []
        for count in (sizes.local_heads, 0 if sizes.stored else sizes.kv_heads):
            tile = None
            if count > 0:
                shape = (min(sizes.depth, PARTITIONS), sizes.depth_tiles, sizes.tokens, count)
                tile = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)
            results.append(tile)
        for block in range(len(self.blocks)):
            segments = self.blocks[block]
            rows, (cosines, sines) = self.loaded[block], self.angles[block]
            self.load_next_angles()
            self.load_next_rows()
            if step.q_norm is not None:
                rows = normalise_rows(rows, segments, step)
            if cosines is not None:
                rows = rotate_rows(rows, cosines, sines, sizes.dtype)
            rows = cast(rows, sizes.dtype)
            if step.scales is not None:
                apply_scales(rows, segments[0], step.scales)
            place_transposed(results, rows, segments)
            if segments[-1].source == 1:
                key_rows.append(rows[segments[-1].row : segments[-1].end, :])
        return results[0], results[1], key_rows

    def list_key_heights(self):
        """Return the number of rows in each tile of key rows that `transpose_heads` returns."""
        heights = []
        for segments in self.blocks:
            if segments[-1].source == 1:
                heights.append(segments[-1].end - segments[-1].row)
        return heights


def choose_queue(block):
    """Return the DMA queue for block number `block`: STATIC for the first BLOCKS_AHEAD, else SCALAR.

    The first blocks are loaded before the caches; later ones must not wait behind those.
    """
    return STATIC if block < BLOCKS_AHEAD else SCALAR


def plan_row_blocks(sizes, alike):
    """Return the blocks of rows, each as a list of its `Segment`s, query blocks before key blocks.

    A block is up to 128 rows, the heads of whole tokens.

    Args:
        alike: whether queries and keys take the same instructions, so that they may share a block.
    """
    tokens, heads = sizes.tokens, [sizes.local_heads] if sizes.stored else [sizes.local_heads, sizes.kv_heads]
    if alike and len(heads) > 1 and tokens * (heads[0] + heads[1]) <= PARTITIONS:
        return [[Segment(0, 0, tokens, heads[0]), Segment(1, 0, tokens, heads[1], tokens * heads[0])]]
    result = []
    for source in range(len(heads)):
        for first, last in ranges(0, tokens, PARTITIONS // heads[source]):
            result.append([Segment(source, first, last, heads[source])])
    return result


def load_rows(sources, depth, segments, queue):
    """Return one block of rows, [row, D] in SBUF, loaded from HBM on `queue`, a queue of `nki_kernels.dma`.

    Args:
        sources: queries [T, Hq * D] and keys [T, Hk * D] in HBM.
        depth: D.
        segments: the block's `Segment`s.
    """
    tokens = sources[0].shape[0]
    tile = nl.ndarray((segments[-1].end, depth), dtype=sources[0].dtype, buffer=nl.sbuf)
    for segment in segments:
        source = sources[segment.source].reshape((tokens, segment.heads, depth))
        transfer(tile[segment.row : segment.end, :], source[segment.first : segment.last], queue)
    return tile


def load_angles(segments, step, queue=STATIC):
    """Return the cosines and sines of one block's rows, [row, R/2] in SBUF, gathered by `step.angle_rows`.

    Returns (None, None) if the step has no rotary tables.

    Args:
        segments: the block's `Segment`s.
        queue: queue of `nki_kernels.dma` for the row numbers.
    """
    if step.cos is None:
        return None, None
    rows = segments[-1].end
    numbers = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    for segment in segments:
        repeated = step.angle_rows[segment.first : segment.last].broadcast(1, segment.heads)
        transfer(numbers[segment.row : segment.end, :], repeated, queue)
    angles = []
    for table in (step.cos, step.sin):
        half = table.shape[1]
        entries = nl.ndarray((rows, half), dtype=table.dtype, buffer=nl.sbuf)
        if step.angle_rows.shape[0] == 1:
            # One row for all partitions: hardware finds the address, GpSimd has nothing to do.
            source = table.ap(pattern=[[0, rows], [1, half]], scalar_offset=numbers[0:1, :], indirect_dim=0)
            transfer(entries, source, SCALAR)
        else:
            source = table.ap(pattern=[[half, rows], [1, half]], vector_offset=numbers)
            transfer(entries, source, COMPILER)
        angles.append(entries)
    return angles[0], angles[1]


def normalise_rows(rows, segments, step):
    """Return a block's rows divided by their root mean squares, times the weight of q_norm or k_norm: [row, D] in SBUF.

    Args:
        segments: the block's `Segment`s, which say whether a row is a query or a key.
    """
    scales = nl.ndarray(rows.shape, dtype=nl.float32, buffer=nl.sbuf)
    for segment in segments:
        norm = step.q_norm if segment.source == 0 else step.k_norm
        pattern = [[0, segment.end - segment.row], [1, rows.shape[1]]]
        nisa.dma_copy(dst=scales[segment.row : segment.end, :], src=norm.weight.ap(pattern=pattern))
    return normalise_rms(rows, scales, step.q_norm.eps)


def rotate_rows(rows, cosines, sines, dtype):
    """Return rows [row, D] rotated by their angles, as a new SBUF tile of `dtype`.

    The first R elements are rotated, half-split; those after them are copied.

    Args:
        cosines: [row, R/2] float32 in SBUF.
        sines: the same.
    """
    count, depth = rows.shape
    half = cosines.shape[1]
    shape = (count, 2, half)
    pairs = rows[:, 0 : 2 * half].reshape(shape)
    # The products stay in float32, so that an element of the result is rounded once.
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


def apply_scales(rows, segment, scales):
    """Change rows in SBUF in place for a cache with scales: multiply queries by the scale of their keys, or round keys.

    Keys are replaced by the numbers that the cache stores: divided by their head's scale, clipped and rounded.

    Args:
        rows: [row, D] of one segment.
        segment: the `Segment`, which says whether rows are queries or keys.
        scales: `CacheScales`.
    """
    tokens, together = segment.last - segment.first, segment.heads // scales.keys.shape[1]
    if segment.source == 0:
        column = load_scale_column(scales.keys, tokens, together)
        nisa.tensor_scalar(dst=rows, data=rows, op0=nl.multiply, operand0=column)
    else:
        round_to_cache(rows, load_scale_column(scales.inverse_keys, tokens, together), scales.dtype)


def place_transposed(results, rows, segments):
    """Transpose a block's rows [row, D], and copy each segment to its tokens in the tile of queries or of keys.

    Args:
        results: [queries, keys], SBUF tiles [D in tile, tile, token, head], which are written.
    """
    count, depth = rows.shape
    for d in range(blocks(depth)):
        start, end = d * PARTITIONS, min(depth, (d + 1) * PARTITIONS)
        bank = nl.ndarray((end - start, count), dtype=rows.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=bank, data=rows[:, start:end])
        for segment in segments:
            target = results[segment.source][0 : end - start, d, segment.first : segment.last, :]
            nisa.tensor_copy(dst=target, src=bank[:, segment.row : segment.end])


def load_first_positions(positions, sequences, kv_heads):
    """Return the position of each sequence's first new token, once for each kv head: [128, B * Hk] float32 in SBUF.

    The row is the same on every partition.

    Args:
        positions: [T, 1] int32 in HBM.
    """
    new = positions.shape[0] // sequences
    numbers = nl.ndarray((PARTITIONS, sequences, kv_heads), dtype=nl.int32, buffer=nl.sbuf)
    transfer(
        numbers,
        positions.reshape((1, sequences, new, 1))[:, :, 0, :].broadcast(0, PARTITIONS).broadcast(2, kv_heads),
        STATIC,
    )
    # The masks compare in float32, which holds every position exactly.
    return cast(numbers.reshape((PARTITIONS, sequences * kv_heads)), nl.float32)
