"""How far ahead of their use attention_prefill loads queries and heads, so that all that is loaded fits in SBUF.

A *head* stands for the keys and values of one key/value head of one sequence. A *tile of queries* has up to 128 queries
of a sequence, of all query heads that share a key/value head. `PrefillLaunch` keeps the result.
"""

from __future__ import annotations

import nki.language as nl

from nki_kernels.prefill.key_blocks import LOADED_BLOCKS
from nki_kernels.prefill.position_bias import count_window_bytes
from nki_kernels.tiles import PARTITIONS, blocks

HEAD_BYTES = 49152
"""Most bytes per partition of the keys and values of one head beside which the next head is loaded ahead."""

FIXED_BYTES = 24576
KEY_BYTES = 12
"""Bytes per partition that scores, weights and rows take, and what they take more for each key of a span."""

LEAST_QUERIES = 3
"""Tiles of queries in SBUF at least.

They are the next one, the one that is scored, and the one for which scores of some keys are computed a second time,
transposed (`prefill.span_steps`).
"""

EARLY_KEYS = 3072
"""Most keys of heads loaded early without a causal mask, for each tile of 128 rows of a head; two heads at least.

The first scores wait for loads that are issued before them.
"""


class LoadAhead(nl.NKIObject):
    """How early attention_prefill loads queries and heads, counted in tiles of queries.

    A tile of queries is loaded `queries` tiles before its use, the keys and values of a head `heads` tiles before their
    first use, of at most `early_heads` heads. If `two_heads_fit`, SBUF has room for the keys and values of two heads;
    else those of one are used up before the next are loaded. `query_room` is the number of bytes per partition that all
    tiles of queries may take.

    `cache_after` is the distance between writes of new keys and values to the caches, in keys as in `Tuning`. Without a
    causal mask it is at most the time of the scores of a head, so that writes of many short heads do not pile up.
    """

    def __init__(self, prompts, tuning):
        room = nl.tile_size.sbuf_fmax_bytes - FIXED_BYTES - KEY_BYTES * min(prompts.keys, tuning.span)
        head_bytes, tile_bytes = count_head_bytes(prompts), count_query_bytes(prompts)
        least = LEAST_QUERIES * tile_bytes
        self.two_heads_fit = head_bytes <= HEAD_BYTES and 2 * head_bytes + least <= room
        # A head that is loaded early stands beside two that products and scores read.
        three_fit = 3 * head_bytes + least + (tuning.queries_ahead - 1) * tile_bytes <= room
        self.heads = tuning.heads_ahead if three_fit else 1
        early_room = room - 2 * head_bytes - least - (tuning.queries_ahead - 1) * tile_bytes
        self.early_heads = max(1, min(tuning.early_heads, early_room // head_bytes))
        self.cache_after = tuning.cache_after
        if not prompts.step.causal:
            tiles = blocks(prompts.share.group * prompts.queries)
            self.early_heads = min(self.early_heads, max(2, EARLY_KEYS * tiles // prompts.keys))
            loads = blocks(prompts.new_keys, LOADED_BLOCKS * PARTITIONS)
            # Values are hidden, or rounded to a cache with scales, before they are written.
            self.cache_after = min(
                tuning.cache_after, max(tuning.values_after, tiles * prompts.keys // loads)
            )
        self.query_room = room - (2 if self.two_heads_fit else 1) * head_bytes
        loaded = self.query_room // tile_bytes
        self.queries = max(1, min(tuning.queries_ahead, loaded - LEAST_QUERIES + 1))


def count_query_bytes(prompts):
    """Return the bytes per partition of a tile of up to 128 queries, with all its query heads on this core."""
    size = 2 if prompts.dtype == nl.bfloat16 else 4
    rows = 0
    for stream in prompts.streams:
        rows = max(rows, min(PARTITIONS, stream.queries))
    return prompts.share.group * prompts.depth_tiles * rows * size


def count_head_bytes(prompts):
    """Return the bytes per partition of the keys, values and biases of one key/value head of one sequence."""
    size = 2 if prompts.dtype == nl.bfloat16 else 4
    keys = blocks(prompts.keys) * (prompts.depth_tiles * PARTITIONS + prompts.value_depth + 1) * size
    return keys + count_window_bytes(prompts)
