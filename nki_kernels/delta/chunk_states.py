"""The state of some heads through a chunk of 128 tokens, and the outputs of the chunk; see `delta/chunks.py`.

Two heads at a time: while one engine works on a pair, another one does on the next pair. What tokens write, u, lacks
the factor beta, which the decays have.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.delta.blocks import HALF
from nki_kernels.delta.chunks import repeat_for_heads
from nki_kernels.delta.output import sums_of_squares
from nki_kernels.delta.units import PAIR, StatePair
from nki_kernels.tiles import PARTITIONS, ranges


def split_state(tile, dtype):
    """Return a StatePair for every two heads of a state [depth, head, width] float32."""
    pairs = []
    for first, end in ranges(0, tile.shape[1], PAIR):
        wide = tile[:, first:end, :]
        pairs.append(StatePair(wide, narrow(wide, dtype)))
    return pairs


def narrow(wide, dtype):
    """Return a float32 state in the dtype of products."""
    if dtype == nl.float32:
        return wide
    result = nl.ndarray(wide.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=result, op=nl.copy, data=wide)
    return result


def multiply_values(inverse, v, heads):
    """Return X v of heads (first, end), [i, head, width] in PSUM. v: [j, head, width]."""
    first, end = heads
    bank = nl.ndarray((PARTITIONS, end - first, v.shape[2]), dtype=nl.float32, buffer=nl.psum)
    for head in range(first, end):
        for row, column, stationary in (
            (0, 0, inverse.y[0:HALF, head, :]),
            (0, HALF, inverse.corner[:, head, :]),
            (HALF, HALF, inverse.y[HALF:PARTITIONS, head, :]),
        ):
            nisa.nc_matmul(
                dst=bank[column : column + HALF, head - first, :],
                stationary=stationary,
                moving=v[row : row + HALF, head, :],
                accumulate=row > 0,
                tile_position=(row, column),
                tile_size=(HALF, HALF),
            )
    return bank


def subtract_predictions(values, reading, state):
    """Return u [i, head, width] in the dtype of products: X v less what the state predicts for the tokens' keys.

    values: X v in PSUM. reading: [depth, head, i]. state: [depth, head, width].
    """
    for head in range(values.shape[1]):
        nisa.nc_matmul(
            dst=values[:, head, :],
            stationary=reading[:, head, :],
            moving=state[:, head, :],
            accumulate=True,
        )
    writes = nl.ndarray(values.shape, dtype=state.dtype, buffer=nl.sbuf)
    nisa.activation(dst=writes, op=nl.copy, data=values)
    return writes


def query_state(queries, state_pairs, heads):
    """Return q S of `heads` heads before the state changes, [i, head, width] in PSUM. queries: [depth, key head, i]."""
    width, group = state_pairs[0].narrow.shape[2], heads // queries.shape[1]
    bank = nl.ndarray((PARTITIONS, heads, width), dtype=nl.float32, buffer=nl.psum)
    for head in range(heads):
        nisa.nc_matmul(
            dst=bank[:, head, :],
            stationary=queries[:, head // group, :],
            moving=state_pairs[head // PAIR].narrow[:, head % PAIR, :],
            accumulate=False,
        )
    return bank


def decay_queried(queried, until, dtype):
    """Return exp(G) (q S), [i, head, width], in a dtype. until: exp(G), [i, head]."""
    result = nl.ndarray(queried.shape, dtype=dtype, buffer=nl.sbuf)
    for head in range(queried.shape[1]):
        nisa.activation(
            dst=result[:, head, :],
            op=nl.copy,
            data=queried[:, head, :],
            scale=until[:, head : head + 1],
        )
    return result


def advance_state(state, keys_after, writes, total):
    """Return the StatePair after a chunk. keys_after: [j, head, depth]. total: the decays of the chunk, [128, head]."""
    _, heads, width = writes.shape
    depth = keys_after.shape[2]
    bank = nl.ndarray((depth, heads, width), dtype=nl.float32, buffer=nl.psum)
    for head in range(heads):
        nisa.nc_matmul(
            dst=bank[:, head, :],
            stationary=keys_after[:, head, :],
            moving=writes[:, head, :],
            accumulate=False,
        )
    wide = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
    for head in range(heads):
        nisa.scalar_tensor_tensor(
            dst=wide[:, head, :],
            data=state.wide[:, head, :],
            op0=nl.multiply,
            operand0=total[0:depth, head : head + 1],
            op1=nl.add,
            operand1=bank[:, head, :],
        )
    return StatePair(wide, narrow(wide, writes.dtype))


def attend(attended, writes, decayed, identity):
    """Return o [i, head, width] in PSUM. attended: P transposed, [j, head, i]. decayed: exp(G) (q S)."""
    bank = nl.ndarray(decayed.shape, dtype=nl.float32, buffer=nl.psum)
    for head in range(decayed.shape[1]):
        nisa.nc_matmul(
            dst=bank[:, head, :],
            stationary=attended[:, head, :],
            moving=writes[head // PAIR][:, head % PAIR, :],
            accumulate=False,
        )
    nisa.nc_matmul(dst=bank, stationary=identity, moving=decayed, accumulate=True)
    return bank


def mean_squares(o, norm_offset, group):
    """Return the means of the squares of o [i, head, width], plus the offsets [i, key head] of the norm: [i, head]."""
    squares = sums_of_squares(o)
    nisa.scalar_tensor_tensor(
        dst=squares,
        data=squares,
        op0=nl.multiply,
        operand0=1.0 / o.shape[2],
        op1=nl.add,
        operand1=repeat_for_heads(norm_offset.expand_dim(2), group),
    )
    return squares
