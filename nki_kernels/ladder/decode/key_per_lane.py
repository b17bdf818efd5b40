"""key_per_lane: decode attention with one key on each partition. The second rung of the ladder.

Dimensions and arguments as in `head_per_lane`.

Layout
    Scores are [128 keys, chunk of keys, head]: 128 lanes work, on S/128 elements of each head, and the weights lie as
    the product with the values needs them, so that nothing is transposed. The maximum of a query crosses the partitions
    by two small transposes. Partition p holds positions p * S/128 on: a load of values takes long runs of HBM.

Tiling
    for each sequence: load its keys and values; S/128 nc_matmuls; softmax; S/128 nc_matmuls

Cost
    Bound: the chain from scores to output, once for every sequence: each engine waits for the one before.
"""

from __future__ import annotations

import nki
import nki.language as nl

from nki_kernels.ladder.decode.steps import (
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


@nki.jit
def key_per_lane(q, k_cache, v_cache, positions, scale):
    """Return decode attention o [B, G * D] in q's dtype in shared HBM, one sequence after another.

    Scores have a key on each partition. `head_per_lane` describes the arguments; AssertionError unless D is
    128 and S a multiple of 128.
    """
    sequences, heads, capacity = expect_whole_tiles(q, k_cache, v_cache, positions)
    o = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    keys_at, last = compute_key_positions(capacity), load_last_positions(positions)
    for sequence in range(sequences):
        end = sequence + 1
        queries = load_transposed_queries(q, sequence, end, heads)
        keys, values = load_keys(k_cache, sequence, end), load_values(v_cache, sequence, end)
        scores = mask_scores(compute_scores(keys, queries, heads), keys_at, last[:, sequence:end])
        weights, sums = compute_exponentials(scores, find_largest(scores), scale, q.dtype)
        store(o, weigh_values(values, weights), sums, sequence, heads)
    return o
