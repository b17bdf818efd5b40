"""A product of few rows with a wide matrix, with the columns cut into chunks that lie on different partitions.

`lm_head` searches the result for its largest elements. T rows alone would leave most partitions of a result
empty, and the search would use as few lanes of the Vector engine. So the columns of the matrix are cut into
chunks of equal width. The result of row t and chunk c lies on partition t * chunks + c. No data moves for
that. The stationary operand of chunk c has row t in column t * chunks + c and zeros in all other columns. So
every chunk adds its products to its own partitions, and zero to those of the other chunks. A matmul takes no
longer for it.

A row of H elements is given as one or two *spans*, which differ in height: the tile of a span is [height,
block, column], see `hidden_spans`.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.norms.hidden_spans import list_spans, load_normalised
from nki_kernels.sampling.top_k import MISSING
from nki_kernels.tiles import BANK, WEIGHT_ELEMENTS, cast, filled, load
from nki_kernels.weights import choose_operand_dtype

LEAST_ELEMENTS = 1024
"""Elements per partition of the smallest load of weights: 256 KiB in bfloat16."""


def view_stationary(tile, rows, chunks, chunk):
    """View the stationary operand of chunk number `chunk` in a padded tile [height, chunks - 1 + T * chunks].

    The tile holds row t in column chunks - 1 + t * chunks, and zeros elsewhere. The view is T * chunks
    columns wide and has row t in column t * chunks + chunk. rows: T.
    """
    start = chunks - 1 - chunk
    return tile[:, start : start + rows * chunks]


def spread_rows(x, norm, chunks):
    """Load rows x [T, H] from HBM, normalise them, and return one padded tile in SBUF for each span of H.

    A tile is [height, block, chunks - 1 + T * chunks] in x's dtype: in each block row t is in column chunks -
    1 + t * chunks, and other columns are zeros. `view_stationary` returns the operand of a chunk. norm: Norm.
    """
    rows, hidden = x.shape
    spans = list_spans(hidden)
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


def make_padding_operands(rows, chunks):
    """Return the operands of the matmuls that write padding, in SBUF: (ones, line), both bfloat16 on one partition.

    ones [1, chunks - 1 + rows * chunks] has a one for each row where `view_stationary` expects the row. line [1, 2 *
    BANK] has BANK zeros and then BANK times MISSING, a value below every logit.
    """
    width = chunks - 1 + rows * chunks
    ones = filled((1, width), 0.0, nl.bfloat16)
    nisa.memset(dst=ones[:, chunks - 1 : width : chunks], value=1.0)
    line = nl.ndarray((1, 2 * BANK), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.memset(dst=line[:, 0:BANK], value=0.0)
    nisa.memset(dst=line[:, BANK : 2 * BANK], value=MISSING)
    return ones, line


def write_padding(sums, padding, rows, chunks, columns):
    """Write padding to `sums` [row * chunk, size] in PSUM if a chunk has columns beyond the matrix; else do nothing.

    The padding is MISSING, a value below every logit, in these columns, and zero everywhere else. Return
    whether it was written: products must then accumulate onto it.

    Args:
        sums: partition t * chunks + c is that of row t and chunk c.
        padding: what `make_padding_operands` returned; not read if there is nothing to write.
        rows, chunks: numbers of rows and chunks.
        columns: columns of the matrix; chunk c has those from c * size on.
    """
    size = sums.shape[1]
    padded = False
    for chunk in range(chunks):
        present = max(0, min(size, columns - chunk * size))
        if present < size:
            nisa.nc_matmul(
                dst=sums,
                stationary=view_stationary(padding[0], rows, chunks, chunk),
                moving=padding[1][:, BANK - present : BANK - present + size],
                accumulate=padded,
            )
            padded = True
    return padded


def project_piece(tiles, padding, rows, chunks, matrix, size):
    """Multiply spread rows by a WeightMatrix [H, n]; return the sums in PSUM, [row * chunk, size] float32.

    Partition t * chunks + c has columns c * size … of row t, and MISSING beyond column n. The matrix is read
    once. Its scales, if any, are not applied, see `load_chunk_scales`.

    Args:
        tiles: one tile for each span, as `spread_rows` returns them.
        padding: what `make_padding_operands` returned; None if n is chunks * size.
        rows: T.
        matrix: WeightMatrix with at most chunks * size columns.
        size: columns of a chunk, at most a PSUM bank.
    """
    hidden, columns = matrix.elements.shape
    spans = list_spans(hidden)
    sums = nl.ndarray((rows * chunks, size), dtype=nl.float32, buffer=nl.psum)
    # A matmul brings the padding into PSUM, so that the search needs no further pass over the sums.
    begun = write_padding(sums, padding, rows, chunks, columns)
    for i in range(len(spans)):
        start, height, count = spans[i]
        rows_of_span = matrix.elements[start : start + height * count].reshape_dim(0, (height, count))
        for first, last in divide_into_loads(count, columns):
            weights = load(rows_of_span[:, first:last], matrix.elements.dtype)
            weights = cast(weights, choose_operand_dtype([matrix], tiles[i].dtype))
            for block in range(first, last):
                for chunk in range(chunks):
                    end = min(columns, (chunk + 1) * size)
                    if chunk * size < end:
                        nisa.nc_matmul(
                            dst=sums[:, 0 : end - chunk * size],
                            stationary=view_stationary(tiles[i][:, block, :], rows, chunks, chunk),
                            moving=weights[:, block - first, chunk * size : end],
                            accumulate=begun,
                        )
                        begun = True
    return sums


def project_rows(tiles, rows, chunks, matrix):
    """Multiply rows by a WeightMatrix [H, n], n up to 512: return [row, n] float32 in PSUM, one row on each partition.

    tiles: what `spread_rows` returned for `rows` rows and `chunks` chunks; they are read without their zeros.
    """
    views = []
    for tile in tiles:
        width = tile.shape[2]
        views.append(tile[:, :, chunks - 1 : width : chunks])
    return project_piece(views, None, rows, 1, matrix, matrix.elements.shape[1])


def load_chunk_scales(scales, rows, chunks, size):
    """Load the scales of a piece's columns: return [row * chunk, size] float32 in SBUF, or None without scales.

    Partition t * chunks + c has the scales of columns c * size …, and 1 beyond the last column, which keeps padding.

    Args:
        scales: [1, n] @ HBM, n at most chunks * size; None for a plain matrix.
        rows: T.
        chunks: chunks of a row.
        size: columns of a chunk.
    """
    if scales is None:
        return None
    columns = scales.shape[1]
    tile = nl.ndarray((rows * chunks, size), dtype=nl.float32, buffer=nl.sbuf)
    if columns < chunks * size:
        nisa.memset(dst=tile, value=1.0, engine=nisa.engine.gpsimd)
    for chunk in range(chunks):
        end = min(columns, (chunk + 1) * size)
        count = end - chunk * size
        if count > 0:
            repeated = scales[:, chunk * size : end].ap(pattern=[[0, rows], [1, count]])
            nisa.dma_copy(dst=tile[chunk : rows * chunks : chunks, 0:count], src=repeated)
    return tile


def divide_into_loads(count, columns):
    """Return ranges (first, end) of blocks that cover blocks 0 … count - 1; one DMA loads each range.

    A range has at most WEIGHT_ELEMENTS elements per partition and half of the remaining blocks, but at least
    LEAST_ELEMENTS. So the products with the range that arrives last end soon after it. columns: elements of a
    block on a partition.
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
