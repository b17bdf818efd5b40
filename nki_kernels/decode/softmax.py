"""Softmax over keys that lie on the partitions, for several sequences at once, relative to the exact maximum.

`decode.pipeline`, `decode.item_stages`, `decode.launch` and `latent.decode_items` call these functions.

Scores are tiles [key on partition, unit, chunk of keys, query], where a unit is one kv head of one sequence and a
chunk is 128 keys. Along a partition the maximum takes one instruction. Across the partitions it takes a transpose,
and a second transpose of the repeated result brings it back to all partitions. The steps are functions of their own,
so that a kernel can put the work of another unit between them.

Of S cached positions, partition p of chunk c has position p * (S // 128) + c. What remains of S is a chunk of its
own, and new keys are the last chunk.

New keys are either apart, or in the cache already (`sizes.stored`). If they are apart, cached keys get
`mark_earlier_keys` and new ones `mark_causal_keys`. If they are in the cache, all keys get `mark_keys_up_to_tokens`,
and there is no causal mask. `mark_keys_in_window` cuts either mask to a window. Without new keys the last chunk stays
LOWEST, but for the sinks that `decode.item_stages.add_sinks` writes there, behind the partitions of new keys.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import PARTITIONS, filled

LOWEST = -3.0e38
"""Score of a masked key: below any other score, and finite, because gen2 transposes by multiplying with zeros."""


def find_largest_by_partition(scores):
    """Return each query's largest score over the chunks, on each partition: [128, unit * query] float32 in SBUF.

    A unit is one kv head of one sequence; a chunk is 128 positions.

    Args:
        scores: [128, unit, chunk, query] in SBUF or PSUM.
    """
    rows, units, _, queries = scores.shape
    result = nl.ndarray((rows, units * queries), dtype=nl.float32, buffer=nl.sbuf)
    # Only trailing dims can be reduced, so the access pattern puts chunks behind queries.
    nisa.tensor_reduce(dst=result, op=nl.maximum, data=scores.permute((0, 1, 3, 2)), axis=3)
    return result


def find_largest_of_queries(by_partition):
    """Return the maximum of each column over the partitions, as a column [columns, 1] float32 in SBUF.

    Args:
        by_partition: [up to 128, columns] float32 in SBUF, at most 128 columns.
    """
    rows, columns = by_partition.shape
    bank = nl.ndarray((columns, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=bank, data=by_partition)
    result = nl.ndarray((columns, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=result, op=nl.maximum, data=bank, axis=1)
    return result


def repeat_on_partitions(column):
    """Return a column [n, 1] float32 in SBUF as the same row on every partition: [128, n] float32 in PSUM."""
    count = column.shape[0]
    bank = nl.ndarray((PARTITIONS, count), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=bank, data=column.broadcast(1, PARTITIONS))
    return bank


def compute_weights(scores, largest, scale, dtype):
    """Return exp(scale * (scores - largest)) as a new SBUF tile [128, unit, chunk, query] of `dtype`.

    A unit is one kv head of one sequence; a chunk is 128 positions.

    Args:
        scores: [128, unit, chunk, query] in SBUF.
        largest: [128, unit * query], the same on every partition.
    """
    rows, units, chunks, queries = scores.shape
    shifted = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
    repeated = largest.reshape((rows, units, 1, queries)).broadcast(2, chunks)
    # The maximum differs along the free dimension, where a bias of exp cannot, so the Vector engine subtracts it.
    nisa.tensor_tensor(dst=shifted, data1=scores, data2=repeated, op=nl.subtract)
    weights = nl.ndarray(scores.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=weights, op=nl.exp, data=shifted, scale=scale)
    return weights


def add_up_chunks(total, weights):
    """Write the sums over the chunks of `weights` to `total`, one number for each unit and query on each partition.

    A unit is one kv head of one sequence; a chunk is 128 positions.

    Args:
        total: [128, unit * query] or its axes apart, float32 in SBUF.
        weights: [128, unit, chunk, query] in SBUF.
    """
    nisa.tensor_reduce(dst=total, op=nl.add, data=weights.permute((0, 1, 3, 2)), axis=3)


def generate_key_positions(sizes, first_slot):
    """Return the position of the cached key on each partition of each chunk: [128, chunk] float32 in SBUF.

    Partition p of the first S // 128 chunks has S // 128 consecutive slots, for long contiguous loads. What remains
    of the S slots is a chunk of its own with one slot on a partition. If ranks divide positions, slot s counts as
    position `sizes.ranks` * s, which is exact on the first rank. A chunk is 128 positions.

    Args:
        first_slot: the slot of the first key.
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
    """Return 1 where a cached key is before the first new token of a unit, else 0: [128, unit, chunk] uint8 in SBUF.

    A unit is one kv head of one sequence; a chunk is 128 positions.

    Args:
        keys_at: positions of the keys, [128, chunk] float32.
        first_positions: position of the first new token, [128, unit] float32.
    """
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


