"""group_of_sequences: decode attention with a softmax for several sequences at once. The third rung of the ladder.

Dimensions, arguments and layout as in `key_per_lane`.

Tiling
    for each group of sequences that fills 1024 elements of a partition with keys, and a PSUM bank with scores at most:
    one DMA for all keys, one for all values; their matmuls; one softmax; one store

Cost
    The chain of small instructions is walked once for a group, and DMAs of short caches are as large as those of long
    ones. Bound: the same chain; within it the Tensor engine waits for the softmax of the group that it has just scored.
"""

from __future__ import annotations

import nki
import nki.language as nl

from nki_kernels.ladder.decode.steps import (
    BANK,
    PARTITIONS,
    compute_exponentials,
    compute_key_positions,
    compute_scores,
    expect_whole_tiles,
    find_largest,
    load_keys,
    load_last_positions,
    load_transposed_queries,
    load_values,
    mask_scores,
    store,
    weigh_values,
)

GROUP_POSITIONS = 4096
"""Positions of all sequences of a group: keys of 1 MiB in bfloat16."""


def count_sequences_together(sequences, heads, capacity):
    """Return how many sequences, at least one, are computed together: SBUF, PSUM and partitions limit them.

    heads: query heads of a sequence. capacity: S, positions of a cache.
    """
    chunks = capacity // PARTITIONS
    return max(1, min(sequences, GROUP_POSITIONS // capacity, BANK // (chunks * heads), PARTITIONS // heads))


@nki.jit
def group_of_sequences(q, k_cache, v_cache, positions, scale):
    """Return decode attention o [B, G * D] in q's dtype in shared HBM, several sequences together.

    Scores have a key on each partition. `head_per_lane` describes the arguments; AssertionError unless D is
    128 and S a multiple of 128.
    """
    sequences, heads, capacity = expect_whole_tiles(q, k_cache, v_cache, positions)
    o = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    keys_at, last = compute_key_positions(capacity), load_last_positions(positions)
    together = count_sequences_together(sequences, heads, capacity)
    for first in range(0, sequences, together):
        end = min(sequences, first + together)
        queries = load_transposed_queries(q, first, end, heads)
        keys, values = load_keys(k_cache, first, end), load_values(v_cache, first, end)
        scores = mask_scores(compute_scores(keys, queries, heads), keys_at, last[:, first:end])
        weights, sums = compute_exponentials(scores, find_largest(scores), scale, q.dtype)
        store(o, weigh_values(values, weights), sums, first, heads)
    return o
