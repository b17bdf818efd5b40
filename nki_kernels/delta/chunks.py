"""One chunk of 128 tokens of some heads: what needs no state; `delta/chunk_states.py` takes the state through it.

    u = X (v - (exp(G) k) S),   o = exp(G) (q S) + P u,   S' = exp(G_end) S + (exp(G_end - G) beta k)^T u

where X is the inverse of the triangle, G the sum of g up to a token and P_ij = q_i . k_j beta_j exp(G_i - G_j) for
j <= i. A has the same decays, times k_i . k_j: beta is that of the token that writes, in place of that of the token
that reads, so what a token writes is beta u.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.delta.blocks import HALF
from nki_kernels.delta.decay import columns_together
from nki_kernels.delta.units import Operands, SumRows
from nki_kernels.recurrent.ssd_between import HALF as ROWS
from nki_kernels.tiles import PARTITIONS

LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys."""


def load_rows(array, rows, columns):
    """Load rows (first, end) and columns (first, end) of an array [T, .]: 128 rows, zeros after the last one."""
    (start, end), (first, last) = rows, columns
    tile = nl.ndarray((PARTITIONS, last - first), dtype=array.dtype, buffer=nl.sbuf)
    if end - start < PARTITIONS:
        nisa.memset(dst=tile, value=0.0)
    nisa.dma_copy(dst=tile[0 : end - start, :], src=array[start:end, first:last])
    return tile


def load_operands(arguments, unit):
    """Load queries, keys, values and output gates of a unit's heads."""
    (first, end), (first_key, end_key) = unit.heads, unit.key_heads
    qkv, depth, width = arguments.qkv, arguments.states.shape[2], arguments.states.shape[3]
    keys = arguments.key_heads * depth
    q = load_rows(qkv, unit.rows, (first_key * depth, end_key * depth))
    k = load_rows(qkv, unit.rows, (keys + first_key * depth, keys + end_key * depth))
    v = load_rows(qkv, unit.rows, (2 * keys + first * width, 2 * keys + end * width))
    z = load_rows(arguments.gates, unit.rows, (first * width, end * width))
    return Operands(q, k, v, z)


