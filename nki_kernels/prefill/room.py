"""What of attention_prefill has room in SBUF and PSUM: how far ahead of its use it loads, and how long results wait."""

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


def fit(case):
    """Choose the distances that keep products in PSUM, and rows and queries beside keys and values in SBUF.

    A product of more parts takes more of PSUM, and each key more time, so that it waits for fewer keys.
    """
    tuning = case.tuning
    tuning.finish_after = tuning.finish_after // case.parts**2
    tuning.store_after = tuning.store_after // case.parts
    room = nl.tile_size.sbuf_fmax_bytes - FIXED_BYTES - KEY_BYTES * min(case.keys, tuning.span)
    each = head_bytes(case)
    least = LEAST_QUERIES * query_bytes(case)
    case.two_heads_fit = each <= HEAD_BYTES and 2 * each + least <= room
    # A head that is loaded early stands beside two that products and scores read.
    if 3 * each + least + (tuning.queries_ahead - 1) * query_bytes(case) > room:
        tuning.heads_ahead = 1
    case.query_room = room - (2 if case.two_heads_fit else 1) * each
    loaded = case.query_room // query_bytes(case)
    tuning.queries_ahead = max(1, min(tuning.queries_ahead, loaded - LEAST_QUERIES + 1))


def query_bytes(case):
    """Bytes per partition of a tile of queries."""
    return case.group * case.parts * min(PARTITIONS, case.queries) * (2 if case.dtype == nl.bfloat16 else 4)


def head_bytes(case):
    """Bytes per partition of the keys and values of one head."""
    size = 2 if case.dtype == nl.bfloat16 else 4
    return blocks(case.keys) * (case.parts * PARTITIONS + case.value_depth + 1) * size
