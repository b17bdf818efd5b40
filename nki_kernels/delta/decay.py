"""Decays and strengths of the gated delta rule, for all chunks of a prompt at once.

Of token t and head h, g = -exp(a_log[h]) * softplus(a + dt_bias[h]) is the logarithm of the decay, and
beta = sigmoid(b) the strength of what it writes. Both are zero for padding, which so leaves the state as it is. Sums of
g over a range of tokens are taken directly, never as a difference of two longer sums.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.recurrent.ssd_between import PARTS, SumsInParts, bounded, logarithms
from nki_kernels.tiles import BANK, MASKED, PARTITIONS, blocks, cast, load_repeated, ranges

LEAST = -104.0
"""The least logarithm of a decay, below that of the smallest number of float32: each key behind a query is masked."""


def strengths(raw, a_log, dt_bias):
    """g and beta [rows, columns, heads] float32 of raw b and a, side by side in [rows, columns, 2 * heads]."""
    rows, columns, heads = raw.shape[0], raw.shape[1], raw.shape[2] // 2
    rate = cast(load_repeated(a_log, rows), nl.float32)
    nisa.activation(dst=rate, op=nl.exp, data=rate)
    bias = cast(load_repeated(dt_bias, rows), nl.float32)
    shape = (rows, columns, heads)
    g = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    across = bias.reshape((rows, 1, heads)).broadcast(1, columns)
    nisa.tensor_tensor(dst=g, data1=raw[:, :, heads : 2 * heads], data2=across, op=nl.add)
    nisa.activation(dst=g, op=nl.softplus, data=g)
    nisa.scalar_tensor_tensor(
        dst=g,
        data=g,
        op0=nl.multiply,
        operand0=-1.0,
        op1=nl.multiply,
        operand1=rate.reshape((rows, 1, heads)).broadcast(1, columns),
    )
    beta = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=beta, op=nl.sigmoid, data=raw[:, :, 0:heads])
    return g, beta


def keep_real(tiles, position, counts):
    """Zeros in tiles [rows, columns, heads] where a token's position is not below its sequence's count."""
    rows, columns, heads = tiles[0].shape
    padding = nl.ndarray(position.shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=padding, data1=position, data2=counts, op=nl.greater_equal)
    across = padding.reshape((rows, columns, 1)).broadcast(2, heads)
    for tile in tiles:
        nisa.tensor_copy_predicated(dst=tile, src=0.0, predicate=across)


def load_raw(gates, first, sequences, heads):
    """Columns `first` on of the gates of all chunks: [token in chunk, sequence and chunk, 2 * heads]."""
    tokens = gates.shape[0] // sequences
    count = blocks(tokens)
    raw = nl.ndarray((PARTITIONS, sequences * count, 2 * heads), dtype=gates.dtype, buffer=nl.sbuf)
    if tokens % PARTITIONS != 0:
        nisa.memset(dst=raw, value=0.0)
    for start, end in ranges(0, tokens):
        chunk = start // PARTITIONS
        for sequence in range(sequences):
            at = sequence * tokens
            nisa.dma_copy(
                dst=raw[0 : end - start, sequence * count + chunk, :],
                src=gates[at + start : at + end, first : first + 2 * heads],
            )
    return raw


def decays(gates, first, a_log, dt_bias, counts, constants):
    """What all chunks need of g and beta: columns [128, sequence and chunk, head] float32.

    `until` is exp of the sum of g up to a token, `rest` of those after it times beta, `whole` of all of its chunk.
    """
    sequences, heads = counts.shape[0], a_log.shape[1]
    raw = load_raw(gates, first, sequences, heads)
    columns = raw.shape[1]
    g, beta = strengths(raw, a_log, dt_bias)
    position = nl.ndarray((PARTITIONS, columns), dtype=nl.int32, buffer=nl.sbuf)
    chunks = columns // sequences
    nisa.iota(dst=position, pattern=[[0, sequences], [PARTITIONS, chunks]], channel_multiplier=1)
    own = load_repeated(counts.reshape((1, sequences)), PARTITIONS)
    each = own.reshape((PARTITIONS, sequences, 1)).broadcast(2, chunks)
    keep_real([g, beta], position.reshape((PARTITIONS, sequences, chunks)), each)
    found = {
        "g": g,
        "beta": beta,
        "until": grown(constants["until"], g),
        "rest": grown(constants["after"], g),
        "whole": grown(constants["ones"], g),
    }
    nisa.tensor_tensor(dst=found["rest"], data1=found["rest"], data2=beta, op=nl.multiply)
    if constants["identity"].dtype != nl.float32 and heads <= PARTITIONS:
        found["rows"] = rows_of_sums(g, beta, constants)
    return found


def rows_of_sums(g, beta, constants):
    """Rows of sums of g and of logarithms of beta, in parts, that `Differences` takes; some chunks' together."""
    heads = g.shape[2]
    size = g.shape[1] * heads
    of_beta = logarithms(beta.reshape((PARTITIONS, size)))
    logs, minus = bounded(of_beta, g.reshape((PARTITIONS, size)), LEAST)
    # The least logarithm of beta is that of 2^-104: where beta is 0, as of padding, exp has to give 0 as well.
    masked = nl.ndarray(of_beta.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=masked,
        data=beta.reshape((PARTITIONS, size)),
        op0=nl.equal,
        operand0=0.0,
        op1=nl.multiply,
        operand1=MASKED,
    )
    nisa.tensor_tensor(dst=of_beta, data1=of_beta, data2=masked, op=nl.add)
    found = []
    for first, end in ranges(0, size, at_once(heads)):
        own = slice(first, end)
        sums = SumsInParts(logs[:, own], minus[:, own], of_beta[:, own], constants["until"], constants["one"])
        for _ in range(PARTS - 1):
            sums.next()
        found.append(sums.rows)
    return found


def at_once(heads):
    """Columns whose rows of sums lie together: those of whole chunks."""
    return PARTITIONS // heads * heads


def grown(stationary, g):
    """exp of the sums over t of stationary[t, row] * g[t, column]."""
    result = nl.ndarray(g.shape, dtype=nl.float32, buffer=nl.sbuf)
    flat = g.reshape((PARTITIONS, g.shape[1] * g.shape[2]))
    target = result.reshape(flat.shape)
    for start, end in ranges(0, flat.shape[1], BANK):
        bank = nl.ndarray((PARTITIONS, end - start), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=bank, stationary=stationary, moving=flat[:, start:end], accumulate=False)
        nisa.activation(dst=target[:, start:end], op=nl.exp, data=bank)
    return result
