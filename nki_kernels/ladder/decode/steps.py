"""Steps that the rungs of the decode ladder share. Keys lie on the partitions: scores are [128 keys, chunk, query]."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

PARTITIONS = 128
BANK = 512  # float32 of a partition in a PSUM bank
LOWEST = -3.0e38
"""What masked scores are: below any score, and finite."""


def expect_whole_tiles(q, k_cache, v_cache, positions):
    """Return (B, G, S): sequences, query heads and positions of a launch.

    Raises:
        AssertionError: D is not 128, S no multiple of 128, G above 128, or shapes do not fit together.
    """
    sequences, depth, capacity = k_cache.shape
    assert depth == PARTITIONS, f"the rungs take heads of {PARTITIONS}, not {depth}"
    assert capacity % PARTITIONS == 0, f"S has to be a multiple of {PARTITIONS}, not {capacity}"
    assert v_cache.shape == (sequences, capacity, depth), (
        f"v_cache has to be [{sequences}, {capacity}, {depth}] for k_cache {k_cache.shape}, not {v_cache.shape}"
    )
    assert q.shape[0] == sequences and q.shape[1] % depth == 0, (
        f"q has to be [{sequences}, G * {depth}] for {sequences} sequences, not {q.shape}"
    )
    assert positions.shape == (sequences, 1), f"positions have to be [{sequences}, 1], not {positions.shape}"
    heads = q.shape[1] // depth
    assert heads <= PARTITIONS, f"the rungs take at most {PARTITIONS} query heads, not {heads}"
    return sequences, heads, capacity


def load(source):
    """Load a view of HBM into a new SBUF tile."""
    tile = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source)
    return tile


def load_transposed_queries(q, first, last, heads):
    """Load the queries of sequences first … last - 1, transposed: [D, sequence * head] in SBUF, in q's dtype."""
    rows = (last - first) * heads
    tile = load(q.reshape((q.shape[0] * heads, PARTITIONS))[first * heads : last * heads, :])
    bank = nl.ndarray((PARTITIONS, rows), dtype=q.dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=bank, data=tile)
    result = nl.ndarray((PARTITIONS, rows), dtype=q.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=bank)
    return result


def compute_key_positions(capacity):
    """Return the position of the key on each partition and in each chunk: [128, S / 128] float32 in SBUF.

    Partition p has positions p * S / 128 …, one for each chunk.
    """
    chunks = capacity // PARTITIONS
    result = nl.ndarray((PARTITIONS, chunks), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=result, pattern=[[1, chunks]], channel_multiplier=chunks)
    return result


def load_last_positions(positions):
    """Load the position of each sequence's token onto every partition: [128, B] float32 in SBUF."""
    sequences = positions.shape[0]
    numbers = nl.ndarray((PARTITIONS, sequences), dtype=positions.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=numbers, src=positions.ap(pattern=[[0, PARTITIONS], [1, sequences]]))
    result = nl.ndarray((PARTITIONS, sequences), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=numbers)
    return result


