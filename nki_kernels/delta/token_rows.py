"""What a step computes of tokens as rows: lengths, decays and strengths before its states, the norm behind them."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.delta.chunks import LENGTH_EPS
from nki_kernels.delta.output import gated_norm
from nki_kernels.dma import COMPILER, transfer
from nki_kernels.tiles import BANK, PARTITIONS, load, load_repeated, psum_slots, ranges

FACTORS = 5
"""Numbers of a token and head, see `Factors.finish`."""

BLOCK = 32
"""Rows and columns that the Vector engine transposes."""


class Factors(nl.NKIObject):
    """Numbers of tokens and heads: what needs a table of the Scalar engine begins when it is made, softplus before exp.

    g = -exp(a_log) softplus(a + dt_bias) and beta = 1 / (1 + exp(-b)), where b and a are the last columns of the gates.
    """

    def __init__(self, qkv, gates, a_log, dt_bias, counts, key_heads, depth):
        self.sequences, self.heads = gates.shape[0], a_log.shape[1]
        self.rows = load(qkv, qkv.dtype)
        counted = load(counts, nl.int32)
        first, last = gates.shape[1] - 2 * self.heads, gates.shape[1]
        raw = load(gates[:, first:last], gates.dtype)
        bias = load_repeated(dt_bias, self.sequences)
        logs = load_repeated(a_log, self.sequences)
        self.logs = nl.ndarray((self.sequences, 2, self.heads), dtype=nl.float32, buffer=nl.sbuf)
        self.rate = nl.ndarray(logs.shape, dtype=nl.float32, buffer=nl.sbuf)
        self.padding = nl.ndarray((self.sequences, 1), dtype=nl.uint8, buffer=nl.sbuf)
        g, beta = self.logs[:, 0, :], self.logs[:, 1, :]
        nisa.tensor_tensor(dst=g, data1=raw[:, self.heads : 2 * self.heads], data2=bias, op=nl.add)
        nisa.tensor_scalar(dst=self.padding, data=counted, op0=nl.less, operand0=1)
        nisa.activation(dst=g, op=nl.softplus, data=g)
        nisa.activation(dst=self.rate, op=nl.exp, data=logs)
        nisa.activation(dst=beta, op=nl.exp, data=raw[:, 0 : self.heads], scale=-1.0)
        size = key_heads * depth
        self.terms = nl.ndarray((self.sequences, 3, key_heads, depth), dtype=nl.float32, buffer=nl.sbuf)
        squares = self.terms[:, 0:2, :, :].reshape((self.sequences, 2 * size))
        nisa.activation(dst=squares, op=nl.square, data=self.rows[:, 0 : 2 * size])

    def decays(self):
        """g and beta, [B, 2, heads] float32. Padding has 0 for both, which leaves the state unchanged."""
        g, beta = self.logs[:, 0, :], self.logs[:, 1, :]
        nisa.tensor_scalar(dst=beta, data=beta, op0=nl.add, operand0=1.0)
        nisa.reciprocal(dst=beta, data=beta)
        nisa.scalar_tensor_tensor(
            dst=g, data=g, op0=nl.multiply, operand0=-1.0, op1=nl.multiply, operand1=self.rate
        )
        across = self.padding.reshape((self.sequences, 1, 1)).broadcast(1, 2).broadcast(2, self.heads)
        nisa.tensor_copy_predicated(dst=self.logs, src=0.0, predicate=across)
        return self.logs

    def products(self):
        """q . q, k . k and q . k: [B, 3, key heads] float32."""
        key_heads, depth = self.terms.shape[2], self.terms.shape[3]
        both = self.terms[:, 2, :, :].reshape((self.sequences, key_heads * depth))
        size = key_heads * depth
        nisa.tensor_tensor(
            dst=both, data1=self.rows[:, 0:size], data2=self.rows[:, size : 2 * size], op=nl.multiply
        )
        sums = nl.ndarray((self.sequences, 3, key_heads), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=sums, op=nl.add, data=self.terms, axis=3)
        return sums

    def finish(self):
        """All numbers, [B, FACTORS, heads] float32.

        With c and d the inverse lengths of key and query, d over the root of the depth: exp(g), beta c,
        exp(g) beta c^2, exp(g) d and (q . k) d, of k and q as they are given.
        """
        key_heads, depth = self.terms.shape[2], self.terms.shape[3]
        group = self.heads // key_heads
        logs = self.decays()
        sums = self.products()
        queries = inverse_roots(sums[:, 0, :], float(depth), depth * LENGTH_EPS)
        keys = inverse_roots(sums[:, 1, :], 1.0, LENGTH_EPS)
        result = nl.ndarray((self.sequences, FACTORS, self.heads), dtype=nl.float32, buffer=nl.sbuf)
        split = result.reshape((self.sequences, FACTORS, key_heads, group))
        nisa.activation(dst=result[:, 0, :], op=nl.exp, data=logs[:, 0, :])
        of_keys = keys.reshape((self.sequences, key_heads, 1)).broadcast(2, group)
        of_queries = queries.reshape((self.sequences, key_heads, 1)).broadcast(2, group)
        both = sums[:, 2, :].reshape((self.sequences, key_heads, 1)).broadcast(2, group)
        for place, data1, data2 in (
            (4, both, of_queries),
            (1, logs[:, 1, :].reshape((self.sequences, key_heads, group)), of_keys),
            (2, split[:, 1, :, :], of_keys),
            (2, split[:, 2, :, :], split[:, 0, :, :]),
            (3, split[:, 0, :, :], of_queries),
        ):
            nisa.tensor_tensor(dst=split[:, place, :, :], data1=data1, data2=data2, op=nl.multiply)
        return result


def inverse_roots(squares, scale, eps):
    """1 / sqrt(scale * squares + eps) of a tile [rows, columns]."""
    bias = nl.ndarray((squares.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=bias, value=eps)
    result = nl.ndarray(squares.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=result, op=nl.rsqrt, data=squares, scale=scale, bias=bias)
    return result


def on_all_partitions(rows, chosen):
    """Rows [B, numbers, heads] on each of 128 partitions, [128, numbers, sequence, head]; `chosen` is the diagonal.

    Each row is copied to its place among zeros: of the terms of a sum over the rows, one is not zero.
    """
    sequences, numbers, heads = rows.shape
    spread = nl.ndarray((sequences, numbers, sequences, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=spread, value=0.0)
    own = chosen.reshape((sequences, 1, sequences, 1)).broadcast(1, numbers).broadcast(3, heads)
    across = rows.reshape((sequences, numbers, 1, heads)).broadcast(2, sequences)
    nisa.tensor_copy_predicated(dst=spread, src=across, predicate=own)
    ones = nl.ndarray((sequences, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    result = nl.ndarray((PARTITIONS, numbers, sequences, heads), dtype=nl.float32, buffer=nl.sbuf)
    size = numbers * sequences * heads
    flat, target = spread.reshape((sequences, size)), result.reshape((PARTITIONS, size))
    for start, end in ranges(0, size, BANK):
        bank = nl.ndarray((PARTITIONS, end - start), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=bank, stationary=ones, moving=flat[:, start:end], accumulate=False)
        nisa.activation(dst=target[:, start:end], op=nl.copy, data=bank)
    return result


def scaled_values(rows, strengths_of_heads):
    """Values [B, heads * width], their elements on the partitions, times [width, B, heads]: the same shape, float32."""
    width, _, heads = strengths_of_heads.shape
    result = nl.ndarray(strengths_of_heads.shape, dtype=nl.float32, buffer=nl.sbuf)
    for first, end in ranges(0, heads, BANK // PARTITIONS):
        turned = turn(rows[:, first * width : end * width], width)
        for head in range(first, end):
            nisa.tensor_tensor(
                dst=result[:, :, head],
                data1=turned[:, head - first, :],
                data2=strengths_of_heads[:, :, head],
                op=nl.multiply,
            )
    return result


def turn(rows, width):
    """Rows [B, heads * width] as columns [width, heads, B].

    The Tensor engine of gen2 multiplies by an identity, where an undefined row reaches all: there by blocks of Vector.
    """
    sequences, heads = rows.shape[0], rows.shape[1] // width
    if nisa.get_nc_version() != nisa.nc_version.gen2:
        bank = psum_slots(width, heads, sequences, rows.dtype)
        for head in range(heads):
            nisa.nc_transpose(dst=bank[:, head, :], data=rows[:, head * width : (head + 1) * width])
        return bank
    result = nl.ndarray((width, heads, sequences), dtype=rows.dtype, buffer=nl.sbuf)
    for head in range(heads):
        for left, right in ranges(0, width, BLOCK):
            for start, end in ranges(0, sequences, BLOCK):
                nisa.nc_transpose(
                    dst=result[left:right, head, start:end],
                    data=rows[start:end, head * width + left : head * width + right],
                    engine=nisa.engine.vector,
                )
    return result


def store_outputs(o, factors, y, eps):
    """Normalise and gate the outputs [width, B, heads], and store them as rows."""
    width, sequences, heads = o.shape
    for first, end in ranges(0, heads, BANK // PARTITIONS):
        bank = nl.ndarray((sequences, end - first, width), dtype=nl.float32, buffer=nl.psum)
        for head in range(first, end):
            nisa.nc_transpose(dst=bank[:, head - first, :], data=o[:, :, head])
        squares = nl.ndarray((sequences, end - first), dtype=nl.float32, buffer=nl.sbuf)
        scratch = nl.ndarray((sequences, width), dtype=nl.float32, buffer=nl.sbuf)
        for head in range(end - first):
            nisa.activation(
                dst=scratch,
                op=nl.square,
                data=bank[:, head, :],
                reduce_op=nl.add,
                reduce_res=squares[:, head : head + 1],
                reduce_cmd=nisa.reduce_cmd.reset_reduce,
            )
        roots = inverse_roots(squares, 1.0 / width, eps)
        result = gated_norm(bank, roots, factors[:, first:end, :], y.dtype)
        transfer(
            y[:, first * width : end * width], result.reshape((sequences, (end - first) * width)), COMPILER
        )