def load_sums(differences, decays, unit):
    """Load the rows whose product has the logarithms of the decays between a unit's tokens."""
    first, end = unit.heads
    heads = decays.g.shape[2]
    together = columns_together(heads)
    column = unit.column * heads
    start = column % together
    keys, queries, row = differences.bring(decays.rows[column // together], (start + first, start + end))
    return SumRows(keys, queries, row)


def squared_lengths(tile, depth):
    """Return the squared length of each head of rows [128, heads * depth]: [128, heads] float32."""
    heads = tile.shape[1] // depth
    squares = nl.ndarray((PARTITIONS, heads), dtype=nl.float32, buffer=nl.sbuf)
    scratch = nl.ndarray((PARTITIONS, depth), dtype=tile.dtype, buffer=nl.sbuf)
    for head in range(heads):
        nisa.activation(
            dst=scratch,
            op=nl.square,
            data=tile[:, head * depth : (head + 1) * depth],
            reduce_op=nl.add,
            reduce_res=squares[:, head : head + 1],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
    return squares


def invert_lengths(squares):
    """Replace squares by 1 / sqrt(squares + 1e-6)."""
    nisa.tensor_scalar(
        dst=squares, data=squares, op0=nl.add, operand0=LENGTH_EPS, op1=nl.power, operand1=-0.5
    )


def scale_heads(dst, data, columns):
    """Multiply elements [rows, heads, n] by a number of their row and head, [rows, heads], on GpSimd."""
    across = columns.reshape((columns.shape[0], columns.shape[1], 1)).broadcast(2, dst.shape[2])
    nisa.tensor_tensor(dst=dst, data1=data, data2=across, op=nl.multiply, engine=nisa.engine.gpsimd)


def transpose_heads(tile):
    """Return rows [128, heads, depth] as [depth, heads, 128]."""
    heads, depth = tile.shape[1], tile.shape[2]
    bank = nl.ndarray((depth, heads, PARTITIONS), dtype=tile.dtype, buffer=nl.psum)
    result = nl.ndarray(bank.shape, dtype=tile.dtype, buffer=nl.sbuf)
    for head in range(heads):
        nisa.nc_transpose(dst=bank[:, head, :], data=tile[:, head, :])
    nisa.activation(dst=result, op=nl.copy, data=bank)
    return result


def decay_between(constants, sums, g, beta):
    """Return beta_j exp(G_i - G_j) for j <= i, else 0: [j, head, i] in the dtype of products.

    sums: SumRows, or None; then sums of g [128, head] are taken directly, in float32.
    """
    heads = g.shape[1]
    shape = (PARTITIONS, heads, PARTITIONS)
    bank = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    if sums is None:
        terms = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        after = constants.after.reshape((PARTITIONS, 1, PARTITIONS)).broadcast(1, heads)
        scale_heads(terms, after, g)
        for head in range(heads):
            nisa.nc_matmul(
                dst=bank[:, head, :],
                stationary=terms[:, head, :],
                moving=constants.until,
                accumulate=False,
            )
    else:
        nisa.nc_matmul(
            dst=bank,
            stationary=sums.keys,
            moving=sums.queries,
            accumulate=False,
            tile_position=(sums.row, 0),
            tile_size=(ROWS, PARTITIONS),
        )
    across = constants.visible.reshape((PARTITIONS, 1, PARTITIONS)).broadcast(1, heads)
    nisa.nc_matmul(dst=bank, stationary=constants.identity, moving=across, accumulate=True)
    decay = nl.ndarray(shape, dtype=constants.identity.dtype, buffer=nl.sbuf)
    nisa.activation(dst=decay, op=nl.exp, data=bank)
    if sums is None:
        scale_heads(decay, decay, beta)
    return decay


def normalise_keys(k, depth):
    """Return keys divided by their lengths, [128, key head, depth]."""
    lengths = squared_lengths(k, depth)
    invert_lengths(lengths)
    keys = nl.ndarray((PARTITIONS, lengths.shape[1], depth), dtype=k.dtype, buffer=nl.sbuf)
    scale_heads(keys, k.reshape(keys.shape), lengths)
    return keys


def norm_offsets(q, depth, eps):
    """Return what the norm of o adds to the mean of squares, [128, key head] float32.

    Queries are taken as they are: o is then larger by sqrt(dk) times their lengths, and so is what the norm adds.
    """
    offsets = squared_lengths(q, depth)
    nisa.tensor_scalar(
        dst=offsets, data=offsets, op0=nl.add, operand0=LENGTH_EPS, op1=nl.multiply, operand1=eps * depth
    )
    return offsets


def weigh_keys(keys, group, columns):
    """Return keys [128, key head, depth] times numbers of their heads [128, head]: [128, head, depth]."""
    result = nl.ndarray((PARTITIONS, columns.shape[1], keys.shape[2]), dtype=keys.dtype, buffer=nl.sbuf)
    scale_heads(result, repeat_for_heads(keys, group), columns)
    return result


def score(negated, keys, queries, decay, group):
    """Write -A transposed to `negated`, and return P transposed: [j, head, i].

    keys, queries: [depth, key head, i].
    """
    attended = nl.ndarray(decay.shape, dtype=keys.dtype, buffer=nl.sbuf)
    key_scores, query_scores = key_products(keys, keys), key_products(keys, queries)
    nisa.scalar_tensor_tensor(
        dst=negated,
        data=repeat_for_heads(key_scores, group),
        op0=nl.multiply,
        operand0=-1.0,
        op1=nl.multiply,
        operand1=decay,
    )
    nisa.tensor_tensor(dst=attended, data1=repeat_for_heads(query_scores, group), data2=decay, op=nl.multiply)
    return attended


def key_products(keys, moving):
    """Return products of a chunk's keys with its keys or queries, [j, key head, i] in PSUM."""
    heads = keys.shape[1]
    bank = nl.ndarray((PARTITIONS, heads, PARTITIONS), dtype=nl.float32, buffer=nl.psum)
    for head in range(heads):
        nisa.nc_matmul(
            dst=bank[:, head, :], stationary=keys[:, head, :], moving=moving[:, head, :], accumulate=False
        )
    return bank


def repeat_for_heads(tile, group):
    """Return a view of a tile [rows, key head, n] for value heads, [rows, key head, head of group, n]."""
    rows, heads, size = tile.shape
    return tile.reshape((rows, heads, 1, size)).broadcast(2, group)


def read_keys(keys_before, y, corner):
    """Return -(X exp(G) k) transposed, [depth, head, i]: what multiplies the state."""
    heads, depth = y.shape[1], keys_before.shape[2]
    bank = nl.ndarray((depth, heads, PARTITIONS), dtype=nl.float32, buffer=nl.psum)
    for head in range(heads):
        for row, column, moving in (
            (0, 0, y[0:HALF, head, :]),
            (0, HALF, corner[:, head, :]),
            (HALF, HALF, y[HALF:PARTITIONS, head, :]),
        ):
            nisa.nc_matmul(
                dst=bank[:, head, column : column + HALF],
                stationary=keys_before[row : row + HALF, head, :],
                moving=moving,
                accumulate=row > 0,
                tile_position=(row, 0),
                tile_size=(HALF, PARTITIONS),
            )
    reading = nl.ndarray(bank.shape, dtype=y.dtype, buffer=nl.sbuf)
    nisa.activation(dst=reading, op=nl.copy, data=bank, scale=-1.0)
    return reading