def load_values(v_cache, first, last):
    """Load the values of sequences first … last - 1 into SBUF: [128, sequence, chunk, D].

    Partition p has positions p * S / 128 … of each sequence, one for each chunk.
    """
    capacity = v_cache.shape[1]
    rows = v_cache[first:last].reshape_dim(1, (PARTITIONS, capacity // PARTITIONS)).permute((1, 0, 2, 3))
    tile = nl.ndarray(rows.shape, dtype=v_cache.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=rows)
    return tile


def load_keys(k_cache, first, last):
    """Load the keys of sequences first … last - 1 into SBUF: [D, sequence, S]."""
    rows = k_cache[first:last].permute((1, 0, 2))
    tile = nl.ndarray(rows.shape, dtype=k_cache.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=rows)
    return tile


def compute_scores(keys, queries, heads):
    """Multiply keys [D, sequence, S] by queries [D, sequence * head]: [128, sequence, chunk, head] in PSUM.

    The scores are float32; partition p, chunk c has the score of position p * S / 128 + c.
    """
    _, sequences, capacity = keys.shape
    chunks = capacity // PARTITIONS
    scores = nl.ndarray((PARTITIONS, sequences, chunks, heads), dtype=nl.float32, buffer=nl.psum)
    for sequence in range(sequences):
        asking = queries[:, sequence * heads : (sequence + 1) * heads]
        for chunk in range(chunks):
            nisa.nc_matmul(
                dst=scores[:, sequence, chunk, :],
                stationary=keys[:, sequence, chunk:capacity:chunks],
                moving=asking,
                accumulate=False,
            )
    return scores


def mask_scores(scores, keys_at, last):
    """Copy scores [128, sequence, chunk, head] to a float32 SBUF tile, with LOWEST for later keys.

    Later keys are those after the last position of the sequence.

    Args:
        keys_at: position of each key, [128, chunk].
        last: last position of each sequence, [128, sequences].
    """
    rows, sequences, chunks, heads = scores.shape
    valid = nl.ndarray((rows, sequences, chunks), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=valid,
        data1=keys_at.expand_dim(1).broadcast(1, sequences),
        data2=last.expand_dim(2).broadcast(2, chunks),
        op=nl.less_equal,
    )
    result = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.select_reduce(
        dst=result, predicate=valid.expand_dim(3).broadcast(3, heads), on_true=scores, on_false=LOWEST
    )
    return result


def find_largest(scores):
    """Return each query's largest score on every partition: [128, sequence * head] float32 in PSUM.

    scores: [128, sequence, chunk, head]. Two transposes bring the maxima of the partitions together.
    """
    rows, sequences, _, heads = scores.shape
    columns = sequences * heads
    maxima = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=maxima, op=nl.maximum, data=scores.permute((0, 1, 3, 2)), axis=3)
    bank = nl.ndarray((columns, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=bank, data=maxima)
    column = nl.ndarray((columns, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=column, op=nl.maximum, data=bank, axis=1)
    result = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=result, data=column.broadcast(1, rows))
    return result


def compute_exponentials(scores, most, scale, dtype):
    """Return exp(scale * (scores - most)) in `dtype`, and its sums over chunks [128, sequence * head], in SBUF.

    The sums are float32 and still divided over the partitions: `store` adds them.

    Args:
        scores: [128, sequence, chunk, head].
        most: the largest score of each query, [128, sequence * head].
    """
    rows, sequences, chunks, heads = scores.shape
    shifted = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
    repeated = most.reshape((rows, sequences, 1, heads)).broadcast(2, chunks)
    nisa.tensor_tensor(dst=shifted, data1=scores, data2=repeated, op=nl.subtract)
    weights = nl.ndarray(scores.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=weights, op=nl.exp, data=shifted, scale=scale)
    sums = nl.ndarray((rows, sequences * heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=weights.permute((0, 1, 3, 2)), axis=3)
    return weights, sums


def weigh_values(values, weights):
    """Return the sum over keys of weights times values: [D, sequence * head] float32 in PSUM.

    Args:
        values: [128, sequence, chunk, D] in SBUF.
        weights: [128, sequence, chunk, head] in SBUF.
    """
    _, sequences, chunks, heads = weights.shape
    product = nl.ndarray((PARTITIONS, sequences * heads), dtype=nl.float32, buffer=nl.psum)
    for sequence in range(sequences):
        for chunk in range(chunks):
            nisa.nc_matmul(
                dst=product[:, sequence * heads : (sequence + 1) * heads],
                stationary=values[:, sequence, chunk, :],
                moving=weights[:, sequence, chunk, :],
                accumulate=chunk > 0,
            )
    return product


def store(o, product, sums, first, heads):
    """Divide `product` by the sums over all keys, and store it to o's rows of sequences `first` and after.

    Args:
        product: [D, sequence * head] in PSUM.
        sums: [128, sequence * head] float32: each partition's part of the sum of weights.
        heads: query heads of a sequence.
    """
    rows = product.shape[1]
    ones = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=total, stationary=sums, moving=ones, accumulate=False)
    inverse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=total)
    columns = nl.ndarray(product.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=columns, src=product)
    bank = nl.ndarray((rows, PARTITIONS), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=bank, data=columns)
    result = nl.ndarray((rows, PARTITIONS), dtype=o.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=bank, op0=nl.multiply, operand0=inverse)
    target = o.reshape((o.shape[0] * heads, PARTITIONS))
    nisa.dma_copy(dst=target[first * heads : first * heads + rows, :], src=result)
