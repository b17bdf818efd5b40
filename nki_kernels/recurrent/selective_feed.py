"""What is added to the states of the selective scan, dt * u * its weights, on the Tensor engine.

Every token has one weight for each element of the states, and the same for all channels. So a matmul of rows of dt * u,
stationary, with a diagonal of weights multiplies a block of tokens, and turns it to channels on the partitions. Rows of
float32 would take four passes: with weights in bfloat16 each number is cut into three of bfloat16, whose products with
the weights are exact and lie beside one another on the partitions.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import PARTITIONS, blocks, transpose_rows

PIECES = 3
"""Numbers of 8 bits that have the 24 bits of a float32 number as their sum."""


def cut(dtype):
    """Return (pieces of each number, tokens of a block) for weights of a dtype."""
    pieces = 1 if dtype == nl.float32 else PIECES
    return pieces, PARTITIONS // pieces


def regions(tokens, size):
    """Return (first token, blocks, tokens of a block) of the full blocks, and of the last one if it is shorter."""
    full = tokens // size
    result = [] if full == 0 else [(0, full, size)]
    if tokens > full * size:
        result.append((full * size, 1, tokens - full * size))
    return result


def block_diagonals(projected, rows, columns, dtype):
    """Load weights of tokens as diagonals for each piece: [piece and token in block, block, state, token in block]."""
    pieces, size = cut(dtype)
    start, tokens, states = rows[0], rows[1] - rows[0], columns[1] - columns[0]
    count = blocks(tokens, size)
    weights = nl.ndarray((pieces * size, count, states), dtype=dtype, buffer=nl.sbuf)
    shape = (pieces * size, count, states, min(size, tokens))
    result = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    for first, full, used in regions(tokens, size):
        number = first // size
        source = projected[start + first : start + first + full * used, columns[0] : columns[1]]
        source = source.reshape_dim(0, (full, used)).permute((1, 0, 2))
        for piece in range(pieces):
            target = weights[piece * used : (piece + 1) * used, number : number + full, :]
            nisa.dma_copy(dst=target, src=source)
        ones = stacked_identities(pieces, used, dtype)
        for block in range(number, number + full):
            nisa.tensor_tensor(
                dst=result[0 : pieces * used, block, :, 0:used],
                data1=ones.expand_dim(1).broadcast(1, states),
                data2=weights[0 : pieces * used, block, :].expand_dim(2).broadcast(2, used),
                op=nl.multiply,
                engine=nisa.engine.gpsimd,
            )
    return result


def stacked_identities(count, size, dtype):
    """Return identities [size, size] on the partitions below one another: [count * size, size]."""
    shape = (count * size, size)
    ones = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0, engine=nisa.engine.gpsimd)
    result = None
    for number in range(count):
        ones_of_block = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
        nisa.affine_select(
            dst=ones_of_block,
            pattern=[[-1, size]],
            offset=-number * size,
            channel_multiplier=1,
            on_true_tile=ones,
            on_false_value=0.0,
            cmp_op=nl.equal,
        )
        if result is not None:
            nisa.tensor_tensor(
                dst=ones_of_block, data1=ones_of_block, data2=result, op=nl.add, engine=nisa.engine.gpsimd
            )
        result = ones_of_block
    return result


def scale_inputs(steps, inputs, dtype):
    """Return steps * inputs of a tile [c, token], cut: [c, pieces of a block, one after another]; on GpSimd."""
    pieces, size = cut(dtype)
    height, tokens = steps.shape
    scaled = nl.ndarray(steps.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=scaled, data1=steps, data2=inputs, op=nl.multiply, engine=nisa.engine.gpsimd)
    columns = scaled
    if pieces > 1:
        columns = nl.ndarray((height, pieces * tokens), dtype=dtype, buffer=nl.sbuf)
        for first, full, used in regions(tokens, size):
            last = first + full * used
            remainder = scaled[:, first:last].reshape_dim(1, (full, used))
            cut_columns = columns[:, pieces * first : pieces * last].reshape_dim(1, (full, pieces, used))
            for piece in range(pieces):
                target = cut_columns[:, :, piece, :]
                nisa.tensor_copy(dst=target, src=remainder, engine=nisa.engine.gpsimd)
                if piece + 1 < pieces:
                    nisa.tensor_tensor(
                        dst=remainder,
                        data1=remainder,
                        data2=target,
                        op=nl.subtract,
                        engine=nisa.engine.gpsimd,
                    )
    return columns


def transpose_inputs(columns, dtype):
    """Return the result of `scale_inputs` as rows: [piece and token in block, block, c]."""
    pieces, size = cut(dtype)
    height, count = columns.shape
    rows = nl.ndarray((pieces * size, blocks(count, pieces * size), height), dtype=dtype, buffer=nl.sbuf)
    transpose_rows(rows, 0, columns)
    return rows


def multiply_inputs(rows, weights, state, tokens):
    """Return what is added to an element of the states of each channel for each token: [c, token] @ PSUM."""
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
