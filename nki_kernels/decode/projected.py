"""The QKV projection of a decode step: from hidden states in SBUF to queries, keys and values as attention takes them.

`decode.block` calls `project`. The weights of queries and keys are the stationary operands, so that their heads come
with D on the partitions. For values the rows are stationary, so that tokens are on the partitions. Nothing is
transposed and nothing goes through HBM.

Hidden states lie as in `decode.hidden`: with C = ceil(H / 128), block i has element p * C + i of each row on
partition p.

Sums leave PSUM times 1 / rms of their token, and times the scale of their column if the weight has scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.products import allocate_blocks, plan_weight_ranges
from nki_kernels.projection.zero_points import (
    NegatedSums,
    add_up_rows,
    fill_minus_ones,
    load_zero_points,
)
from nki_kernels.tiles import ACCUMULATOR_BANKS, BANK, PARTITIONS, blocks, count_block_partitions, ranges
from nki_kernels.weights import WeightMatrix, choose_operand_dtype, load_runs_into, select_columns


class Projected(nl.NKIObject):
    """Results of the projection in SBUF, in `sizes.dtype`.

    heads: query heads, then key heads, [D in tile, tile, head, token]. values: [token, Hk * D].
    """

    def __init__(self, sizes):
        shape = (min(sizes.depth, PARTITIONS), sizes.depth_tiles, sizes.heads + sizes.kv_heads, sizes.tokens)
        self.heads = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)
        width = sizes.kv_heads * sizes.depth
        self.values = nl.ndarray((sizes.tokens, width), dtype=sizes.dtype, buffer=nl.sbuf)


def plan_column_groups(sizes):
    """Return which columns of w_qkv are accumulated together, as (first head, end, first column of values, end).

    Heads are numbered through queries and keys. All columns make one group if their sums fit into PSUM. Otherwise
    heads and values have groups of their own, in which the other range is empty.
    """
    heads, width = sizes.heads + sizes.kv_heads, sizes.kv_heads * sizes.depth
    most = BANK // sizes.tokens * ACCUMULATOR_BANKS // sizes.depth_tiles * sizes.together
    if heads <= most and width <= 2 * BANK:
        return [(0, heads, 0, width)]
    groups = []
    for first, end in ranges(0, heads, most):
        groups.append((first, end, 0, 0))
    for first, end in ranges(0, width, ACCUMULATOR_BANKS * BANK):
        groups.append((0, 0, first, end))
    return groups


@dataclass
class GroupProduct(nl.NKIObject):
    """Sums of the columns of w_qkv that are accumulated together, in PSUM, and how far they are added up.

    rows: hidden states times the norm's weight, [partition, C, token] in SBUF. matrix: WeightMatrix of the columns.
    value_columns: how many of these, the last ones, are values. sums: triples of `allocate_head_sums`. banks, panels:
    as for `add_values`. loads: ranges (start, end) of K blocks that are loaded together. loaded: how many of them are
    added. zero_points: result of `load_zero_points` for a weight of 4 bits, else None. negated_sums: NegatedSums of
    the rows, or None.
    """

    rows: nl.NkiTensor
    matrix: WeightMatrix
    value_columns: int
    sums: list
    banks: list
    panels: list
    loads: list
    loaded: int
    zero_points: nl.NkiTensor | None
    negated_sums: object

    def multiply_until(self, end_block, sizes):
        """Load and multiply the ranges of K blocks that end at `end_block` or before, in order."""
        hidden, width = self.matrix.count_rows(), self.matrix.elements.shape[1]
        dtype = choose_operand_dtype([self.matrix], sizes.dtype)
        while self.loaded < len(self.loads) and self.loads[self.loaded][1] <= end_block:
            start, stop = self.loads[self.loaded]
            weights = allocate_blocks(hidden, stop - start, width, dtype)
            load_runs_into(weights, self.matrix, start)
            add_heads(self.sums, weights, self.rows, start, hidden, sizes)
            value_weights = weights[:, :, width - self.value_columns : width]
            add_values(self.banks, value_weights, self.panels, self.rows, start, hidden)
            self.loaded += 1

    def add_zero_points(self, sizes):
        """Add the term of the zero points, if the weight has 4 bits."""
        if self.zero_points is not None:
            sums = self.negated_sums.split()
            add_head_block(self.sums, self.zero_points[:, 0, :], sums, True, sizes)
            width = self.zero_points.shape[2]
            value_zeros = self.zero_points[:, 0, width - self.value_columns : width]
            add_value_block(self.banks, value_zeros, self.panels, sums, True)


def start_group(group, rows, w_qkv, sizes, negated_sums):
    """Return the GroupProduct of one of `plan_column_groups`, with nothing added up yet.

    negated_sums: NegatedSums of the rows for a w_qkv of 4 bits, else None. The other arguments are those of `project`.
    """
    first, end, left, right = group
    first_value = (sizes.heads + sizes.kv_heads) * sizes.depth
    columns = first * sizes.depth, end * sizes.depth
    if right > left:
        columns = first_value + left, first_value + right
        if end > first:
            columns = first * sizes.depth, first_value + right
    matrix = select_columns(w_qkv, columns[0], columns[1])
    sums = allocate_head_sums(end - first, sizes)
    panels, banks = ranges(0, right - left, BANK), []
    for start, stop in panels:
        banks.append(nl.ndarray((sizes.tokens, stop - start), dtype=nl.float32, buffer=nl.psum))
    zero_points = None
    if negated_sums is not None:
        zero_points = load_zero_points([matrix], choose_operand_dtype([matrix], sizes.dtype))
    # Parts of the weight grow from one block on, so the first products begin while most of it is on its way.
    loads = plan_weight_ranges(matrix, columns[1] - columns[0], 1)
    return GroupProduct(rows, matrix, right - left, sums, banks, panels, loads, 0, zero_points, negated_sums)


def start_packed_product(rows, w_qkv, sizes):
    """Return the GroupProduct of the first columns with all of its products; None unless w_qkv has 4 bits.

    The Vector engine unpacks weights before it prepares masks and angles, for which no product waits.
    """
    if w_qkv.nibbles is None:
        return None
    negated_sums = NegatedSums(add_up_rows(rows, w_qkv.count_rows(), fill_minus_ones(rows.dtype)), rows.dtype)
    product = start_group(plan_column_groups(sizes)[0], rows, w_qkv, sizes, negated_sums)
    product.multiply_until(blocks(w_qkv.count_rows()), sizes)
    negated_sums.split()
    return product


def project(rows, w_qkv, sizes, roots, column_scales, started=None):
    """Return `rows` times w_qkv, times `roots`, as a `Projected`; w_qkv is loaded from HBM piece by piece.

    Args:
        rows: hidden states times the norm's weight, [partition, C, token] in SBUF.
        w_qkv: `WeightMatrix` [H, q_size + 2 * kv_size].
        roots: 1 / rms of each token, [128, token] and [token, 1] float32 in SBUF, see `compute_reciprocal_roots`.
        column_scales: `ProjectionScales` of w_qkv, or None without scales.
        started: result of `start_packed_product`.
    """
    result = Projected(sizes)
    negated_sums = None if started is None else started.negated_sums
    for group in plan_column_groups(sizes):
        product = started
        if product is None:
            product = start_group(group, rows, w_qkv, sizes, negated_sums)
        started = None
        first, first_column = group[0], group[2]
        factors = compute_head_factors(product.sums, first, roots[0], column_scales, sizes)
        product.multiply_until(blocks(w_qkv.count_rows()), sizes)
        product.add_zero_points(sizes)
        read_heads(result.heads, product.sums, first, factors, sizes)
        for panel in range(len(product.panels)):
            start = first_column + product.panels[panel][0]
            stop = first_column + product.panels[panel][1]
            read_values(result.values[:, start:stop], product.banks[panel], start, roots[1], column_scales)
    return result


def allocate_head_sums(heads, sizes):
    """Return accumulators for `heads` heads: triples (first head, end, PSUM tile).

    A tile is [D in tile, tile, head, token] float32 and takes one PSUM bank. Of heads of 32 or 64 elements,
    `sizes.together` neighbours share the partitions, and axis 2 counts such sets.
    """
    tiles = []
    most = sizes.together * (BANK // (sizes.tokens * sizes.depth_tiles))
    for first, end in ranges(0, heads, most):
        height = min(sizes.together * sizes.depth, PARTITIONS)
        shape = (height, sizes.depth_tiles, blocks(end - first, sizes.together), sizes.tokens)
        tiles.append((first, end, nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)))
    return tiles


def add_heads(sums, weights, rows, first, hidden, sizes):
    """Add the products of some blocks of hidden states with their weights to the accumulators of the heads.

    Of the C neighbouring elements of a row that each partition has, block i is the i-th. Block 0 overwrites the
    accumulators.

    Args:
        sums: triples of `allocate_head_sums`.
        weights: [partition, block, column] in SBUF, whose first columns make the heads.
        rows: [partition, C, token] in SBUF.
        first: number of the first block in `weights`.
        hidden: H.
    """
    for within in range(weights.shape[1]):
        block = first + within
        used = count_block_partitions(hidden, block, True)
        add_head_block(sums, weights[0:used, within, :], rows[0:used, block, :], block > 0, sizes)


def add_head_block(sums, weights, rows, accumulate, sizes):
    """Add the product of one block of the contraction to the accumulators of the heads; write them unless `accumulate`.

    Args:
        sums: triples of `allocate_head_sums`.
        weights: [partition, column] in SBUF, whose first columns make the heads.
        rows: [partition, token] in SBUF.
    """
    for first_head, end_head, tile in sums:
        for head in range(first_head, end_head, sizes.together):
            count = min(sizes.together, end_head - head)
            for d in range(sizes.depth_tiles):
                height = min(PARTITIONS, count * sizes.depth - d * PARTITIONS)
                column = head * sizes.depth + d * PARTITIONS
                nisa.nc_matmul(
                    dst=tile[0:height, d, (head - first_head) // sizes.together, :],
                    stationary=weights[:, column : column + height],
                    moving=rows,
                    accumulate=accumulate,
                )


def add_values(banks, weights, panels, rows, first, hidden):
    """Add the products of some blocks of hidden states with their weights to the accumulators of the values.

    Of the C neighbouring elements of a row that each partition has, block i is the i-th. Block 0 overwrites the
    accumulators.

    Args:
        banks: PSUM tiles [token, column], one for each range of columns.
        weights: [partition, block, column] in SBUF, the columns of values only.
        panels: ranges (first column, end) of `weights`, at most 512 columns each.
        rows: [partition, C, token] in SBUF.
        first: number of the first block in `weights`.
        hidden: H.
    """
    for within in range(weights.shape[1]):
        block = first + within
        used = count_block_partitions(hidden, block, True)
        add_value_block(banks, weights[0:used, within, :], panels, rows[0:used, block, :], block > 0)


def add_value_block(banks, weights, panels, rows, accumulate):
    """Add the product of one block of the contraction to the accumulators of values; write them unless `accumulate`.

    Args:
        banks, panels: as for `add_values`.
        weights: [partition, column] in SBUF, the columns of values only.
        rows: [partition, token] in SBUF.
    """
    for panel in range(len(panels)):
        start, stop = panels[panel]
        nisa.nc_matmul(
            dst=banks[panel], stationary=rows, moving=weights[:, start:stop], accumulate=accumulate
        )


def compute_head_factors(sums, first, roots, column_scales, sizes):
    """Return what the accumulated heads are multiplied by: for each accumulator a float32 tile or view in SBUF.

    Each is [partition, tile of D, head, token], as the accumulator: 1 / rms of the token, times the column's scale if
    there are scales.

    Args:
        sums: triples of `allocate_head_sums`.
        first: number of the first head of `sums`.
        roots: 1 / rms, [128, token] float32 in SBUF.
        column_scales: `ProjectionScales`, or None.
    """
    factors = []
    for first_head, _, tile in sums:
        height, number, count, tokens = tile.shape
        repeated = roots[0:height, :].expand_dim(1).broadcast(1, count)
        if column_scales is None:
            factors.append(repeated.expand_dim(1).broadcast(1, number))
            continue
        start = (first + first_head) // sizes.together
        factor = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
        for d in range(number):
            used = min(height, sizes.together * sizes.depth - d * PARTITIONS)
            scales = column_scales.heads[0:used, d, start : start + count].expand_dim(2).broadcast(2, tokens)
            nisa.tensor_tensor(
                dst=factor[0:used, d, :, :], data1=repeated[0:used], data2=scales, op=nl.multiply
            )
        factors.append(factor)
    return factors


def read_heads(heads, sums, first, factors, sizes):
    """Copy accumulated heads from PSUM to `heads` in SBUF, times `factors`, to head number `first` and those after it.

    Args:
        heads: [D in tile, tile, head, token] in SBUF.
        sums: triples of `allocate_head_sums`.
        factors: results of `compute_head_factors`.
    """
    for index in range(len(sums)):
        first_head, end_head, tile = sums[index]
        for offset in range(min(sizes.together, end_head - first_head)):
            for d in range(sizes.depth_tiles):
                start = offset * sizes.depth
                height = min(PARTITIONS, sizes.depth - d * PARTITIONS)
                target = heads[
                    0:height, d, first + first_head + offset : first + end_head : sizes.together, :
                ]
                count = target.shape[1]
                # Tokens lie along the free dimension here, so their roots are a tile, and the Vector engine evicts.
                factor = factors[index][start : start + height, d, 0:count, :]
                source = tile[start : start + height, d, 0:count, :]
                nisa.tensor_tensor(dst=target, data1=source, data2=factor, op=nl.multiply)


def read_values(values, bank, first, root, column_scales):
    """Copy accumulated columns of values from PSUM to `values` in SBUF, times 1 / rms and the columns' scales, if any.

    Args:
        values: [token, column] in SBUF.
        bank: [token, column] float32 in PSUM.
        first: number of the first column among all columns of values.
        root: 1 / rms of each token, [token, 1] float32 in SBUF.
        column_scales: `ProjectionScales`, or None.
    """
    if column_scales is None:
        # Tokens lie on the partitions here, so the Scalar engine applies a root per partition as it evicts.
        nisa.activation(dst=values, op=nl.copy, data=bank, scale=root)
        return
    scales = column_scales.values[:, first : first + values.shape[1]]
    nisa.scalar_tensor_tensor(
        dst=values, data=bank, op0=nl.multiply, operand0=root, op1=nl.multiply, operand1=scales
    )
