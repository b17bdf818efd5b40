"""Products of few normalised rows with a weight of 8 or 4 bits, [norm(x)] @ w, for `qkv_projection`.

Such a weight arrives in half the time, so that the Tensor engine and all that comes before and after the product count
more. Up to 64 rows take 32 or 64 columns of the PE array. The array is divided into *groups* of so many columns, and
each group multiplies another *panel*, a range of columns of the weight, at the same time. Rows come in runs, without a
norm before the product, see `few_rows`; their angles are loaded before the weight. Rows may be rounded to fp8, with the
scales and elements that `paired_rows` gives them. Rows that meet a weight with block scales come in blocks, and each
block of columns multiplies a copy of them, see `scaled_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.norms.runs import RowFactors, sum_to_column
from nki_kernels.projection.few_rows import can_take_runs, request_few_rows, spread_few_rows, sum_few_squares
from nki_kernels.projection.grouped_product import choose_group_width
from nki_kernels.projection.head_groups import (
    allocate_row_numbers,
    choose_panels,
    finish_head_groups,
    load_group_operands,
    plan_head_groups,
    scale_angles,
)
from nki_kernels.projection.products import allocate_blocks, load_block_range, plan_weight_ranges
from nki_kernels.projection.quantised_rows import IntermediateQuantiser, RowQuantiser
from nki_kernels.projection.scaled_rows import add_scaled_panels, create_row_copies
from nki_kernels.projection.zero_points import (
    NegatedSums,
    add_up_rows,
    fill_minus_ones,
    load_zero_points,
)
from nki_kernels.tiles import (
    ACCUMULATOR_BANKS,
    BANK,
    PARTITIONS,
    blocks,
    count_block_partitions,
    filled,
    identity,
    ranges,
)
from nki_kernels.weights import choose_operand_dtype, load_runs_into, select_columns

LAST_BLOCKS = 4
"""Blocks of the last loads of the weight, before whose products 1 / rms is computed."""

COPY_BUFFERS = 4
"""Buffers of copies of rows that block scales multiply."""

FIRST_BLOCKS = 4
"""Blocks of the first load of the weight, before which x arrives."""


def project_in_groups(x, norm, w, columns, heads, quantises_rows=False):
    """Compute norm(x) @ w for at most 64 rows; hand the finished PSUM tiles to `heads.deliver`, which stores them.

    Args:
        x: [T, H] @ HBM.
        norm: Norm, RMSNorm; one without a weight leaves rows as they are.
        w: WeightMatrix [H, columns] with scales, or one that `scales_rows`.
        columns: range (first, end) of columns of w.
        heads: Heads. If heads.head is not 0, a tile has whole heads of so many columns.
        quantises_rows: whether rows are rounded to fp8 with a scale for each, as `paired_rows` does; H is then a
            multiple of 128.
    """
    rows = x.shape[0]
    layout = plan_head_groups(heads, columns, rows)
    if layout is not None:
        project_head_groups(x, norm, w, columns, heads, layout, quantises_rows)
        return
    requested = request_rows(x, norm, rows, w)
    element = w.elements.dtype if quantises_rows else None
    product = None
    for first, end in divide_among_banks(columns, heads.head):
        heads.load_scales((first, end), rows)
        if product is None:
            heads.load_angles_ahead(rows)
            product = start_product(requested, norm, choose_group_width(rows), 1, element)
        panels = divide_among_groups(end - first, rows)
        sums = allocate_panel_sums(panels, rows)
        product.multiply(sums, select_columns(w, first, end), panels)
        heads.deliver(0, first, end, sums, panels, product.scale)


def project_head_groups(x, norm, w, columns, heads, layout, quantises_rows):
    """Compute norm(x) @ w as `project_in_groups` does, and finish the heads of all groups in the same instructions.

    layout: HeadGroups of the columns. The other arguments are those of `project_in_groups`.
    """
    row_numbers = allocate_row_numbers(layout, x.shape[0])
    requested = request_rows(x, norm, layout.width, w)
    loaded = load_group_operands(heads, columns, layout, row_numbers, x.shape[0])
    element = w.elements.dtype if quantises_rows else None
    product = start_product(requested, norm, layout.width, layout.panels, element)
    operands = None
    if w.nibbles is None:
        # After the rows, for which the Tensor engine waits.
        operands = scale_angles(loaded, heads, columns[0], layout)
    width = layout.panel_width
    panels = ranges(0, columns[1] - columns[0], width)
    bank = nl.ndarray((layout.panels * layout.width, width), dtype=nl.float32, buffer=nl.psum)
    sums = []
    for panel in range(layout.panels):
        sums.append(bank[panel * layout.width : (panel + 1) * layout.width, :])
    product.multiply(sums, select_columns(w, columns[0], columns[1]), panels)
    if operands is None:
        # After the weight, which the Vector engine unpacks before it waits for the angles.
        operands = scale_angles(loaded, heads, columns[0], layout)
    finish_head_groups(heads, columns[0], bank, product.scale, operands, layout, x.shape[0])


def request_rows(x, norm, columns, w):
    """Return the RequestedRows of `request_few_rows` that meet the WeightMatrix w.

    norm: Norm; one without a weight leaves rows as they are. columns: columns of the result.
    """
    in_runs, unpacks = can_take_runs(w), w.nibbles is not None
    return request_few_rows(x, norm if norm.weight is not None else None, columns, in_runs, unpacks)


@dataclass
class FewRowsProduct(nl.NKIObject):
    """Product of few rows in runs, or in blocks, with weights that stream through SBUF.

    rows: the stationary operand, SBUF tile [partition, C, column], of which the first `count` columns are rows.
    factors: RowFactors of the rows' norm, or None. hidden: H. width: columns of the PE array of a group. in_runs:
    whether rows lie in runs; else in blocks. copies: number of groups for which `scale` has the rows. row_scales:
    float32 [row, row] in SBUF with the scales of rows that are quantised on its diagonal, or None. scale: what
    multiplies each row, 1 / rms and its scale, float32 [group * row, 1] in SBUF; None if nothing does, and before the
    first product. negated_sums: NegatedSums for a weight of 4 bits from the first product on, else None.
    """

    rows: nl.NkiTensor
    factors: RowFactors | None
    hidden: int
    width: int
    in_runs: bool
    copies: int
    count: int
    row_scales: nl.NkiTensor | None = None
    scale: nl.NkiTensor | None = None
    negated_sums: NegatedSums | None = None

    def multiply(self, sums, matrix, panels):
        """Load a WeightMatrix [H, columns] range by range and write its product with the rows to `sums`.

        Args:
            sums: PSUM tiles [row, column], one for each panel.
            matrix: the WeightMatrix.
            panels: ranges (start, end) of its columns.
        """
        count, columns = blocks(self.hidden), matrix.elements.shape[1]
        dtype = choose_operand_dtype([matrix], self.rows.dtype)
        block_ranges = plan_weight_ranges(matrix, columns, FIRST_BLOCKS)
        copies, zero_points = None, None
        if matrix.scales_rows:
            copies = self.create_copies(matrix, block_ranges)
        if matrix.nibbles is not None:
            zero_points = load_zero_points([matrix], dtype)
            if self.negated_sums is None:
                row_sums = add_up_rows(self.rows, self.hidden, fill_minus_ones(self.rows.dtype))
                self.negated_sums = NegatedSums(row_sums, self.rows.dtype)
        for start, end in block_ranges:
            weights = allocate_blocks(self.hidden, end - start, columns, dtype)
            scaled_rows = None
            if self.in_runs:
                load_runs_into(weights, matrix, start)
            else:
                load_block_range(weights, matrix, start)
            if copies is not None:
                rows = (start * PARTITIONS, min(self.hidden, end * PARTITIONS))
                loaded = matrix.submatrix(rows, (0, columns))
                scaled_rows = copies.make(self.rows[:, :, 0 : self.count], loaded, start)
            # Before the last products, so that neither other products nor the copies of their sums wait for it.
            if end > count - LAST_BLOCKS and self.scale is None:
                self.compute_scale()
            if scaled_rows is not None:
                add_scaled_panels(
                    sums, scaled_rows, weights, panels, start, self.hidden, self.width, matrix.block_start
                )
                continue
            for within in range(end - start):
                used = count_block_partitions(self.hidden, start + within, self.in_runs)
                rows = self.rows[0:used, start + within, :]
                add_panel_block(
                    sums, rows, weights[0:used, within, :], panels, start + within > 0, self.width
                )
            if self.negated_sums is not None and 2 * end >= count:
                # Amid the products, so that neither they nor the last ones wait for the sums.
                self.negated_sums.split()
        if zero_points is not None:
            add_panel_block(sums, self.negated_sums.split(), zero_points[:, 0, :], panels, True, self.width)

    def create_copies(self, matrix, block_ranges):
        """Return RowCopies for a WeightMatrix that is loaded in ranges (start, end) of K blocks."""
        longest = 0
        for start, end in block_ranges:
            longest = max(longest, end - start)
        shape = (self.rows.shape[0], longest, matrix.block_scales.shape[2], self.rows.shape[2])
        return create_row_copies(shape, self.rows.dtype, self.count, COPY_BUFFERS)

    def compute_scale(self):
        """Compute `scale` of the factors and of the scales of rows, as far as there are any."""
        if self.factors is not None:
            self.scale = self.factors.compute_column(self.width, self.copies)
        if self.row_scales is not None:
            column = sum_to_column(self.row_scales, self.width, self.copies)
            scale = nl.ndarray(column.shape, dtype=nl.float32, buffer=nl.sbuf)
            if self.scale is None:
                nisa.tensor_copy(dst=scale, src=column)
            else:
                nisa.tensor_tensor(dst=scale, data1=self.scale, data2=column, op=nl.multiply)
            self.scale = scale


def start_product(requested, norm, width, copies, element):
    """Return the FewRowsProduct of RequestedRows, which are spread, squared and maybe quantised here.

    norm: Norm; one without a weight leaves rows as they are. width, copies: those of the product. element: the fp8
    dtype to which rows are rounded, or None.
    """
    stationary, factors, row_scales = spread_few_rows(requested), None, None
    if element is not None:
        stationary, row_scales = quantise_runs(stationary, requested.hidden, element)
    if norm.weight is not None:
        columns = requested.runs.shape[2]
        factors = RowFactors(sum_few_squares(requested, columns), requested.hidden, norm.eps)
    in_runs, count = requested.in_runs, requested.rows
    return FewRowsProduct(stationary, factors, requested.hidden, width, in_runs, copies, count, row_scales)


def quantise_runs(runs, hidden, element):
    """Return rows in runs as fp8 with a scale for each row.

    Args:
        runs: SBUF tile [partition, C, row], on all partitions.
        hidden: H, a multiple of 128.
        element: float8_e4m3 or float8_e4m3fn.

    Returns:
        The fp8 tile of the same shape, and the diagonal matrix of the scales, float32 [row, row] in SBUF.
    """
    rows = runs.shape[2]
    quantiser = RowQuantiser([], [], identity(rows, nl.float32), filled((rows, PARTITIONS), 1.0), [], element)
    stages = IntermediateQuantiser(quantiser, [runs], hidden, [(0, rows)], None, False, 0, None, [], [], [])
    quantised, scales = stages.finish()
    return quantised[0], quantiser.build_diagonal(scales[0])


def divide_among_banks(columns, head):
    """Divide a range of columns (first, end) into ranges that accumulate together, in at most ACCUMULATOR_BANKS banks.

    head: columns of a head, which no range cuts, or 0.
    """
    most = ACCUMULATOR_BANKS * BANK
    if head > 0:
        most = most // head * head
    return ranges(columns[0], columns[1], most)


def divide_among_groups(width, rows):
    """Return ranges (start, end) of equal width that cover columns 0 … width - 1, the last one maybe shorter."""
    groups = PARTITIONS // choose_group_width(rows)
    return ranges(0, width, blocks(width, choose_panels(width, 1, max(groups, blocks(width, BANK)), False)))


def allocate_panel_sums(panels, rows):
    """Return views [row, column] of PSUM, one for each panel; panels of different groups share a bank."""
    group_width = choose_group_width(rows)
    sums = []
    for index in range(len(panels)):
        first = index * group_width % PARTITIONS
        if first == 0:
            bank = nl.ndarray((PARTITIONS, panels[0][1]), dtype=nl.float32, buffer=nl.psum)
        sums.append(bank[first : first + rows, 0 : panels[index][1] - panels[index][0]])
    return sums


def add_panel_block(sums, rows, weights, panels, accumulate, group_width):
    """Add the products of one block of the contraction to the sums of `allocate_panel_sums`.

    Args:
        sums: PSUM tiles [row, column], one for each panel.
        rows: the stationary operand [k in block, row] in SBUF.
        weights: [k in block, column] in SBUF.
        panels: ranges (start, end) of columns of `weights`.
        accumulate: whether the sums are kept; else they are overwritten.
        group_width: columns of the PE array of a group.
    """
    # Matmuls of different groups follow each other, so that they run at the same time.
    for index in range(len(panels)):
        start, end = panels[index]
        nisa.nc_matmul(
            dst=sums[index],
            stationary=rows,
            moving=weights[:, start:end],
            accumulate=accumulate,
            tile_position=(0, index * group_width % PARTITIONS),
            tile_size=(PARTITIONS, group_width),
        )
