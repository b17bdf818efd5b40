"""The last product of output_projection and mlp: rows times a weight, summed over ranks, plus the residual.

    y[first …] = residual[first …] + gate * (sum over ranks of row_scale * column_scales * (x @ weight) + bias)

x in SBUF, as K blocks [k in block, block, row], is stationary. The weight moves; it streams through SBUF or
stays there. A *chunk* is some rows and columns of y. It accumulates in half of the PSUM banks while the chunk
before is read out of the other half. A row tile is up to 128 rows of it. Over several ranks a chunk is
rounded to y's dtype and summed from SBUF to SBUF, see `sums`.

If y is cut along the sequence over N ranks (see `sequence`), y has this rank's own rows. x then has rows of
every rank: in a row tile the same 128 // N own rows of each, those of rank 0 first.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, STATIC
from nki_kernels.nibbles import choose_packed_blocks
from nki_kernels.projection.block_loads import store_rows_from
from nki_kernels.projection.grouped_product import choose_group_width
from nki_kernels.projection.products import multiply_block_pair
from nki_kernels.projection.residual_gate import ResidualGate, load_gates, multiply_columns
from nki_kernels.projection.row_groups import count_rows_per_rank, count_tile_rows
from nki_kernels.projection.scaled_rows import accumulate_scaled
from nki_kernels.projection.sums import OutputChunk, RankSum
from nki_kernels.projection.zero_points import (
    fill_minus_ones,
    load_centred_blocks,
    load_zero_points,
    load_zero_rows,
    negate_sums,
)
from nki_kernels.tiles import (
    ACCUMULATOR_BANKS,
    BANK,
    PARTITIONS,
    blocks,
    copy_bank,
    load_repeated,
    shuffle_row,
)
from nki_kernels.weights import (
    choose_operand_dtype,
    is_e4m3,
    load_blocks,
    load_blocks_into,
    occupies_vector,
    select_columns,
)

PIECE_ELEMENTS = 1024
"""Elements per partition of one loaded piece of the weight: 256 KiB in bfloat16.

