"""Decays and strengths of the gated delta rule, for all chunks of a prompt at once.

Of token t and head h, g = -exp(a_log[h]) * softplus(a + dt_bias[h]) is the logarithm of the decay, and beta =
sigmoid(b) the strength of what it writes. Both are zero for padding, which so leaves the state as it is.
`gated_delta` calls `compute_chunk_decays` once.

A chunk is 128 tokens of a sequence. Sums of g over a range of tokens are taken directly in float32 launches,
and for more than 128 heads, never as a difference of two longer sums. Otherwise, in bfloat16, `Differences`
subtracts two sums up to a token, each of which is stored as three bfloat16 numbers (parts).
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.recurrent.ssd_between import PARTS, bound_logarithms, compute_logarithms, sum_in_parts
from nki_kernels.tiles import BANK, MASKED, PARTITIONS, blocks, cast, load_repeated, ranges

LEAST = -104.0
"""The least logarithm of a decay, below that of the smallest number of float32: each key behind a query is masked."""


@dataclass
class ChunkDecays(nl.NKIObject):
    """Decays of all chunks: SBUF tiles [token in chunk, sequence and chunk, head] float32.

    g: logarithms of the tokens' decays. beta: strengths. until: exp of the sum of g from the chunk's first
    token up to a token. after: exp of the sum after the token to the chunk's end, times beta. total: exp of
    the sum over the chunk, the same on all partitions. rows: for `Differences`, tensors [head, side, part,
    token] in HBM with the sums of g as bfloat16 parts. There is one for each `count_shared_columns(heads)` of
    the flat (sequence and chunk, head) columns. None if sums between tokens are taken directly.
    """

    g: nl.NkiTensor
    beta: nl.NkiTensor
    until: nl.NkiTensor
    after: nl.NkiTensor
    total: nl.NkiTensor
    rows: list | None


def compute_strengths(raw, a_log, dt_bias):
    """Return (g, beta): the logarithms of decays, and the strengths of writes.

    Both are new float32 SBUF tiles [rows, columns, heads]. g = -exp(a_log) * softplus(a + dt_bias), beta =
    sigmoid(b).

    Args:
        raw: b and then a of each head, [rows, columns, 2 * heads] in SBUF.
        a_log: [1, heads] in HBM, as is dt_bias.
    """
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
    """Write zeros to each of `tiles` [rows, columns, heads] where position >= count.

    Args:
        tiles: a list of SBUF tiles of equal shape, changed in place.
        position: the token's index in its sequence, int32 in SBUF, with `columns` elements in each row.
        counts: the number of real tokens of its sequence, in the shape of `position`.
    """
    rows, columns, heads = tiles[0].shape
    padding = nl.ndarray(position.shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=padding, data1=position, data2=counts, op=nl.greater_equal)
    across = padding.reshape((rows, columns, 1)).broadcast(2, heads)
    for tile in tiles:
        nisa.tensor_copy_predicated(dst=tile, src=0.0, predicate=across)


def load_raw_gates(gates, first, sequences, heads):
    """Load b and a of all chunks from HBM to a new SBUF tile [token in chunk, sequence and chunk, 2 * heads].

    They are the 2 * heads columns of `gates` [T, columns] from `first` on. Every one of the `sequences` has T
    / sequences rows, in chunks of 128. Rows after the last token of a short chunk are zeros.
    """
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


def compute_chunk_decays(arguments, constants):
    """Load b, a and counts of all tokens, and return ChunkDecays: the decays and strengths of all chunks, in SBUF.

    A chunk is 128 tokens of a sequence. In bfloat16, with up to 128 heads, also store sums of logarithms of
    decays to HBM: `ChunkDecays.rows`, else None.

    Args:
        arguments: those of the kernel.
        constants: ChunkConstants.
    """
    a_log, counts, states = arguments.a_log, arguments.counts, arguments.states
    sequences, heads = counts.shape[0], states.shape[1]
    raw = load_raw_gates(arguments.gates, heads * states.shape[3], sequences, heads)
    columns = raw.shape[1]
    g, beta = compute_strengths(raw, a_log, arguments.dt_bias)
    position = nl.ndarray((PARTITIONS, columns), dtype=nl.int32, buffer=nl.sbuf)
    chunks = columns // sequences
    nisa.iota(dst=position, pattern=[[0, sequences], [PARTITIONS, chunks]], channel_multiplier=1)
    repeated = load_repeated(counts.reshape((1, sequences)), PARTITIONS)
    across = repeated.reshape((PARTITIONS, sequences, 1)).broadcast(2, chunks)
    clear_padding([g, beta], position.reshape((PARTITIONS, sequences, chunks)), across)
    until, after = exponentiate_sums(constants.until, g), exponentiate_sums(constants.after, g)
    total = exponentiate_sums(constants.ones, g)
    nisa.tensor_tensor(dst=after, data1=after, data2=beta, op=nl.multiply)
    rows = None
    if constants.identity.dtype != nl.float32 and heads <= PARTITIONS:
        rows = store_sums(g, beta, constants)
    return ChunkDecays(g, beta, until, after, total, rows)


def store_sums(g, beta, constants):
    """Store sums of g, and log(beta) less these sums, to HBM as bfloat16 parts: return a list of tensors.

    g are the logarithms of decays, summed from the chunk's first token up to each token; beta are strengths.
    Both are [token, sequence and chunk, head] in SBUF, and not changed. Each tensor is [column, side, part,
    token], as `Differences.load` takes it, for a range of the flat (sequence and chunk, head) columns. It has
    `count_shared_columns(heads)` of them; the last one may have fewer. A g below LEAST counts as LEAST, and
    where beta is 0 its logarithm counts as MASKED.
    """
    heads = g.shape[2]
    size = g.shape[1] * heads
    beta_logs = compute_logarithms(beta.reshape((PARTITIONS, size)))
    logs, minus = bound_logarithms(beta_logs, g.reshape((PARTITIONS, size)), LEAST)
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
    for first, end in ranges(0, size, count_shared_columns(heads)):
        columns = slice(first, end)
        sums = sum_in_parts(
            logs[:, columns],
            minus[:, columns],
            beta_logs[:, columns],
            constants.until,
            constants.wide_identity,
        )
        for _ in range(PARTS - 1):
            sums.write_next_part()
        rows.append(sums.rows)
    return rows


def count_shared_columns(heads):
    """Return how many columns (a chunk and a head each) have their sums in one HBM tensor: 128 or fewer.

    They are all `heads` heads of as many chunks as fit. `heads` is at most 128.
    """
    return PARTITIONS // heads * heads


def exponentiate_sums(stationary, g):
    """Return exp of the sums of g over tokens, a new float32 SBUF tile of g's shape: exp(stationary^T @ g).

    Args:
        stationary: [token, row] float32, ones where the sum of a row includes the token, else zeros.
        g: [token, columns, heads] float32 in SBUF.
    """
    result = nl.ndarray(g.shape, dtype=nl.float32, buffer=nl.sbuf)
    flat = g.reshape((PARTITIONS, g.shape[1] * g.shape[2]))
    target = result.reshape(flat.shape)
    for start, end in ranges(0, flat.shape[1], BANK):
        bank = nl.ndarray((PARTITIONS, end - start), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=bank, stationary=stationary, moving=flat[:, start:end], accumulate=False)
        nisa.activation(dst=target[:, start:end], op=nl.exp, data=bank)
    return result
