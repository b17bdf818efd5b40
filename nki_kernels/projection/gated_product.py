"""The first products of a feed-forward block: activation(x @ w_gate) * (x @ w_up), or activation(x @ w_up).

The result is the *intermediate*, with F columns. The weights are stationary and the rows of x move. So the
intermediate is [f in block, block, row] in SBUF, the form in which the product with w_down takes it: column f
lies on partition f % 128, in block f // 128.

The columns are computed in *units*, whose sums fill half of the PSUM banks. A bank holds the sums of as many
blocks of 128 columns as fit: one for 512 rows. If the last block of F has 32 or 64 columns, gate and up share
one bank for it, the *packed bank*: gate's sums lie on the lower half of its partitions, up's on the upper
half. One stationary tile with the columns of both weights computes it.

`mlp` and the decode kernels call `compute_unit` for each unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, STATIC, transfer
from nki_kernels.nibbles import choose_packed_blocks
from nki_kernels.norms.runs import RowFactors
from nki_kernels.projection.products import multiply_block_pair
from nki_kernels.projection.row_groups import trigger_loads
from nki_kernels.projection.scaled_rows import copy_rows, select_block
from nki_kernels.projection.stacks import SpreadRows
from nki_kernels.projection.zero_points import (
    NegatedSums,
    add_up_rows,
    fill_minus_ones,
    load_zero_points,
)
from nki_kernels.tiles import ACCUMULATOR_BANKS, BANK, PARTITIONS, blocks, count_block_partitions
from nki_kernels.weights import (
    choose_operand_dtype,
    is_e4m3,
    load_blocks_into,
    load_runs_into,
    occupies_vector,
    select_columns,
)

UNIT_COLUMNS = 2048
"""The most columns of each weight that are multiplied at a time."""

PIECE_ELEMENTS = 1024
"""Most elements per partition of one loaded piece of a weight, for each of gate and up: 256 KiB in bfloat16."""


@dataclass
class GateLayout(nl.NKIObject):
    """How columns of the intermediate lie in groups.

    width: columns of the PE array of a group. rows: rows of x. piece: columns of the intermediate in a piece. pieces:
    pieces of a group. pieces_per_unit: the most pieces of a group in a unit.
    """

    width: int
    rows: int
    piece: int
    pieces: int
    pieces_per_unit: int

    def count_groups(self):
        """Return the number of groups of columns of the PE array, 2 or 4."""
        return PARTITIONS // self.width

    def count_unit_columns(self):
        """Return the columns of the intermediate in a unit; the last unit may have fewer."""
        return self.count_groups() * self.piece * self.pieces_per_unit


@dataclass
class GatedProduct(nl.NKIObject):
    """What all units of the product share.

    weights: the WeightMatrix [hidden, inner] of gate and the one of up, or that of up alone. biases, scales:
    those of gate and up as `load_bias_columns` returns them, each maybe None. activation: function of the Scalar
    engine. in_runs: whether x and the weights lie in runs instead of K blocks, see `rows`. hidden: length of the
    contraction. inner: columns of the intermediate. row_factors: RowFactors that multiply the rows of the
    sums, if x is not normalised yet or is quantised, else None. gate_factors_only: whether they multiply gate
    alone; the reader of the intermediate then multiplies its rows by them. negated_sums: NegatedSums of x's rows for
    weights of 4 bits; None before, and for other weights. early_pieces: the
    first pieces of the weights in SBUF, see `load_early_pieces`; None for none. layout:
    GateLayout if x is stationary in groups of columns of the PE array, see `grouped_gate`, else None. Then
    scales are those of `load_group_scales`. group_factors: result of `compute_group_factors` for a product
    with a layout and a norm, else None. loaded: the first piece of the next unit's weights, if it is in SBUF.
    minus_ones: result of `fill_minus_ones` once the first sums are computed. spread: SpreadRows of x, if scales are
    those of groups and x is in SBUF, else None.
    """

    weights: list
    biases: list
    scales: list
    activation: object
    in_runs: bool
    hidden: int
    inner: int
    row_factors: RowFactors | None = None
    gate_factors_only: bool = False
    negated_sums: NegatedSums | None = None
    early_pieces: list | None = None
    layout: GateLayout | None = None
    group_factors: nl.NkiTensor | None = None
    loaded: nl.NkiTensor | None = None
    minus_ones: nl.NkiTensor | None = None
    spread: SpreadRows | None = None

    def find_negated_sums(self, x):
        """Return the result of `negate_sums` for rows x, [h in block, block, row] in SBUF; the first call computes it.

        A caller with other rows sets `negated_sums` to None before.
        """
        self.start_negated_sums(x)
        return self.negated_sums.split()

    def start_negated_sums(self, x):
        """Let the Tensor engine add up rows x for `find_negated_sums`, unless that is done."""
        if self.negated_sums is None:
            if self.minus_ones is None:
                self.minus_ones = fill_minus_ones(x.dtype)
            self.negated_sums = NegatedSums(add_up_rows(x, self.hidden, self.minus_ones), x.dtype)

    def set_factors(self, factors):
        """Let RowFactors multiply the rows of the sums; their sums of squares have a column for each row of x."""
        if self.layout is None:
            self.row_factors = factors
        else:
            self.group_factors = factors.compute_column(self.layout.width, self.layout.count_groups())

    def find_element_dtype(self):
        """Return the dtype of the elements of all weights, to which rows are rounded if they are quantised."""
        return self.weights[0].elements.dtype

    def load_scales(self):
        """Load the scales of gate and up into SBUF, if the weights have any; until then `scales` has None for both."""
        for side in range(len(self.weights)):
            # Up is the last weight, and has the second place also where there is no gate.
            self.scales[2 - len(self.weights) + side] = load_bias_columns(self.weights[side].scales)


@dataclass
class GatedUnit(nl.NKIObject):
    """The accumulators of one unit: columns first_column … end_column - 1 of the intermediate, for all rows of x.

    full_width: columns of the unit that are not in packed_bank. blocks_per_bank: blocks of 128 columns in a
    bank. banks: for each weight a list of float32 PSUM tiles [f in block, block * row] with these columns.
    packed_bank: float32 PSUM tile [gate's and up's f, row] for a short last block that gate and up share, or
    None.
    """

    first_column: int
    end_column: int
    full_width: int
    blocks_per_bank: int
    banks: list
    packed_bank: nl.NkiTensor | None


def allocate_unit(product, first_column, rows):
    """Allocate PSUM for columns of the intermediate from `first_column` on, and `rows` rows of x; return a GatedUnit.

    It has as many columns as half of the PSUM banks hold, or those that remain.
    """
    end_column = min(product.inner, first_column + count_unit_columns(product, rows))
    width = end_column - first_column
    packed = count_packed_columns(width) if packs_tail(product.weights) else 0
    full_width = width - packed
    blocks_per_bank = BANK // rows
    banks = []
    for side in range(len(product.weights)):
        banks.append([])
        for _ in range(blocks(blocks(full_width), blocks_per_bank)):
            banks[side].append(nl.ndarray((PARTITIONS, BANK), dtype=nl.float32, buffer=nl.psum))
    packed_bank = None
    if packed > 0:
        # Gate and up of a short block share a stationary tile, so that one matmul does the work of two.
        packed_bank = nl.ndarray((2 * packed, rows), dtype=nl.float32, buffer=nl.psum)
    return GatedUnit(first_column, end_column, full_width, blocks_per_bank, banks, packed_bank)


def count_unit_columns(product, rows):
    """Return the columns of a unit for `rows` rows: as many as ACCUMULATOR_BANKS banks hold, at most UNIT_COLUMNS."""
    if product.layout is not None:
        return product.layout.count_unit_columns()
    banks_per_weight = ACCUMULATOR_BANKS // len(product.weights)
    return min(UNIT_COLUMNS, banks_per_weight * (BANK // rows) * PARTITIONS)


def count_packed_columns(width):
    """Return the columns of a short last block for which gate and up share a bank, of `width` columns: 32, 64, or 0.

    The sums of up then begin at partition 32 or 64, where engines can begin.
    """
    short = width % PARTITIONS
    return short if short == PARTITIONS // 2 or short == PARTITIONS // 4 else 0


def packs_tail(weights):
    """Return whether a short last block of gate and up shares a bank: not with block scales, which gate and up have.

    weights: those of a GatedProduct.
    """
    return len(weights) == 2 and weights[0].block_scales is None and weights[1].block_scales is None


def needs_tail_in_both_halves(weights):
    """Return whether the last block of the intermediate has 64 columns and has to be on both halves of the partitions.

    That is so if gate and up share a PSUM bank for it and the intermediate has more than 128 columns. The
    next product then multiplies it for two row tiles at once. weights: those of a GatedProduct.
    """
    inner = weights[0].elements.shape[1]
    return packs_tail(weights) and inner > PARTITIONS and count_packed_columns(inner) == PARTITIONS // 2


def compute_unit(product, intermediate, x, first_column, planned_loads, next_column=None, next_chunk=None):
    """Write activation(x @ w_gate) * (x @ w_up) to the SBUF tile `intermediate`, for columns from `first_column` on.

    They are as many columns as half of the PSUM banks hold, a unit, or those that remain. Without w_gate it
    is activation(x @ w_up); biases are added to the products.

    Args:
        product: GatedProduct.
        intermediate: [f in block, block, row] with all columns of the product.
        x: [h in block, block, row] in SBUF.
        first_column: a multiple of the columns of a unit.
        planned_loads: PlannedLoads for later work, which are issued evenly between the loads of the weights.
        next_column: first column of the next unit for as many rows; None for none. next_chunk: ChunkStart of the next
            chunk, or None. Their first pieces are loaded before the sums are read out if `occupies_vector`: the Vector
            engine works on them while it would wait for the sums.
    """
    unit = allocate_unit(product, first_column, x.shape[2])
    accumulate(unit, product, x, planned_loads)
    if occupies_vector(product.weights[0]):
        if next_column is not None:
            end_column = min(product.inner, next_column + count_unit_columns(product, x.shape[2]))
            following = GatedUnit(next_column, end_column, 0, 1, [], None)
            count = count_piece_blocks(product, end_column - next_column, x.dtype)
            dtype = choose_operand_dtype(product.weights, x.dtype)
            end_block = min(count, blocks(product.hidden))
            product.loaded = provide_piece(following, product, 0, end_block, dtype)
        if next_chunk is not None:
            next_chunk.load()
    if product.row_factors is not None:
        multiply_rows(unit, product)
    for bank in range(len(unit.banks[0])):
        activate_bank(intermediate, unit, bank, product)
    if unit.packed_bank is not None:
        activate_packed_bank(intermediate, unit.packed_bank, product)


def accumulate(unit, product, x, planned_loads):
    """Load the weights of a GatedUnit piece by piece along the contraction, and write x @ weight to its PSUM banks.

    x: [h in block, block, row] in SBUF. planned_loads: PlannedLoads for later work, issued evenly after the
    pieces.
    """
    hidden, width = product.hidden, unit.end_column - unit.first_column
    operand_dtype = choose_operand_dtype(product.weights, x.dtype)
    blocks_per_piece = count_piece_blocks(product, width, x.dtype)
    pairs_blocks = is_e4m3(x.dtype)
    packed = product.weights[0].adds_zero_points()
    if packed:
        # Before the products, so that their last ones do not wait for the sums.
        product.find_negated_sums(x)
    triggered = 0
    for first_block in range(0, blocks(hidden), blocks_per_piece):
        end_block = min(blocks(hidden), first_block + blocks_per_piece)
        piece = product.loaded
        if piece is None:
            piece = provide_piece(unit, product, first_block, end_block, operand_dtype)
        product.loaded = None
        loaded_rows = min(hidden, end_block * PARTITIONS)
        due = blocks(len(planned_loads) * loaded_rows, hidden)  # as great a part of them as of the weights
        # The queue is served in order, so loads for later work follow the piece that the next matmuls wait for.
        trigger_loads(planned_loads[triggered:due], STATIC)
        triggered = due
        copies = None
        if product.weights[0].scales_rows:
            index = first_block // blocks_per_piece
            copies = copy_rows(x, select_unit_columns(unit, product), (first_block, end_block), hidden, index)
        # All banks of the unit take a K block before the next one, so that a loaded piece is read once and released.
        for k in range(first_block, end_block):  # k: K block
            used = count_block_partitions(hidden, k, product.in_runs)
            if pairs_blocks and (k + 1) * PARTITIONS <= hidden - hidden % (2 * PARTITIONS):
                # Full blocks of fp8 rows are multiplied two at a time, with the first one of the two.
                if k % 2 == 0:
                    pair = piece[:, :, k - first_block : k - first_block + 2, :]
                    add_block_pair(unit, pair, x[:, k : k + 2, :], k > 0)
                continue
            stationary, block = piece[0:used, :, k - first_block, :], k - first_block
            add_block(unit, stationary, x[0:used, k, :], k > 0, select_block(copies, block, used))
    if packed:
        zero_points = load_zero_points(select_unit_columns(unit, product), operand_dtype)
        add_block(unit, zero_points, product.find_negated_sums(x), True)


def add_block_pair(unit, stationary, moving, accumulate):
    """Add the products of two full blocks of fp8 rows to the banks of a GatedUnit; write them unless `accumulate`.

    stationary: [h in block, weight, block, column] in SBUF, the unit's columns. moving: [h in block, block, row].
    """
    rows = moving.shape[2]
    for side in range(len(unit.banks)):  # gate, up
        for column in range(0, unit.full_width, PARTITIONS):
            end = min(unit.full_width, column + PARTITIONS)
            block = column // PARTITIONS
            bank = unit.banks[side][block // unit.blocks_per_bank]
            start = block % unit.blocks_per_bank * rows
            dst = bank[0 : end - column, start : start + rows]
            multiply_block_pair(dst, stationary[:, side, :, column:end], moving, accumulate)
    if unit.packed_bank is not None:
        for index in range(2):
            nisa.nc_matmul(
                dst=unit.packed_bank,
                stationary=stationary[:, :, index, unit.full_width :],
                moving=moving[:, index, :],
                accumulate=accumulate or index > 0,
            )


def add_block(unit, stationary, moving, accumulate, copies=None):
    """Add the products of one block of the contraction to the banks of a GatedUnit; write them unless `accumulate`.

    stationary: [h in block, weight, column] in SBUF, the unit's columns of the weights. moving: [h in block, row].
    copies: for each weight [h in block, column block, row] in SBUF, which take the place of `moving`; or None.
    """
    rows = moving.shape[1]
    for side in range(len(unit.banks)):  # gate, up
        for column in range(0, unit.full_width, PARTITIONS):
            end = min(unit.full_width, column + PARTITIONS)
            block = column // PARTITIONS
            bank = unit.banks[side][block // unit.blocks_per_bank]
            start = block % unit.blocks_per_bank * rows
            nisa.nc_matmul(
                dst=bank[0 : end - column, start : start + rows],
                stationary=stationary[:, side, column:end],
                moving=moving if copies is None else copies[side][:, block, :],
                accumulate=accumulate,
            )
    if unit.packed_bank is not None:
        nisa.nc_matmul(
            dst=unit.packed_bank,
            stationary=stationary[:, :, unit.full_width :],
            moving=moving,
            accumulate=accumulate,
        )


def select_unit_columns(unit, product):
    """Return the WeightMatrix of a GatedUnit's columns for each weight of the product, in a list."""
    matrices = []
    for weight in product.weights:
        matrices.append(select_columns(weight, unit.first_column, unit.end_column))
    return matrices