Larger pieces load no faster once all 16 DMA engines are busy, and the products with the last piece end later.
"""

PACKED_ELEMENTS = 8 * PIECE_ELEMENTS
"""Elements per partition of one loaded piece of a weight of 4 bits, which few instructions unpack."""

VECTOR_SHARE = 2
"""From gen3 on the Vector engine reads out one of so many PSUM banks, the Scalar engine the others."""


MOST_KEPT_SCALES = 8192
"""Most scales of a row that stay in SBUF beside groups of rows: 32 KiB of each partition."""


def keeps_scales(scales, rows):
    """Return whether scales [1, N] @ HBM stay in SBUF beside row tiles of `rows` rows: few rows or few scales.

    Others are loaded again for each chunk.
    """
    return rows <= PARTITIONS // 2 or scales.shape[1] <= MOST_KEPT_SCALES


@dataclass
class MovingWeight(nl.NKIObject):
    """The weight of a product: a list of WeightMatrix [K, N] @ HBM, one for each part of the contraction.

    resident_tiles: SBUF tiles loaded so far of a weight that stays in SBUF, which has one matrix; None if the
    weight streams through. tail_in_both_halves: whether a last K block of 64 rows is loaded to both halves of
    the partitions, see `accumulate`. gate: [1, N] @ HBM, which multiplies the columns of resident tiles, or None.
    """

    matrices: list
    resident_tiles: list | None = None
    tail_in_both_halves: bool = False
    gate: nl.NkiTensor | None = None


@dataclass
class ResidualProduct(nl.NKIObject):
    """What all chunks of one product share.

    y: [T, N] @ HBM. residual: the same shape @ HBM, or None. weight: MovingWeight. bias: [row, N] in SBUF,
    the same on every row, or None. rank_sum: the sum over ranks. residual_tile: [row, 1, N] in SBUF if the
    residual is there already, else None. row_scales: float32 columns [row, 1] in SBUF that multiply the rows
    of a row tile, one for each row tile so far; None to multiply nothing. scales: [1, N] float32 @ HBM, those of
    the weight's columns; None for a plain weight. column_scales: [row, N] in SBUF with the scales on every row
    once `load_scales` has run; None before, and for a plain weight. negated_sums: for a weight of 4 bits the sums of
    the rows, see `find_negated_sums`; None before, and for other weights. minus_ones: result of `fill_minus_ones` once
    the first sums are computed. spread: for scales of groups the SpreadRows of each matrix of the weight, as far as
    `grouped_product` has made them. gate: ResidualGate, or None.
    """

    y: nl.NkiTensor
    residual: nl.NkiTensor | None
    weight: MovingWeight
    bias: nl.NkiTensor | None
    rank_sum: RankSum
    residual_tile: nl.NkiTensor | None = None
    row_scales: list | None = None
    scales: nl.NkiTensor | None = None
    column_scales: nl.NkiTensor | None = None
    negated_sums: list | None = None
    minus_ones: nl.NkiTensor | None = None
    spread: list | None = None
    gate: ResidualGate | None = None

    def find_negated_sums(self, x_parts):
        """Return the results of `negate_sums` for x_parts, the SBUF tiles of the rows in a list.

        The first call computes them. A caller with other rows sets `negated_sums` to None before.
        """
        if self.negated_sums is None:
            self.negated_sums = []
            for index in range(len(x_parts)):
                depth = self.weight.matrices[index].count_rows()
                if self.minus_ones is None:
                    self.minus_ones = fill_minus_ones(x_parts[index].dtype)
                self.negated_sums.append(negate_sums(x_parts[index], depth, self.minus_ones))
        return self.negated_sums

    def load_scales(self, rows):
        """Load the scales, if there are any, onto `rows` partitions; do nothing if they are in SBUF already.

        The Vector engine copies a row to few partitions. A DMA reads it for each of many partitions, which takes less
        time than four passes of the Tensor engine over float32 rows.
        """
        if self.scales is None or self.column_scales is not None or not keeps_scales(self.scales, rows):
            return
        if rows > PARTITIONS // 2:
            self.column_scales = load_repeated(self.scales, rows)
        else:
            self.column_scales = shuffle_row(self.scales, rows)

    def select_scales(self, first_column, end_column, rows):
        """Return float32 scales [row, column] in SBUF of some columns, those on `rows` rows; None without scales.

        They are a view of `column_scales`, or loaded here if those are not kept.
        """
        if self.column_scales is not None:
            return self.column_scales[:, first_column:end_column]
        if self.scales is None:
            return None
        return load_repeated(self.scales[:, first_column:end_column], rows)

    def keep_residual(self, tile):
        """Add the residual from an SBUF tile [row, 1, N] from now on, instead of loading it from HBM."""
        self.residual_tile = tile


@dataclass
class WeightPiece(nl.NKIObject):
    """Some rows of a weight in SBUF: `rows` of them, from K block `first_block` on.

    tiles: SBUF tiles [k in block, block, column] of equal width, whose columns side by side are those of a
    chunk.
    """

    tiles: list
    first_block: int
    rows: int


@dataclass
class Accumulator(nl.NKIObject):
    """A PSUM bank [row, up to 512 columns] with sums of a chunk.

    row_tile: its row tile in the chunk. first_row: its first row of the chunk. first_column: its first column
    of the chunk.
    """

    bank: nl.NkiTensor
    row_tile: int
    first_row: int
    first_column: int


def count_chunk_columns(rows, ranks=1):
    """Return the columns of a chunk of `rows` rows: as many as ACCUMULATOR_BANKS banks hold, at least one bank.

    ranks: over how many ranks the rows are cut, which may leave partitions of a row tile unused.
    """
    return BANK * max(1, ACCUMULATOR_BANKS // blocks(rows, count_tile_rows(ranks)))


def count_piece_blocks(weight, index, width, x):
    """Return how many K blocks of `width` columns of a matrix make a piece for rows x.

    index: index of the matrix among those of the MovingWeight `weight`.
    """
    matrix = weight.matrices[index]
    if matrix.nibbles is not None:
        elements = PACKED_ELEMENTS if matrix.adds_zero_points() else PIECE_ELEMENTS
        return choose_packed_blocks(elements // width)
    if weight.resident_tiles is not None:
        return blocks(matrix.count_rows())
    elements = 2 * PIECE_ELEMENTS if occupies_vector(matrix) else PIECE_ELEMENTS
    blocks_per_piece = max(1, elements // width)
    return blocks_per_piece + blocks_per_piece % 2 if is_e4m3(x.dtype) else blocks_per_piece


def compute_chunk(product, x_parts, first_row, first_column, start=None, following=None):
    """Compute the chunk of y that begins at `first_row` and `first_column`.

    On one rank the chunk is stored to y. Else its partial sums are appended to the rank sum, which stores it
    later.

    Args:
        product: ResidualProduct.
        x_parts: for each matrix of the weight the stationary operand, an SBUF tile [k in block, block, row].
            It has all rows of the chunk, and of rows that are cut, those of every rank.
        first_row: first row of y, counted among the rows of one rank.
        first_column: first column of y; the chunk has as many as `count_chunk_columns` returns, or those that remain.
        start, following: ChunkStarts of the chunk and of the next one, or None. The next one is loaded before the sums
            are read out: the Vector engine unpacks it while it would wait for the sums.
    """
    rank_sum, weight = product.rank_sum, product.weight
    rows = x_parts[0].shape[2]
    chunk = view_chunk(product, rows, first_row, first_column)
    width = chunk.y.shape[1]
    in_groups = product.scales is not None or weight.matrices[0].scales_rows
    group_width = PARTITIONS
    if in_groups and not is_e4m3(x_parts[0].dtype):
        group_width = choose_group_width(rows)
    adds_zero_points = weight.matrices[0].adds_zero_points() and weight.resident_tiles is None
    if adds_zero_points:
        # Before the products, so that their last ones do not wait for the sums.
        product.find_negated_sums(x_parts)
    accumulators = allocate_accumulators(rows, width, count_tile_rows(rank_sum.sequence_ranks), group_width)
    for index in range(len(x_parts)):
        x = x_parts[index]
        k_blocks = blocks(weight.matrices[index].count_rows())
        blocks_per_piece = count_piece_blocks(weight, index, width, x)
        for k in range(0, k_blocks, blocks_per_piece):  # k: first K block of a piece
            piece = start.piece if start is not None and index == 0 and k == 0 else None
            if piece is None:
                piece = load_piece(weight.matrices[index], weight, k, blocks_per_piece, chunk.columns, x)
            # After the first piece in the queue, so that no product waits for it. A sum over ranks loads it later.
            load_gates(product.gate, chunk, first_row, rows, count_tile_rows(rank_sum.sequence_ranks))
            if rank_sum.replica_group is None:
                chunk.load_residual(rank_sum.sequence_ranks)
            if weight.matrices[index].scales_rows:
                matrix = select_columns(weight.matrices[index], chunk.columns[0], chunk.columns[1])
                accumulate_scaled(accumulators, x, piece, matrix, index > 0, group_width)
            elif group_width < PARTITIONS:
                accumulate_in_groups(accumulators, x, piece, index > 0, group_width)
            else:
                accumulate(accumulators, x, piece, index > 0, weight.tail_in_both_halves)
    if adds_zero_points:
        add_zero_points(accumulators, product, x_parts, chunk.columns, group_width)
    if following is not None:
        following.load()
    if rank_sum.replica_group is None:
        shape = (min(rows, PARTITIONS), blocks(rows), width)
        result = nl.ndarray(shape, dtype=product.y.dtype, buffer=nl.sbuf)
        add_residual(result, accumulators, chunk)
        # A store waits for its product, and in the queue of bulk loads the next weights would wait with it.
        store_rows_from(chunk.y, result, COMPILER)
    else:
        chunk.round_partial_sums(accumulators, rank_sum.sequence_ranks)
        rank_sum.append(chunk)


def add_zero_points(accumulators, product, x_parts, columns, group_width):
    """Add the term of the zero points to the accumulators of a chunk with the columns (first, end) of y, in PSUM.

    The weight has 4 bits. The other arguments are those of `compute_chunk` and `allocate_accumulators`.
    """
    sums = product.find_negated_sums(x_parts)
    for index in range(len(x_parts)):
        matrix = select_columns(product.weight.matrices[index], columns[0], columns[1])
        zero_points = load_zero_points([matrix], choose_operand_dtype([matrix], x_parts[index].dtype))
        piece = WeightPiece([zero_points], 0, zero_points.shape[0])
        x = sums[index].expand_dim(1)
        if group_width < PARTITIONS:
            accumulate_in_groups(accumulators, x, piece, True, group_width)
        else:
            accumulate(accumulators, x, piece, True, False)


def view_chunk(product, rows, first_row, first_column):
    """Return the OutputChunk at `first_row` and `first_column` of this rank's y; nothing is loaded or computed.

    It has views of y, residual, bias and row scales. rows: rows of the chunk, those of all ranks together.
    """
    ranks = product.rank_sum.sequence_ranks
    end_row = first_row + rows // ranks
    end_column = min(product.y.shape[1], first_column + count_chunk_columns(rows, ranks))
    residual, residual_tile = product.residual, product.residual_tile
    row_scales = product.row_scales
    return OutputChunk(
        product.y[first_row:end_row, first_column:end_column],
        (first_column, end_column),
        None if residual is None else residual[first_row:end_row, first_column:end_column],
        None if residual_tile is None else residual_tile[:, :, first_column:end_column],
        None if product.bias is None else product.bias[:, first_column:end_column],
        None if row_scales is None else row_scales[first_row // count_rows_per_rank(ranks) :],
        product.select_scales(first_column, end_column, min(rows, count_tile_rows(ranks))),
    )


def allocate_accumulators(rows, width, height, group_width=PARTITIONS):
    """Return Accumulators for `rows` rows and `width` columns: for each row tile one for every 512 columns.

    Accumulators have a PSUM bank each. With a group width below 128 the rows are one row tile, and accumulators
    for as many groups of columns of the PE array as there are share a bank, where each begins on the partition
    of its group. height: rows of a full row tile. The list is ordered by row tile.
    """
    accumulators = []
    for m in range(blocks(rows, height)):  # m: row tile
        for column in range(0, width, BANK):
            first = column // BANK * group_width % PARTITIONS
            tile_rows = min(height, rows - m * height)
            if first == 0:
                partitions = PARTITIONS if group_width < PARTITIONS else tile_rows
                bank = nl.ndarray((partitions, min(BANK, width - column)), dtype=nl.float32, buffer=nl.psum)
            view = bank[first : first + tile_rows, 0 : min(BANK, width - column)]
            accumulators.append(Accumulator(view, m, m * height, column))
    return accumulators


def load_piece(matrix, weight, first_block, count, columns, x):
    """Return a WeightPiece: `count` K blocks from `first_block` on of columns (first, end) of a matrix.

    Its dtype is the one in which products with x take the weight.

    The blocks are loaded into a new SBUF tile, or taken from the resident tiles of the weight. If the weight
    has its tail in both halves, a last block of 64 rows is loaded to both halves of the partitions.

    matrix: WeightMatrix, one of those of `weight`. x: the stationary operand, whose number of partitions the
    tile has.
    """
    first, last = columns
    start = first_block * PARTITIONS
    depth = matrix.count_rows()
    end = min(depth, start + count * PARTITIONS)
    if weight.resident_tiles is not None:
        return WeightPiece(load_resident_columns(weight, first, last, x.dtype), first_block, end - start)
    shape = (x.shape[0], blocks(end - start), last - first)
    tile = nl.ndarray(shape, dtype=choose_operand_dtype([matrix], x.dtype), buffer=nl.sbuf)
    load_blocks_into(tile, matrix.submatrix((start, end), columns), STATIC)
    if weight.tail_in_both_halves and end == depth:
        # Every second accumulator multiplies the tail in the upper half of the array, so its rows lie there as well.
        half = PARTITIONS // 2
        tail = tile[half:PARTITIONS, shape[1] - 1 :, :]
        load_blocks_into(tail, matrix.submatrix((end - half, end), columns), STATIC)
    return WeightPiece([tile], first_block, end - start)


def load_resident_columns(weight, first, last, dtype):
    """Return the tiles of a resident weight that hold columns first … last - 1; load those that are not in SBUF yet.

    Tiles are [k in block, block, column] in SBUF and of equal width. Loaded ones are appended to
    `weight.resident_tiles`. Those of a weight of 4 bits have lost their zero points.
    """
    matrix, tiles = weight.matrices[0], weight.resident_tiles
    depth, all_columns = matrix.count_rows(), matrix.elements.shape[1]
    width = BANK * max(1, min(ACCUMULATOR_BANKS, PIECE_ELEMENTS // (BANK * blocks(depth))))
    for start in range(len(tiles) * width, last, width):
        end = min(all_columns, start + width)
        columns = select_columns(matrix, start, end)
        if matrix.adds_zero_points():
            tiles.append(load_centred_blocks(columns, 0, blocks(depth), dtype, load_zero_rows(columns)))
        else:
            tiles.append(load_blocks(columns, choose_operand_dtype([matrix], dtype), STATIC))
        if weight.gate is not None:
            multiply_columns(tiles[len(tiles) - 1], weight.gate[:, start:end], depth)
    return tiles[first // width : blocks(last, width)]


def accumulate(accumulators, x, piece, add, tail_in_both_halves):
    """Add x @ piece, the product with a WeightPiece, to all accumulators of a chunk, in PSUM.

    Args:
        accumulators: Accumulators, each for some rows of x and some columns of the piece.
        x: SBUF tile [k in block, block, row] with all K blocks of the piece's matrix.
        piece: WeightPiece.
        add: whether the accumulators hold sums already; else the product with K block 0 overwrites them.
        tail_in_both_halves: whether x and the piece have a last K block of 64 rows on both halves of the
            partitions. It is then multiplied for two accumulators at once, each in half of the rows of the PE
            array.
    """
    full = piece.rows // PARTITIONS
    tail_rows = piece.rows - full * PARTITIONS
    tail_block = piece.first_block + full
    half = PARTITIONS // 2
    for i in range(len(accumulators)):
        stationary, moving = select_operands(accumulators[i], x, piece)
        paired = full - full % 2 if is_e4m3(x.dtype) else 0
        for k in range(0, paired, 2):  # k: first K block of a pair of fp8 blocks
            block = piece.first_block + k
            pair = stationary[:, block : block + 2, :]
            multiply_block_pair(accumulators[i].bank, pair, moving[:, k : k + 2, :], add or block > 0)
        for k in range(paired, full):  # k: K block of the piece
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
                stationary, moving = select_operands(accumulators[j], x, piece)
                first = half * (j % 2)
                nisa.nc_matmul(
                    dst=accumulators[j].bank,
                    stationary=stationary[first : first + half, tail_block, :],
                    moving=moving[first : first + half, full, :],
                    accumulate=add or tail_block > 0,
                    tile_position=(first, 0),
                    tile_size=(half, PARTITIONS),
                )


def accumulate_in_groups(accumulators, x, piece, add, group_width):
    """Add the product of few rows x and a piece of the weight to the accumulators of a chunk, in PSUM.

    Accumulators take groups of `group_width` columns of the PE array in turn. The matmuls of different groups
    follow each other, so that they run at the same time. The other arguments are those of `accumulate`.
    """
    for k in range(blocks(piece.rows)):  # k: K block of the piece
        used = min(PARTITIONS, piece.rows - k * PARTITIONS)
        for i in range(len(accumulators)):
            stationary, moving = select_operands(accumulators[i], x, piece)
            nisa.nc_matmul(
                dst=accumulators[i].bank,
                stationary=stationary[0:used, piece.first_block + k, :],
                moving=moving[0:used, k, :],
                accumulate=add or piece.first_block + k > 0,
                tile_position=(0, i * group_width % PARTITIONS),
                tile_size=(PARTITIONS, group_width),
            )


def select_operands(accumulator, x, piece):
    """Return views (stationary, moving) of an accumulator's rows of x and of its columns of a weight piece.

    Both are in SBUF and have all K blocks: [k in block, block, row] and [k in block, block, column].
    """
    rows, columns = accumulator.bank.shape
    tile_width = piece.tiles[0].shape[2]
    tile = piece.tiles[accumulator.first_column // tile_width]
    start = accumulator.first_column % tile_width
    first_row = accumulator.first_row
    return x[:, :, first_row : first_row + rows], tile[:, :, start : start + columns]


def add_residual(result, accumulators, chunk):
    """Write accumulators * scales + residual + bias to `result`, an SBUF tile [row in tile, row tile, column].

    chunk: OutputChunk with the scales of rows and columns, the residual in SBUF, the bias and the gates; those that
    are None are left out. With both residual and bias, chunk.residual_tile is overwritten with their sum.

    The Vector engine adds one of VECTOR_SHARE banks, the last one included. The Scalar engine copies the
    others to SBUF, where GpSimd adds. On gen2 these engines wait for each other at their ports, so the Vector
    engine adds all.
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
        column_scales = chunk.select_column_scales(m, rows, start, columns)
        addend = chunk.select_bias(m, rows, start, columns)
        if chunk.residual_tile is None and addend is None:
            copy_bank(dst, bank, from_last, vector_share, row_scale, column_scales)
            continue
        if chunk.residual_tile is not None:
            residual = chunk.residual_tile[0:rows, m, start : start + columns]
            if addend is not None:
                # The bias joins the residual in SBUF, so that one instruction empties a PSUM bank.
                nisa.tensor_tensor(dst=residual, data1=residual, data2=addend, op=nl.add)
            addend = residual
        if from_last % vector_share != 0 or column_scales is not None:
            # GpSimd reads no PSUM; the copy for it stays in float32, so that only the addition rounds.
            copied = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
            copy_bank(copied, bank, i, 0, row_scale, column_scales)
            engine = nisa.engine.vector if vector_share == 1 else nisa.engine.gpsimd
            nisa.tensor_tensor(dst=dst, data1=copied, data2=addend, op=nl.add, engine=engine)
        elif row_scale is None:
            nisa.tensor_tensor(dst=dst, data1=bank, data2=addend, op=nl.add)
        else:
            nisa.scalar_tensor_tensor(
                dst=dst, data=bank, op0=nl.multiply, operand0=row_scale, op1=nl.add, operand1=addend
            )
