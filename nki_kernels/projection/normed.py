"""Products of normalised rows with a weight: [norm(x)] @ w, for few rows and for many.

RMSNorm's weight is multiplied into the smaller operand, w or x^T; 1 / rms of a row is applied to its row of the
product by whoever takes it out of PSUM. So no product waits for a norm. LayerNorm comes before the transpose.

`deliver(context, row, left, right, sums, panels, scale)` is called for each row tile and group of columns left … right:
sums are PSUM tiles of the columns left + start … left + end of w for each (start, end) of panels; row is the first row
of the tile; scale is a float32 column by which its rows are to be multiplied, or None.

Rows come as `whole_rows` or `gathered_rows` of `sequence` give them. norm is (norm_weight [1, H], norm_bias [1, H],
offset, eps) with tensors in HBM: norm_bias is None for RMSNorm, norm_weight too for no norm; offset is added to
norm_weight; eps is a float32 column in SBUF.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.projection.products import (
    add_products,
    block_tile,
    empty_sums,
    load_part,
    parts,
    transpose_part,
)
from nki_kernels.projection.rows import (
    add_squares,
    column_of,
    in_block,
    inverse_rms,
    inverse_root,
    spread,
    squared,
    standardise,
    weighted,
)
from nki_kernels.projection.sequence import rows_of
from nki_kernels.tiles import ACCUMULATOR_BANKS, BANK, PARTITIONS, blocks, load, ranges
from nki_kernels.weights import WeightMatrix, load_runs_into

RESIDENT_BYTES = 65536
"""Bytes per partition of the weight that stay in SBUF."""

LEAD_BANKS = 6
"""At most so many PSUM banks of the row tiles that accumulate side by side while the weight arrives."""

OPERAND_BYTES = 163840
"""Bytes per partition of the weight, the rows that accumulate side by side, the next rows, and squares."""

GATHERED_TILES = 2
"""Row tiles that accumulate side by side where rows are gathered: the weight is there before the third."""

LEAD_ELEMENTS = 1024
"""Elements per partition of the weight that one DMA brings then: little, so that the Tensor engine starts early."""

ROUNDS = 3
"""Panels of few rows: the last one that leaves PSUM holds up the end of the launch, more matmuls take longer."""


def project(rows, norm, w, columns, head, deliver, context):
    """Deliver norm(x) @ w for a range of columns; those of a panel are whole heads of `head`, if that is not 0."""
    if rows.all_rows.shape[0] > PARTITIONS or transposes_multiply():
        project_many(rows, norm, w, columns, head, deliver, context)
    else:
        project_few(rows, norm, w, columns, head, deliver, context)


def transposes_multiply():
    """Whether the Tensor engine transposes by a product, in which an undefined row would reach the other rows."""
    return nisa.get_nc_version() == nisa.nc_version.gen2


def column_groups(columns, head, most):
    """Ranges that cover a range of columns, with the columns of a PSUM bank: whole heads.

    Each has at most `most` columns and ACCUMULATOR_BANKS banks.
    """
    bank = min(BANK, most)
    if head > 0:
        bank = max(head, bank // head * head)
    at_once = min(ACCUMULATOR_BANKS, most // bank)
    first, end = columns
    if end - first <= min(most, ACCUMULATOR_BANKS * bank):
        at_once = ACCUMULATOR_BANKS
    return ranges(first, end, at_once * bank), bank


def even_panels(width, head, bank):
    """Panels of about equal width, ROUNDS or a multiple: two engines take them out of PSUM, the last one soon."""
    unit = head if head > 0 else 1
    units = blocks(width, unit)
    number = min(units, ROUNDS * blocks(width, ROUNDS * bank))
    return ranges(0, width, blocks(units, number) * unit)


def project_few(source, norm, w, columns, head, deliver, context):
    """The product of at most 128 rows, past which the weights stream."""
    norm_weight, norm_bias, offset, eps = norm
    x = rows_of(source, 0, source.all_rows.shape[0])
    tokens, hidden = x.shape
    rows = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    transfer(rows, x, SCALAR)  # so that the weights come first in their queue
    weight = bias = scale = None
    if norm_weight is not None:
        weight = column_of(norm_weight, offset, True)
    if norm_bias is not None:
        bias = column_of(norm_bias, 0.0, True)
        standardise(rows, eps)
    elif norm_weight is not None:
        scale = inverse_rms(rows, eps)
    stationary = spread(rows, True, weight, bias)
    tiles = [(0, tokens)]
    groups, bank = column_groups(columns, head, columns[1] - columns[0])
    for left, right in groups:
        panels = even_panels(right - left, head, bank)
        sums = empty_sums(tiles, panels)
        for start, end in parts(blocks(hidden), right - left, 1):
            part = block_tile(hidden, end - start, right - left, x.dtype)
            load_runs_into(part, WeightMatrix(w[:, left:right]), start)
            add_products(sums, stationary, tiles, part, panels, start, hidden, True)
        deliver(context, 0, left, right, sums[0], panels, scale)


def project_many(source, norm, w, columns, head, deliver, context):
    """The product of any number of rows with weights that stay in SBUF."""
    norm_weight, norm_bias, offset, eps = norm
    x = source.all_rows
    tokens, hidden = x.shape
    block_bytes = blocks(hidden) * (4 if x.dtype == nl.float32 else 2)
    weight = column_of(norm_weight, offset, False) if norm_weight is not None else None
    bias = column_of(norm_bias, 0.0, False) if norm_bias is not None else None
    groups, bank = column_groups(columns, head, RESIDENT_BYTES // block_bytes)
    ones = nl.ndarray((min(hidden, PARTITIONS), 1), dtype=x.dtype, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    scales = []
    for left, right in groups:
        here = w[:, left:right]
        panels = ranges(0, right - left, bank)
        together = 1
        if bias is None:
            spare = OPERAND_BYTES - block_bytes * (right - left)
            together = max(1, min(LEAD_BANKS // len(panels), spare // (block_bytes * PARTITIONS) - 3))
        if source.gather is not None:
            together = min(together, GATHERED_TILES)
        lead = min(tokens, together * PARTITIONS)
        turns = [(0, lead)] + ranges(lead, tokens)
        measured = weight is not None and bias is None and left == columns[0]
        loaded = []
        stationary = squares = ready = None
        for number in range(len(turns)):
            first, last = turns[number]
            tiles = ranges(0, last - first)
            sums = empty_sums(tiles, panels)
            totals = empty_sums(tiles, [(0, 1)]) if measured else None
            if number == 0:
                loaded = first_products(
                    sums, totals, rows_of(source, first, last), here, panels, weight, bias, ones, eps
                )
            else:
                block = 0
                for part in loaded:
                    add_products(sums, stationary, tiles, part, panels, block, hidden)
                    block += part.shape[1]
                if measured:
                    add_squares(totals, squares, ones, tiles, 0, block, hidden)
            if number + 1 < len(turns):
                following = rows_of(source, turns[number + 1][0], turns[number + 1][1])
                if bias is not None:
                    following = standardised_rows(following, eps) if number == 0 else ready
                stationary = transposed_rows(following, weight, bias)
                squares = squared(stationary, 0, hidden) if measured else None
            if bias is not None and number + 2 < len(turns):
                ready = standardised_rows(rows_of(source, turns[number + 2][0], turns[number + 2][1]), eps)
            for tile in range(len(tiles)):
                row = first + tiles[tile][0]
                if measured:
                    scales.append(inverse_root(totals[tile][0], 1.0 / hidden, eps))
                scale = scales[row // PARTITIONS] if len(scales) > 0 else None
                deliver(context, row, left, right, sums[tile], panels, scale)


def first_products(sums, totals, x, columns, panels, weight, bias, ones, eps):
    """Add up the products of rows of x with columns of the weight, and the squares of the rows, while both arrive.

    Returns the parts of the weight.
    """
    rows, depth = x.shape
    tiles = ranges(0, rows)
    if bias is None:
        stationary = block_tile(depth, blocks(depth), rows, x.dtype)
    else:
        stationary = transposed_rows(standardised_rows(x, eps), weight, bias)
    loaded = []
    for start, end in parts(blocks(depth), columns.shape[1], 1, LEAD_ELEMENTS):
        if bias is None:
            transpose_part(stationary[:, start:end, :], x, start)
        part = load_weights(columns, start, end, x.dtype, weight if bias is None else None)
        loaded.append(part)
        add_products(sums, stationary, tiles, part, panels, start, depth)
        if totals is not None:
            squares = squared(stationary[:, start:end, :], start, depth)
            add_squares(totals, squares, ones, tiles, start, end, depth)
    return loaded


def standardised_rows(x, eps):
    """Rows of x in HBM as a tile, less their mean and over their standard deviation."""
    rows = load(x, x.dtype)
    standardise(rows, eps)
    return rows


def transposed_rows(x, weight, bias):
    """Rows in HBM transposed in blocks, by DMA; with a bias they are a tile, and weighted and shifted as well."""
    if bias is None:
        result = block_tile(x.shape[1], blocks(x.shape[1]), x.shape[0], x.dtype)
        transpose_part(result, x, 0)
        return result
    if not transposes_multiply():
        return spread(x, False, weight, bias)
    depth = x.shape[1]
    result = block_tile(depth, blocks(depth), x.shape[0], x.dtype)
    transpose_part(result, x, 0)
    full = blocks(depth) if depth <= PARTITIONS else depth // PARTITIONS
    for start, end in ranges(0, full, full) + ranges(full, blocks(depth)):
        part = result[0 : in_block(depth, start, False), start:end, :]
        weighted(part, part, weight, bias, start)
    return result


def load_weights(matrix, start, end, dtype, weight):
    """Blocks start … end of a weight, each row times the norm's weight of its element, in `dtype`."""
    depth, columns = matrix.shape
    if weight is None:
        part = block_tile(depth, end - start, columns, dtype)
        load_part(part, matrix, start)
        return part
    raw = block_tile(depth, end - start, columns, matrix.dtype)
    load_part(raw, matrix, start)
    part = raw if matrix.dtype == dtype else block_tile(depth, end - start, columns, dtype)
    for block in range(start, end):
        used = in_block(depth, block, False)
        nisa.tensor_scalar(
            dst=part[0:used, block - start, :],
            data=raw[0:used, block - start, :],
            op0=nl.multiply,
            operand0=weight[0:used, block : block + 1],
        )
    return part
