"""Linear biases (ALiBi) of attention_prefill: the slope of a head times the distance of a key from the query.

    bias[t, h, s] = slopes[h] * (position of s - position of t)

The distance is a whole number and exact. A matmul that adds slopes[h] * s alone, since a softmax ignores what a row has
in common, would lose the bits of near keys beside that of far ones.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.prefill.cores import query_head
from nki_kernels.tiles import PARTITIONS, blocks


def add_slopes(case, span, scores, bank, start, end):
    """scores = bank [row, key] of keys start … end, in PSUM, and their biases."""
    split = max(start, min(end, case.prefix))
    if split > start:
        distances = nl.ndarray((span.rows, split - start), dtype=nl.float32, buffer=nl.sbuf)
        cached_distances(case, span, distances, start)
        add_bias(case, span, scores[:, 0 : split - start], bank[:, 0 : split - start], distances)
    if end > split:
        distances = new_distances(case, span, split - case.prefix, end - case.prefix)
        add_bias(case, span, scores[:, split - start :], bank[:, split - start :], distances)


def add_bias(case, span, result, scores, distances):
    """result = slope * distances + scores."""
    slope = slopes_of(case, span)
    nisa.scalar_tensor_tensor(
        dst=result, data=distances, op0=nl.multiply, operand0=slope, op1=nl.add, operand1=scores
    )


def new_distances(case, span, start, end):
    """Distances of new keys start … end: columns of a tile that holds those of all keys from all tiles of queries."""
    count = PARTITIONS if span.heads == 1 else span.queries.count
    name = f"{span.heads} {count}"
    last = blocks(case.queries) * PARTITIONS - PARTITIONS
    if name not in case.distances:
        shape = (span.heads * count, last + PARTITIONS)
        tile = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        multiplier = -1 if span.heads == 1 else 0
        nisa.iota(dst=tile, pattern=[[1, shape[1]]], offset=-last, channel_multiplier=multiplier)
        if span.heads > 1:
            nisa.tensor_scalar(dst=tile, data=tile, op0=nl.subtract, operand0=places(case, span))
        case.distances[name] = tile
    column = last - span.queries.first
    return case.distances[name][0 : span.rows, column + start : column + end]


def cached_distances(case, span, result, position):
    """Distances of cached keys from a position on; one that is not valid is the first new key."""
    nisa.iota(dst=result, pattern=[[1, result.shape[1]]], offset=position)
    first = nl.ndarray((span.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=first,
        data=places(case, span),
        op0=nl.add,
        operand0=float(span.queries.first),
        op1=nl.multiply,
        operand1=-1.0,
    )
    nisa.tensor_scalar(
        dst=result,
        data=result,
        op0=nl.subtract,
        operand0=span.queries.keys.cached.count[0 : span.rows, :],
        op1=nl.minimum,
        operand1=0.0,
    )
    nisa.tensor_scalar(dst=result, data=result, op0=nl.add, operand0=first)


def places(case, span):
    """The number of each row's query among those of its tile [row, 1]."""
    count = span.queries.count
    name = f"{span.heads} {count}"
    if name not in case.places:
        numbers = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.iota(dst=numbers, pattern=[[0, 1]], channel_multiplier=1)
        tile = nl.ndarray((span.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        for head in range(span.heads):
            nisa.dma_copy(dst=tile[head * count : (head + 1) * count, :], src=numbers)
        case.places[name] = tile
    return case.places[name]


def slopes_of(case, span):
    """The slope of each row's head, over the scale [row, 1]."""
    queries = span.queries
    name = f"{queries.head} {span.first_head} {queries.count}"
    if name not in case.slopes_by_rows:
        tile = nl.ndarray((span.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        pattern = [[1, span.heads], [0, queries.count], [1, 1]]
        offset = query_head(case, queries, span.first_head)
        nisa.dma_copy(dst=tile, src=case.slopes.ap(pattern=pattern, offset=offset))
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=1.0 / case.scale)
        case.slopes_by_rows[name] = tile
    return case.slopes_by_rows[name]
