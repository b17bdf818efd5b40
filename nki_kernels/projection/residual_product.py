"""The last product of output_projection and mlp: rows times a weight, summed over ranks, plus the residual.

    y[first …] = residual[first …] + sum over ranks of row_scale * (x @ weight) + bias

x in SBUF, as K blocks [k in block, block, row], is stationary. The weight moves; it streams through SBUF or stays
there. A chunk of columns accumulates in half of the PSUM banks while the chunk before is read out of the other half.
Over several ranks a chunk is rounded to y's dtype and summed from SBUF to SBUF, see `sums`.

If y is cut over the ranks (see `sequence`), a row tile of x has the same rows of every rank, [rank * row].
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, STATIC
from nki_kernels.projection.block_loads import store_rows_from
from nki_kernels.projection.row_groups import row_tile_height, rows_per_rank
from nki_kernels.projection.sums import OutputChunk, RankSum
from nki_kernels.tiles import ACCUMULATOR_BANKS, BANK, PARTITIONS, blocks, copy_bank
from nki_kernels.weights import load_blocks, load_blocks_into, weight_columns

PIECE_ELEMENTS = 1024
"""Elements per partition of one loaded piece of the weight: 256 KiB in bfloat16.

Larger pieces load no faster once all 16 DMA engines are busy, and the products with the last piece end later.
"""

VECTOR_SHARE = 2
"""The Vector engine reads out one of so many PSUM banks from gen3 on; 0: none."""


@dataclass
class MovingWeight(nl.NKIObject):
    """The weight of a product, cut along K into matrices: a WeightMatrix [K, N] for each part of x.

    resident_tiles: the tiles so far of a weight of one matrix that stays in SBUF; None if the weight streams through.
    tail_in_both_halves: whether a last K block of 64 rows is loaded to both partition halves, see `accumulate`.
    """

    matrices: list
    resident_tiles: list | None = None
    tail_in_both_halves: bool = False


@dataclass
class ResidualProduct(nl.NKIObject):
    """What all chunks of one product share.

    y: [T, N] @ HBM. residual: the same, or None. bias: [row, N] in SBUF, or None.
    residual_tile: [row, 1, N], if the residual is in SBUF already, else None.
    row_scales: for each row tile so far a float32 column [row, 1] that multiplies its rows, or None.
    """

    y: nl.NkiTensor
    residual: nl.NkiTensor | None
    weight: MovingWeight
    bias: nl.NkiTensor | None
    rank_sum: RankSum
    residual_tile: nl.NkiTensor | None = None
    row_scales: list | None = None

    def keep_residual(self, tile):
        """Take the residual from a tile [row, 1, N] in SBUF."""
        self.residual_tile = tile


@dataclass
class WeightPiece(nl.NKIObject):
    """`rows` rows of a weight in SBUF, from K block `first_block` on.

    tiles: [k in block, block, column], of equal width.
    """

    tiles: list
    first_block: int
    rows: int


@dataclass
class Accumulator(nl.NKIObject):
    """A PSUM bank [row, up to 512 columns] of a chunk: its row tile, first row of x and first column of the chunk."""

    bank: nl.NkiTensor
    row_tile: int
    first_row: int
    first_column: int


def chunk_width(rows, ranks=1):
    """Return the columns of a chunk whose `rows` rows accumulate in ACCUMULATOR_BANKS banks."""
    return BANK * max(1, ACCUMULATOR_BANKS // blocks(rows, row_tile_height(ranks)))


def product_chunk(product, x_parts, first_row, first_column):
    """Compute the chunk of y that begins at `first_row` and `first_column`; store it or hand it to the rank sum.

    x_parts: for each part of the weight the stationary operand [k in block, block, row] of all rows of the chunk.
    """
    rank_sum, weight = product.rank_sum, product.weight
    rows = x_parts[0].shape[2]
    chunk = chunk_of(product, rows, first_row, first_column)
    width = chunk.y.shape[1]
    accumulators = allocate_accumulators(rows, width, row_tile_height(rank_sum.sequence_ranks))
    for index in range(len(x_parts)):
        x = x_parts[index]
        k_blocks = blocks(weight.matrices[index].elements.shape[0])
        blocks_per_piece = max(1, PIECE_ELEMENTS // width) if weight.resident_tiles is None else k_blocks
        for k in range(0, k_blocks, blocks_per_piece):  # k: first K block of a piece
            piece = load_piece(weight.matrices[index], weight, k, blocks_per_piece, chunk.columns, x)
            # After the first piece in the queue, so that no product waits for it. A sum over ranks loads it later.
            if rank_sum.replica_group is None:
                chunk.load_residual(rank_sum.sequence_ranks)
            accumulate(accumulators, x, piece, index > 0, weight.tail_in_both_halves)
    if rank_sum.replica_group is None:
        shape = (min(rows, PARTITIONS), blocks(rows), width)
        result = nl.ndarray(shape, dtype=product.y.dtype, buffer=nl.sbuf)
        add_residual(result, accumulators, chunk)
        # A store waits for its product, and in the queue of bulk loads the next weights would wait with it.
        store_rows_from(chunk.y, result, COMPILER)
    else:
        chunk.round_partial_sums(accumulators, rank_sum.sequence_ranks)
        rank_sum.append(chunk)


def chunk_of(product, rows, first_row, first_column):
    """Return the chunk of y that begins at `first_row` and `first_column`, for `rows` rows of all ranks."""
    ranks = product.rank_sum.sequence_ranks
    end_row = first_row + rows // ranks
    end_column = min(product.y.shape[1], first_column + chunk_width(rows, ranks))
    residual, residual_tile = product.residual, product.residual_tile
    row_scales = product.row_scales
    return OutputChunk(
        product.y[first_row:end_row, first_column:end_column],
        (first_column, end_column),
        None if residual is None else residual[first_row:end_row, first_column:end_column],
        None if residual_tile is None else residual_tile[:, :, first_column:end_column],
        None if product.bias is None else product.bias[:, first_column:end_column],
        None if row_scales is None else row_scales[first_row // rows_per_rank(ranks) :],
    )


def allocate_accumulators(rows, width, height):
    """Allocate the PSUM banks of a chunk: for each row tile, of up to `height` rows, one for every 512 columns."""
    accumulators = []
    for m in range(blocks(rows, height)):  # m: row tile
        for column in range(0, width, BANK):
            shape = (min(height, rows - m * height), min(BANK, width - column))
            bank = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
            accumulators.append(Accumulator(bank, m, m * height, column))
    return accumulators


def load_piece(matrix, weight, first_block, count, columns, x):
    """Load `count` K blocks of columns (first, end) of a matrix of the weight, in x's dtype."""
    first, last = columns
    start = first_block * PARTITIONS
    depth = matrix.elements.shape[0]
    end = min(depth, start + count * PARTITIONS)
    if weight.resident_tiles is not None:
        return WeightPiece(resident_columns(weight, first, last, x.dtype), first_block, end - start)
    shape = (x.shape[0], blocks(end - start), last - first)
    tile = nl.ndarray(shape, dtype=x.dtype, buffer=nl.sbuf)
    load_blocks_into(tile, matrix.submatrix((start, end), columns), STATIC)
    if weight.tail_in_both_halves and end == depth:
        # Every second accumulator multiplies the tail in the upper half of the array, so its rows lie there as well.
        half = PARTITIONS // 2
        tail = tile[half:PARTITIONS, shape[1] - 1 :, :]
        load_blocks_into(tail, matrix.submatrix((end - half, end), columns), STATIC)
    return WeightPiece([tile], first_block, end - start)


