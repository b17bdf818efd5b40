"""A product of few rows with a wide matrix whose columns lie on different partitions, chunk by chunk.

Rows alone would leave most partitions of a result empty, and what searches the result would run on as few lanes. Here
the columns of a piece are cut into chunks, and the result of row t and chunk c lies on partition t * chunks + c. No
data moves for that: the stationary operand of chunk c has row t in column t * chunks + c and zeros in all others, so
every chunk adds its products to its own partitions and zero to those of the others. A matmul takes no longer for it.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.norms.hidden_spans import hidden_spans, load_normalised
from nki_kernels.sampling.top_k import MISSING
from nki_kernels.tiles import BANK, WEIGHT_ELEMENTS, cast, filled, load

LEAST_ELEMENTS = 1024
"""Elements per partition of the smallest load: 256 KiB in bfloat16."""


def window(tile, rows, chunks, chunk):
    """Return the stationary operand of a chunk: T * chunks columns of a tile [height, chunks - 1 + T * chunks].

    The tile holds row t at column chunks - 1 + t * chunks, and zeros elsewhere.
    """
    start = chunks - 1 - chunk
    return tile[:, start : start + rows * chunks]


def spread_rows(x, norm, chunks):
    """Normalise rows x [T, H] and spread them for `window`: [height, block, chunks - 1 + T * chunks] for each span."""
    rows, hidden = x.shape
    spans = hidden_spans(hidden)
    width = chunks - 1 + rows * chunks
    tiles = []
    views = []
    for i in range(len(spans)):
        _, height, count = spans[i]
        tile = nl.ndarray((height, count, width), dtype=x.dtype, buffer=nl.sbuf)
        if chunks > 1:
            # GpSimd writes the zeros, so that the Vector engine is free for the norm of the rows.
            nisa.memset(dst=tile, value=0.0, engine=nisa.engine.gpsimd)
        pattern = [[count * width, height], [chunks, rows], [width, count]]
        views.append(tile.ap(pattern=pattern, offset=chunks - 1))
        tiles.append(tile)
    load_normalised(views, x, norm)
    return tiles


def padding_operands(rows, chunks):
    """Return the padding matmul's operands: a one for `window` per row, and a line of zeros followed by MISSING."""
    width = chunks - 1 + rows * chunks
    ones = filled((1, width), 0.0, nl.bfloat16)
    nisa.memset(dst=ones[:, chunks - 1 : width : chunks], value=1.0)
    line = nl.ndarray((1, 2 * BANK), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.memset(dst=line[:, 0:BANK], value=0.0)
    nisa.memset(dst=line[:, BANK : 2 * BANK], value=MISSING)
    return ones, line


def pad(sums, padding, rows, chunks, columns):
    """Write MISSING to sums [row * chunk, n] beyond `columns`, and zero before; return whether any chunk is padded."""
    size = sums.shape[1]
    padded = False
    for chunk in range(chunks):
        present = max(0, min(size, columns - chunk * size))
        if present < size:
            nisa.nc_matmul(
                dst=sums,
                stationary=window(padding[0], rows, chunks, chunk),
                moving=padding[1][:, BANK - present : BANK - present + size],
                accumulate=padded,
            )
            padded = True
    return padded


def project_piece(tiles, padding, rows, chunks, matrix, size):
    """Multiply rows by a matrix [H, n]: [row * chunk, size] float32 @ PSUM, with MISSING beyond n <= chunks * size.

    The matrix is read once, cast to the rows' dtype.
    """
    hidden, columns = matrix.shape
    spans = hidden_spans(hidden)
    sums = nl.ndarray((rows * chunks, size), dtype=nl.float32, buffer=nl.psum)
    # A matmul brings the padding into PSUM, so that the search needs no further pass over the sums.
    begun = pad(sums, padding, rows, chunks, columns)
    for i in range(len(spans)):
        start, height, count = spans[i]
        rows_of_span = matrix[start : start + height * count].reshape_dim(0, (height, count))
        for first, last in loads(count, columns):
            weights = load(rows_of_span[:, first:last], matrix.dtype)
            weights = cast(weights, tiles[i].dtype)
            for block in range(first, last):
                for chunk in range(chunks):
                    end = min(columns, (chunk + 1) * size)
                    if chunk * size < end:
                        nisa.nc_matmul(
                            dst=sums[:, 0 : end - chunk * size],
                            stationary=window(tiles[i][:, block, :], rows, chunks, chunk),
                            moving=weights[:, block - first, chunk * size : end],
                            accumulate=begun,
                        )
                        begun = True
    return sums


def project_rows(tiles, rows, chunks, matrix):
    """Multiply rows that are spread for `chunks` by a matrix [H, n] of one bank: [row, n] float32 @ PSUM."""
    views = []
    for tile in tiles:
        width = tile.shape[2]
        views.append(tile[:, :, chunks - 1 : width : chunks])
    return project_piece(views, None, rows, 1, matrix, matrix.shape[1])


def loads(count, columns):
    """Divide `count` blocks into the ranges of DMA loads; each range has at most half of the remaining blocks.

    So the products with what comes last end soon after it.
    """
    most = max(1, WEIGHT_ELEMENTS // columns)
    least = max(1, LEAST_ELEMENTS // columns)
    ranges = []
    first = 0
    while first < count:
        last = min(count, first + max(least, min(most, (count - first) // 2)))
        ranges.append((first, last))
        first = last
    return ranges
