"""What is added to the states of the selective scan, dt * u * its weights, on the Tensor engine.

`selective_scan` calls the functions here for prompts. Every token has one input weight for each element of
the states, the same for all channels. So a matmul of rows of dt * u, stationary, with a diagonal of weights
multiplies a block of tokens, and turns it to channels on the partitions.

Rows of float32 would take four passes. With weights in bfloat16 each number is cut into three numbers of
bfloat16, its pieces. Their products with the weights are exact, and they lie on the partitions one piece
after another, so that the matmul sums them. A block is then 42 tokens, else 128.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import PARTITIONS, blocks, transpose_rows

PIECES = 3
"""Numbers of bfloat16 that have a float32 number as their sum: 8 bits each of its 24."""


def choose_cut(dtype):
    """Return (pieces, tokens): how many numbers each dt * u is cut into, and how many tokens a block has.

    They are (1, 128) if the weights' dtype is float32, else (3, 42).
    """
    pieces = 1 if dtype == nl.float32 else PIECES
    return pieces, PARTITIONS // pieces


def split_blocks(tokens, size):
    """Return a list of (first token, number of blocks, tokens of each block): all full blocks, then a shorter last one.

    Either entry is left out if it has no tokens.

    Args:
        tokens: of the chunk.
        size: tokens of a full block.
    """
    full = tokens // size
    result = [] if full == 0 else [(0, full, size)]
    if tokens > full * size:
        result.append((full * size, 1, tokens - full * size))
    return result


def load_diagonals(projected, rows, columns, dtype):
    """Load a chunk's input weights from HBM as diagonal matrices in SBUF.

    The tile is [piece and token in block, block, state, token in block]. The weight of a token is repeated
    for each piece. GpSimd makes the diagonals.

    Args:
        projected: [T, W] in HBM.
        rows: (start, end) of the chunk's tokens.
        columns: (first, end) of the input weights in `projected`, one for each element of the states.
    """
    pieces, size = choose_cut(dtype)
    start, tokens, states = rows[0], rows[1] - rows[0], columns[1] - columns[0]
    count = blocks(tokens, size)
    weights = nl.ndarray((pieces * size, count, states), dtype=dtype, buffer=nl.sbuf)
    shape = (pieces * size, count, states, min(size, tokens))
    result = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    for first, full, used in split_blocks(tokens, size):
        number = first // size
        source = projected[start + first : start + first + full * used, columns[0] : columns[1]]
        source = source.reshape_dim(0, (full, used)).permute((1, 0, 2))
        for piece in range(pieces):
            target = weights[piece * used : (piece + 1) * used, number : number + full, :]
            nisa.dma_copy(dst=target, src=source)
        ones = build_stacked_identities(pieces, used, dtype)
        for block in range(number, number + full):
            nisa.tensor_tensor(
                dst=result[0 : pieces * used, block, :, 0:used],
                data1=ones.expand_dim(1).broadcast(1, states),
                data2=weights[0 : pieces * used, block, :].expand_dim(2).broadcast(2, used),
                op=nl.multiply,
                engine=nisa.engine.gpsimd,
            )
    return result


def build_stacked_identities(count, size, dtype):
    """Return `count` identities [size, size] below one another: a new SBUF tile [count * size, size] of a dtype."""
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
    """Return steps * inputs [c, token], cut into pieces whose sum it is: a new SBUF tile [c, pieces * token].

    With float32 weights there is one piece, else three of the weights' dtype. The columns are block after
    block, and in a block piece after piece. GpSimd computes.

    Args:
        dtype: of the weights.
    """
    pieces, size = choose_cut(dtype)
    height, tokens = steps.shape
    scaled = nl.ndarray(steps.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=scaled, data1=steps, data2=inputs, op=nl.multiply, engine=nisa.engine.gpsimd)
    columns = scaled
    if pieces > 1:
        columns = nl.ndarray((height, pieces * tokens), dtype=dtype, buffer=nl.sbuf)
        for first, full, used in split_blocks(tokens, size):
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
    """Return the result of `scale_inputs` [c, pieces * token], transposed.

    It is a new SBUF tile [piece and token in block, block, c].

    Args:
        dtype: of the weights.
    """
    pieces, size = choose_cut(dtype)
    height, count = columns.shape
    rows = nl.ndarray((pieces * size, blocks(count, pieces * size), height), dtype=dtype, buffer=nl.sbuf)
    transpose_rows(rows, 0, columns)
    return rows


def multiply_inputs(rows, weights, state, tokens):
    """Return what is added to element `state` of each channel's states, for each token: [c, token] float32 in PSUM.

    Args:
        rows: from `transpose_inputs`.
        weights: from `load_diagonals`.
        tokens: the number of tokens of the chunk.
    """
    pieces, size = choose_cut(rows.dtype)
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
