"""Which keys a query of attention_prefill sees, and masks for blocks of keys that only some queries of a tile see.

A mask is a tile [query, key] of 0 and MASKED, which is added to scores. `prefill.spans` asks for the masks of blocks,
and `prefill.span_steps` adds them.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import MASKED, PARTITIONS, filled


class Masks(nl.NKIObject):
    """Masks [query, key] of a launch in SBUF, in `dtype`, each made at its first use and kept.

    A matmul adds them to scores in PSUM: its stationary tile, an identity, repeats them for each head of a tile. New
    keys are masked alike wherever a tile of queries is equally far behind a block of keys, so `tiles` are kept by that
    distance.
    """

    def __init__(self, dtype, causal, window):
        self.dtype, self.causal, self.window = dtype, causal, window
        self.zeros = filled((PARTITIONS, PARTITIONS), 0.0, dtype)
        self.ones = filled((PARTITIONS, PARTITIONS), 1.0, dtype)
        self.tiles = {}
        self.identities = {}
        self.cached = {}

    def find_first_key(self, query):
        """Return the first new key that query `query` or a later one sees, rounded down to a multiple of 128.

        Queries and keys count from the first new token. Without a window the first key is 0.
        """
        if self.window is None:
            return 0
        return max(0, query - self.window + 1) // PARTITIONS * PARTITIONS

    def make_new_mask(self, queries, distance, keys):
        """Return the mask [queries, keys] @ SBUF of a block of new keys; None if each query sees each key.

        Args:
            queries: number of queries, at most 128.
            distance: position of the first query minus position of the first key.
            keys: number of keys, at most 128.
        """
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
                mask_below_zero(tile, source, [[-1, PARTITIONS]], 1, distance)
                source = tile
            if self.window is not None and PARTITIONS - 1 + distance >= self.window:
                mask_below_zero(tile, source, [[1, PARTITIONS]], -1, self.window - 1 - distance)
            self.tiles[name] = tile
        return self.tiles[name][0:queries, 0:keys]

    def make_page_mask(self, queries, keys, page, same):
        """Return the mask [queries, keys] @ SBUF of the block of 128 positions that the queries themselves have.

        A query sees the keys of its own page up to itself, or all keys of earlier pages.

        Args:
            queries: number of queries, at most 128.
            keys: number of keys, at most 128.
            page: positions of a page, a divisor of 128.
            same: whether the keys of the own page are seen, else those of earlier pages.
        """
        name = f"{page} {same}"
        if name not in self.tiles:
            tile = nl.ndarray((PARTITIONS, PARTITIONS), dtype=self.dtype, buffer=nl.sbuf)
            pages = PARTITIONS // page
            if same:
                # Query q is before the end of the key's page: page * (key's page + 1) - 1 - q >= 0.
                mask_below_zero(tile, self.zeros, [[page, pages], [0, page]], -1, page - 1)
                mask_below_zero(tile, tile, [[-1, PARTITIONS]], 1, 0)
            else:
                mask_below_zero(tile, self.zeros, [[-page, pages], [0, page]], 1, -page)
            self.tiles[name] = tile
        return self.tiles[name][0:queries, 0:keys]

    def make_identity(self, queries, heads):
        """Return ones where both queries are the same, else 0: [query, (head, query)] @ SBUF.

        A matmul with it repeats a mask for `heads` heads.
        """
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

    def make_cached_mask(self, head, query, start):
        """Return the mask [128 queries, 128 keys] @ SBUF of cached positions start … start + 127 for the window.

        `query` is the index of the tile's first query among the new tokens. With `count` valid cached positions, its
        position is count + query. Query i of the tile sees the key at position c if c - i > count + query - window.
        Positions that are not valid are masked too.
        """
        name = f"{head.sequence} {head.number} {query} {start}"
        if name not in self.cached:
            tile = nl.ndarray((PARTITIONS, PARTITIONS), dtype=self.dtype, buffer=nl.sbuf)
            beyond = nl.ndarray((PARTITIONS, PARTITIONS), dtype=self.dtype, buffer=nl.sbuf)
            mask_compared(tile, nl.less_equal, -1, start - query + self.window, head.cached.count)
            # Invalid positions hold the first new key, which lies outside the window of some queries and is masked too.
            mask_compared(beyond, nl.greater_equal, 0, start, head.cached.count)
            nisa.tensor_tensor(dst=tile, data1=tile, data2=beyond, op=nl.add)
            self.cached[name] = tile
        return self.cached[name]


def mask_below_zero(result, source, pattern, multiplier, offset):
    """Write `source` [query, key] to `result` where offset + multiplier * query + pattern . key >= 0, else MASKED.

    `pattern` is that of `nisa.affine_select`. `result` may be `source`.
    """
    nisa.affine_select(
        dst=result,
        pattern=pattern,
        channel_multiplier=multiplier,
        offset=offset,
        on_true_tile=source,
        on_false_value=MASKED,
        cmp_op=nl.greater_equal,
    )


def mask_compared(result, op, multiplier, offset, limit):
    """Write MASKED to `result` [query, key] where a number compares true with `limit` [128, 1] float32, else 0.

    The number is offset + multiplier * query + key; `op` compares it, such as `nl.less_equal`.
    """
    numbers = nl.ndarray(result.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=numbers, pattern=[[1, PARTITIONS]], offset=offset, channel_multiplier=multiplier)
    nisa.tensor_scalar(dst=result, data=numbers, op0=op, operand0=limit, op1=nl.multiply, operand1=MASKED)
