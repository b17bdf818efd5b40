"""Linear biases (ALiBi) of attention_prefill: the slope of a head times the distance of a key from the query.

    bias[t, h, s] = slopes[h] * (position of s - position of t)

The distance is a whole number and exact. A matmul that adds slopes[h] * s alone, since a softmax ignores what a row has
in common, would lose the bits of near keys beside that of far ones.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import PARTITIONS, blocks


class Slopes(nl.NKIObject):
    """Slopes of the heads of some prompts, and tiles that are made when needed, by the heads and queries of a span.

    `by_rows` are the slopes of rows, `query_numbers` those of the rows' queries in their tile, and `distances` those of
    all keys from all tiles of queries.
    """

    def __init__(self, prompts):
        self.prompts = prompts
        self.by_rows = {}
        self.query_numbers = {}
        self.distances = {}

    def add(self, span, scores, bank, start, end):
        """Write to `scores` those of `bank` [row, key], of keys start … end in PSUM, and their biases."""
        prefix = self.prompts.prefix
        split = max(start, min(end, prefix))
        if split > start:
            distances = nl.ndarray((span.rows, split - start), dtype=nl.float32, buffer=nl.sbuf)
            self.write_cached_distances(span, distances, start)
            self.add_bias(span, scores[:, 0 : split - start], bank[:, 0 : split - start], distances)
        if end > split:
            distances = self.new_distances(span, split - prefix, end - prefix)
            self.add_bias(span, scores[:, split - start :], bank[:, split - start :], distances)

    def add_bias(self, span, result, scores, distances):
        """Write slope * distances + scores to `result`."""
        nisa.scalar_tensor_tensor(
            dst=result,
            data=distances,
            op0=nl.multiply,
            operand0=self.slopes_of_rows(span),
            op1=nl.add,
            operand1=scores,
        )

    def new_distances(self, span, start, end):
        """Return distances of new keys start … end: columns of a tile that serves all tiles of queries."""
        count = PARTITIONS if span.heads == 1 else span.queries.count
        name = f"{span.heads} {count}"
        last = blocks(self.prompts.queries) * PARTITIONS - PARTITIONS
        if name not in self.distances:
            shape = (span.heads * count, last + PARTITIONS)
            tile = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
            multiplier = -1 if span.heads == 1 else 0
            nisa.iota(dst=tile, pattern=[[1, shape[1]]], offset=-last, channel_multiplier=multiplier)
            # Query numbers start again with each head, which the linear channel multiplier of iota cannot express.
            if span.heads > 1:
                nisa.tensor_scalar(dst=tile, data=tile, op0=nl.subtract, operand0=self.numbers_of_rows(span))
            self.distances[name] = tile
        column = last - span.queries.first
        return self.distances[name][0 : span.rows, column + start : column + end]

    def write_cached_distances(self, span, result, position):
        """Write the distances of cached keys from a position on; one that is not valid is the first new key."""
        nisa.iota(dst=result, pattern=[[1, result.shape[1]]], offset=position)
        first = nl.ndarray((span.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=first,
            data=self.numbers_of_rows(span),
            op0=nl.add,
            operand0=float(span.queries.first),
            op1=nl.multiply,
            operand1=-1.0,
        )
        nisa.tensor_scalar(
            dst=result,
            data=result,
            op0=nl.subtract,
            operand0=span.head.cached.count[0 : span.rows, :],
            op1=nl.minimum,
            operand1=0.0,
        )
        nisa.tensor_scalar(dst=result, data=result, op0=nl.add, operand0=first)

    def numbers_of_rows(self, span):
        """Return the number of each row's query among those of its tile [row, 1]."""
        count = span.queries.count
        name = f"{span.heads} {count}"
        if name not in self.query_numbers:
            numbers = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.iota(dst=numbers, pattern=[[0, 1]], channel_multiplier=1)
            tile = nl.ndarray((span.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
            # DMA places each head's numbers, as a compute engine starts at multiples of 32 partitions only.
            for head in range(span.heads):
                nisa.dma_copy(dst=tile[head * count : (head + 1) * count, :], src=numbers)
            self.query_numbers[name] = tile
        return self.query_numbers[name]

    def slopes_of_rows(self, span):
        """Return the slope of each row's head, over the scale [row, 1]."""
        prompts, queries = self.prompts, span.queries
        name = f"{queries.kv_head} {span.first_head} {queries.count}"
        if name not in self.by_rows:
            tile = nl.ndarray((span.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
            pattern = [[1, span.heads], [0, queries.count], [1, 1]]
            offset = prompts.share.query_head(queries.kv_head, span.first_head)
            nisa.dma_copy(dst=tile, src=prompts.step.slopes.ap(pattern=pattern, offset=offset))
            nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=1.0 / prompts.step.scale)
            self.by_rows[name] = tile
        return self.by_rows[name]
