"""Projections of rows and weights of 8-bit integers (W8A8), for `qkv_projection`, `output_projection` and `mlp`.

Rows lie on the partitions, a row tile of up to 128 after the other. They become integers with a scale for each row, see
`integer_product`; their transpose is stationary, and columns of the weight move, up to 512 at a time. Every row tile
loads all of the weight, and the Vector engine converts it to bfloat16. Sums of integers equal their definition bit for
bit. This is simple and exact, not fast.
"""

from __future__ import annotations

import nki.language as nl

from nki_kernels.dma import COMPILER, STATIC
from nki_kernels.norms.row_tiles import allocate_row_scratch, load_norm
from nki_kernels.projection.block_loads import store_rows_from
from nki_kernels.projection.integer_product import quantise_rows_to_integers, sum_integer_products
from nki_kernels.projection.normed import divide_columns
from nki_kernels.projection.residual_product import Accumulator, add_residual, view_chunk
from nki_kernels.projection.row_groups import (
    list_starts,
    normalise_tiles,
    plan_loads,
    split_by_rank,
    trigger_loads,
)
from nki_kernels.projection.rows import spread
from nki_kernels.projection.sequence import provide_rows
from nki_kernels.tiles import ACCUMULATOR_BANKS, BANK, PARTITIONS, load_repeated, ranges
from nki_kernels.weights import select_columns


def project_integers(source, norm, w, columns, heads):
    """Compute norm(x) @ w for rows of integers; hand each finished tile to `heads.deliver`, which stores it.

    Args:
        source: RowSource of x [T, H] @ HBM.
        norm: Norm; one without a weight leaves rows as they are. Normalised rows are rounded to their dtype.
        w: WeightMatrix [H, columns] of int8 with scales.
        columns: range (first, end) of columns of w.
        heads: Heads. If heads.head is not 0, a tile has whole heads of so many columns.
    """
    x = source.all_rows
    row_norm = None
    if norm.weight is not None:
        scratch = allocate_row_scratch(min(x.shape[0], PARTITIONS), x.shape[1], x.dtype)
        row_norm = load_norm(norm, scratch, x.dtype)
    groups, bank = divide_columns(columns, heads.head, ACCUMULATOR_BANKS * BANK)
    for first_row, end_row in ranges(0, x.shape[0]):
        rows = provide_rows(source, first_row, end_row)
        tile = nl.ndarray(rows.shape, dtype=x.dtype, buffer=nl.sbuf)
        trigger_loads(plan_loads([tile], split_by_rank(rows, 1)), STATIC)
        normalise_tiles([tile], [tile], row_norm)
        numbers, row_scale = quantise_rows_to_integers(tile)
        stationary = spread(numbers, False)
        for first, end in groups:
            panels, sums = ranges(0, end - first, bank), []
            for start, stop in panels:
                sums.append(sum_integer_products(stationary, select_columns(w, first + start, first + stop)))
            heads.column_scales = load_repeated(w.scales[:, first:end], tile.shape[0])
            heads.deliver(first_row, first, end, sums, panels, row_scale)


def project_integer_tile(product, tile, first_row, largest):
    """Compute the rows of y from `first_row` on of a ResidualProduct with an int8 weight.

    Appends the scales of the rows to the product. Over several ranks their sums may be under way at the end.

    Args:
        product: ResidualProduct with a list of row scales.
        tile: row tile [row, K] in SBUF; with rows that are cut over ranks, rows of every rank.
        first_row: counted among the rows of one rank.
        largest: the largest magnitude of each row over all ranks, [row, 1] in SBUF; None for those of the tile.
    """
    numbers, row_scale = quantise_rows_to_integers(tile, None, largest)
    product.row_scales.append(row_scale)
    stationary = spread(numbers, False)
    for first_column in list_starts(product.y.shape[1], ACCUMULATOR_BANKS * BANK):
        compute_integer_chunk(product, None, stationary, first_row, first_column)


def compute_integer_chunk(product, bias, stationary, first_row, first_column):
    """Compute the rows of a row tile and up to 2048 columns of y, from `first_row` and `first_column` on.

    On one rank they are stored; else their sum over ranks is appended to the rank sum. Scales of the columns, and the
    bias, are loaded here where all of them would take too much of SBUF.

    Args:
        product: ResidualProduct, whose last row scale is that of the row tile.
        bias: [1, N] @ HBM, or None for the bias of the product, if it has one.
        stationary: the integers of the rows, [k in block, block, row] in SBUF.
        first_row, first_column: the first row, counted among the rows of one rank, and the first column.
    """
    rank_sum, rows = product.rank_sum, stationary.shape[2]
    chunk = view_chunk(product, rows, first_row, first_column)
    if bias is not None:
        chunk.bias = load_repeated(bias[:, chunk.columns[0] : chunk.columns[1]], rows)
    accumulators = []
    for start, end in ranges(chunk.columns[0], chunk.columns[1], BANK):
        sums = sum_integer_products(stationary, select_columns(product.weight.matrices[0], start, end))
        accumulators.append(Accumulator(sums, 0, 0, start - first_column))
    if rank_sum.replica_group is None:
        chunk.load_residual(1)
        y_tile = nl.ndarray((rows, 1, chunk.y.shape[1]), dtype=product.y.dtype, buffer=nl.sbuf)
        add_residual(y_tile, accumulators, chunk)
        store_rows_from(chunk.y, y_tile, COMPILER)
    else:
        chunk.round_partial_sums(accumulators, rank_sum.sequence_ranks)
        rank_sum.append(chunk)
