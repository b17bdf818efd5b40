"""Decays and strengths of the gated delta rule, for all chunks of a prompt at once.

Of token t and head h, g = -exp(a_log[h]) * softplus(a + dt_bias[h]) is the logarithm of the decay, and
beta = sigmoid(b) the strength of what it writes. Both are zero for padding, which so leaves the state as it is. Sums of
g over a range of tokens are taken directly, never as a difference of two longer sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.recurrent.ssd_between import PARTS, bounded, logarithms, sum_in_parts
from nki_kernels.tiles import BANK, MASKED, PARTITIONS, blocks, cast, load_repeated, ranges

LEAST = -104.0
"""The least logarithm of a decay, below that of the smallest number of float32: each key behind a query is masked."""


@dataclass
class ChunkDecays(nl.NKIObject):
    """Decays of all chunks, by columns: [128, sequence and chunk, head] float32.

    until: exp of the sum of g up to a token. after: exp of the sum after it, times beta. total: exp of the sum of the
    chunk. rows: sums in parts, which `Differences` takes, [head, side, part, token] in HBM for each range of
    `columns_together`; None if sums between tokens are taken directly.
    """

    g: nl.NkiTensor
    beta: nl.NkiTensor
    until: nl.NkiTensor
    after: nl.NkiTensor
    total: nl.NkiTensor
    rows: list | None


def strengths(raw, a_log, dt_bias):
    """Return g and beta [rows, columns, heads] float32 of raw b and a, side by side in [rows, columns, 2 * heads]."""
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


def clear_padding(tiles, position, counts):
    """Write zeros to tiles [rows, columns, heads] where a token's position is not below its sequence's count."""
    rows, columns, heads = tiles[0].shape
    padding = nl.ndarray(position.shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=padding, data1=position, data2=counts, op=nl.greater_equal)
    across = padding.reshape((rows, columns, 1)).broadcast(2, heads)
    for tile in tiles:
        nisa.tensor_copy_predicated(dst=tile, src=0.0, predicate=across)


def load_raw(gates, first, sequences, heads):
    """Load columns `first` on of the gates of all chunks: [token in chunk, sequence and chunk, 2 * heads]."""
    tokens = gates.shape[0] // sequences
    count = blocks(tokens)
    raw = nl.ndarray((PARTITIONS, sequences * count, 2 * heads), dtype=gates.dtype, buffer=nl.sbuf)
    if tokens % PARTITIONS != 0:
        nisa.memset(dst=raw, value=0.0)
    for start, end in ranges(0, tokens):
        chunk = start // PARTITIONS
        for sequence in range(sequences):
            row = sequence * tokens
            nisa.dma_copy(
                dst=raw[0 : end - start, sequence * count + chunk, :],
                src=gates[row + start : row + end, first : first + 2 * heads],
            )
    return raw


def chunk_decays(arguments, constants):
    """Return the decays of all chunks."""
    a_log, counts, states = arguments.a_log, arguments.counts, arguments.states
    sequences, heads = counts.shape[0], states.shape[1]
    raw = load_raw(arguments.gates, heads * states.shape[3], sequences, heads)
    columns = raw.shape[1]
    g, beta = strengths(raw, a_log, arguments.dt_bias)
    position = nl.ndarray((PARTITIONS, columns), dtype=nl.int32, buffer=nl.sbuf)
    chunks = columns // sequences
    nisa.iota(dst=position, pattern=[[0, sequences], [PARTITIONS, chunks]], channel_multiplier=1)
    repeated = load_repeated(counts.reshape((1, sequences)), PARTITIONS)
    across = repeated.reshape((PARTITIONS, sequences, 1)).broadcast(2, chunks)
    clear_padding([g, beta], position.reshape((PARTITIONS, sequences, chunks)), across)
    until, after = exp_sums(constants.until, g), exp_sums(constants.after, g)
    total = exp_sums(constants.ones, g)
    nisa.tensor_tensor(dst=after, data1=after, data2=beta, op=nl.multiply)
    rows = None
    if constants.identity.dtype != nl.float32 and heads <= PARTITIONS:
        rows = rows_of_sums(g, beta, constants)
    return ChunkDecays(g, beta, until, after, total, rows)


def rows_of_sums(g, beta, constants):
    """Return rows of sums of g and of logarithms of beta, in parts, for `Differences`; some chunks are together."""
    heads = g.shape[2]
    size = g.shape[1] * heads
    beta_logs = logarithms(beta.reshape((PARTITIONS, size)))
    logs, minus = bounded(beta_logs, g.reshape((PARTITIONS, size)), LEAST)
    # The least logarithm of beta is that of 2^-104: where beta is 0, as of padding, exp has to give 0 as well.
    masked = nl.ndarray(beta_logs.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=masked,
        data=beta.reshape((PARTITIONS, size)),
        op0=nl.equal,
        operand0=0.0,
        op1=nl.multiply,
        operand1=MASKED,
    )
    nisa.tensor_tensor(dst=beta_logs, data1=beta_logs, data2=masked, op=nl.add)
    rows = []
    for first, end in ranges(0, size, columns_together(heads)):
        columns = slice(first, end)
        sums = sum_in_parts(
            logs[:, columns],
            minus[:, columns],
            beta_logs[:, columns],
            constants.until,
            constants.wide_identity,
        )
        for _ in range(PARTS - 1):
            sums.next()
        rows.append(sums.rows)
    return rows


def columns_together(heads):
    """Return how many columns have their rows of sums in one tensor: those of whole chunks."""
    return PARTITIONS // heads * heads


def exp_sums(stationary, g):
    """Return exp of the sums over t of stationary[t, row] * g[t, column]."""
    result = nl.ndarray(g.shape, dtype=nl.float32, buffer=nl.sbuf)
    flat = g.reshape((PARTITIONS, g.shape[1] * g.shape[2]))
    target = result.reshape(flat.shape)
    for start, end in ranges(0, flat.shape[1], BANK):
        bank = nl.ndarray((PARTITIONS, end - start), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=bank, stationary=stationary, moving=flat[:, start:end], accumulate=False)
        nisa.activation(dst=target[:, start:end], op=nl.exp, data=bank)
    return result