def resident_columns(weight, first, last, dtype):
    """Return the tiles of a resident weight that hold columns first … last; load those not in SBUF yet."""
    matrix, tiles = weight.matrices[0], weight.resident_tiles
    depth, all_columns = matrix.elements.shape
    width = BANK * max(1, min(ACCUMULATOR_BANKS, PIECE_ELEMENTS // (BANK * blocks(depth))))
    for start in range(len(tiles) * width, last, width):
        end = min(all_columns, start + width)
        tiles.append(load_blocks(weight_columns(matrix, start, end), dtype, STATIC))
    return tiles[first // width : blocks(last, width)]


def accumulate(accumulators, x, piece, add, tail_in_both_halves):
    """Add the product of x and a piece of the weight to all accumulators of a chunk.

    add: whether the accumulators hold partial sums of another part of the weight. tail_in_both_halves: a last K block
    of 64 rows is multiplied for two accumulators at once, each in half of the PE array's rows.
    """
    full = piece.rows // PARTITIONS
    tail_rows = piece.rows - full * PARTITIONS
    tail_block = piece.first_block + full
    half = PARTITIONS // 2
    for i in range(len(accumulators)):
        stationary, moving = operands_of(accumulators[i], x, piece)
        for k in range(full):  # k: K block of the piece
            nisa.nc_matmul(
                dst=accumulators[i].bank,
                stationary=stationary[:, piece.first_block + k, :],
                moving=moving[:, k, :],
                accumulate=add or piece.first_block + k > 0,
            )
        if tail_rows > 0 and not tail_in_both_halves:
            nisa.nc_matmul(
                dst=accumulators[i].bank,
                stationary=stationary[0:tail_rows, tail_block, :],
                moving=moving[0:tail_rows, full, :],
                accumulate=add or tail_block > 0,
            )
        if tail_rows > 0 and tail_in_both_halves and (i % 2 == 1 or i + 1 == len(accumulators)):
            # The tails of a pair follow each other, so that both halves of the array's rows work at the same time.
            for j in range(i - i % 2, i + 1):  # j: accumulator of a pair
                stationary, moving = operands_of(accumulators[j], x, piece)
                first = half * (j % 2)
                nisa.nc_matmul(
                    dst=accumulators[j].bank,
                    stationary=stationary[first : first + half, tail_block, :],
                    moving=moving[first : first + half, full, :],
                    accumulate=add or tail_block > 0,
                    tile_position=(first, 0),
                    tile_size=(half, PARTITIONS),
                )


def operands_of(accumulator, x, piece):
    """Return the operands of an accumulator: its rows of x, and its columns of a weight piece, with all K blocks."""
    rows, columns = accumulator.bank.shape
    tile_width = piece.tiles[0].shape[2]
    tile = piece.tiles[accumulator.first_column // tile_width]
    start = accumulator.first_column % tile_width
    first_row = accumulator.first_row
    return x[:, :, first_row : first_row + rows], tile[:, :, start : start + columns]


def add_residual(result, accumulators, chunk):
    """Add the residual and the bias, if there are any, to the accumulators: result [row in tile, row tile, column].

    The Vector engine adds one of VECTOR_SHARE banks, the last one included. The Scalar engine copies the others to
    SBUF, where GpSimd adds. On gen2 these engines wait for each other at their ports, so the Vector engine adds all.
    """
    vector_share = 1 if nisa.get_nc_version() == nisa.nc_version.gen2 else VECTOR_SHARE
    for i in range(len(accumulators)):
        bank = accumulators[i].bank
        rows, columns = bank.shape
        m, start = accumulators[i].row_tile, accumulators[i].first_column
        # The way over Scalar engine and GpSimd has two steps, so the bank that ends last goes to the Vector engine.
        from_last = len(accumulators) - 1 - i
        dst = result[0:rows, m, start : start + columns]
        row_scale = None if chunk.row_scales is None else chunk.row_scales[m]
        if chunk.residual_tile is None and chunk.bias is None:
            copy_bank(dst, bank, from_last, vector_share, row_scale)
            continue
        addend = None if chunk.bias is None else chunk.bias[0:rows, start : start + columns]
        if chunk.residual_tile is not None:
            residual = chunk.residual_tile[0:rows, m, start : start + columns]
            if addend is not None:
                # The bias joins the residual in SBUF, so that one instruction empties a PSUM bank.
                nisa.tensor_tensor(dst=residual, data1=residual, data2=addend, op=nl.add)
            addend = residual
        if from_last % vector_share != 0:
            # GpSimd reads no PSUM; the copy for it stays in float32, so that only the addition rounds.
            copied = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
            copy_bank(copied, bank, i, 0, row_scale)
            nisa.tensor_tensor(dst=dst, data1=copied, data2=addend, op=nl.add, engine=nisa.engine.gpsimd)
        elif row_scale is None:
            nisa.tensor_tensor(dst=dst, data1=bank, data2=addend, op=nl.add)
        else:
            nisa.scalar_tensor_tensor(
                dst=dst, data=bank, op0=nl.multiply, operand0=row_scale, op1=nl.add, operand1=addend
            )
