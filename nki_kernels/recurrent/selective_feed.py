"""What is added to the states of the selective scan, dt * u * its weights, on the Tensor engine.

Every token has one weight for each element of the states, and the same for all channels. So a matmul of rows of dt * u,
stationary, with a diagonal of weights multiplies a block of tokens, and turns it to channels on the partitions. Rows of
float32 would take four passes: with weights in bfloat16 each number is cut into three of bfloat16, whose products with
the weights are exact and lie beside one another on the partitions.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.normalised_rows import transpose_rows
from nki_kernels.tiles import PARTITIONS, blocks

PIECES = 3
"""Numbers of 8 bits that have the 24 bits of a float32 number as their sum."""


def cut(dtype):
    """(pieces of each number, tokens of a block) for weights of a dtype."""
    pieces = 1 if dtype == nl.float32 else PIECES
    return pieces, PARTITIONS // pieces


def regions(tokens, size):
    """(first token, blocks, tokens of a block): the whole blocks, and the last one where it is shorter."""
    whole = tokens // size
    found = [] if whole == 0 else [(0, whole, size)]
    if tokens > whole * size:
        found.append((whole * size, 1, tokens - whole * size))
    return found


def block_diagonals(projected, rows, columns, dtype):
    """Weights of tokens as diagonals, one for each piece: [piece and token in block, block, state, token in block]."""
    pieces, size = cut(dtype)
    start, tokens, states = rows[0], rows[1] - rows[0], columns[1] - columns[0]
    count = blocks(tokens, size)
    weights = nl.ndarray((pieces * size, count, states), dtype=dtype, buffer=nl.sbuf)
    shape = (pieces * size, count, states, min(size, tokens))
    result = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    for first, whole, used in regions(tokens, size):
        number = first // size
        source = projected[start + first : start + first + whole * used, columns[0] : columns[1]]
        source = source.reshape_dim(0, (whole, used)).permute((1, 0, 2))
        for piece in range(pieces):
            own = weights[piece * used : (piece + 1) * used, number : number + whole, :]
            nisa.dma_copy(dst=own, src=source)
        ones = stacked_identities(pieces, used, dtype)
        for block in range(number, number + whole):
            nisa.tensor_tensor(
                dst=result[0 : pieces * used, block, :, 0:used],
                data1=ones.expand_dim(1).broadcast(1, states),
                data2=weights[0 : pieces * used, block, :].expand_dim(2).broadcast(2, used),
                op=nl.multiply,
                engine=nisa.engine.gpsimd,
            )
    return result


def stacked_identities(count, size, dtype):
    """Identities [size, size] on the partitions below one another: [count * size, size]."""
    shape = (count * size, size)
    ones = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0, engine=nisa.engine.gpsimd)
    result = None
    for number in range(count):
        own = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
        nisa.affine_select(
            dst=own,
            pattern=[[-1, size]],
            offset=-number * size,
            channel_multiplier=1,
            on_true_tile=ones,
            on_false_value=0.0,
            cmp_op=nl.equal,
        )
        if result is not None:
            nisa.tensor_tensor(dst=own, data1=own, data2=result, op=nl.add, engine=nisa.engine.gpsimd)
        result = own
    return result


def fed_columns(steps, inputs, dtype):
    """steps * inputs of a tile [c, token], cut: [c, pieces of a block, one behind another]; on GpSimd."""
    pieces, size = cut(dtype)
    height, tokens = steps.shape
    grown = nl.ndarray(steps.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=grown, data1=steps, data2=inputs, op=nl.multiply, engine=nisa.engine.gpsimd)
    columns = grown
    if pieces > 1:
        columns = nl.ndarray((height, pieces * tokens), dtype=dtype, buffer=nl.sbuf)
        for first, whole, used in regions(tokens, size):
            last = first + whole * used
            rest = grown[:, first:last].reshape_dim(1, (whole, used))
            beside = columns[:, pieces * first : pieces * last].reshape_dim(1, (whole, pieces, used))
            for piece in range(pieces):
                own = beside[:, :, piece, :]
                nisa.tensor_copy(dst=own, src=rest, engine=nisa.engine.gpsimd)
                if piece + 1 < pieces:
                    nisa.tensor_tensor(
                        dst=rest, data1=rest, data2=own, op=nl.subtract, engine=nisa.engine.gpsimd
                    )
    return columns


def fed_rows(columns, dtype):
    """The rows of `fed_columns`: [piece and token in block, block, c]."""
    pieces, size = cut(dtype)
    height, count = columns.shape
    rows = nl.ndarray((pieces * size, blocks(count, pieces * size), height), dtype=dtype, buffer=nl.sbuf)
    transpose_rows(rows, 0, columns)
    return rows


def feed(rows, weights, state, tokens):
    """What is added to an element of the states of each channel for each token: [c, token] @ PSUM."""
    pieces, size = cut(rows.dtype)
    bank = nl.ndarray((rows.shape[2], tokens), dtype=nl.float32, buffer=nl.psum)
    for block in range(blocks(tokens, size)):
        first = block * size
        used = min(size, tokens - first)
        nisa.nc_matmul(
            dst=bank[:, first : first + used],
            stationary=rows[0 : pieces * used, block, :],
            moving=weights[0 : pieces * used, block, state, 0:used],
            accumulate=False,
        )
    return bank
