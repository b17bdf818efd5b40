"""rope: rotary position embedding, half-split as in Hugging Face's Llama.

With the first R elements of a head's row cut in halves a and b, and c, s the cosines and sines of the row's position:

    a' = a * c - b * s        b' = b * c + a * s

The other elements of a head are copied.

Dimensions:
    T   tokens; heads; D head size; R rotated elements (even, at most D); S positions that the tables hold.

Arguments:
    x          [T, heads * D] @ HBM, float32 or bfloat16
    positions  [T, 1] @ HBM, int32, 0 <= position < S
    cos, sin   [S, R/2] @ HBM, float32
    heads      compile-time int
    returns y  [T, heads * D] @ HBM, x's dtype

Layout
    Tokens on the partitions, so that every partition needs one row of each table, which an indirect DMA fetches by
    position. Heads and halves lie along the free dim, where the table rows are repeated by stride 0.

Tiling
    for 128 tokens: x times cos, x times sin, then the difference for the first halves, the sum for the second.

Limits:
    heads * D up to 8192: three float32 tiles and the result lie in SBUF together.

Cost
    HBM: x, positions and y once, one row of each table per token. Four Vector instructions and five DMAs for 128
    tokens. Bound: DMA.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.precision import widened
from nki_kernels.tiles import expect_dims, load, ranges

cores = (1,)

MAX_WIDTH = 8192


@nki.jit
def rope(x, positions, cos, sin, heads):
    """Return y [T, heads * D] @ HBM in x's dtype: the first R elements of every head turned, the others copied.

    R is twice the columns of cos and sin, [S, R/2] each, whose row positions[t] has the angles of row t.
    Raises AssertionError if shapes do not fit together, or if rows have more than MAX_WIDTH elements.
    """
    expect_dims(2, x, "x [T, heads * D]")
    expect_dims(2, cos, "cos [S, R/2]")
    tokens, width = x.shape
    half = cos.shape[1]
    assert width % heads == 0 and width >= heads * 2 * half, (
        f"{heads} heads with tables of width {half} need x of {2 * heads * half} or more in equal heads, not {width}"
    )
    assert width <= MAX_WIDTH, f"rope takes rows of at most {MAX_WIDTH}, not {width}"
    assert cos.shape == sin.shape, f"cos is {cos.shape}, sin is {sin.shape}"
    assert positions.shape == (tokens, 1), f"positions are [{tokens}, 1], not {positions.shape}"
    y = nl.ndarray((tokens, width), dtype=x.dtype, buffer=nl.shared_hbm)
    starts = ranges(0, tokens)
    ahead = load_operands(x, positions, cos, sin, starts[0])
    for number in range(len(starts)):
        first, last = starts[number]
        tile, cosines, sines = ahead
        if number + 1 < len(starts):
            ahead = load_operands(x, positions, cos, sin, starts[number + 1])
        result = nl.ndarray(tile.shape, dtype=x.dtype, buffer=nl.sbuf)
        rotate(result, tile, cosines, sines, width // heads)
        nisa.dma_copy(dst=y[first:last, :], src=result)
    return y


def load_operands(x, positions, cos, sin, rows):
    """Load rows (first, last) of x with their angles into new SBUF tiles: return (x's tile, cosines, sines).

    x's tile is [row, heads * D]; cosines and sines are [row, R/2], the rows of the tables at the tokens'
    positions.
    """
    first, last = rows
    row_numbers = load(positions[first:last, :], nl.int32)
    return load(x[first:last, :], x.dtype), gather(cos, row_numbers), gather(sin, row_numbers)


def gather(table, row_numbers):
    """Load rows of a table [S, half] @ HBM by number into a new SBUF tile [rows, half].

    row_numbers: [rows, 1] int32 in SBUF.
    """
    rows = row_numbers.shape[0]
    half = table.shape[1]
    return load(table.ap(pattern=[[half, rows], [1, half]], vector_offset=row_numbers), table.dtype)


def rotate(result, tile, cosines, sines, head, engine=nisa.engine.vector):
    """Write an SBUF tile [rows, heads * D] to `result`, the first R elements of each head turned, the others copied.

    These elements are cut in halves a and b: a' = a * c - b * s, b' = b * c + a * s. `result` is an SBUF tile
    of the same shape.

    head: D. cosines, sines: c and s, SBUF tiles [rows, R/2], the same for every head. engine: Vector or GpSimd.
    """
    rows, width = tile.shape
    heads = width // head
    half = cosines.shape[1]
    shape = (rows, heads, 2, half)
    source = tile.reshape((rows, heads, head))
    target = result.reshape((rows, heads, head))
    halves = source[:, :, 0 : 2 * half].reshape_dim(2, (2, half))
    with_cos = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=with_cos, data1=halves, data2=broadcast_to_heads(cosines, heads), op=nl.multiply, engine=engine
    )
    with_sin = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=with_sin, data1=halves, data2=broadcast_to_heads(sines, heads), op=nl.multiply, engine=engine
    )
    combine_halves(target[:, :, 0 : 2 * half].reshape_dim(2, (2, half)), with_cos, with_sin, engine)
    if 2 * half < head:
        nisa.tensor_copy(dst=target[:, :, 2 * half : head], src=source[:, :, 2 * half : head])


def combine_halves(result, with_cos, with_sin, engine=nisa.engine.vector):
    """Write the turned halves a' = a * c - b * s and b' = b * c + a * s to `result`, [rows, heads, 2, R/2] in SBUF.

    with_cos, with_sin: a and b, times c and times s, float32 tiles of the same shape in SBUF. engine: Vector or GpSimd.
    """
    nisa.tensor_tensor(
        dst=result[:, :, 0, :],
        data1=with_cos[:, :, 0, :],
        data2=with_sin[:, :, 1, :],
        op=nl.subtract,
        engine=engine,
    )
    nisa.tensor_tensor(
        dst=result[:, :, 1, :],
        data1=with_cos[:, :, 1, :],
        data2=with_sin[:, :, 0, :],
        op=nl.add,
        engine=engine,
    )


def broadcast_to_heads(angles, heads):
    """Return a view [rows, heads, 2, half] of an SBUF tile [rows, half] of angles, repeated for each head and half."""
    rows, half = angles.shape
    return angles.reshape((rows, 1, 1, half)).broadcast(1, heads).broadcast(2, 2)


def rope_reference(
    x: np.ndarray, positions: np.ndarray, cos: np.ndarray, sin: np.ndarray, heads: int
) -> np.ndarray:
    """Return y [T, heads * D] in x's dtype: x * cos + rotate_half(x) * sin as in Hugging Face, computed in float32.

    cos, sin: [S, R/2], whose row positions[t] has the angles of row t; they serve both halves of a head's
    first R elements. The other elements of a head are copied.
    """
    heads_of_rows = widened(x).reshape(x.shape[0], heads, -1)
    wide, unrotated = np.split(heads_of_rows, [2 * cos.shape[1]], axis=2)
    cosines = np.tile(widened(cos)[positions], 2)
    sines = np.tile(widened(sin)[positions], 2)
    first, second = np.split(wide, 2, axis=2)
    rotated = np.concatenate([-second, first], axis=2)
    result = np.concatenate([wide * cosines + rotated * sines, unrotated], axis=2)
    return result.reshape(x.shape).astype(x.dtype)
