"""Which keys a query of attention_prefill sees, and masks for blocks of keys that only some queries of a tile see."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import MASKED, PARTITIONS, filled


class Masks(nl.NKIObject):
    """Tiles [query, key] of 0 and MASKED, by the distance of the first query from the first key; made when needed.

    A matmul adds them to scores in PSUM: its stationary tile, an identity, repeats them for each head of a tile.
    """

    def __init__(self, dtype, causal, window):
        self.dtype, self.causal, self.window = dtype, causal, window
        self.zeros = filled((PARTITIONS, PARTITIONS), 0.0, dtype)
        self.ones = filled((PARTITIONS, PARTITIONS), 1.0, dtype)
        self.tiles = {}
        self.identities = {}
        self.cached = {}

    def first_key(self, query):
        """Return the first new key that some query from `query` on sees, rounded down to a block."""
        if self.window is None:
            return 0
        return max(0, query - self.window + 1) // PARTITIONS * PARTITIONS

    def new_mask(self, queries, distance, keys):
        """Return the mask of keys that begin `distance` before the first of so many queries; None if all see all."""
        early = self.causal and keys - 1 > distance
        late = self.window is not None and queries - 1 + distance >= self.window
        if not early and not late:
            return None
        name = f"{distance}"
        if name not in self.tiles:
            tile = nl.ndarray((PARTITIONS, PARTITIONS), dtype=self.dtype, buffer=nl.sbuf)
            source = self.zeros
            # Whole blocks, although this one may be short: the tile serves all blocks of this distance.
            if self.causal and distance < PARTITIONS - 1:
                select(tile, source, [[-1, PARTITIONS]], 1, distance)
                source = tile
            if self.window is not None and PARTITIONS - 1 + distance >= self.window:
                select(tile, source, [[1, PARTITIONS]], -1, self.window - 1 - distance)
            self.tiles[name] = tile
        return self.tiles[name][0:queries, 0:keys]

    def identity(self, queries, heads):
        """Return [query, (head, query)] with a one where both queries are the same."""
        name = f"{queries} {heads}"
        if name not in self.identities:
            tile = nl.ndarray((queries, heads, queries), dtype=self.dtype, buffer=nl.sbuf)
            nisa.affine_select(
                dst=tile,
                pattern=[[0, heads], [-1, queries]],
                channel_multiplier=1,
                on_true_tile=self.ones[0:queries, 0 : heads * queries],
                on_false_value=0.0,
                cmp_op=nl.equal,
            )
            self.identities[name] = tile
        return self.identities[name]

    def cached_mask(self, head, query, start):
        """Return the mask [query, key] within a window of a head's cached positions from `start` on.

        Query `query` has as position the number of valid ones, count: a key at position c is in the window of the one
        i behind it if c - i > count + query - window.
        """
        name = f"{head.sequence} {head.number} {query} {start}"
        if name not in self.cached:
            tile = nl.ndarray((PARTITIONS, PARTITIONS), dtype=self.dtype, buffer=nl.sbuf)
            beyond = nl.ndarray((PARTITIONS, PARTITIONS), dtype=self.dtype, buffer=nl.sbuf)
            compare(tile, nl.less_equal, -1, start - query + self.window, head.cached.count)
            # Invalid positions hold the first new key, which lies outside the window of some queries and is masked too.
            compare(beyond, nl.greater_equal, 0, start, head.cached.count)
            nisa.tensor_tensor(dst=tile, data1=tile, data2=beyond, op=nl.add)
            self.cached[name] = tile
        return self.cached[name]


def select(result, source, pattern, multiplier, offset):
    """Write `source` to `result` where offset + multiplier * query + pattern . key >= 0, else MASKED."""
    nisa.affine_select(
        dst=result,
        pattern=pattern,
        channel_multiplier=multiplier,
        offset=offset,
        on_true_tile=source,
        on_false_value=MASKED,
        cmp_op=nl.greater_equal,
    )


def compare(result, op, multiplier, offset, limit):
    """Write MASKED to `result` where offset + multiplier * query + key compares so with a limit [128, 1], else 0."""
    numbers = nl.ndarray(result.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=numbers, pattern=[[1, PARTITIONS]], offset=offset, channel_multiplier=multiplier)
    nisa.tensor_scalar(dst=result, data=numbers, op0=op, operand0=limit, op1=nl.multiply, operand1=MASKED)
