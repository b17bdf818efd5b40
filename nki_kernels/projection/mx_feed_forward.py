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

Two cores divide prompts by rows. Of up to 128 rows each core computes half of the units, sends them to the other core,
and computes half of the columns of y.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cores import divides_columns, find_core_rows
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

AHEAD_BYTES = 16384
"""Bytes of w_down on a partition that are loaded before the cores exchange their units."""


@dataclass
class MxWeight(nl.NKIObject):
    """A weight and the scales of some of its columns in SBUF.

    matrix: MxMatrix. end_column: end of the columns that this core reads. scales: uint8 [partition, slot, column] in
    SBUF, see `MxOperand`, or None before the first load. columns: their range (first, end).
    """

    matrix: MxMatrix
    end_column: int
    scales: nl.NkiTensor | None = None
    columns: tuple = (0, 0)

    def load_scales(self, first_column):
        """Load the scales of a panel, and of as many panels after it as PANEL_BYTES hold, unless they are in SBUF."""
        if self.scales is None or first_column < self.columns[0] or first_column >= self.columns[1]:
            slots = blocks(count_tiles(self.matrix.depth), SCALE_ROWS)
            width = max(1, PANEL_BYTES // (slots * PANEL)) * PANEL
            self.columns = (first_column, min(self.end_column, first_column + width))
            self.scales = load_scales(self.matrix, self.columns)

    def load_panel(self, first_column):
        """Return an MxOperand with a panel of the weight, loaded into SBUF. first_column: the panel's."""
        self.load_scales(first_column)
        elements = load_elements(self.matrix, first_column)
        return MxOperand(elements, self.scales, self.matrix.depth, SCALE_ROWS, first_column - self.columns[0])


@dataclass
class MxShare(nl.NKIObject):
    """What this core computes.

    rows, units, columns: ranges (first, end) of the rows of x, of units of the intermediate, and of columns of y.
    exchanges: whether the cores send each other their units.
    """

    rows: tuple
    units: tuple
    columns: tuple
    exchanges: bool


@dataclass
class MxFeedForward(nl.NKIObject):
    """What all row groups of a block share.

    gate: MxWeight, or None. up, w_down: MxWeight. first_column: first column of w_down and y that this core computes.
    b_gate, b_up: float32 [p, tile, q] in SBUF, or None. activation: function of the Scalar engine. down: the down
    product, whose row_scales get a column for each row tile with a row gate. ahead: first panels of w_down, as far as
    they are loaded before they are multiplied.
    """

    gate: MxWeight | None
    up: MxWeight
    w_down: MxWeight
    first_column: int
    b_gate: nl.NkiTensor | None
    b_up: nl.NkiTensor | None
    activation: object
    down: ResidualProduct
    ahead: list


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
    ranks, inner = rank_sum.sequence_ranks, weights.w_down.depth
    share = assign_share(x.shape[0], ranks, x.shape[1], inner)
    first_row, end_row = share.rows
    if first_row == end_row:
        return
    x, y = x[first_row:end_row, :], y[first_row:end_row, share.columns[0] : share.columns[1]]
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
    row_scales = None if row_gate is None else []
    added = x[:, share.columns[0] : share.columns[1]] if residual else None
    block = prepare_block(y, added, weights, activation, row_scales, rank_sum, share)
    for m in range(len(groups)):
        following = None if m + 1 == len(groups) else allocate_group(feed, x.shape[1], groups[m + 1])
        units = list(range(share.units[0], share.units[1]))
        chunks = list_starts(y.shape[1], count_chunk_columns(ranks * groups[m].rows, ranks))
        stages = len(units) + len(chunks)
        intermediate = allocate_intermediate(inner, count_padded(ranks * groups[m].rows), share)
        for u in range(len(units)):
            compute_unit(block, rows.operand, intermediate, units[u])
            advance_evenly(feed, following, u + 1, stages)
        if share.exchanges:
            load_panels_ahead(block)
            exchange_units(intermediate, share)
        for gate in rows.gates:
            row_scales.append(gate)
        for n in range(len(chunks)):
            compute_chunk(block, intermediate, groups[m], chunks[n])
            advance_evenly(feed, following, len(units) + n + 1, stages)
        rows = following
    rank_sum.finish()


def assign_share(rows, ranks, hidden, inner):
    """Return the MxShare of this core: of a prompt half of the rows, else half of the units and of the columns of y.

    Up to 128 rows whose intermediate or y has no two tiles of 512 columns are those of the first core.

    rows: number of rows of this rank. ranks: over how many ranks rows are cut. hidden, inner: H and F.
    """
    core, units, panels = nl.program_id(0), count_tiles(inner), blocks(hidden, PANEL)
    if not divides_columns(rows * ranks):
        return MxShare(find_core_rows(rows, ranks), (0, units), (0, hidden), False)
    if units == 1 or panels == 1:
        return MxShare((0, rows if core == 0 else 0), (0, units), (0, hidden), False)
    return MxShare(
        (0, rows),
        ranges(0, units, blocks(units, 2))[core],
        ranges(0, hidden, blocks(panels, 2) * PANEL)[core],
        True,
    )


def load_panels_ahead(block):
    """Load the first panels of w_down, which then do not wait in the queue of loads for the exchange of units."""
    panel_bytes = VALUES * PANEL * count_tiles(block.w_down.matrix.depth)
    count = max(1, AHEAD_BYTES // panel_bytes)
    for start in list_starts(block.down.y.shape[1], PANEL)[0:count]:
        block.ahead.append(block.w_down.load_panel(block.first_column + start))


def exchange_units(intermediate, share):
    """Send this core's tiles of the intermediate to the other core, and receive those that it computed.

    intermediate: MxOperand with twice as many tiles as the first core has units.
    """
    core, half = nl.program_id(0), intermediate.elements.shape[1] // 2
    sent, received = core * half, (1 - core) * half
    for tile in (intermediate.elements, intermediate.scales):
        nisa.sendrecv(
            src=tile[:, sent : sent + half, :],
            dst=tile[:, received : received + half, :],
            send_to_rank=1 - core,
            recv_from_rank=1 - core,
            pipe_id=0,
        )


def allocate_intermediate(depth, rows, share):
    """Return an MxOperand for `rows` rows of the intermediate. If the cores exchange tiles, it holds zeros.

    depth: F. share: MxShare.
    """
    if not share.exchanges:
        return allocate_rows(depth, rows)
    # All partitions are sent, also those that quantisation does not write.
    intermediate = allocate_rows(depth, rows, 2 * blocks(count_tiles(depth), 2))
    nisa.memset(dst=intermediate.elements, value=0)
    nisa.memset(dst=intermediate.scales, value=0)
    return intermediate


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


def prepare_block(y, residual, weights, activation, row_scales, rank_sum, share):
    """Return the MxFeedForward of some rows, with the biases and the residual of up to 128 rows loaded into SBUF.

    Args:
        y, residual: this core's rows and columns @ HBM; no residual: None.
        weights, activation, rank_sum: those of `run_mx_feed_forward`.
        row_scales: list that gets the sigmoids of a row gate, or None without one.
        share: MxShare.
    """
    ranks, bias = rank_sum.sequence_ranks, None
    first, end = share.columns
    if weights.b_down is not None:
        bias = broadcast_row(weights.b_down[:, first:end], min(ranks * y.shape[0], PARTITIONS), y.dtype, 0.0)
    down = ResidualProduct(y, residual, MovingWeight([]), bias, rank_sum, None, row_scales)
    if ranks == 1 and y.shape[0] <= PARTITIONS:
        keep_residual_rows(down, None)
    end_column = min(weights.w_down.depth, share.units[1] * TILE)
    gate = None if weights.w_gate is None else MxWeight(weights.w_gate, end_column)
    return MxFeedForward(
        gate,
        MxWeight(weights.w_up, end_column),
        MxWeight(weights.w_down, end),
        first,
        load_columns(weights.b_gate, nl.float32),
        load_columns(weights.b_up, nl.float32),
        activation,
        down,
        [],
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


def compute_unit(block, rows, intermediate, unit):
    """Compute up to 512 columns of the intermediate of a row group, and round them to MXFP8.

    rows: MxOperand. intermediate: MxOperand, of which the unit is tile number `unit`.
    """
    count, padded = rows.elements.shape[2], intermediate.elements.shape[2]
    first_column = unit * TILE
    used = min(PARTITIONS, (intermediate.depth - first_column) // VALUES)
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
        if len(block.ahead) > 0:
            weight = block.ahead.pop(0)
        else:
            weight = block.w_down.load_panel(block.first_column + start)
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
