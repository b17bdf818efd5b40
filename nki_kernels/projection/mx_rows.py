"""Rows of activations that become an operand of products in MX formats: loaded, normalised, transposed, rounded.

Rows lie on the partitions for the norm, which writes them in bfloat16. The Tensor engine transposes them into *values*,
[p, tile, row, q] in SBUF: value 512 * tile + 4 * p + q of the contraction, see `mx_operands`. The Vector engine rounds
these to MXFP8.

Up to 128 rows whose H is a multiple of 512 are *divided* before: a tile of a row lies on one partition, [row * tile,
512], so that few rows use many partitions. A product with a matrix of ones adds the squares of a row's tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import STATIC, transfer
from nki_kernels.norms.norm import compute_inverse_root
from nki_kernels.norms.row_tiles import RowNorm, sum_squares
from nki_kernels.projection.mx_operands import (
    QUADRANT,
    TILE,
    VALUES,
    MxOperand,
    allocate_rows,
    count_tiles,
    quantise_tiles,
)
from nki_kernels.projection.row_groups import (
    RowGroup,
    count_rows_per_rank,
    normalise_tiles,
    plan_loads,
    split_by_rank,
    trigger_loads,
)
from nki_kernels.projection.sequence import RowSource, provide_rows
from nki_kernels.tiles import BANK_BYTES, PARTITIONS, cast, count_slot_columns, filled, ranges


@dataclass
class RowFeed(nl.NKIObject):
    """What prepares the rows of all groups.

    rows: RowSource of x. norm: RowNorm, or None if rows need none. row_gate: bfloat16 [p, tile, q] in SBUF, or None.
    ranks: over how many ranks the rows are cut.
    """

    rows: RowSource
    norm: RowNorm | None
    row_gate: nl.NkiTensor | None
    ranks: int


@dataclass
class GroupRows(nl.NKIObject):
    """The rows of a group on their way to an operand of a product.

    group: RowGroup. operand: MxOperand of the rows of all ranks. normalised: bfloat16 tiles [row, H] so far. gates:
    float32 columns [row, 1] with the sigmoids of a row gate so far, one for each row tile. spread: how many row tiles
    are in the operand.
    """

    group: RowGroup
    operand: MxOperand
    normalised: list
    gates: list
    spread: int = 0

    def take_tile(self):
        """Return the first normalised row tile that is not in the operand, and count it as one that is."""
        self.spread += 1
        return self.normalised[self.spread - 1]

    def count_done(self):
        """Return how many steps are done, see `advance`."""
        return len(self.normalised) + self.spread


def takes_divided_rows(x, norm, ranks):
    """Return whether rows x [T, H] @ HBM are divided for the norm: up to 128 on one rank, RMSNorm or none."""
    return x.shape[0] <= PARTITIONS and x.shape[1] % TILE == 0 and norm.bias is None and ranks == 1


def prepare_divided_rows(x, norm, row_gate):
    """Return the GroupRows of all rows x [T, H] @ HBM, which `takes_divided_rows` accepts.

    As many rows as have their tiles on 128 partitions are one batch.

    norm: Norm. row_gate: bfloat16 [p, tile, q] in SBUF, or None.
    """
    count, hidden = x.shape
    tiles = count_tiles(hidden)
    rows = GroupRows(RowGroup(0, count), allocate_rows(hidden, count), [], [])
    values = nl.ndarray((PARTITIONS, tiles, count, VALUES), dtype=nl.bfloat16, buffer=nl.sbuf)
    batches = ranges(0, count, PARTITIONS // tiles)
    loaded = []
    for first, end in batches:
        tile = nl.ndarray(((end - first) * tiles, TILE), dtype=x.dtype, buffer=nl.sbuf)
        transfer(tile, x[first:end, :].reshape(tile.shape), STATIC)
        loaded.append(tile)
    weight, members, eps = None, None, None
    if norm.weight is not None:
        height = loaded[0].shape[0]
        weight = load_divided_weight(norm, height, tiles)
        members, eps = mark_members(height, tiles), filled((height, 1), norm.eps)
    # A batch is transposed after the next one is normalised and the statistics of the one after it are computed.
    factors = None
    for index in range(len(batches) + 2):
        if 0 < index <= len(batches):
            rows.normalised.append(weight_divided(loaded[index - 1], weight, factors))
        if weight is not None and index < len(batches):
            factors = compute_factors(loaded[index], members, eps, hidden)
        if index > 1:
            first, end = batches[index - 2]
            transpose_divided(values[:, :, first:end, :], rows.normalised[index - 2], index)
            quantise_tiles(rows.operand, values[:, :, first:end, :], (0, tiles), (first, end))
    if row_gate is not None:
        rows.gates.append(compute_row_gate(row_gate, values, hidden))
    return rows


def load_divided_weight(norm, height, tiles):
    """Load the weight of a Norm, plus its offset, for divided rows: a new SBUF tile [row * tile, 512], equal rows."""
    raw = nl.ndarray((height, TILE), dtype=norm.weight.dtype, buffer=nl.sbuf)
    source = norm.weight.ap(pattern=[[0, height // tiles], [TILE, tiles], [1, TILE]])
    transfer(raw, source, STATIC)
    if norm.offset == 0.0:
        return raw
    weight = nl.ndarray(raw.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=weight, data=raw, op0=nl.add, operand0=norm.offset)
    return weight


def mark_members(height, tiles):
    """Return a float32 SBUF tile [height, height]: ones where both indices are tiles of one row, zeros elsewhere."""
    shape = (height, height // tiles, tiles)
    lower = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    members = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    # p - tiles * row is at least 0 and below `tiles` for the partitions p of a row.
    nisa.affine_select(
        dst=lower,
        pattern=[[-tiles, shape[1]], [0, tiles]],
        channel_multiplier=1,
        on_true_tile=filled(shape, 1.0),
        on_false_value=0.0,
        cmp_op=nl.greater_equal,
    )
    nisa.affine_select(
        dst=members,
        pattern=[[tiles, shape[1]], [0, tiles]],
        offset=tiles - 1,
        channel_multiplier=-1,
        on_true_tile=lower,
        on_false_value=0.0,
        cmp_op=nl.greater_equal,
    )
    return members.reshape((height, height))


def compute_factors(tile, members, eps, hidden):
    """Return 1 / rms of the row of each tile of divided rows [row * tile, 512]: float32 [row * tile, 1] in SBUF.

    members: result of `mark_members`. eps: float32 column. hidden: elements of a row.
    """
    height = tile.shape[0]
    squares = sum_squares(nl.ndarray(tile.shape, dtype=nl.bfloat16, buffer=nl.sbuf), tile)
    sums = nl.ndarray((height, 1), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=members[0:height, 0:height], moving=squares, accumulate=False)
    return compute_inverse_root(sums, 1.0 / hidden, eps)


def weight_divided(tile, weight, factors):
    """Return divided rows [row * tile, 512] times `factors` and `weight` in bfloat16; unchanged without a weight."""
    if weight is None:
        return cast(tile, nl.bfloat16)
    height = tile.shape[0]
    normalised = nl.ndarray(tile.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=normalised,
        data=tile,
        op0=nl.multiply,
        operand0=factors,
        op1=nl.multiply,
        operand1=weight[0:height, :],
    )
    return normalised


def transpose_divided(values, rows, index):
    """Transpose divided rows [row * tile, 512] into `values`, [p, tile, row, q], through one PSUM bank.

    index: number of the batch; the Vector engine copies even ones to SBUF, the Scalar engine odd ones.
    """
    _, tiles, count, _ = values.shape
    slots = count_slot_columns(rows.shape[0], nl.bfloat16)
    bank = nl.ndarray((PARTITIONS, VALUES, slots), dtype=nl.bfloat16, buffer=nl.psum)
    for q in range(VALUES):
        nisa.nc_transpose(dst=bank[:, q, 0 : rows.shape[0]], data=rows[:, q:TILE:VALUES])
    source = bank[:, :, 0 : rows.shape[0]].reshape_dim(2, (count, tiles)).permute((0, 3, 2, 1))
    if index % 2 == 0:
        nisa.tensor_copy(dst=values, src=source)
    else:
        nisa.activation(dst=values, op=nl.copy, data=source)


def allocate_group(feed, hidden, group):
    """Return the GroupRows of a RowGroup of rows of `hidden` elements, of which nothing is loaded yet."""
    return GroupRows(group, allocate_rows(hidden, feed.ranks * group.rows), [], [])


def count_steps(feed, group):
    """Return how many steps prepare a RowGroup: two for each row tile."""
    return 2 * len(ranges(0, group.rows, count_rows_per_rank(feed.ranks)))


def advance_evenly(feed, rows, position, count):
    """Do the steps of GroupRows that are due after `position` of `count` parts of other work; nothing for None."""
    if rows is not None:
        advance(feed, rows, count_steps(feed, rows.group) * position // count)


def advance(feed, rows, steps):
    """Prepare GroupRows until `steps` steps are done: load and normalise a row tile, or bring one into the operand.

    A row tile is normalised a step before the Tensor engine transposes it.
    """
    tiles = ranges(0, rows.group.rows, count_rows_per_rank(feed.ranks))
    while rows.count_done() < steps:
        if len(rows.normalised) < len(tiles) and len(rows.normalised) < rows.spread + 2:
            rows.normalised.append(normalise_row_tile(feed, rows.group, tiles[len(rows.normalised)]))
        else:
            spread_row_tile(feed, rows, feed.ranks * tiles[rows.spread][0])


def normalise_row_tile(feed, group, rows):
    """Load and normalise rows (first, end) of every rank's part of a RowGroup; return them as a new bfloat16 SBUF tile.

    The tile is [rank * row, H].
    """
    first, end = group.first_row, group.first_row + group.rows
    group_rows = provide_rows(feed.rows, feed.ranks * first, feed.ranks * end)
    source = split_by_rank(group_rows, feed.ranks)[:, rows[0] : rows[1], :]
    shape = (feed.ranks * (rows[1] - rows[0]), group_rows.shape[1])
    tile = nl.ndarray(shape, dtype=group_rows.dtype, buffer=nl.sbuf)
    trigger_loads(plan_loads([tile], source), STATIC)
    if feed.norm is None:
        return cast(tile, nl.bfloat16)
    normalised = tile
    if tile.dtype != nl.bfloat16:
        normalised = nl.ndarray(tile.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    normalise_tiles([normalised], [tile], feed.norm)
    return normalised


def spread_row_tile(feed, rows, first_row):
    """Transpose the next normalised row tile of GroupRows and round it to MXFP8 into the operand.

    Also appends the sigmoids of a row gate, which are computed from the rows in bfloat16.

    first_row: first row of the row tile in the operand.
    """
    tile = rows.take_tile()
    count, hidden = tile.shape
    tiles, full = count_tiles(hidden), hidden // TILE
    values = nl.ndarray((PARTITIONS, tiles, count, VALUES), dtype=nl.bfloat16, buffer=nl.sbuf)
    clear_padding(values, hidden)
    tiles_per_bank = max(1, BANK_BYTES // 2 // (VALUES * count_slot_columns(count, nl.bfloat16)))
    turns = ranges(0, full, tiles_per_bank) + ranges(full, tiles)
    for index in range(len(turns)):
        first, end = turns[index]
        transpose_turn(values, tile, turns[index], index)
        span = (first_row, first_row + count)
        quantise_tiles(rows.operand, values[:, first:end, :, :], turns[index], span)
    if feed.row_gate is not None:
        rows.gates.append(compute_row_gate(feed.row_gate, values, hidden))


def clear_padding(values, depth):
    """Write zeros to the partitions of an SBUF tile [partition, tile, …] that complete a short last quadrant of values.

    depth: values of the contraction. What follows in the short quadrant overwrites its first partitions.
    """
    last = count_tiles(depth) - 1
    used = (depth - last * TILE) // VALUES
    if used % QUADRANT > 0:
        first = used - used % QUADRANT
        nisa.memset(dst=values[first : first + QUADRANT, last : last + 1, :, :], value=0.0)


def transpose_turn(values, tile, tiles, index):
    """Transpose tiles (first, end) of rows [row, H] into `values`, [p, tile, row, q], through one PSUM bank.

    index: number of the turn; the Vector engine copies every other one to SBUF, the Scalar engine the others.
    """
    first, end = tiles
    count, hidden = tile.shape
    used = min(PARTITIONS, (hidden - first * TILE) // VALUES)
    slots = count_slot_columns(count, nl.bfloat16)
    bank = nl.ndarray((used, end - first, VALUES, slots), dtype=nl.bfloat16, buffer=nl.psum)
    for t in range(first, end):
        for q in range(VALUES):
            start = t * TILE + q
            columns = tile[:, start : start + VALUES * (used - 1) + 1 : VALUES]
            nisa.nc_transpose(dst=bank[:, t - first, q, 0:count], data=columns)
    source = bank[:, :, :, 0:count].permute((0, 1, 3, 2))
    target = values[0:used, first:end, :, :]
    if index % 2 == 0:
        nisa.tensor_copy(dst=target, src=source)
    else:
        nisa.activation(dst=target, op=nl.copy, data=source)


def compute_row_gate(row_gate, values, hidden):
    """Return sigmoid(n @ row_gate) of each row of a row tile, float32 [row, 1] in SBUF.

    row_gate: bfloat16 [p, tile, q] in SBUF. values: n, bfloat16 [p, tile, row, q] in SBUF.
    """
    bank = nl.ndarray((values.shape[2], 1), dtype=nl.float32, buffer=nl.psum)
    for t in range(count_tiles(hidden)):
        used = min(PARTITIONS, (hidden - t * TILE) // VALUES)
        for q in range(VALUES):
            nisa.nc_matmul(
                dst=bank,
                stationary=values[0:used, t, :, q],
                moving=row_gate[0:used, t, q : q + 1],
                accumulate=t > 0 or q > 0,
            )
    sigmoids = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=sigmoids, op=nl.sigmoid, data=bank)
    return sigmoids
