"""The gate and up product of few rows and weights of 4 bits: x is stationary, in groups of columns of the PE array.

Weights of 4 bits arrive faster than the Tensor engine multiplies them as stationary operands, 128 columns at a time.
Here x is stationary and the weights move. The few rows of x take few columns of the PE array, so the array is divided
into 2 or 4 *groups*, which multiply different columns of the weights at the same time, as in `grouped_product`.

The columns of the intermediate are cut into *pieces* of 32, 64 or 128, which the groups take in turn: piece i * groups
+ g is group g's i-th. A *unit* is some pieces of every group, whose sums of gate fill up to one PSUM bank. Row r of
group g lies on partition g * width + r, so one instruction reads the sums of all groups. The gated sums are transposed
piece by piece into the intermediate, [f in block, block, row].
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.nibbles import choose_packed_blocks
from nki_kernels.norms.norm import compute_inverse_root
from nki_kernels.projection.gated_product import GatedUnit, GateLayout, load_piece, select_unit_columns
from nki_kernels.projection.grouped_product import choose_group_width
from nki_kernels.projection.stacks import (
    StackedSums,
    choose_nibble_dtype,
    count_columns_of_rows,
    spread_rows,
)
from nki_kernels.projection.zero_points import load_zero_points
from nki_kernels.tiles import BANK, BANK_BYTES, PARTITIONS, blocks, count_block_partitions, filled

QUADRANT = PARTITIONS // 4
"""Partitions within which a stream shuffle copies."""

LOADED_BYTES = 4096
"""Most bytes per partition of one loaded piece of the packed weights, for each of gate and up."""


def plan_gate_groups(weights, rows, biases):
    """Return the GateLayout for `rows` rows of x; None if the product takes no groups.

    It takes none for weights that do not have 4 bits, with biases, for more than 64 rows, or fewer with scales of
    groups, see `count_columns_of_rows`, and where no piece cuts the columns into equal parts.

    weights: list of WeightMatrix. biases: those of gate and up, each maybe None.
    """
    width = choose_group_width(count_columns_of_rows(rows, weights[0]))
    groups = PARTITIONS // width
    if weights[0].nibbles is None or biases[0] is not None or biases[1] is not None or groups == 1:
        return None
    columns = weights[0].elements.shape[1]
    for piece in (128, 64, 32):
        # Pieces of all groups together fill whole blocks of the intermediate.
        if columns % (groups * piece) == 0 and groups * piece % PARTITIONS == 0:
            pieces = columns // (groups * piece)
            return GateLayout(width, rows, piece, pieces, min(pieces, BANK // piece))
    return None


def load_group_scales(product):
    """Load the scales of a GatedProduct with a layout in groups, into `product.scales`, if columns have scales.

    They become float32 tiles [partition, piece, column] in SBUF, in which the first partition of each quadrant has the
    scales of its group. `spread_group_scales` copies them to the others, once the first weights are unpacked.
    """
    layout = product.layout
    if not product.weights[0].adds_zero_points():
        return
    for side in range(len(product.weights)):
        shape = (PARTITIONS, layout.pieces, layout.piece)
        lines = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        rows = product.weights[side].scales.reshape_dim(
            1, (layout.pieces, layout.count_groups(), layout.piece)
        )
        for first in range(0, PARTITIONS, QUADRANT):
            transfer(lines[first : first + 1, :, :], rows[:, :, first // layout.width, :], SCALAR)
        # Up is the last weight, and has the second place also where there is no gate.
        product.scales[2 - len(product.weights) + side] = lines


def spread_group_scales(product, first_piece, end_piece):
    """Return the scales of some pieces of every group for each weight of a GatedProduct, [partition, column] in SBUF.

    A row of scales fills its group.
    """
    layout = product.layout
    columns = (end_piece - first_piece) * layout.piece
    tiles = []
    for side in range(len(product.weights)):
        lines = product.scales[2 - len(product.weights) + side][:, first_piece:end_piece, :]
        spread = nl.ndarray((PARTITIONS, columns), dtype=nl.float32, buffer=nl.sbuf)
        # Within each quadrant the first partition is copied to all, in one instruction for the four quadrants.
        nisa.nc_stream_shuffle(
            dst=spread, src=lines.reshape((PARTITIONS, columns)), shuffle_mask=[0] * QUADRANT
        )
        tiles.append(spread)
    return tiles


def create_unit(product, first_column):
    """Return a GatedUnit of a GatedProduct with a layout, from column `first_column` on, without banks."""
    end_column = min(product.inner, first_column + product.layout.count_unit_columns())
    return GatedUnit(first_column, end_column, end_column - first_column, 1, [], None)


def count_group_blocks(unit):
    """Return how many K blocks of a GatedUnit's columns are loaded at a time."""
    return choose_packed_blocks(2 * LOADED_BYTES // (unit.end_column - unit.first_column))


def load_group_piece(product, first_column, dtype, first_block=0):
    """Load K blocks of a unit's columns from `first_block` on; return [h in block, weight, block, column] in SBUF.

    product: GatedProduct with a layout. first_column: the unit's. dtype: that of x.
    """
    unit = create_unit(product, first_column)
    count = min(blocks(product.hidden) - first_block, count_group_blocks(unit))
    if product.early_pieces is not None and first_column == 0:
        index = first_block // count_group_blocks(unit)
        if index < len(product.early_pieces):
            return product.early_pieces[index]
    shape = (min(PARTITIONS, product.hidden), len(product.weights), count, unit.end_column - first_column)
    piece = nl.ndarray(shape, dtype=choose_nibble_dtype(product.weights, dtype), buffer=nl.sbuf)
    load_piece(piece, unit, product, first_block)
    return piece


def accumulate_group_unit(product, x, first_column, piece=None):
    """Load a unit's columns of the weights and multiply them by x; return a GatedUnit with the sums in PSUM.

    Args:
        product: GatedProduct with a layout, whose weights have 4 bits.
        x: [h in block, block, row] in SBUF with `layout.width` rows, zeros behind those that count.
        first_column: a multiple of the columns of a unit.
        piece: the first piece, if `load_group_piece` has loaded it already; else None.
    """
    layout = product.layout
    unit = create_unit(product, first_column)
    columns = (unit.end_column - first_column) // layout.count_groups()
    for _ in range(len(product.weights)):
        unit.banks.append(nl.ndarray((PARTITIONS, columns), dtype=nl.float32, buffer=nl.psum))
    if not product.weights[0].adds_zero_points():
        accumulate_stacks(product, unit, x, piece)
        return unit
    count = count_group_blocks(unit)
    # Before the products, so that the Vector engine has the sums when it has unpacked the next piece.
    product.start_negated_sums(x)
    zero_points = load_zero_points(
        select_unit_columns(unit, product), choose_nibble_dtype(product.weights, x.dtype)
    )
    for first_block in range(0, blocks(product.hidden), count):
        if piece is None:
            piece = load_group_piece(product, first_column, x.dtype, first_block)
        for k in range(piece.shape[2]):  # k: K block of the piece
            used = count_block_partitions(product.hidden, first_block + k, False)
            block = x[0:used, first_block + k, :]
            add_group_block(unit.banks, block, piece[0:used, :, k, :], first_block + k > 0, layout)
        if first_block > 0:
            # Amid the products, so that neither they nor the last ones wait for the sums.
            product.find_negated_sums(x)
        piece = None
    add_group_block(unit.banks, product.find_negated_sums(x), zero_points, True, layout)
    return unit


def accumulate_stacks(product, unit, x, piece):
    """Write the sums of a GatedUnit whose weights have scales of groups to its banks, see `stacks`.

    The arguments are those of `accumulate_group_unit`.
    """
    if product.spread is None:
        product.spread = spread_rows(x, product.layout.rows, product.layout.width, product.weights[0].nibbles)
    scales, zeros = [], []
    for weight in select_unit_columns(unit, product):
        scales.append(view_pieces(weight.nibbles.scales, product.layout))
        zeros.append(weight.nibbles.zeros)
    sums = StackedSums(product.spread, scales, zeros, [], [], [], 0)
    count, columns = count_group_blocks(unit), unit.banks[0].shape[1]
    sums.load_rows(0, count)
    if piece is None:
        piece = load_group_piece(product, unit.first_column, x.dtype)
    for first_block in range(0, blocks(product.hidden), count):
        following = None
        if first_block + count < blocks(product.hidden):
            # The Vector engine unpacks the next piece before it scales sums, for which it waits.
            sums.load_rows(first_block + count, first_block + 2 * count)
            following = load_group_piece(product, unit.first_column, x.dtype, first_block + count)
        for k in range(piece.shape[2]):  # k: K block of the piece
            block = first_block + k
            used = count_block_partitions(product.hidden, block, False)
            begins = sums.begin_block(block, columns)
            rows = product.spread.tile[0:used, block, :]
            add_group_block(sums.banks, rows, piece[0:used, :, k, :], not begins, product.layout)
            zero_block = sums.find_zero_block(block)
            if zero_block is not None:
                add_group_block(sums.banks, zero_block[0], zero_block[1], True, product.layout)
            sums.end_block(block, unit.banks, False)
        piece = following
    sums.add_scaled(unit.banks, False)


def view_pieces(rows, layout):
    """View the columns of each group in rows [row, column] @ HBM of a unit: a list of [row, piece, column]."""
    shape = (rows.shape[1] // (layout.count_groups() * layout.piece), layout.count_groups(), layout.piece)
    views = []
    for group in range(layout.count_groups()):
        views.append(rows.reshape_dim(1, shape)[:, :, group, :])
    return views


def finish_group_unit(product, unit, intermediate):
    """Write activation(x @ w_gate) * (x @ w_up) to the SBUF tile `intermediate`, for the columns of a GatedUnit.

    intermediate: [f in block, block, row] with all columns of the product, for the rows of x that count.
    """
    gated = gate_sums(unit, product, intermediate.dtype)
    transpose_pieces(intermediate, gated, unit.first_column, product.layout)


def add_group_block(banks, x, weights, accumulate, layout):
    """Add the products of one block of the contraction to banks, one for each weight; write them unless `accumulate`.

    banks: PSUM tiles [partition, column]. x: [h in block, row] in SBUF. weights: [h in block, weight, column] in SBUF
    with the columns of a unit.
    """
    groups = layout.count_groups()
    columns = weights.shape[2]
    shape = (columns // (groups * layout.piece), groups, layout.piece)
    for side in range(len(banks)):  # gate, up
        pieces = weights[:, side, :].reshape_dim(1, shape)
        # Matmuls of different groups follow each other, so that they run at the same time.
        for group in range(groups):
            first = group * layout.width
            bank = banks[side][first : first + x.shape[1], :]
            nisa.nc_matmul(
                dst=bank.reshape_dim(1, (shape[0], layout.piece)),
                stationary=x,
                moving=pieces[:, :, group, :],
                accumulate=accumulate,
                tile_position=(0, first),
                tile_size=(PARTITIONS, layout.width),
            )


def gate_sums(unit, product, dtype):
    """Return activation(gate) * up of a GatedUnit in groups, [partition, column] in SBUF of `dtype`.

    gate and up are the sums times the factors of their rows, if there are any, and the scales, if columns have some.
    """
    layout, factors = product.layout, product.group_factors
    if not product.weights[0].adds_zero_points():
        return gate_scaled_sums(unit, product, dtype)
    first = unit.first_column // (layout.count_groups() * layout.piece)
    columns = unit.banks[0].shape[1]
    end = first + columns // layout.piece
    gated = nl.ndarray((PARTITIONS, columns), dtype=dtype, buffer=nl.sbuf)
    scales, scaled = spread_group_scales(product, first, end), []
    for side in range(len(unit.banks)):
        tile = nl.ndarray((PARTITIONS, columns), dtype=nl.float32, buffer=nl.sbuf)
        if factors is None:
            nisa.tensor_tensor(dst=tile, data1=unit.banks[side], data2=scales[side], op=nl.multiply)
        else:
            nisa.scalar_tensor_tensor(
                dst=tile,
                data=unit.banks[side],
                op0=nl.multiply,
                operand0=factors,
                op1=nl.multiply,
                operand1=scales[side],
            )
        scaled.append(tile)
    if len(scaled) == 1:
        nisa.activation(dst=gated, op=product.activation, data=scaled[0])
        return gated
    gate = nl.ndarray((PARTITIONS, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=gate, op=product.activation, data=scaled[0])
    nisa.tensor_tensor(dst=gated, data1=gate, data2=scaled[1], op=nl.multiply)
    return gated


def gate_scaled_sums(unit, product, dtype):
    """Return what `gate_sums` returns for weights with scales of groups, which the sums in PSUM contain."""
    factors = 1.0 if product.group_factors is None else product.group_factors
    gated = nl.ndarray(unit.banks[0].shape, dtype=dtype, buffer=nl.sbuf)
    if len(unit.banks) == 1:
        nisa.activation(dst=gated, op=product.activation, data=unit.banks[0], scale=factors)
        return gated
    gate = nl.ndarray(unit.banks[0].shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=gate, op=product.activation, data=unit.banks[0], scale=factors)
    nisa.scalar_tensor_tensor(
        dst=gated, data=unit.banks[1], op0=nl.multiply, operand0=factors, op1=nl.multiply, operand1=gate
    )
    return gated


def compute_group_factors(tile, product, eps):
    """Return the factors 1 / rms of rows for all groups, a float32 column [128, 1] in SBUF, with zeros for no row.

    tile: rows [row, H] in SBUF, at most `layout.width`. product: GatedProduct with a layout. eps: the norm's.
    """
    rows, hidden = tile.shape
    squares = nl.ndarray(tile.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    sums = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    factors, eps_column = filled((PARTITIONS, 1), 0.0), filled((PARTITIONS, 1), eps)
    nisa.activation_reduce(dst=squares, op=nl.square, data=tile, reduce_op=nl.add, reduce_res=sums)
    for first in range(0, PARTITIONS, product.layout.width):
        compute_inverse_root(sums, 1.0 / hidden, eps_column, factors[first : first + rows, :])
    # The Scalar engine loads the tables of the activation now, instead of when the sums wait for it.
    nisa.activation(dst=sums, op=product.activation, data=sums)
    return factors


def transpose_pieces(intermediate, gated, first_column, layout):
    """Transpose gated sums [partition, column] in SBUF on the Tensor engine into a unit's blocks of `intermediate`.

    As many pieces as fit share a PSUM bank. A block of the intermediate has 128 // piece pieces, those of neighbouring
    groups, each on its partitions.
    """
    groups, piece = layout.count_groups(), layout.piece
    rows = intermediate.shape[2]
    pieces_per_block = PARTITIONS // piece
    blocks_per_turn = groups // pieces_per_block  # all groups' pieces with one index are so many blocks
    itemsize = 4 if gated.dtype == nl.float32 else 2
    per_bank = BANK_BYTES // itemsize // PARTITIONS
    count = gated.shape[1] // piece
    first_block = first_column // PARTITIONS
    for first in range(0, count, per_bank):
        end = min(count, first + per_bank)
        bank = nl.ndarray((piece, end - first, PARTITIONS), dtype=gated.dtype, buffer=nl.psum)
        for index in range(first, end):
            nisa.nc_transpose(
                dst=bank[:, index - first, :], data=gated[:, index * piece : (index + 1) * piece]
            )
        sums = bank.reshape_dim(2, (groups, layout.width))
        blocks_range = slice(first_block + first * blocks_per_turn, first_block + end * blocks_per_turn)
        for position in range(pieces_per_block):
            target = intermediate[position * piece : (position + 1) * piece, blocks_range, :]
            nisa.tensor_copy(
                dst=target.reshape_dim(1, (end - first, blocks_per_turn)),
                src=sums[:, :, position:groups:pieces_per_block, 0:rows],
            )
