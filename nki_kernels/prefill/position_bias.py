"""Biases of attention_prefill by relative position, as T5 has them: one number for each head and distance.

    score[i, h, j] = scale * q[i, h] . k[j, h] + position_bias[h, j - i + T - 1]

The biases of 128 queries are an overlapping window of one row of HBM. A matmul adds them to scores in PSUM, so that the
Vector engine still passes over the scores only once. DMA brings the *window* of a head, whose row c begins c elements
later than row 0, once for all queries: it reads 2 T - 128 elements for each partition, which takes less time than the
head's scores, and no engine has to make it. The distance falls with the query, while addresses rise with the partition,
so the stationary operand is an *exchange matrix*, which reverses the queries of a tile.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import BANK, PARTITIONS, ranges


class PositionBias(nl.NKIObject):
    """Biases of a launch: the exchange matrices, each made at its first use, and how windows are represented.

    A window is a list of `terms` tiles in the dtype of the launch, which a matmul each adds up: two if bfloat16 does
    not hold a bias over the scale, by which exp multiplies scores and biases.
    """

    def __init__(self, prompts):
        self.prompts = prompts
        self.scale = prompts.step.scale
        self.exchanges = {}
        self.terms = count_terms(prompts.dtype, prompts.step)

    def load_window(self, kv_head):
        """Load the window of the biases of one head from HBM, and return it: [row, column] @ SBUF, in their dtype.

        Row c and column m have the bias of element c + m of the head's row.
        """
        prompts, source = self.prompts, self.prompts.step.position_bias
        tokens = prompts.queries
        rows = min(PARTITIONS, tokens)
        shape = (rows, 2 * tokens - rows)
        loaded = nl.ndarray(shape, dtype=source.dtype, buffer=nl.sbuf)
        pattern = [[1, rows], [1, shape[1]]]
        nisa.dma_copy(dst=loaded, src=source.ap(pattern=pattern, offset=kv_head * source.shape[1]))
        return [loaded]

    def split_window(self, head):
        """Replace `head.window`, as it is loaded, by the terms of the biases over the scale.

        The Vector engine waits until it is loaded, so this comes later than the load.
        """
        dtype, (loaded,) = self.prompts.dtype, head.window
        if self.scale == 1.0 and loaded.dtype == dtype:
            return
        inverse = 1.0 / self.scale
        first = nl.ndarray(loaded.shape, dtype=dtype, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=first, data=loaded, op0=nl.multiply, operand0=inverse)
        if self.terms == 1:
            head.take_window([first])
            return
        remaining = nl.ndarray(loaded.shape, dtype=dtype, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(
            dst=remaining, data=loaded, op0=nl.multiply, operand0=inverse, op1=nl.subtract, operand1=first
        )
        head.take_window([first, remaining])

    def add_biases(self, span, ones, bank, start, end):
        """Add biases, over the scale, to `bank` [query, key] @ PSUM of keys start … end - 1 and the rows of a `Span`.

        Keys behind a key length are masked, because their biases may exceed all scores. `ones` is a tile of ones
        [128, 128] @ SBUF.
        """
        queries = span.queries
        exchange = self.make_exchange(queries.count)
        column = self.prompts.queries - queries.first - queries.count
        for first, last in ranges(start, end, BANK):
            scores = bank[:, first - start : last - start]
            for term in span.head.window:
                moving = term[0 : queries.count, column + first : column + last]
                nisa.nc_matmul(dst=scores, stationary=exchange, moving=moving, accumulate=True)
            if span.head.lengths is not None:
                moving = span.head.lengths.mask[:, first:last]
                nisa.nc_matmul(
                    dst=scores, stationary=ones[0:1, 0 : queries.count], moving=moving, accumulate=True
                )

    def make_exchange(self, queries):
        """Return the exchange matrix [row, query] @ SBUF of a number of queries: 1 where row + query = queries - 1."""
        name = f"{queries}"
        if name not in self.exchanges:
            tile = nl.ndarray((queries, queries), dtype=self.prompts.dtype, buffer=nl.sbuf)
            ones = nl.ndarray((queries, queries), dtype=self.prompts.dtype, buffer=nl.sbuf)
            nisa.memset(dst=ones, value=1.0)
            nisa.affine_select(
                dst=tile,
                pattern=[[1, queries]],
                channel_multiplier=1,
                offset=1 - queries,
                on_true_tile=ones,
                on_false_value=0.0,
                cmp_op=nl.equal,
            )
            self.exchanges[name] = tile
        return self.exchanges[name]


def count_terms(dtype, step):
    """Return how many numbers of the launch's `dtype` hold a bias of a step over its scale: 1, or 2 bfloat16 ones.

    A bfloat16 bias over a power of two is a bfloat16 number. Two hold 16 bits of a float32 one, more than bfloat16
    scores have.
    """
    scale = step.scale
    while scale > 1.0:
        scale = scale / 2.0
    while scale < 1.0:
        scale = scale * 2.0
    exact = step.position_bias.dtype == nl.bfloat16 and scale == 1.0
    return 1 if exact or dtype == nl.float32 else 2


def count_window_bytes(prompts):
    """Return the bytes per partition of a head's biases, as they are loaded and as matmuls take them; 0 without any."""
    step = prompts.step
    if step.position_bias is None:
        return 0
    terms = count_terms(prompts.dtype, step)
    loaded = 4 if step.position_bias.dtype == nl.float32 else 2
    size = 2 if prompts.dtype == nl.bfloat16 else 4
    return (2 * prompts.queries - min(PARTITIONS, prompts.queries)) * (terms * size + loaded)
