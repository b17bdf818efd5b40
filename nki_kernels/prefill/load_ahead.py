"""How far ahead of their use attention_prefill loads queries and heads, so that all that is loaded fits in SBUF."""

from __future__ import annotations

import nki.language as nl

from nki_kernels.tiles import PARTITIONS, blocks

HEAD_BYTES = 49152
"""Keys and values of one head, in bytes per partition, beside which those of the next head still fit."""

FIXED_BYTES = 24576
KEY_BYTES = 12
"""Bytes per partition that scores, weights and rows take, and what they take more for each key of a span."""

LEAST_QUERIES = 3
"""Tiles of queries in SBUF at least: the next one, that of the scores, and that of the scores computed again."""


class LoadAhead(nl.NKIObject):
    """How many tiles of queries ahead of their use `queries` and `heads` are loaded.

    `two_heads_fit`: keys and values of two heads have room. Tiles of queries have `query_room` bytes per partition.
    """

    def __init__(self, prompts, tuning):
        room = nl.tile_size.sbuf_fmax_bytes - FIXED_BYTES - KEY_BYTES * min(prompts.keys, tuning.span)
        head_bytes, tile_bytes = bytes_of_head(prompts), bytes_of_queries(prompts)
        least = LEAST_QUERIES * tile_bytes
        self.two_heads_fit = head_bytes <= HEAD_BYTES and 2 * head_bytes + least <= room
        # A head that is loaded early stands beside two that products and scores read.
        three_fit = 3 * head_bytes + least + (tuning.queries_ahead - 1) * tile_bytes <= room
        self.heads = tuning.heads_ahead if three_fit else 1
        self.query_room = room - (2 if self.two_heads_fit else 1) * head_bytes
        loaded = self.query_room // tile_bytes
        self.queries = max(1, min(tuning.queries_ahead, loaded - LEAST_QUERIES + 1))


def bytes_of_queries(prompts):
    """Return the bytes per partition of a tile of queries."""
    size = 2 if prompts.dtype == nl.bfloat16 else 4
    return prompts.share.group * prompts.depth_tiles * min(PARTITIONS, prompts.queries) * size


def bytes_of_head(prompts):
    """Return the bytes per partition of the keys and values of one head."""
    size = 2 if prompts.dtype == nl.bfloat16 else 4
    return blocks(prompts.keys) * (prompts.depth_tiles * PARTITIONS + prompts.value_depth + 1) * size
