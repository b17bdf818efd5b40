"""A feed-forward block whose weights are in an MX format and whose rows become MXFP8, for the Tensor engine of gen4.

    n = MXFP8 of norm(x) in bfloat16;   h = activation(n @ w_gate + b_gate) * (n @ w_up + b_up) in bfloat16
    y = x + sum over ranks of MXFP8 of h @ w_down + b_down

`mx_rows` prepares n. In the gate and up product the weights are stationary and the rows move. A *unit* is 512 columns
of the intermediate, a tile of the contraction of the down product: every fourth column is a stationary column, so that
the sums of column 512 * t + 4 * p + q arise on partition p. In the down product the intermediate is stationary and the
weight moves, 512 columns at a time.

Rows are cut into groups of up to four row tiles, which load the weights once. A group is loaded, normalised and
transposed while the group before is multiplied. If x is cut along the sequence over N ranks, a row tile has 128 // N
rows of every rank, see `sequence`.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cores import find_core_rows
from nki_kernels.dma import COMPILER, STATIC, transfer
from nki_kernels.norms.row_tiles import allocate_row_scratch, load_norm
from nki_kernels.projection.block_loads import store_rows_from
from nki_kernels.projection.few_rows import keep_residual_rows
from nki_kernels.projection.mx_operands import (
    PANEL,
    QUADRANT,
    SCALE_ROWS,
    TILE,
    VALUES,
    MxMatrix,
    MxOperand,
    add_mx_products,
    allocate_rows,
    count_tiles,
    load_elements,
    load_scales,
    quantise_tiles,
)
from nki_kernels.projection.mx_rows import (
    RowFeed,
    advance,
    advance_evenly,
    allocate_group,
    count_steps,
    prepare_divided_rows,
    takes_divided_rows,
)
from nki_kernels.projection.residual_product import (
    Accumulator,
    MovingWeight,
    ResidualProduct,
    add_residual,
    count_chunk_columns,
    view_chunk,
)
from nki_kernels.projection.row_groups import count_rows_per_rank, divide_into_groups, item_bytes, list_starts
from nki_kernels.projection.sequence import plan_gathered_rows, use_whole_rows
from nki_kernels.tiles import BANK, PARTITIONS, blocks, broadcast_row, cast, ranges

GROUP_TILES = 4
"""Row tiles of the largest group: 512 rows, the columns of the widest moving tile of a PSUM bank."""

PANEL_BYTES = 8192
"""Most bytes of a weight's scales on a partition that are loaded at once."""