def mark_keys_of_pages(keys_at, first_positions, sizes):
    """Return 1 where a key of full pages, or of the newest page, is before the new token of a unit, else 0.

    The mask is [128, unit, chunk] uint8 in SBUF. Full pages count up to the page of the new token, whose earlier
    keys are in the last chunk, one on a partition. A unit is one kv head of one sequence; a chunk is 128 positions.

    Args:
        keys_at: positions of the keys of full pages, [128, chunk] float32.
        first_positions: position of the new token, [128, unit] float32.
    """
    full, units = sizes.full, first_positions.shape[1]
    numbers = nl.ndarray(first_positions.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=numbers, src=first_positions)
    offsets = nl.ndarray(first_positions.shape, dtype=nl.int32, buffer=nl.sbuf)
    # The positions of a page are a power of two, so a mask gives the remainder exactly.
    nisa.tensor_scalar(dst=offsets, data=numbers, op0=nl.bitwise_and, operand0=sizes.newest - 1)
    starts = nl.ndarray(first_positions.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=starts, data1=first_positions, data2=offsets, op=nl.subtract)
    seen = nl.ndarray((keys_at.shape[0], units, full + 1), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=seen[:, :, 0:full],
        data1=keys_at[:, 0:full].expand_dim(1).broadcast(1, units),
        data2=starts.expand_dim(2).broadcast(2, full),
        op=nl.less,
    )
    partitions = nl.ndarray((keys_at.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=partitions, pattern=[[1, 1]], channel_multiplier=1)
    nisa.tensor_scalar(dst=seen[:, :, full], data=offsets, op0=nl.greater, operand0=partitions)
    return seen


def create_masked_tiles(sizes):
    """Return two SBUF tiles for masked scores [128, unit, chunk, query] float32, filled with LOWEST.

    `select` leaves LOWEST where a chunk has no keys on a partition. A unit is one kv head of one sequence; a chunk is
    128 positions.
    """
    result = []
    # Items alternate between two tiles, so the next scores are written while the weights of these are computed.
    for _ in range(2):
        shape = (PARTITIONS, sizes.units, sizes.chunks, sizes.width)
        tile = filled(shape, LOWEST)
        result.append(tile)
    return result


def mark_keys_up_to_tokens(keys_at, first_positions, new):
    """Return 1 where a key is not after a new token, else 0: [128, unit, chunk, new token] uint8 in SBUF.

    A unit is one kv head of one sequence; a chunk is 128 positions.

    Args:
        keys_at: positions of the keys, [128, chunk] float32.
        first_positions: position of the first new token, [128, unit] float32; the others follow it.
        new: number of new tokens of a sequence.
    """
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
    """Return 1 where a new token sees a cached key within its window: [128, unit, chunk, new token] uint8 in SBUF.

    A unit is one kv head of one sequence; a chunk is 128 positions.

    Args:
        seen: mask without a window, [128, unit, chunk, 1 or new token] uint8.
        keys_at: positions of the keys, [128, chunk] float32.
        first_positions: position of the first new token, [128, unit] float32.
        new: number of new tokens of a sequence.
        window: number of last positions that a token sees, its own included.
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
    """Return 1 where new key j (partition) is not after new query i and in its window: [j, i] uint8 in SBUF.

    Args:
        new: number of new tokens of a sequence.
        window: number of last positions that a token sees, its own included; None for all.
    """
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
    """Return tanh(factor * scores) as a new SBUF tile [128, unit, chunk, query] float32.

    Partitions on which a chunk has no keys stay undefined, as they are in `scores`. A unit is one kv head of one
    sequence; a chunk is 128 positions.

    Args:
        scores: [128, unit, chunk, query] in PSUM.
    """
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
    """Return a view of `predicate` [rows, unit, chunk, token] with axis 4 added: each token's mask once for each query.

    Axis 4 has `queries` / tokens entries, the query heads of a token. A unit is one kv head of one sequence; a chunk
    is 128 positions.
    """
    return predicate.expand_dim(4).broadcast(4, queries // predicate.shape[3])


def select(scores, valid, causal, tile, sizes):
    """Copy scores to `tile` where the query sees the key, and write LOWEST where it does not.

    Partitions on which a chunk has no keys are not written. Without new keys their chunk is not written either. A
    unit is one kv head of one sequence; a chunk is 128 positions.

    Args:
        scores: [128, unit, chunk, query].
        valid: mask of the cached keys, [128, unit, chunk, 1 or new token of the queries] uint8.
        causal: mask of the new keys in the last chunk, [new key, new token of the queries] uint8, or None.
        tile: [128, unit, chunk, query] float32 in SBUF.
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
