"""A feed-forward block whose rows and weights are 8-bit integers (W8A8): simple and exact, not fast.

    q, s = integers of norm(x), scales of its rows;   n @ w stands for (q @ w) * s * scales of w's columns
    h = activation(n @ w_gate + b_gate) * (n @ w_up + b_up), rounded to x's dtype
    y = x + sum over ranks of (integers of h @ w_down) * scales of h's rows * scales of w_down's columns + b_down

Sums of integers are those of `integer_product`, bit for bit. The scales of h's rows are those of a rank's columns, or
of the columns of all ranks, see `row_maxima`.

Rows lie on the partitions, a row tile of up to 128 after the other. Their transpose is stationary, and columns of the
weights move, up to 512 at a time. If x is cut along the sequence over N ranks, a row tile has 128 // N rows of every
rank, see `sequence`.

Cost: every row tile loads all weights and the Vector engine converts them to bfloat16, group by group. Predicted on
trn2 in bfloat16, one core in program order: 261 to 266 us for each row tile of 1 to 128 rows (H = 4096, F = 1792), 2.2
times as long as int8 weights with plain rows take for T = 1, 1.9 times for T = 128. 512 rows take 2.7 times as long.
Row maxima that 8 ranks share add 11 us to a row tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from nki_kernels.cores import find_core_rows
from nki_kernels.dma import STATIC
from nki_kernels.norms.row_tiles import RowNorm, allocate_row_scratch, load_norm
from nki_kernels.projection.feed_forward import Weights
from nki_kernels.projection.integer_product import quantise_rows_to_integers, sum_integer_products
from nki_kernels.projection.integer_projection import compute_integer_chunk
from nki_kernels.projection.products import add_products
from nki_kernels.projection.residual_product import MovingWeight, ResidualProduct
from nki_kernels.projection.row_groups import (
    count_rows_per_rank,
    list_starts,
    normalise_tiles,
    plan_loads,
    split_by_rank,
    trigger_loads,
)
from nki_kernels.projection.row_maxima import find_largest_in_rows, share_maxima
from nki_kernels.projection.rows import spread
from nki_kernels.projection.sequence import RowSource, plan_gathered_rows, provide_rows, use_whole_rows
from nki_kernels.projection.static_rows import StaticQuantiser
from nki_kernels.tiles import (
    ACCUMULATOR_BANKS,
    BANK,
    PARTITIONS,
    cast,
    copy_bank,
    load_repeated,
    ranges,
)
from nki_kernels.weights import WeightMatrix, load_blocks, select_columns


@dataclass
class IntegerFeedForward(nl.NKIObject):
    """What all row tiles of a block of integers share.

    rows: RowSource of x. norm: RowNorm, or None if rows need none. weights: Weights of int8 elements with scales.
    activation: function of the Scalar engine. down: the down product, whose row_scales get a column for each row tile.
    row_gate: [h in block, block, 1] in SBUF, or None. static: StaticQuantiser of rows, or None without
    static scales. maxima_group: the ranks that share the row maxima of h, or None.
    """

    rows: RowSource
    norm: RowNorm | None
    weights: Weights
    activation: object
    down: ResidualProduct
    row_gate: nl.NkiTensor | None
    static: StaticQuantiser | None
    maxima_group: ncc.ReplicaGroup | None


def run_integer_feed_forward(
    y, x, weights, norm, activation, row_gate, residual, rank_sum, static, maxima_group
):
    """Write y @ HBM, [T, H]; with rows that are cut over ranks, this rank's rows.

    Args:
        y, x: [T, H] @ HBM.
        weights: Weights of int8 elements with scales.
        norm: Norm; one without a weight leaves rows as they are.
        activation: function of the Scalar engine.
        row_gate: [H, 1] @ HBM, or None.
        residual: whether x is added.
        rank_sum: RankSum without chunks. Its sequence_ranks are the ranks over which rows are cut.
        static: StaticQuantiser, or None if rows have scales of their own.
        maxima_group: the ranks that share the row maxima of h, or None.
    """
    first_row, end_row = find_row_share(x.shape[0], rank_sum.sequence_ranks)
    if first_row < end_row:
        x, y = x[first_row:end_row, :], y[first_row:end_row, :]
        block = prepare_block(
            y, x, weights, norm, activation, row_gate, residual, rank_sum, static, maxima_group
        )
        for start, end in ranges(0, x.shape[0], count_rows_per_rank(rank_sum.sequence_ranks)):
            compute_row_tile(block, start, end)
        rank_sum.finish()


def find_row_share(rows, ranks):
    """Return (first, end) of the rows that this core computes: half of a prompt, all or none of up to 128 rows.

    rows: number of rows of this rank. ranks: over how many ranks rows are cut.
    """
    if nl.program_id(0) > 0 and rows * ranks <= PARTITIONS:
        return rows, rows
    return find_core_rows(rows, ranks)


def prepare_block(y, x, weights, norm, activation, row_gate, residual, rank_sum, static, maxima_group):
    """Return the IntegerFeedForward of some rows, with norm and row gate loaded into SBUF.

    The arguments are those of `run_integer_feed_forward`.
    """
    ranks, row_norm, gate_column = rank_sum.sequence_ranks, None, None
    tile_rows = min(x.shape[0], PARTITIONS)
    if norm.weight is not None:
        row_norm = load_norm(norm, allocate_row_scratch(tile_rows, x.shape[1], x.dtype), x.dtype)
    if row_gate is not None:
        gate_column = load_blocks(WeightMatrix(row_gate), x.dtype, STATIC)
    rows = use_whole_rows(x)
    if ranks > 1:
        # Rows of other ranks arrive normalised.
        rows = plan_gathered_rows(x, row_norm, ranks, rank_sum.replica_group, count_rows_per_rank(ranks))
        row_norm = None
    added = x if residual else None
    w_down = MovingWeight([weights.w_down])
    down = ResidualProduct(y, added, w_down, None, rank_sum, None, [], weights.w_down.scales)
    return IntegerFeedForward(rows, row_norm, weights, activation, down, gate_column, static, maxima_group)


def compute_row_tile(block, first_row, end_row):
    """Compute the rows of y from `first_row` on that a row tile has; over several ranks their sums may be under way.

    first_row, end_row: the range of rows, counted among those of one rank; at most 128 rows of all ranks together.
    """
    ranks, hidden = block.down.rank_sum.sequence_ranks, block.rows.all_rows.shape[1]
    dtype = block.rows.all_rows.dtype
    tile = nl.ndarray((ranks * (end_row - first_row), hidden), dtype=dtype, buffer=nl.sbuf)
    rows = provide_rows(block.rows, ranks * first_row, ranks * end_row)
    trigger_loads(plan_loads([tile], split_by_rank(rows, ranks)), STATIC)
    normalise_tiles([tile], [tile], block.norm)
    row_static, inner_static = None, None
    if block.static is not None:
        row_static, inner_static = block.static.rows, block.static.intermediate
    numbers, row_scale = quantise_rows_to_integers(tile, row_static)
    stationary = spread(numbers, False)
    intermediate = compute_intermediate(block, stationary, row_scale, dtype)
    largest = None
    if block.maxima_group is not None:
        largest = share_maxima([find_largest_in_rows(intermediate)], block.maxima_group)[0]
    inner_numbers, inner_scale = quantise_rows_to_integers(intermediate, inner_static, largest)
    if block.row_gate is not None:
        factor = compute_row_gate(block.row_gate, numbers, row_scale)
        nisa.tensor_tensor(dst=factor, data1=factor, data2=inner_scale, op=nl.multiply)
        inner_scale = factor
    block.down.row_scales.append(inner_scale)
    inner_stationary = spread(inner_numbers, False)
    for first_column in list_starts(hidden, ACCUMULATOR_BANKS * BANK):
        compute_integer_chunk(block.down, block.weights.b_down, inner_stationary, first_row, first_column)


def compute_intermediate(block, stationary, row_scale, dtype):
    """Return activation(n @ w_gate) * (n @ w_up) of a row tile, or activation(n @ w_up), [row, F] in SBUF.

    Args:
        block: IntegerFeedForward.
        stationary: the integers of n, [h in block, block, row] in SBUF.
        row_scale: their scales, float32 [row, 1].
        dtype: of the result.
    """
    weights, inner = block.weights, block.weights.w_up.elements.shape[1]
    result = nl.ndarray((stationary.shape[2], inner), dtype=dtype, buffer=nl.sbuf)
    for columns in ranges(0, inner, BANK):
        dst = result[:, columns[0] : columns[1]]
        up = project_columns(stationary, row_scale, weights.w_up, weights.b_up, columns)
        if weights.w_gate is None:
            nisa.activation(dst=dst, op=block.activation, data=up)
        else:
            gate = project_columns(stationary, row_scale, weights.w_gate, weights.b_gate, columns)
            activated = nl.ndarray(gate.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.activation(dst=activated, op=block.activation, data=gate)
            nisa.tensor_tensor(dst=dst, data1=activated, data2=up, op=nl.multiply)
    return result


def project_columns(stationary, row_scale, weight, bias, columns):
    """Return columns (first, end), at most 512, of n @ weight + bias for a row tile: a new float32 SBUF tile.

    stationary, row_scale: as in `compute_intermediate`. weight: WeightMatrix. bias: [1, F] @ HBM, or None.
    """
    matrix = select_columns(weight, columns[0], columns[1])
    sums = sum_integer_products(stationary, matrix)
    scaled = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf)
    copy_bank(scaled, sums, 0, 0, row_scale, load_repeated(matrix.scales, sums.shape[0]))
    if bias is not None:
        repeated = load_repeated(bias[:, columns[0] : columns[1]], sums.shape[0])
        nisa.tensor_tensor(dst=scaled, data1=scaled, data2=repeated, op=nl.add)
    return scaled


def compute_row_gate(row_gate, numbers, row_scale):
    """Return sigmoid(n @ row_gate) of each row of a row tile, float32 [row, 1] in SBUF.

    row_gate: [h in block, block, 1] in SBUF. numbers: the integers of n, bfloat16 [row, H]; row_scale: their scales.
    """
    stationary = spread(cast(numbers, row_gate.dtype), False)
    rows, hidden = numbers.shape
    bank = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.psum)
    add_products([[bank]], stationary, [(0, rows)], row_gate, [(0, 1)], 0, hidden)
    sigmoids = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=sigmoids, op=nl.sigmoid, data=bank, scale=row_scale)
    return sigmoids