def count_piece_blocks(product, width, dtype):
    """Return how many K blocks of `width` columns of each weight make a piece, for rows of `dtype`.

    An even number for fp8 rows; for weights of 4 bits as `choose_packed_blocks` returns.
    """
    operand_dtype = choose_operand_dtype(product.weights, dtype)
    most = PIECE_ELEMENTS if operand_dtype == dtype else 4 * PIECE_ELEMENTS  # 8 bits: as many bytes
    if product.weights[0].nibbles is not None:
        # Nibbles with scales of groups become as many bytes as plain weights, and the scales as many again.
        return choose_packed_blocks((2 if product.weights[0].adds_zero_points() else 1) * most // width)
    if occupies_vector(product.weights[0]):
        most = most * (2 if dtype == nl.float32 else 4)
    blocks_per_piece = max(1, most // width)
    return blocks_per_piece + blocks_per_piece % 2 if is_e4m3(dtype) else blocks_per_piece


def provide_piece(unit, product, first_block, end_block, dtype):
    """Return K blocks `first_block` … `end_block` - 1 of a unit's weights in SBUF, [h in block, weight, block, column].

    They are one of `product.early_pieces`, or loaded here, in `dtype`.
    """
    count = end_block - first_block
    if product.early_pieces is not None and len(product.early_pieces) > 0 and unit.first_column == 0:
        index = first_block // product.early_pieces[0].shape[2]
        if index < len(product.early_pieces):
            return product.early_pieces[index]
    shape = (
        min(product.hidden, PARTITIONS),
        len(product.weights),
        count,
        unit.end_column - unit.first_column,
    )
    piece = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    load_piece(piece, unit, product, first_block)
    return piece


def load_piece(piece, unit, product, first_block):
    """Load K blocks of a unit's columns of w_gate and w_up into an SBUF tile [h in block, weight, block, column].

    piece: the tile, whose size tells how many blocks. first_block: the K block that goes to block 0 of it.
    Elements are converted to the tile's dtype.
    """
    start = first_block * PARTITIONS
    end = min(product.hidden, start + piece.shape[2] * PARTITIONS)
    for side in range(len(product.weights)):
        weight, columns = product.weights[side], (unit.first_column, unit.end_column)
        if product.in_runs:
            load_runs_into(piece[:, side, :, :], select_columns(weight, columns[0], columns[1]), first_block)
        else:
            load_blocks_into(piece[:, side, :, :], weight.submatrix((start, end), columns), STATIC)


def multiply_rows(unit, product):
    """Replace the banks of a unit by float32 SBUF tiles with their sums times the row factors of the product."""
    factors = product.row_factors.compute()
    rows, width = factors.shape[1], unit.full_width
    for side in range(1 if product.gate_factors_only else len(unit.banks)):
        for bank in range(len(unit.banks[side])):
            first = bank * unit.blocks_per_bank
            last = min(blocks(width), first + unit.blocks_per_bank)
            full = max(first, min(last, width // PARTITIONS))
            sums = unit.banks[side][bank]
            scaled = nl.ndarray((PARTITIONS, (last - first) * rows), dtype=nl.float32, buffer=nl.sbuf)
            if full > first:
                columns = (full - first) * rows
                multiply_by_rows(scaled[:, 0:columns], sums[:, 0:columns], factors)
            if last > full:
                # The short block has sums on its first partitions only.
                height = width - full * PARTITIONS
                columns = slice((full - first) * rows, (last - first) * rows)
                multiply_by_rows(scaled[0:height, columns], sums[0:height, columns], factors[0:height, :])
            unit.banks[side][bank] = scaled
    if unit.packed_bank is not None:
        scaled = nl.ndarray(unit.packed_bank.shape, dtype=nl.float32, buffer=nl.sbuf)
        height = scaled.shape[0]
        if product.gate_factors_only:
            height = height // 2
            nisa.tensor_copy(dst=scaled[height:, :], src=unit.packed_bank[height:, :])
        multiply_by_rows(scaled[0:height, :], unit.packed_bank[0:height, :], factors[0:height, :])
        unit.packed_bank = scaled


def multiply_by_rows(dst, sums, factors):
    """Write sums [partition, block * row] times factors [partition, row], the same for every block, to `dst`."""
    height, rows = factors.shape
    count = sums.shape[1] // rows
    shape = (height, count, rows)
    factor = factors.expand_dim(1).broadcast(1, count)
    nisa.tensor_tensor(dst=dst.reshape(shape), data1=sums.reshape(shape), data2=factor, op=nl.multiply)


def activate_bank(intermediate, unit, bank, product):
    """Write activation(gate + bias) * (up + bias) of one bank to `intermediate`; without a gate, activation(up + bias).

    gate and up are the sums times their scales. One instruction takes all full blocks of the bank if there are
    neither biases nor scales, which differ from block to block.

    Args:
        intermediate: SBUF tile [f in block, block, row] with all columns of the product.
        unit: GatedUnit with the sums.
        bank: index in the unit's list of banks of each weight.
        product: GatedProduct with activation, biases and scales.
    """
    rows, inner = intermediate.shape[2], product.inner
    full = inner // PARTITIONS
    for side in range(2):  # gate, up
        if product.biases[side] is not None or product.scales[side] is not None:
            full = 0
    first = unit.first_column // PARTITIONS + bank * unit.blocks_per_bank
    last = min(blocks(unit.first_column + unit.full_width), first + unit.blocks_per_bank)
    block = first
    while block < last:
        count = max(1, min(last, full) - block)
        used = min(PARTITIONS, inner - block * PARTITIONS)
        columns = slice((block - first) * rows, (block - first + count) * rows)
        dst = intermediate[0:used, block : block + count, :]
        up = unit.banks[len(unit.banks) - 1][bank][0:used, columns]
        if len(unit.banks) == 2:
            # The Vector engine reads at most one operand from PSUM, so the gate goes to SBUF, still in float32.
            gate = nl.ndarray((used, count * rows), dtype=nl.float32, buffer=nl.sbuf)
            gate_sums = unit.banks[0][bank][0:used, columns]
            activate(gate, gate_sums, product, 0, 0, block)
            scale_and_multiply(dst, up, gate, product, 0, block)
        else:
            activate(dst, up, product, 1, 0, block)
        block += count


def activate_packed_bank(intermediate, packed_bank, product):
    """Write activation(gate + bias) * (up + bias) of the short last block, 32 or 64 columns, to `intermediate` in SBUF.

    packed_bank: PSUM tile [gate's columns, then up's; row], whose lower half of partitions has the sums of
    gate and upper half those of up. If `intermediate` has twice as many partitions as the block has columns,
    the block is written to both halves of them.
    """
    half = packed_bank.shape[0] // 2
    block = product.inner // PARTITIONS
    gate = nl.ndarray(packed_bank.shape, dtype=nl.float32, buffer=nl.sbuf)[half : 2 * half, :]
    activate(gate, packed_bank[0:half, :], product, 0, 0, block)
    # The down product multiplies a tail of 64 rows for two accumulators at once, each in half of the array's rows.
    copies = 2 if intermediate.shape[0] == 2 * half else 1
    for copy in range(copies):
        dst = intermediate[copy * half : (copy + 1) * half, block, :]
        scale_and_multiply(dst, packed_bank[half : 2 * half, :], gate, product, half, block)


def select_column(columns, first_partition, count, block):
    """Return a view [count, 1] of block `block` of bias or scale columns, from `first_partition` on; None for None.

    columns: [f in block, block], as `load_bias_columns` returns them.
    """
    return None if columns is None else columns[first_partition : first_partition + count, block : block + 1]


def activate(dst, sums, product, side, first_partition, block):
    """Write activation(sums * scale + bias) of one block of the intermediate to `dst`, on the Scalar engine.

    Args:
        dst: SBUF tile [f in block, row].
        sums: PSUM tile of the same shape.
        product: GatedProduct with activation, biases and scales.
        side: whose bias and scale are taken, 0: gate's, 1: up's.
        first_partition: partition of the bias and scale columns where those of the first sum lie.
        block: index of the block among all blocks of the intermediate.
    """
    count = sums.shape[0]
    bias = select_column(product.biases[side], first_partition, count, block)
    scale = select_column(product.scales[side], first_partition, count, block)
    nisa.activation(
        dst=dst, op=product.activation, data=sums, bias=bias, scale=1.0 if scale is None else scale
    )


def scale_and_multiply(dst, sums, gate, product, first_partition, block):
    """Write (sums * scale + bias) * gate of one block of the intermediate to `dst`, on the Vector engine.

    Scale and bias are up's. sums: PSUM tile [f in block, row]. gate: SBUF tile of the same shape. The other
    arguments are those of `activate`.
    """
    count = sums.shape[0]
    bias = select_column(product.biases[1], first_partition, count, block)
    scale = select_column(product.scales[1], first_partition, count, block)
    if bias is None and scale is None:
        nisa.tensor_tensor(dst=dst, data1=sums, data2=gate, op=nl.multiply)
        return
    if bias is not None and scale is not None:
        # One instruction takes two operands besides its data, so scale and bias come first.
        biased = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=biased, data=sums, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=bias)
        nisa.tensor_tensor(dst=dst, data1=biased, data2=gate, op=nl.multiply)
        return
    operation, column = (nl.add, bias) if scale is None else (nl.multiply, scale)
    nisa.scalar_tensor_tensor(
        dst=dst, data=sums, op0=operation, operand0=column, op1=nl.multiply, operand1=gate
    )


def load_bias_columns(row):
    """Load a row [1, F] of biases or scales from HBM into a new float32 SBUF tile [f in block, block]; None for None.

    A short last block of 32 or 64 columns is there twice: on the first partitions, and again right behind
    them, where the sums of up lie in a packed bank.
    """
    if row is None:
        return None
    columns = row.shape[1]
    height, count, packed = min(PARTITIONS, columns), blocks(columns), count_packed_columns(columns)
    full = columns // PARTITIONS
    # The columns of a block lie on partitions, 128 elements apart in HBM: so blocks are loaded as lines and transposed.
    lines = nl.ndarray((count, height), dtype=row.dtype, buffer=nl.sbuf)
    if full < count:
        # On gen2 a transpose is a product, in which a NaN behind the short line would spread to other elements.
        nisa.memset(dst=lines, value=0.0, engine=nisa.engine.gpsimd)
        transfer(
            lines[full:count, 0 : columns - full * PARTITIONS], row[:, full * PARTITIONS : columns], SCALAR
        )
    if full > 0:
        # Scalar triggers these loads, so that the queue of the weights does not wait for the memset.
        transfer(lines[0:full, :], row[:, 0 : full * PARTITIONS].reshape((full, PARTITIONS)), SCALAR)
    transposed = nl.ndarray((height, count), dtype=row.dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=transposed, data=lines)
    tall = nl.ndarray((max(height, 2 * packed), count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=tall[0:height, :], src=transposed)
    if packed > 0:
        # Up sums of a packed block lie on the upper partitions of their bank, so its bias must lie there too.
        last = slice(count - 1, count)
        nisa.tensor_copy(dst=tall[packed : 2 * packed, last], src=transposed[0:packed, last])
    return tall