@dataclass
class MxWeight(nl.NKIObject):
    """A weight and the scales of some of its columns in SBUF.

    matrix: MxMatrix. scales: uint8 [partition, slot, column] in SBUF, see `MxOperand`, or None before the first load.
    columns: their range (first, end).
    """

    matrix: MxMatrix
    scales: nl.NkiTensor | None = None
    columns: tuple = (0, 0)

    def load_scales(self, first_column):
        """Load the scales of a panel, and of as many panels after it as PANEL_BYTES hold, unless they are in SBUF."""
        if self.scales is None or first_column < self.columns[0] or first_column >= self.columns[1]:
            slots = blocks(count_tiles(self.matrix.depth), SCALE_ROWS)
            width = max(1, PANEL_BYTES // (slots * PANEL)) * PANEL
            self.columns = (first_column, min(self.matrix.elements.shape[1], first_column + width))
            self.scales = load_scales(self.matrix, self.columns)

    def load_panel(self, first_column):
        """Return an MxOperand with a panel of the weight, loaded into SBUF. first_column: the panel's."""
        self.load_scales(first_column)
        elements = load_elements(self.matrix, first_column)
        return MxOperand(elements, self.scales, self.matrix.depth, SCALE_ROWS, first_column - self.columns[0])


@dataclass
class MxFeedForward(nl.NKIObject):
    """What all row groups of a block share.

    gate: MxWeight, or None. up, w_down: MxWeight. b_gate, b_up: float32 [p, tile, q] in SBUF, or None. activation:
    function of the Scalar engine. down: the down product, whose row_scales get a column for each row tile with a row
    gate.
    """

    gate: MxWeight | None
    up: MxWeight
    w_down: MxWeight
    b_gate: nl.NkiTensor | None
    b_up: nl.NkiTensor | None
    activation: object
    down: ResidualProduct


def run_mx_feed_forward(y, x, weights, norm, activation, row_gate, residual, rank_sum):
    """Write y @ HBM, [T, H]; with rows that are cut over ranks, this rank's rows.

    Args:
        y, x: [T, H] @ HBM.
        weights: Weights of MxMatrix.
        norm: Norm; one without a weight leaves rows as they are.
        activation: function of the Scalar engine.
        row_gate: [H, 1] @ HBM, or None.
        residual: whether x is added.
        rank_sum: RankSum without chunks. Its sequence_ranks are the ranks over which rows are cut.
    """
    ranks = rank_sum.sequence_ranks
    first_row, end_row = find_row_share(x.shape[0], ranks)
    if first_row == end_row:
        return
    x, y = x[first_row:end_row, :], y[first_row:end_row, :]
    group_rows = count_group_tiles(x, weights) * count_rows_per_rank(ranks)
    groups = divide_into_groups(x.shape[0], group_rows)
    if row_gate is not None:
        row_gate = load_columns(row_gate.reshape((1, x.shape[1])), nl.bfloat16)
    feed = None
    if takes_divided_rows(x, norm, ranks):
        rows = prepare_divided_rows(x, norm, row_gate)
    else:
        feed = prepare_feed(x, norm, row_gate, rank_sum, group_rows)
        rows = allocate_group(feed, x.shape[1], groups[0])
        advance(feed, rows, count_steps(feed, groups[0]))
    block = prepare_block(y, x, weights, activation, row_gate is not None, residual, rank_sum)
    for m in range(len(groups)):
        following = None if m + 1 == len(groups) else allocate_group(feed, x.shape[1], groups[m + 1])
        units = list_starts(weights.w_down.depth, TILE)
        chunks = list_starts(x.shape[1], count_chunk_columns(ranks * groups[m].rows, ranks))
        stages = len(units) + len(chunks)
        intermediate = allocate_rows(weights.w_down.depth, count_padded(ranks * groups[m].rows))
        for u in range(len(units)):
            compute_unit(block, rows.operand, intermediate, units[u])
            advance_evenly(feed, following, u + 1, stages)
        for gate in rows.gates:
            block.down.row_scales.append(gate)
        for n in range(len(chunks)):
            compute_chunk(block, intermediate, groups[m], chunks[n])
            advance_evenly(feed, following, len(units) + n + 1, stages)
        rows = following
    rank_sum.finish()


def find_row_share(rows, ranks):
    """Return (first, end) of the rows that this core computes: half of a prompt, all or none of up to 128 rows.

    rows: number of rows of this rank. ranks: over how many ranks rows are cut.
    """
    if nl.program_id(0) > 0 and rows * ranks <= PARTITIONS:
        return rows, rows
    return find_core_rows(rows, ranks)


def count_padded(rows):
    """Return the even number of columns that a stationary operand of `rows` rows has."""
    return rows + rows % 2


def count_group_tiles(x, weights):
    """Return how many row tiles a group has at most: GROUP_TILES, or fewer where SBUF does not hold their operands."""
    hidden, inner = x.shape[1], weights.w_down.depth
    x_bytes = item_bytes(x.dtype)
    row_bytes = 2 * hidden * (x_bytes + 2) + 2 * x_bytes * hidden + 2 * VALUES * TILE * count_tiles(hidden)
    weight_bytes = 4 * PANEL * (2 * count_tiles(hidden) + count_tiles(inner)) + 4 * PANEL_BYTES
    operand_bytes = 5 * PARTITIONS * (2 * count_tiles(hidden) + count_tiles(inner))
    free_bytes = nl.tile_size.sbuf_fmax_bytes - row_bytes - weight_bytes
    return max(1, min(GROUP_TILES, free_bytes // operand_bytes))


def prepare_feed(x, norm, row_gate, rank_sum, group_rows):
    """Return the RowFeed of rows x @ HBM, with the norm loaded into SBUF.

    row_gate: bfloat16 [p, tile, q] in SBUF, or None. group_rows: rows of a group of each rank.
    """
    ranks, row_norm = rank_sum.sequence_ranks, None
    if norm.weight is not None:
        scratch = allocate_row_scratch(min(x.shape[0], PARTITIONS), x.shape[1], x.dtype)
        row_norm = load_norm(norm, scratch, x.dtype)
    if ranks == 1:
        return RowFeed(use_whole_rows(x), row_norm, row_gate, ranks)
    # Rows of other ranks arrive normalised.
    rows = plan_gathered_rows(x, row_norm, ranks, rank_sum.replica_group, group_rows)
    return RowFeed(rows, None, row_gate, ranks)


def prepare_block(y, x, weights, activation, has_row_gate, residual, rank_sum):
    """Return the MxFeedForward of some rows, with the biases and the residual of up to 128 rows loaded into SBUF.

    The arguments are those of `run_mx_feed_forward`.
    """
    ranks, bias = rank_sum.sequence_ranks, None
    if weights.b_down is not None:
        bias = broadcast_row(weights.b_down, min(ranks * x.shape[0], PARTITIONS), x.dtype, 0.0)
    row_scales = [] if has_row_gate else None
    down = ResidualProduct(y, x if residual else None, MovingWeight([]), bias, rank_sum, None, row_scales)
    if ranks == 1 and x.shape[0] <= PARTITIONS:
        keep_residual_rows(down, None)
    return MxFeedForward(
        None if weights.w_gate is None else MxWeight(weights.w_gate),
        MxWeight(weights.w_up),
        MxWeight(weights.w_down),
        load_columns(weights.b_gate, nl.float32),
        load_columns(weights.b_up, nl.float32),
        activation,
        down,
    )


def load_columns(row, dtype):
    """Load a row [1, n] of HBM as values of a contraction, [p, tile, q] in SBUF of `dtype`; return None for None."""
    if row is None:
        return None
    size = row.shape[1]
    raw = nl.ndarray((PARTITIONS, count_tiles(size), VALUES), dtype=row.dtype, buffer=nl.sbuf)
    full = size // TILE
    if full > 0:
        source = row[0, 0 : full * TILE].reshape_dim(0, (full, PARTITIONS, VALUES)).permute((1, 0, 2))
        transfer(raw[:, 0:full, :], source, STATIC)
    short = (size - full * TILE) // VALUES
    if short > 0:
        # One instruction converts all tiles, so the partitions that the short tile lacks hold zeros.
        nisa.memset(dst=raw[:, full, :], value=0.0)
        source = row[0, full * TILE : size].reshape_dim(0, (short, VALUES))
        transfer(raw[0:short, full, :], source, STATIC)
    return cast(raw, dtype)


def compute_unit(block, rows, intermediate, first_column):
    """Compute up to 512 columns of the intermediate of a row group, and round them to MXFP8.

    rows: MxOperand. intermediate: MxOperand, of which the unit is one tile. first_column: the unit's.
    """
    count, padded = rows.elements.shape[2], intermediate.elements.shape[2]
    unit, used = first_column // TILE, min(PARTITIONS, (intermediate.depth - first_column) // VALUES)
    gate = None if block.gate is None else block.gate.load_panel(first_column)
    up = block.up.load_panel(first_column)
    values = nl.ndarray((PARTITIONS, 1, padded, VALUES), dtype=nl.bfloat16, buffer=nl.sbuf)
    if padded > count:
        nisa.memset(dst=values[:, :, count:padded, :], value=0.0)
    if used % QUADRANT > 0:
        # The partitions that complete the last quadrant hold zeros.
        first = used - used % QUADRANT
        nisa.memset(dst=values[first : first + QUADRANT, :, :, :], value=0.0)
    # Sums of as many values of the packed elements as fit share a PSUM bank.
    for first, end in ranges(0, VALUES, max(1, BANK // count)):
        up_bank = multiply_columns(up, rows, used, first, end)
        target = values[0:used, 0, 0:count, first:end].permute((0, 2, 1))
        if gate is None:
            activate(target, up_bank, block.activation, block.b_up, unit, first)
            continue
        gate_bank = multiply_columns(gate, rows, used, first, end)
        activated = nl.ndarray(gate_bank.shape, dtype=nl.float32, buffer=nl.sbuf)
        activate(activated, gate_bank, block.activation, block.b_gate, unit, first)
        multiply_with_bias(target, activated, up_bank, block.b_up, unit, first)
    quantise_tiles(intermediate, values, (unit, unit + 1), (0, padded))


def multiply_columns(weight, rows, used, first, end):
    """Return the products of rows and some columns of a weight, a new float32 PSUM tile [p, q, row].

    Args:
        weight: MxOperand with the columns of a unit.
        rows: MxOperand.
        used: partitions of the unit, a fourth of its columns.
        first, end: range of q, the values of the packed elements of the intermediate.
    """
    count = rows.elements.shape[2]
    bank = nl.ndarray((used, end - first, count), dtype=nl.float32, buffer=nl.psum)
    for q in range(first, end):
        columns = (q, q + VALUES * (used - 1) + 1, VALUES)
        add_mx_products(bank[:, q - first, :], weight, columns, rows, (0, count, 1))
    return bank


def activate(dst, bank, function, bias, unit, first):
    """Write function(bank + bias) to `dst`; both are [p, q, row], of q from `first` on.

    bias: [p, tile, q] in SBUF, or None. unit: the tile of the bias.
    """
    if bias is None:
        nisa.activation(dst=dst, op=function, data=bank)
        return
    for q in range(bank.shape[1]):
        column = bias[0 : bank.shape[0], unit, first + q : first + q + 1]
        nisa.activation(dst=dst[:, q, :], op=function, data=bank[:, q, :], bias=column)


def multiply_with_bias(dst, activated, bank, bias, unit, first):
    """Write activated * (bank + bias) to `dst`, [p, q, row] each. The other arguments are those of `activate`."""
    if bias is None:
        nisa.tensor_tensor(dst=dst, data1=activated, data2=bank, op=nl.multiply)
        return
    for q in range(bank.shape[1]):
        nisa.scalar_tensor_tensor(
            dst=dst[:, q, :],
            data=bank[:, q, :],
            op0=nl.add,
            operand0=bias[0 : bank.shape[0], unit, first + q : first + q + 1],
            op1=nl.multiply,
            operand1=activated[:, q, :],
        )


def compute_chunk(block, intermediate, group, first_column):
    """Compute a chunk of y of a row group from `first_column` on; on one rank store it, else append it to the rank sum.

    intermediate: MxOperand of the rows of all ranks. group: RowGroup.
    """
    down, rank_sum = block.down, block.down.rank_sum
    ranks = rank_sum.sequence_ranks
    rows = ranks * group.rows
    chunk = view_chunk(down, rows, group.first_row, first_column)
    tiles = ranges(0, rows, ranks * count_rows_per_rank(ranks))
    accumulators = []
    for start, end in ranges(chunk.columns[0], chunk.columns[1], BANK):
        weight = block.w_down.load_panel(start)
        for m in range(len(tiles)):
            first, last = tiles[m]
            padded = min(intermediate.elements.shape[2], first + count_padded(last - first))
            bank = nl.ndarray((padded - first, end - start), dtype=nl.float32, buffer=nl.psum)
            add_mx_products(bank, intermediate, (first, padded, 1), weight, (0, end - start, 1))
            accumulators.append(Accumulator(bank[0 : last - first, :], m, first, start - first_column))
    if rank_sum.replica_group is None:
        chunk.load_residual(ranks)
        shape = (tiles[0][1], len(tiles), chunk.columns[1] - first_column)
        y_tile = nl.ndarray(shape, dtype=down.y.dtype, buffer=nl.sbuf)
        add_residual(y_tile, accumulators, chunk)
        store_rows_from(chunk.y, y_tile, COMPILER)
    else:
        chunk.round_partial_sums(accumulators, ranks)
        rank_sum.append(chunk)
