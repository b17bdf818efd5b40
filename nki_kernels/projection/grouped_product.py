"""The last product of `mlp` and of `output_projection` for few rows and a weight with scales.

    y = residual + sum over ranks of scales * (x @ weight)

x is stationary, and its few rows take few columns of the PE array. So the array is divided into 2 or 4 *groups* of
64 or 32 columns. Each group multiplies other columns of the weight, at the same time. The sums of a group lie on the
partitions of its columns, so one PSUM bank holds the sums of all groups, and one instruction reads them. The columns
of y are cut into *chunks*, one for each bank. A chunk has `size` columns for each group: columns chunk * groups *
size + group * size … of y.

Residual, scales and results lie in SBUF as the sums do: row r of group g on partition g * width + r, [partition,
chunk, column of the group]. Over several ranks the scaled sums go to the rows' partitions, and `sums` does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, SCALAR, STATIC, transfer
from nki_kernels.nibbles import choose_packed_blocks
from nki_kernels.projection.scaled_rows import COPIES_AHEAD, RowCopies, add_scaled_piece, create_row_copies
from nki_kernels.projection.stacks import (
    StackedSums,
    choose_nibble_dtype,
    spread_rows,
)
from nki_kernels.projection.sums import OutputChunk
from nki_kernels.projection.zero_points import load_zero_points
from nki_kernels.tiles import BANK, PARTITIONS, blocks, copy_bank
from nki_kernels.weights import WeightMatrix, choose_operand_dtype, load_blocks_into

PIECE_ELEMENTS = 1024
"""Elements per partition of one loaded piece of the weight, see `residual_product`."""

PACKED_ELEMENTS = 8 * PIECE_ELEMENTS
"""Elements per partition of one loaded piece of a weight of 4 bits: as few instructions as memory allows unpack it."""

COPY_SHARE = 2
"""The Vector engine copies one of so many groups of sums over ranks, the Scalar engine the others."""


@dataclass
class GroupLayout(nl.NKIObject):
    """How columns of y lie in groups.

    width: columns of the PE array of a group. chunks: number of chunks. size: columns of a group in a chunk.
    """

    width: int
    chunks: int
    size: int

    def count_groups(self):
        """Return the number of groups of columns of the PE array, 2 or 4."""
        return PARTITIONS // self.width

    def count_columns(self):
        """Return the columns of y in a chunk."""
        return self.count_groups() * self.size

    def view_group(self, rows, group):
        """View the columns of a group in [row, N] @ HBM: [row, chunk, column of the group]."""
        return rows.reshape_dim(1, (self.chunks, self.count_groups(), self.size))[:, :, group, :]


@dataclass
class GroupedOperands(nl.NKIObject):
    """Operands in SBUF, [partition, chunk, column of the group]: float32 scales and the residual, or None for either.

    copies: RowCopies of a product with block scales, else None. lines: of a weight of 4 bits the scales on the first
    partition of each quadrant, until `spread` has run; else None.
    """

    scales: nl.NkiTensor | None
    residual: nl.NkiTensor | None
    lines: nl.NkiTensor | None = None
    copies: RowCopies | None = None

    def spread(self):
        """Copy the scales to all partitions, if that is still to do."""
        if self.lines is not None:
            spread_lines(self.scales, self.lines)
            self.lines = None


def choose_group_width(rows):
    """Return the narrowest group of columns of the PE array that `rows` rows fit into: 32 (not on gen2), 64 or 128."""
    narrowest = PARTITIONS // 2 if nisa.get_nc_version() == nisa.nc_version.gen2 else PARTITIONS // 4
    if rows <= narrowest:
        return narrowest
    return PARTITIONS // 2 if rows <= PARTITIONS // 2 else PARTITIONS


def plan_groups(rows, columns, unit=1):
    """Return the GroupLayout of `columns` columns of y for `rows` rows; None if there is none.

    There is none for more than 64 rows, and where no number of chunks cuts the columns into equal parts of whole units
    of `unit` columns.
    """
    width = choose_group_width(rows)
    groups = PARTITIONS // width
    fewest = blocks(columns, groups * BANK)
    if groups > 1:
        for chunks in range(fewest, 2 * fewest + 1):
            if columns % (groups * chunks * unit) == 0:
                return GroupLayout(width, chunks, columns // (groups * chunks))
    return None


def load_operands(product, layout, residual_rows, queue=SCALAR):
    """Load scales and residual of a ResidualProduct into SBUF; return GroupedOperands. A row of scales fills its group.

    residual_rows: the residual [row, N] in SBUF if it is there, which is copied; None to load it.
    Over several ranks the residual is loaded later. queue: queue of `dma` of the scales. Scalar triggers small
    loads, so that the first weights do not wait behind them.
    """
    rows, shape = product.y.shape[0], (PARTITIONS, layout.chunks, layout.size)
    residual, scales, lines, copies = None, None, None, None
    # The Vector engine unpacks weights of 4 bits, and GpSimd and its fast modes exclude each other.
    is_packed = product.weight.matrices[0].nibbles is not None
    fill_engine = nisa.engine.vector if is_packed else nisa.engine.gpsimd
    if product.residual is not None and product.rank_sum.replica_group is None:
        residual = nl.ndarray(shape, dtype=product.y.dtype, buffer=nl.sbuf)
        if rows < layout.width:
            # One instruction adds all partitions, so those without a row of y hold zeros.
            nisa.memset(dst=residual, value=0.0, engine=fill_engine)
    if product.scales is not None:
        scales = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        lines = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        for first in range(0, PARTITIONS, PARTITIONS // 4):
            row = layout.view_group(product.scales, first // layout.width)
            transfer(lines[first : first + 1, :, :], row, queue)
        if not is_packed:
            spread_lines(scales, lines)
            lines = None
    elif product.weight.matrices[0].scales_rows:
        piece = list_pieces(product, layout)[0].matrix
        columns = blocks(layout.count_columns())
        height = min(PARTITIONS, piece.count_rows())
        copy_shape = (height, blocks(piece.count_rows()), columns, layout.width)
        copies = create_row_copies(copy_shape, product.y.dtype, rows, 2 * COPIES_AHEAD)
    for group in range(layout.count_groups()):
        first = group * layout.width
        if residual is not None and residual_rows is None:
            transfer(residual[first : first + rows, :, :], layout.view_group(product.residual, group), SCALAR)
        elif residual is not None:
            source = layout.view_group(residual_rows, group)
            target = residual[first : first + rows, :, :]
            if is_packed:
                nisa.activation(dst=target, op=nl.copy, data=source)
            else:
                nisa.tensor_copy(dst=target, src=source, engine=nisa.engine.gpsimd)
    return GroupedOperands(scales, residual, lines, copies)


def spread_lines(dst, lines):
    """Copy the first partition of each quadrant of an SBUF tile to all partitions of the quadrant, in `dst`."""
    # One instruction serves the four quadrants.
    for chunk in range(lines.shape[1]):
        nisa.nc_stream_shuffle(
            dst=dst[:, chunk, :], src=lines[:, chunk, :], shuffle_mask=[0] * (PARTITIONS // 4)
        )


@dataclass
class ChunkPiece(nl.NKIObject):
    """Some K blocks of the weight's columns of a chunk.

    chunk: the chunk. matrix_index: that of the weight's matrix. first_block: the first K block. matrix: the
    WeightMatrix of these rows and columns. is_first, is_last: whether the chunk begins or ends with the piece.
    ends_part: whether it is the last one of its matrix.
    """

    chunk: int
    matrix_index: int
    first_block: int
    matrix: WeightMatrix
    is_first: bool
    is_last: bool
    ends_part: bool

    def load(self, height, dtype):
        """Load the piece into a new SBUF tile [k in block, block, column] of `height` partitions, for `dtype` rows."""
        depth, columns = self.matrix.count_rows(), self.matrix.elements.shape[1]
        operand_dtype = choose_nibble_dtype([self.matrix], dtype)
        tile = nl.ndarray((height, blocks(depth), columns), dtype=operand_dtype, buffer=nl.sbuf)
        load_blocks_into(tile, self.matrix, STATIC)
        return tile


def list_pieces(product, layout):
    """Return the ChunkPieces of all chunks of a ResidualProduct, in the order in which they are multiplied."""
    columns, matrices = layout.count_columns(), product.weight.matrices
    blocks_per_piece = max(1, PIECE_ELEMENTS // columns)
    if matrices[0].nibbles is not None:
        blocks_per_piece = choose_packed_blocks(PACKED_ELEMENTS // columns)
    pieces = []
    for chunk in range(layout.chunks):
        for matrix_index in range(len(matrices)):
            depth = matrices[matrix_index].count_rows()
            for first_block in range(0, blocks(depth), blocks_per_piece):
                start = first_block * PARTITIONS
                end = min(depth, start + blocks_per_piece * PARTITIONS)
                matrix = matrices[matrix_index].submatrix(
                    (start, end), (chunk * columns, (chunk + 1) * columns)
                )
                is_first, ends_part = matrix_index == 0 and start == 0, end == depth
                is_last = ends_part and matrix_index + 1 == len(matrices)
                pieces.append(
                    ChunkPiece(chunk, matrix_index, first_block, matrix, is_first, is_last, ends_part)
                )
    return pieces


def multiply_in_groups(product, operands, x_parts, layout, loaded=None):
    """Write y of a ResidualProduct: the product of few rows and its weight, with scales and residual.

    Args:
        product: ResidualProduct without bias and row scales, whose rows are not cut and whose weight streams through
            SBUF.
        operands: GroupedOperands.
        x_parts: for each matrix of the weight the stationary operand, an SBUF tile [k in block, block, row] with
            `layout.width` rows, zeros behind those of y.
        layout: GroupLayout of y's columns.
        loaded: list of the first pieces of the weight, as far as they are in SBUF; it is emptied. None for none.
    """
    pieces = list_pieces(product, layout)
    # The Vector engine unpacks the next piece, or copies its rows, before it reads out a chunk, for which it waits.
    is_packed, scales_rows = product.weight.matrices[0].nibbles is not None, operands.copies is not None
    ahead = 1 if is_packed else 0
    if scales_rows:
        ahead = COPIES_AHEAD
    loaded = [] if loaded is None else loaded
    bank, zero_points, stacks, copies = None, [], [], []
    adds_zero_points = product.weight.matrices[0].adds_zero_points()
    scales_groups = is_packed and not adds_zero_points
    for index in range(len(pieces)):
        piece = pieces[index]
        if piece.is_first:
            bank = nl.ndarray((PARTITIONS, layout.size), dtype=nl.float32, buffer=nl.psum)
        for following in range(index, min(len(pieces), index + ahead + 1)):
            if scales_groups and following == index + len(stacks):
                stacks.append(request_sums(product, pieces[following], stacks, x_parts, layout))
            if following == index + len(loaded):
                x = x_parts[pieces[following].matrix_index]
                loaded.append(pieces[following].load(x.shape[0], x.dtype))
            if scales_rows and following == index + len(copies):
                copies.append(copy_piece_rows(product, operands, pieces[following], x_parts))
        if scales_rows:
            depth = piece.matrix.count_rows()
            add_scaled_piece(bank, copies.pop(0), loaded.pop(0), depth, not piece.is_first, layout)
        elif scales_groups:
            add_stacked_piece(bank, piece, loaded.pop(0), stacks.pop(0), layout)
        else:
            add_piece(bank, product, piece, loaded.pop(0), x_parts, layout)
        if index == 0 and adds_zero_points:
            # Behind the first products, so that neither they nor the last ones wait for the sums.
            product.find_negated_sums(x_parts)
            for matrix in product.weight.matrices:
                zero_points.append(
                    load_zero_points([matrix], choose_operand_dtype([matrix], x_parts[0].dtype))
                )
        if piece.ends_part and adds_zero_points:
            first = piece.chunk * layout.count_columns()
            block = zero_points[piece.matrix_index][:, 0, first : first + layout.count_columns()]
            add_block(bank, product.find_negated_sums(x_parts)[piece.matrix_index], block, True, layout)
        if piece.is_last:
            operands.spread()
            if product.rank_sum.replica_group is None:
                store_chunk(product, operands, bank, piece.chunk, layout)
            else:
                append_chunk(product, operands, bank, piece.chunk, layout)


def copy_piece_rows(product, operands, piece, x_parts):
    """Return copies of the rows that a ChunkPiece multiplies, times its block scales, see `RowCopies.make`.

    The other arguments are those of `multiply_in_groups`.
    """
    x = x_parts[piece.matrix_index][:, :, 0 : product.y.shape[0]]
    return operands.copies.make(x, piece.matrix, piece.first_block)


def add_piece(bank, product, piece, tile, x_parts, layout):
    """Add the product of a ChunkPiece in SBUF, [k in block, block, column], to a PSUM bank; the first overwrites it.

    bank: [partition, column of the group]. The other arguments are those of `multiply_in_groups`.
    """
    matrix, x = piece.matrix, x_parts[piece.matrix_index]
    for k in range(tile.shape[1]):  # k: K block of the piece
        used = min(PARTITIONS, matrix.count_rows() - k * PARTITIONS)
        accumulate = not piece.is_first or k > 0
        add_block(bank, x[0:used, piece.first_block + k, :], tile[0:used, k, :], accumulate, layout)


def request_sums(product, piece, requested, x_parts, layout):
    """Return the StackedSums that a ChunkPiece adds to, with the scales of its stacks on their way to SBUF.

    requested: StackedSums of the pieces before, in a list. The other arguments are those of `multiply_in_groups`.
    """
    sums = (
        requested[len(requested) - 1] if piece.first_block > 0 else plan_sums(product, piece, x_parts, layout)
    )
    sums.load_rows(piece.first_block, piece.first_block + blocks(piece.matrix.count_rows()))
    return sums


def plan_sums(product, piece, x_parts, layout):
    """Return the StackedSums of the chunk and matrix that a ChunkPiece begins; the first chunk spreads the rows.

    The arguments are those of `multiply_in_groups`.
    """
    matrix = product.weight.matrices[piece.matrix_index]
    if product.spread is None:
        product.spread = []
    if len(product.spread) == piece.matrix_index:
        x = x_parts[piece.matrix_index]
        product.spread.append(spread_rows(x, product.y.shape[0], layout.width, matrix.nibbles))
    scales, zeros = [], matrix.nibbles.zeros
    for group in range(layout.count_groups()):
        scales.append(layout.view_group(matrix.nibbles.scales, group)[:, piece.chunk, :])
    if zeros is not None:
        zeros = zeros[:, piece.chunk * layout.count_columns() : (piece.chunk + 1) * layout.count_columns()]
    return StackedSums(product.spread[piece.matrix_index], [scales], [zeros], [], [], [], 0)


def add_stacked_piece(bank, piece, tile, sums, layout):
    """Add the product of a ChunkPiece in SBUF, times the scales of its groups, to a PSUM bank, see `stacks`.

    sums: StackedSums of the chunk and matrix. The other arguments are those of `add_piece`.
    """
    for k in range(tile.shape[1]):  # k: K block of the piece
        block = piece.first_block + k
        used = min(PARTITIONS, piece.matrix.count_rows() - k * PARTITIONS)
        begins = sums.begin_block(block, layout.size)
        add_block(sums.banks[0], sums.rows.tile[0:used, block, :], tile[0:used, k, :], not begins, layout)
        zero_block = sums.find_zero_block(block)
        if zero_block is not None:
            add_block(sums.banks[0], zero_block[0], zero_block[1][:, 0, :], True, layout)
        sums.end_block(block, [bank], piece.matrix_index > 0)
    if piece.ends_part:
        sums.add_scaled([bank], piece.matrix_index > 0)


def add_block(bank, x, weight, accumulate, layout):
    """Add the product of one block of the contraction to a PSUM bank of a chunk; write it unless `accumulate`.

    bank: [partition, column of the group]. x: [k in block, row] in SBUF. weight: [k in block, column of the chunk].
    """
    # Matmuls of different groups follow each other, so that they run at the same time.
    for group in range(layout.count_groups()):
        first = group * layout.width
        nisa.nc_matmul(
            dst=bank[first : first + x.shape[1], :],
            stationary=x,
            moving=weight[:, group * layout.size : (group + 1) * layout.size],
            accumulate=accumulate,
            tile_position=(0, first),
            tile_size=(PARTITIONS, layout.width),
        )


def append_chunk(product, operands, bank, chunk, layout):
    """Append scales * sums of a chunk to the rank sum. bank: PSUM tile [partition, column of the group]."""
    rows, width = product.y.shape[0], layout.count_groups() * layout.size
    first, end = chunk * width, (chunk + 1) * width
    residual = None if product.residual is None else product.residual[:, first:end]
    appended = OutputChunk(product.y[:, first:end], (first, end), residual, None, None, None, None)
    appended.partial = nl.ndarray((rows, 1, width), dtype=product.y.dtype, buffer=nl.sbuf)
    appended.total = nl.ndarray((rows, 1, width), dtype=product.y.dtype, buffer=nl.sbuf)
    for group in range(layout.count_groups()):
        partition = group * layout.width
        target = appended.partial[:, 0, group * layout.size : (group + 1) * layout.size]
        sums = bank[partition : partition + rows, :]
        if operands.scales is None:
            # The Vector engine is busy with scales of groups, so that the Scalar engine copies all sums then.
            copy_bank(target, sums, group, 0 if operands.copies is None else COPY_SHARE)
            continue
        scales = operands.scales[partition : partition + rows, chunk, :]
        nisa.tensor_tensor(dst=target, data1=sums, data2=scales, op=nl.multiply)
    product.rank_sum.append(appended)


def store_chunk(product, operands, bank, chunk, layout):
    """Store residual + scales * sums of a chunk to y @ HBM. bank: PSUM tile [partition, column of the group]."""
    rows = product.y.shape[0]
    y_tile = nl.ndarray(bank.shape, dtype=product.y.dtype, buffer=nl.sbuf)
    if operands.scales is None and operands.residual is None:
        nisa.activation(dst=y_tile, op=nl.copy, data=bank)
    elif operands.scales is None:
        nisa.tensor_tensor(dst=y_tile, data1=bank, data2=operands.residual[:, chunk, :], op=nl.add)
    elif operands.residual is None:
        nisa.tensor_tensor(dst=y_tile, data1=bank, data2=operands.scales[:, chunk, :], op=nl.multiply)
    else:
        scaled = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=scaled, data1=bank, data2=operands.scales[:, chunk, :], op=nl.multiply)
        # On gen2 GpSimd and the Vector engine wait for each other at their port, so the Vector engine adds.
        gen2 = nisa.get_nc_version() == nisa.nc_version.gen2
        engine = nisa.engine.vector if gen2 else nisa.engine.gpsimd
        residual = operands.residual[:, chunk, :]
        nisa.tensor_tensor(dst=y_tile, data1=scaled, data2=residual, op=nl.add, engine=engine)
    for group in range(layout.count_groups()):
        first = group * layout.width
        # A store waits for its product, and in the queue of bulk loads the next weights would wait with it.
        transfer(layout.view_group(product.y, group)[:, chunk, :], y_tile[first : first + rows, :], COMPILER)
