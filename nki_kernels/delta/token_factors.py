"""Factors of a decode step's tokens: lengths, decays and strengths, before its states; the norm of its outputs.

`gated_delta_step` has one token of each of B sequences. With c = 1 / |k| and d = 1 / (|q| sqrt(dk)), for q
and k as the arguments have them, a step of a head with state S is

    w = WRITE v - READ S^T k;   o = QUERY S^T q + SCORE w;   S = DECAY S + k w^T
    DECAY = exp(g);   WRITE = beta c;   READ = exp(g) beta c^2;   QUERY = exp(g) d;   SCORE = (q . k) d

The capital names are indices of the factors of a token and head.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.delta.chunk_scores import LENGTH_EPS
from nki_kernels.delta.output import apply_gated_norm, sum_squares
from nki_kernels.dma import COMPILER, transfer
from nki_kernels.norms.norm import compute_inverse_root
from nki_kernels.tiles import BANK, PARTITIONS, allocate_psum_slots, filled, load, load_repeated, ranges

DECAY = 0
"""Index of exp(g) among the factors of a token and head."""

WRITE = 1
"""Index of the factor of values: beta over the key's length."""

READ = 2
"""Index of the factor of S^T k, which is subtracted from values."""

QUERY = 3
"""Index of the factor of S^T q."""

SCORE = 4
"""Index of the factor of a write in the token's output: q . k, with q divided by its length and by sqrt(dk)."""

FACTORS = 5
"""Number of factors of a token and head."""

BLOCK = 32
"""Rows and columns of the square that the Vector engine transposes."""


def begin_factors(arguments, lanes):
    """Load the tokens of the sequences of `lanes` as rows, and begin their factors.

    g = -exp(a_log) softplus(a + dt_bias) and beta = 1 / (1 + exp(-b)), where b and a are the last columns of
    the gates. Softplus comes before all exponentials, so that the Scalar engine loads the table of each
    function once.

    Returns:
        qkv, logs, rate, padding, terms: new SBUF tiles. B counts the sequences of `lanes`.
        qkv: [B, columns], as in HBM. logs: [B, 2, heads] float32, softplus(a + dt_bias) and exp(-b), which
        `finish_factors` makes g and beta. rate: exp(a_log), [B, heads] float32. padding: [B, 1] uint8, 1 if the
        sequence's count is 0. terms: q * q, k * k, and uninitialised space for q * k, [B, 3, key heads, depth] float32.
    """
    sequences, heads, key_heads, depth = lanes.sequences, lanes.heads, lanes.key_heads, lanes.depth
    first, end = lanes.first_sequence, lanes.first_sequence + sequences
    qkv = load(arguments.qkv[first:end, :], arguments.qkv.dtype)
    counts = load(arguments.counts[first:end, :], nl.int32)
    gates = arguments.gates[first:end, :]
    columns = gates.shape[1]
    raw = load(gates[:, columns - 2 * heads : columns], gates.dtype)
    bias = load_repeated(arguments.dt_bias, sequences)
    a_log = load_repeated(arguments.a_log, sequences)
    logs = nl.ndarray((sequences, 2, heads), dtype=nl.float32, buffer=nl.sbuf)
    rate = nl.ndarray(a_log.shape, dtype=nl.float32, buffer=nl.sbuf)
    padding = nl.ndarray((sequences, 1), dtype=nl.uint8, buffer=nl.sbuf)
    g, beta = logs[:, 0, :], logs[:, 1, :]
    nisa.tensor_tensor(dst=g, data1=raw[:, heads : 2 * heads], data2=bias, op=nl.add)
    nisa.tensor_scalar(dst=padding, data=counts, op0=nl.less, operand0=1)
    nisa.activation(dst=g, op=nl.softplus, data=g)
    nisa.activation(dst=rate, op=nl.exp, data=a_log)
    # Sigmoid follows from exp, which the decays take as well; its own table would have to be loaded.
    nisa.activation(dst=beta, op=nl.exp, data=raw[:, 0:heads], scale=-1.0)
    size = key_heads * depth
    terms = nl.ndarray((sequences, 3, key_heads, depth), dtype=nl.float32, buffer=nl.sbuf)
    squares = terms[:, 0:2, :, :].reshape((sequences, 2 * size))
    nisa.activation(dst=squares, op=nl.square, data=qkv[:, 0 : 2 * size])
    return qkv, logs, rate, padding, terms


