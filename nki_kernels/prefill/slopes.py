"""Linear biases (ALiBi) of attention_prefill: the slope of a head times the distance of a key from the query.

    bias[t, h, s] = slopes[h] * (position of s - position of t)

The distance is a whole number and exact. A matmul that adds slopes[h] * s alone, since a softmax ignores what a row has
in common, would lose the bits of near keys beside that of far ones. A *row* is one query of one head, as in
`prefill.span_steps`, which adds the biases to its scores.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import PARTITIONS, blocks


class Slopes(nl.NKIObject):
    """Slopes and distances of a launch in SBUF, made when needed and kept by the heads and number of queries of a span.

    `by_rows` are columns [row, 1] of slopes over the scale, `query_numbers` columns [row, 1] of the index of each row's
    query in its tile, and `distances` tiles [row, column] of key position minus query position.
    """

    def __init__(self, prompts):
        self.prompts = prompts
        self.by_rows = {}
        self.query_numbers = {}
        self.distances = {}

    def add_biases(self, span, scores, bank, start, end):
        """Write scores plus biases for keys start … end - 1 and the rows of a `Span`: `scores` = `bank` + biases.

        `bank` [row, key] is in PSUM, `scores` [row, key] in SBUF, both float32. Keys below `prefix` are cached
        positions, later ones are new.
        """
        prefix = self.prompts.prefix
        split = max(start, min(end, prefix))
        if split > start:
            distances = nl.ndarray((span.rows, split - start), dtype=nl.float32, buffer=nl.sbuf)
            self.write_cached_distances(span, distances, start)
            self.multiply_distances(span, scores[:, 0 : split - start], bank[:, 0 : split - start], distances)
        if end > split:
            distances = self.view_new_distances(span, split - prefix, end - prefix)
            self.multiply_distances(span, scores[:, split - start :], bank[:, split - start :], distances)

    def multiply_distances(self, span, result, scores, distances):
        """Write slope * distances + scores to `result`, all [row, key] float32.

        Each row has the slope of its head divided by the scale, as exp multiplies scores and biases by the scale.
        """
        nisa.scalar_tensor_tensor(
            dst=result,
            data=distances,
            op0=nl.multiply,
            operand0=self.load_row_slopes(span),
            op1=nl.add,
            operand1=scores,
        )

    def view_new_distances(self, span, start, end):
        """Return key minus query position of new keys start … end - 1 for a `Span`'s rows: [row, key] float32 @ SBUF.

        It is a view of a tile that serves all tiles of queries, made at the first call. Keys count from the first new
        token.
        """
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
                nisa.tensor_scalar(dst=tile, data=tile, op0=nl.subtract, operand0=self.number_rows(span))
            self.distances[name] = tile
        column = last - span.queries.first
        return self.distances[name][0 : span.rows, column + start : column + end]

    def write_cached_distances(self, span, result, position):
        """Write key minus query position of cached keys to `result` [row, key] float32 @ SBUF.

        The first key is that of cached position `position`. A position that is not valid holds the first new key, and
        gets that key's distance.
        """
        nisa.iota(dst=result, pattern=[[1, result.shape[1]]], offset=position)
        first = nl.ndarray((span.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=first,
            data=self.number_rows(span),
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

    def number_rows(self, span):
        """Return the index of each row's query in its tile of queries: [row, 1] float32 @ SBUF."""
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

    def load_row_slopes(self, span):
        """Return the slope of each row's head divided by the scale: [row, 1] float32 @ SBUF.

        It is loaded from HBM at the first call.
        """
        prompts, queries = self.prompts, span.queries
        name = f"{queries.kv_head} {span.first_head} {queries.count}"
        if name not in self.by_rows:
            tile = nl.ndarray((span.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
            pattern = [[1, span.heads], [0, queries.count], [1, 1]]
            offset = prompts.share.index_query_head(queries.kv_head, span.first_head)
            nisa.dma_copy(dst=tile, src=prompts.step.slopes.ap(pattern=pattern, offset=offset))
            nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=1.0 / prompts.step.scale)
            self.by_rows[name] = tile
        return self.by_rows[name]
