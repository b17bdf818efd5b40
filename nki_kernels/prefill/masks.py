"""Which keys a query of attention_prefill sees, and masks for blocks of keys that only some queries of a tile see."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import MASKED, PARTITIONS


class Masks(nl.NKIObject):
    """Tiles [query, key] of 0 and MASKED, by the distance of the first query from the first key; made when needed.

    A matmul adds them to scores in PSUM: its stationary tile, an identity, repeats them for each head of a tile.
    """

    def __init__(self, dtype, causal, window):
        self.dtype = dtype
        self.causal = causal
        self.window = window
        self.zeros = constant(dtype, 0.0)
        self.ones = constant(dtype, 1.0)
        self.tiles = {}
        self.identities = {}


def constant(dtype, value):
    """A tile [128, 128] of one value."""
    tile = nl.ndarray((PARTITIONS, PARTITIONS), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=value)
    return tile


def first_key(masks, query):
    """The first new key that some query from `query` on sees, rounded down to a block."""
    if masks.window is None:
        return 0
    return max(0, query - masks.window + 1) // PARTITIONS * PARTITIONS


def mask_of(masks, queries, distance, keys):
    """The mask of a block of keys that begins `distance` before the first of so many queries; None if all see all."""
    early = masks.causal and keys - 1 > distance
    late = masks.window is not None and queries - 1 + distance >= masks.window
    if not early and not late:
        return None
    name = f"{distance}"
    if name not in masks.tiles:
        tile = nl.ndarray((PARTITIONS, PARTITIONS), dtype=masks.dtype, buffer=nl.sbuf)
        source = masks.zeros
        # Whole blocks, although this one may be short: the tile serves all blocks of this distance.
        if masks.causal and distance < PARTITIONS - 1:
            select(tile, source, [[-1, PARTITIONS]], 1, distance)
            source = tile
        if masks.window is not None and PARTITIONS - 1 + distance >= masks.window:
            select(tile, source, [[1, PARTITIONS]], -1, masks.window - 1 - distance)
        masks.tiles[name] = tile
    return masks.tiles[name][0:queries, 0:keys]


def select(result, source, pattern, multiplier, offset):
    """result = source where offset + multiplier * query + pattern . key >= 0, else MASKED."""
    nisa.affine_select(
        dst=result,
        pattern=pattern,
        channel_multiplier=multiplier,
        offset=offset,
        on_true_tile=source,
        on_false_value=MASKED,
        cmp_op=nl.greater_equal,
    )


def identity(masks, queries, heads):
    """[query, (head, query)] with a one where both queries are the same."""
    name = f"{queries} {heads}"
    if name not in masks.identities:
        tile = nl.ndarray((queries, heads, queries), dtype=masks.dtype, buffer=nl.sbuf)
        nisa.affine_select(
            dst=tile,
            pattern=[[0, heads], [-1, queries]],
            channel_multiplier=1,
            on_true_tile=masks.ones[0:queries, 0 : heads * queries],
            on_false_value=0.0,
            cmp_op=nl.equal,
        )
        masks.identities[name] = tile
    return masks.identities[name]


def cached_mask(masks, count, query, start):
    """The mask [query, key] within a window of cached positions from `start` on, of which `count` [128, 1] are valid.

    Query `query` has position `count`: a key at position c is in the window of the one i behind it if
    c - i > count + query - window.
    """
    result = nl.ndarray((PARTITIONS, PARTITIONS), dtype=masks.dtype, buffer=nl.sbuf)
    beyond = nl.ndarray((PARTITIONS, PARTITIONS), dtype=masks.dtype, buffer=nl.sbuf)
    compared(result, nl.less_equal, -1, start - query + masks.window, count)
    compared(beyond, nl.greater_equal, 0, start, count)
    nisa.tensor_tensor(dst=result, data1=result, data2=beyond, op=nl.add)
    return result


def compared(result, op, multiplier, offset, limit):
    """result = MASKED where offset + multiplier * query + key compares so with a limit [128, 1], else 0."""
    numbers = nl.ndarray(result.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=numbers, pattern=[[1, PARTITIONS]], offset=offset, channel_multiplier=multiplier)
    nisa.tensor_scalar(dst=result, data=numbers, op0=op, operand0=limit, op1=nl.multiply, operand1=MASKED)