def finish_factors(qkv, logs, rate, padding, terms):
    """Return the factors of all tokens and heads, a new float32 SBUF tile [B, FACTORS, heads].

    With c = 1 / |k| and d = 1 / (|q| sqrt(depth)), in the order of their indices: exp(g), beta c, exp(g) beta
    c^2, exp(g) d and (q . k) d. q and k are as in `qkv`. Padding has 0 for g and beta, which leaves the state
    unchanged. The arguments are the results of `begin_factors`; `logs` and `terms` are overwritten.
    """
    sequences, _, key_heads, depth = terms.shape
    heads, size = logs.shape[2], key_heads * depth
    g, beta = logs[:, 0, :], logs[:, 1, :]
    nisa.tensor_scalar(dst=beta, data=beta, op0=nl.add, operand0=1.0)
    nisa.reciprocal(dst=beta, data=beta)
    nisa.scalar_tensor_tensor(dst=g, data=g, op0=nl.multiply, operand0=-1.0, op1=nl.multiply, operand1=rate)
    across = padding.reshape((sequences, 1, 1)).broadcast(1, 2).broadcast(2, heads)
    # A copy makes exact zeros of padding, even where its gates are not numbers.
    nisa.tensor_copy_predicated(dst=logs, src=0.0, predicate=across)
    products = terms[:, 2, :, :].reshape((sequences, size))
    nisa.tensor_tensor(dst=products, data1=qkv[:, 0:size], data2=qkv[:, size : 2 * size], op=nl.multiply)
    sums = nl.ndarray((sequences, 3, key_heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=terms, axis=3)
    queries = compute_inverse_root(sums[:, 0, :], float(depth), filled((sequences, 1), depth * LENGTH_EPS))
    keys = compute_inverse_root(sums[:, 1, :], 1.0, filled((sequences, 1), LENGTH_EPS))
    result = nl.ndarray((sequences, FACTORS, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=result[:, DECAY, :], op=nl.exp, data=g)
    shape = (sequences, key_heads, heads // key_heads)
    factors = result.reshape((sequences, FACTORS, key_heads, shape[2]))
    key_lengths = keys.expand_dim(2).broadcast(2, shape[2])
    query_lengths = queries.expand_dim(2).broadcast(2, shape[2])
    scores = sums[:, 2, :].expand_dim(2).broadcast(2, shape[2])
    decay, write, read = factors[:, DECAY, :, :], factors[:, WRITE, :, :], factors[:, READ, :, :]
    nisa.tensor_tensor(dst=factors[:, SCORE, :, :], data1=scores, data2=query_lengths, op=nl.multiply)
    nisa.tensor_tensor(dst=write, data1=beta.reshape(shape), data2=key_lengths, op=nl.multiply)
    nisa.tensor_tensor(dst=read, data1=write, data2=key_lengths, op=nl.multiply)
    nisa.tensor_tensor(dst=read, data1=read, data2=decay, op=nl.multiply)
    nisa.tensor_tensor(dst=factors[:, QUERY, :, :], data1=decay, data2=query_lengths, op=nl.multiply)
    return result


def repeat_on_partitions(rows, diagonal):
    """Return rows [B, numbers, heads] on each of 128 partitions: a new float32 SBUF tile [128, numbers, B, heads].

    Each row is copied to its sequence's columns among zeros, and a matmul with ones adds the rows: of the
    terms of a sum one is not zero.

    Args:
        diagonal: the identity [B, B] uint8.
    """
    sequences, numbers, heads = rows.shape
    spread = filled((sequences, numbers, sequences, heads), 0.0)
    on_diagonal = diagonal.reshape((sequences, 1, sequences, 1)).broadcast(1, numbers).broadcast(3, heads)
    across = rows.reshape((sequences, numbers, 1, heads)).broadcast(2, sequences)
    nisa.tensor_copy_predicated(dst=spread, src=across, predicate=on_diagonal)
    ones = filled((sequences, PARTITIONS), 1.0)
    result = nl.ndarray((PARTITIONS, numbers, sequences, heads), dtype=nl.float32, buffer=nl.sbuf)
    size = numbers * sequences * heads
    flat, target = spread.reshape((sequences, size)), result.reshape((PARTITIONS, size))
    for start, end in ranges(0, size, BANK):
        bank = nl.ndarray((PARTITIONS, end - start), dtype=nl.float32, buffer=nl.psum)
        # Float32 operands pass unchanged, as a sum has one term that is not 0, times 1.
        nisa.nc_matmul(dst=bank, stationary=ones, moving=flat[:, start:end], accumulate=False)
        nisa.activation(dst=target[:, start:end], op=nl.copy, data=bank)
    return result


def scale_values(rows, factors):
    """Return values times factors, a new float32 SBUF tile [width, B, heads].

    Args:
        rows: the values, [B, heads * width] in SBUF.
        factors: [width, B, heads] float32.
    """
    width, _, heads = factors.shape
    result = nl.ndarray(factors.shape, dtype=nl.float32, buffer=nl.sbuf)
    for first, end in ranges(0, heads, BANK // PARTITIONS):
        columns = transpose_heads(rows[:, first * width : end * width], width)
        for head in range(first, end):
            nisa.tensor_tensor(
                dst=result[:, :, head],
                data1=columns[:, head - first, :],
                data2=factors[:, :, head],
                op=nl.multiply,
            )
    return result


def transpose_heads(rows, width):
    """Return rows [B, heads * width] as columns [width, heads, B] of their dtype.

    The tile is new, in SBUF on gen2, else in PSUM. On gen2 the Tensor engine transposes by a product with an
    identity, where an undefined row reaches all others. There the Vector engine transposes in squares of 32.
    """
    sequences, heads = rows.shape[0], rows.shape[1] // width
    if nisa.get_nc_version() != nisa.nc_version.gen2:
        bank = allocate_psum_slots(width, heads, sequences, rows.dtype)
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
    """Normalise and gate outputs o [width, B, heads] of SBUF, and store them as rows to y [B, heads * width] in HBM.

    Args:
        factors: norm weight times silu(z), [B, heads, width] float32 in SBUF.
        eps: what the norm adds to the mean of squares.
    """
    width, sequences, heads = o.shape
    for first, end in ranges(0, heads, BANK // PARTITIONS):
        bank = nl.ndarray((sequences, end - first, width), dtype=nl.float32, buffer=nl.psum)
        for head in range(first, end):
            nisa.nc_transpose(dst=bank[:, head - first, :], data=o[:, :, head])
        squares = sum_squares(bank, nl.float32)
        roots = compute_inverse_root(squares, 1.0 / width, filled((sequences, 1), eps))
        result = apply_gated_norm(bank, roots, factors[:, first:end, :], y.dtype)
        transfer(
            y[:, first * width : end * width], result.reshape((sequences, (end - first) * width)), COMPILER
        )
