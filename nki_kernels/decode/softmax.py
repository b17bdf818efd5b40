"""Softmax over keys that lie on the partitions, for several sequences at once, relative to the exact maximum.

Scores are tiles [key on partition, unit, chunk of keys, query], where a unit is one kv head of one sequence. Along a
partition the maximum takes one instruction; across the partitions it takes a transpose, and a second transpose of
the repeated result brings it back to all partitions. The steps are functions of their own, so that a kernel can
put the work of another unit between them.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import PARTITIONS, filled

LOWEST = -3.0e38
"""What masked scores are: below any score, and finite, because gen2 transposes by multiplying with zeros."""


def find_largest_by_partition(scores):
    """Return the maximum over the chunks of scores [128, units, chunks, queries]: [128, units * queries]."""
    rows, units, _, queries = scores.shape
    result = nl.ndarray((rows, units * queries), dtype=nl.float32, buffer=nl.sbuf)
    # Only trailing dims can be reduced, so the access pattern puts chunks behind queries.
    nisa.tensor_reduce(dst=result, op=nl.maximum, data=scores.permute((0, 1, 3, 2)), axis=3)
    return result


def find_largest_of_queries(by_partition):
    """Return the maximum over the partitions of [128, columns]: [columns, 1]."""
    rows, columns = by_partition.shape
    bank = nl.ndarray((columns, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=bank, data=by_partition)
    result = nl.ndarray((columns, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=result, op=nl.maximum, data=bank, axis=1)
    return result


def repeat_on_partitions(column):
    """Return a column [n, 1] as a row on each partition: [128, n] @ PSUM."""
    count = column.shape[0]
    bank = nl.ndarray((PARTITIONS, count), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=bank, data=column.broadcast(1, PARTITIONS))
    return bank


def compute_weights(scores, largest, scale, dtype):
    """Return exp(scale * (scores - largest)) in `dtype`, of scores [128, units, chunks, queries]."""
    rows, units, chunks, queries = scores.shape
    shifted = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
    repeated = largest.reshape((rows, units, 1, queries)).broadcast(2, chunks)
    # The maximum differs along the free dimension, where a bias of exp cannot, so the Vector engine subtracts it.
    nisa.tensor_tensor(dst=shifted, data1=scores, data2=repeated, op=nl.subtract)
    weights = nl.ndarray(scores.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=weights, op=nl.exp, data=shifted, scale=scale)
    return weights


def add_up_chunks(total, weights):
    """Write the sums over the chunks of weights [128, units, chunks, queries] to `total` [128, units * queries]."""
    nisa.tensor_reduce(dst=total, op=nl.add, data=weights.permute((0, 1, 3, 2)), axis=3)


def generate_key_positions(sizes, first_slot):
    """Return the position of the key on each partition of each chunk, [128, chunks], in float32, on the first rank.

    Partition p of the first S // 128 chunks holds so many consecutive slots, for long contiguous loads; what is left
    of the capacity lies one slot per partition in a chunk of its own. The first of the slots is `first_slot`.
    """
    full, step = sizes.full, sizes.ranks
    result = nl.ndarray((PARTITIONS, sizes.cached), dtype=nl.float32, buffer=nl.sbuf)
    if full > 0:
        nisa.iota(
            dst=result[:, 0:full],
            pattern=[[step, full]],
            offset=step * first_slot,
            channel_multiplier=step * full,
        )
    if sizes.remaining > 0:
        nisa.iota(
            dst=result[:, full : full + 1],
            pattern=[[1, 1]],
            offset=step * (first_slot + full * PARTITIONS),
            channel_multiplier=step,
        )
    return result


def mark_earlier_keys(keys_at, first_positions):
    """Return 1 where a key [128, chunks] lies before the first new token [128, units]: [128, units, chunks], uint8."""
    rows, chunks = keys_at.shape
    units = first_positions.shape[1]
    result = nl.ndarray((rows, units, chunks), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=result,
        data1=keys_at.expand_dim(1).broadcast(1, units),
        data2=first_positions.expand_dim(2).broadcast(2, chunks),
        op=nl.less,
    )
    return result


def create_masked_tiles(sizes):
    """Return two tiles for masked scores [128, units, chunks, queries], LOWEST where `select` does not write."""
    result = []
    # Items alternate between two tiles, so the next scores are written while the weights of these are computed.
    for _ in range(2):
        shape = (PARTITIONS, sizes.units, sizes.chunks, sizes.width)
        tile = filled(shape, LOWEST)
        result.append(tile)
    return result


def mark_keys_up_to_tokens(keys_at, first_positions, new):
    """Return 1 where a key [128, chunks] is not behind a new token: [128, units, chunks, new token], uint8."""
    rows, chunks = keys_at.shape
    units = first_positions.shape[1]
    result = nl.ndarray((rows, units, chunks, new), dtype=nl.uint8, buffer=nl.sbuf)
    for i in range(new):
        nisa.scalar_tensor_tensor(
            dst=result[:, :, :, i],
            data=keys_at.expand_dim(1).broadcast(1, units),
            op0=nl.add,
            operand0=float(-i),
            op1=nl.less_equal,
            operand1=first_positions.expand_dim(2).broadcast(2, chunks),
        )
    return result


def mark_keys_in_window(seen, keys_at, first_positions, new, window):
    """Return 1 where a key is in the window of each new token: [128, units, chunks, new token], uint8.

    seen: the keys that new tokens see without a window, [128, units, chunks, 1 or new token]. Token i sees the last
    `window` positions, its own included.
    """
    rows, units, chunks, tokens = seen.shape
    result = nl.ndarray((rows, units, chunks, new), dtype=nl.uint8, buffer=nl.sbuf)
    for i in range(new):
        nearer = nl.ndarray((rows, units, chunks), dtype=nl.float32, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(
            dst=nearer,
            data=keys_at.expand_dim(1).broadcast(1, units),
            op0=nl.add,
            operand0=float(window - i),
            op1=nl.greater,
            operand1=first_positions.expand_dim(2).broadcast(2, chunks),
        )
        earlier = seen[:, :, :, min(i, tokens - 1)]
        nisa.tensor_tensor(dst=result[:, :, :, i], data1=nearer, data2=earlier, op=nl.multiply)
    return result


def mark_causal_keys(new, window):
    """Return 1 where new key j (partition) is not after new query i, nor outside its window: [new, new], uint8."""
    ones = filled((new, new), 1, nl.uint8)
    result = nl.ndarray((new, new), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.affine_select(
        dst=result,
        pattern=[[1, new]],
        channel_multiplier=-1,
        on_true_tile=ones,
        on_false_value=0.0,
        cmp_op=nl.greater_equal,
    )
    if window is not None:
        nisa.affine_select(
            dst=result,
            pattern=[[-1, new]],
            channel_multiplier=1,
            offset=window - 1,
            on_true_tile=result,
            on_false_value=0.0,
            cmp_op=nl.greater_equal,
        )
    return result


def cap_scores(scores, factor, sizes):
    """Return tanh(factor * scores), of scores as `select` takes them."""
    units, queries = scores.shape[1], scores.shape[3]
    result = nl.ndarray((PARTITIONS, units, sizes.chunks, queries), dtype=nl.float32, buffer=nl.sbuf)
    # Chunks of remaining and of new keys fill the first partitions only; what PSUM holds on others is undefined.
    for start, stop, height in (
        (0, sizes.full, PARTITIONS),
        (sizes.full, sizes.cached, sizes.remaining),
        (sizes.cached, sizes.multiplied, sizes.new),
    ):
        if stop > start:
            nisa.activation(
                dst=result[0:height, :, start:stop, :],
                op=nl.tanh,
                data=scores[0:height, :, start:stop, :],
                scale=factor,
            )
    return result


def repeat_per_query(predicate, queries):
    """Repeat a predicate [rows, units, chunks, tokens] for each of `queries`, as many of a token."""
    return predicate.expand_dim(4).broadcast(4, queries // predicate.shape[3])


def select(scores, valid, causal, tile, sizes):
    """Copy scores [128, units, chunks, queries] to `tile`, LOWEST where the key is not valid for the query.

    valid: [128, units, chunks of the cache, 1 or new tokens of the queries]. causal: [new keys, new tokens of the
    queries], for the last chunk, or None. The chunk of what is left of the capacity and that of the new keys take the
    first partitions only.
    """
    units, queries = scores.shape[1], scores.shape[3]
    for start, stop, height in (0, sizes.full, PARTITIONS), (sizes.full, sizes.cached, sizes.remaining):
        if stop > start:
            nisa.select_reduce(
                dst=tile[0:height, :, start:stop, :],
                predicate=repeat_per_query(valid[0:height, :, start:stop, :], queries),
                on_true=scores[0:height, :, start:stop, :],
                on_false=LOWEST,
            )
    # Without new keys their chunk stays LOWEST, as the tile was filled, but for the sinks that follow.
    if causal is None:
        return
    new, asking = causal.shape
    among_new = causal.expand_dim(1).broadcast(1, units).expand_dim(3).broadcast(3, queries // asking)
    nisa.select_reduce(
        dst=tile[0:new, :, sizes.cached, :],
        predicate=among_new,
        on_true=scores[0:new, :, sizes.cached, :],
        on_false=LOWEST,
    )
