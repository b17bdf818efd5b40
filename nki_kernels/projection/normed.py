"""Products of normalised rows with a weight, [norm(x)] @ w, for `qkv_projection`.

`project` computes some columns of the product, and hands each finished tile of PSUM to the record Heads,
whose `deliver` stores it. Up to 128 rows are transposed once and the weight streams past them. For more rows
as many columns of the weight as fit stay in SBUF, and one row tile of 128 rows after the other meets them.
Columns that accumulate together are a *group*; the columns of one PSUM bank are a *panel*.

No product waits for an RMSNorm: its weight is multiplied into the smaller operand, w or x^T, and `deliver`
multiplies each row of the product by 1 / rms. LayerNorm comes before the transpose. Rows come from a
RowSource, which may gather them from other ranks, see `sequence`.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.norms.blocks import (
    BlockNorm,
    add_squares,
    load_norm_blocks,
    sum_block_squares,
    weight_blocks,
)
from nki_kernels.norms.norm import compute_inverse_root
from nki_kernels.norms.row_tiles import compute_inverse_rms, standardise
from nki_kernels.projection.few_rows import can_take_runs, is_transposed_on_chip, takes_runs
from nki_kernels.projection.group_panels import project_in_groups
from nki_kernels.projection.products import (
    add_products,
    allocate_blocks,
    allocate_sums,
    load_block_range,
    plan_growing_ranges,
    plan_weight_ranges,
    transpose_block_range,
)
from nki_kernels.projection.row_groups import count_bytes, item_bytes
from nki_kernels.projection.rows import spread
from nki_kernels.projection.scaled_rows import scale_rows
from nki_kernels.projection.sequence import RowSource, provide_rows
from nki_kernels.projection.zero_points import load_centred_blocks, load_zero_rows
from nki_kernels.tiles import (
    ACCUMULATOR_BANKS,
    BANK,
    PARTITIONS,
    blocks,
    count_block_partitions,
    filled,
    load,
    ranges,
)
from nki_kernels.weights import choose_operand_dtype, load_runs_into, select_columns

RESIDENT_BYTES = 65536
"""Most bytes per partition of the weight's columns that stay in SBUF."""

LEAD_BANKS = 6
"""Most PSUM banks of the row tiles that accumulate side by side while the weight arrives."""

OPERAND_BYTES = 163840
"""Bytes per partition for the weight, the row tiles that accumulate side by side, the next row tiles, and squares."""

GATHERED_TILES = 2
"""Most row tiles that accumulate side by side if rows are gathered: the weight is there before the third."""

MOVING_TILES = 6
"""Row tiles and transposes of a LayerNorm that are on their way to a product, beside those that stay in SBUF."""

HEAD_BYTES = 32768
"""Bytes per partition in which results are finished if heads are normalised or rotated."""

FINISHED_BYTES = 16384
"""Bytes per partition in which other results are finished."""

LEAD_ELEMENTS = 1024
"""Most elements per partition of a load of the weight while the first row tiles accumulate.

With few elements the Tensor engine starts early.
"""

ROUNDS = 3
"""The number of panels of few rows is a multiple of this, unless the heads are fewer.

Few panels make the last one large, which holds up the end of the launch; with many, the matmuls take longer.
"""


def project(rows, norm, w, columns, heads):
    """Compute norm(x) @ w for a range of columns; hand each finished PSUM tile to `heads.deliver`, which stores it.

    1 / rms of the rows is handed over as well, for `deliver` to multiply by. Up to 128 rows are transposed
    once and the weight streams past them; else columns of the weight stay in SBUF.

    Args:
        rows: RowSource of x [T, H] @ HBM.
        norm: Norm; one without a weight leaves rows as they are.
        w: WeightMatrix [H, columns]; the scales of its columns are those of `heads`.
        columns: range (first, end) of columns of w.
        heads: Heads. If heads.head is not 0, a tile has whole heads of so many columns.
    """
    in_groups = takes_groups(rows, norm, w)
    if w.block_scales is not None and in_groups:
        scale_rows([w], rows.all_rows.dtype)
    if in_groups and (w.scales is not None or w.scales_rows):
        project_in_groups(rows.all_rows, norm, w, columns, heads)
    elif rows.all_rows.shape[0] > PARTITIONS or needs_defined_rows() or w.nibbles is not None:
        project_many(rows, norm, w, columns, heads)
    else:
        project_few(rows, norm, w, columns, heads)


def takes_groups(source, norm, w):
    """Return whether `project_in_groups` takes the rows of a RowSource and w: few rows, RMSNorm or none."""
    x = source.all_rows
    # On gen2 a transpose is a product, which spreads NaN of one row to the others.
    spreads = is_transposed_on_chip(x, can_take_runs(w)) and needs_defined_rows()
    return source.gather is None and not spreads and takes_runs(x, norm, 1, False)


def needs_defined_rows():
    """Return whether the Tensor engine transposes by a product, as on gen2: undefined rows then spoil the others."""
    return nisa.get_nc_version() == nisa.nc_version.gen2


def divide_columns(columns, head, most):
    """Divide a range of columns into groups that accumulate together; return (groups, columns of a PSUM bank).

    A group is (first, end), with at most `most` columns in at most ACCUMULATOR_BANKS banks. If `head` is not
    0, groups and banks have whole heads of so many columns. columns: (first, end).
    """
    bank = min(BANK, most)
    if head > 0:
        bank = max(head, bank // head * head)
    at_once = min(ACCUMULATOR_BANKS, most // bank)
    first, end = columns
    if end - first <= min(most, ACCUMULATOR_BANKS * bank):
        at_once = ACCUMULATOR_BANKS
    return ranges(first, end, at_once * bank), bank


def divide_evenly(width, head, bank):
    """Return ranges (start, end) of nearly equal width that cover columns 0 … width - 1, one for each PSUM bank.

    Two engines then copy half of the banks each. head: columns of a head, which no range cuts, or 0. bank:
    most columns of a range.
    """
    unit = head if head > 0 else 1
    units = blocks(width, unit)
    number = min(units, ROUNDS * blocks(width, ROUNDS * bank))
    return ranges(0, width, blocks(units, number) * unit)


def project_few(source, norm, w, columns, heads):
    """Compute norm(x) @ w for at most 128 rows; hand each finished PSUM tile to `heads.deliver`, which stores it.

    The rows are transposed once, and the weight streams past them. Arguments are those of `project`.
    """
    x = provide_rows(source, 0, source.all_rows.shape[0])
    tokens, hidden = x.shape
    rows = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    transfer(rows, x, SCALAR)  # so that the weights come first in their queue
    in_runs = w.block_scales is None
    factors, scale = load_norm_blocks(norm, heads.eps, in_runs, heads.rank_rows), None
    if norm.bias is not None:
        standardise(rows, rows, heads.eps)
    elif norm.weight is not None:
        scale = compute_inverse_rms(rows, heads.eps)
    # Runs make a partition's part of the weight one piece of HBM, which a DMA reads at its full rate. Block scales are
    # the same for all rows of a block.
    stationary = spread(rows, in_runs, factors, heads.first_row)
    tiles = [(0, tokens)]
    groups, bank = divide_columns(columns, heads.head, columns[1] - columns[0])
    for left, right in groups:
        heads.load_scales((left, right), tokens)
        panels = divide_evenly(right - left, heads.head, bank)
        sums = allocate_sums(tiles, panels)
        for start, end in plan_growing_ranges(blocks(hidden), right - left, 1):
            operand_dtype = choose_operand_dtype([w], x.dtype)
            weights = allocate_blocks(hidden, end - start, right - left, operand_dtype)
            if in_runs:
                load_runs_into(weights, select_columns(w, left, right), start)
            else:
                load_block_range(weights, select_columns(w, left, right), start)
            add_products(sums, stationary, tiles, weights, panels, start, hidden, in_runs)
        heads.deliver(0, left, right, sums[0], panels, scale)


def project_many(source, norm, w, columns, heads):
    """Compute norm(x) @ w for any number of rows; hand each finished PSUM tile to `heads.deliver`, which stores it.

    Some columns of the weight at a time stay in SBUF, and all rows meet them. While these columns arrive, the
    first row tiles of 128 rows accumulate side by side. The 1 / rms of the rows is computed with the first
    columns and used for all. Arguments are those of `project`.
    """
    x = source.all_rows
    tokens, hidden = x.shape
    block_bytes = blocks(hidden) * (4 if x.dtype == nl.float32 else 2)
    factors = load_norm_blocks(norm, heads.eps, False, heads.rank_rows)
    groups, bank = divide_columns(columns, heads.head, RESIDENT_BYTES // block_bytes)
    ones = filled((min(hidden, PARTITIONS), 1), 1.0, x.dtype)
    scales = []
    normed_rows = None
    if norm.bias is not None:
        if len(heads.norms) > 0:
            factors.scalar_share = 1  # the Vector engine normalises heads
        kept_tiles = count_kept_tiles(groups, hidden, x.dtype, heads)
        normed_rows = NormedRows(source, factors, heads.first_row, kept_tiles, [])
    for left, right in groups:
        panels = ranges(0, right - left, bank)
        heads.load_scales((left, right), min(tokens, PARTITIONS))
        together = 1
        # LayerNorm takes rows as a tile of up to 128 partitions, so with a bias one row tile leads alone.
        if norm.bias is None:
            spare = OPERAND_BYTES - block_bytes * (right - left)
            together = max(1, min(LEAD_BANKS // len(panels), spare // (block_bytes * PARTITIONS) - 3))
        if source.gather is not None:
            together = min(together, GATHERED_TILES)
        lead = min(tokens, together * PARTITIONS)
        turns = [(0, lead)] + ranges(lead, tokens)
        # The sum of squares belongs to a row, so the first group of columns measures it for all groups.
        measured = norm.weight is not None and norm.bias is None and left == columns[0]
        loaded = []
        stationary = squares = None
        for number in range(len(turns)):
            first, last = turns[number]
            tiles = ranges(0, last - first)
            sums = allocate_sums(tiles, panels)
            totals = allocate_sums(tiles, [(0, 1)]) if measured else None
            if number == 0:
                rows, matrix = provide_rows(source, first, last), select_columns(w, left, right)
                if normed_rows is not None:
                    stationary = normed_rows.provide(0)
                loaded = accumulate_first_rows(sums, totals, rows, matrix, panels, factors, ones, stationary)
            else:
                block = 0
                for weights in loaded:
                    add_products(sums, stationary, tiles, weights, panels, block, hidden)
                    block += weights.shape[1]
                if measured:
                    add_squares(totals, squares, ones, tiles, 0, block, hidden)
            # The next rows arrive while this turn's products run, so that the next turn waits for no DMA.
            if number + 1 < len(turns) and normed_rows is not None:
                stationary = normed_rows.provide(number + 1)
                # The rows after them are standardised while they are transposed, so that no transpose waits.
                normed_rows.prepare(number + 2)
            elif number + 1 < len(turns):
                following = provide_rows(source, turns[number + 1][0], turns[number + 1][1])
                stationary = allocate_blocks(hidden, blocks(hidden), following.shape[0], x.dtype)
                transpose_block_range(stationary, following, 0)
                squares = sum_block_squares(stationary, 0, hidden) if measured else None
            for tile in range(len(tiles)):
                row = first + tiles[tile][0]
                if measured:
                    scales.append(compute_inverse_root(totals[tile][0], 1.0 / hidden, heads.eps))
                scale = scales[row // PARTITIONS] if len(scales) > 0 else None
                heads.deliver(row, left, right, sums[tile], panels, scale)


def accumulate_first_rows(sums, totals, x, columns, panels, norm, ones, stationary):
    """Add up x @ columns, and the squares of each row of x, in PSUM, while both operands arrive from HBM.

    Returns the list of loaded parts of the weight, SBUF tiles [k in block, block, column], which serve the
    later rows.

    Args:
        sums: PSUM tiles [row, column] of all row tiles and panels, as `allocate_sums` returns them.
        totals: PSUM tiles [row, 1] for the sums of squares, a list for each row tile; None to leave these
            sums out.
        x: the first rows, [row, H] @ HBM.
        columns: WeightMatrix [H, column], some columns of the weight.
        panels: ranges (start, end) of columns, one for each PSUM tile of a row tile.
        norm: BlockNorm. An RMSNorm's weight is multiplied into the weight's rows.
        ones: column [k in block, 1] of ones, the operand that sums squares over partitions.
        stationary: for a LayerNorm the result of `NormedRows.provide` for x, else None.
    """
    rows, depth = x.shape
    tiles = ranges(0, rows)
    if norm.bias is None:
        stationary = allocate_blocks(depth, blocks(depth), rows, x.dtype)
    loaded = []
    zero_rows = load_zero_rows(columns)
    for start, end in plan_weight_ranges(columns, columns.elements.shape[1], 1, LEAD_ELEMENTS):
        if norm.bias is None:
            transpose_block_range(stationary[:, start:end, :], x, start)
        factors = None if norm.weight is None or norm.bias is not None else norm.weight[:, :, 0]
        weights = load_weights(columns, start, end, x.dtype, factors, zero_rows)
        loaded.append(weights)
        add_products(sums, stationary, tiles, weights, panels, start, depth)
        if totals is not None:
            squares = sum_block_squares(stationary[:, start:end, :], start, depth)
            add_squares(totals, squares, ones, tiles, start, end, depth)
    return loaded


def count_kept_tiles(groups, hidden, dtype, heads):
    """Return of how many row tiles of a LayerNorm SBUF holds the transposes for the later groups of columns.

    Without later groups that is 0.

    Args:
        groups: ranges (start, end) of columns of the weight that are in SBUF together.
        hidden, dtype: elements of a row, and their dtype.
        heads: Heads.
    """
    if len(groups) == 1:
        return 0
    row_bytes = blocks(hidden) * item_bytes(dtype)
    taken = row_bytes * (groups[0][1] - groups[0][0]) + MOVING_TILES * row_bytes * PARTITIONS
    taken += count_bytes(heads.bias) + (HEAD_BYTES if heads.head > 0 else FINISHED_BYTES)
    return max(0, (nl.tile_size.sbuf_fmax_bytes - taken) // (row_bytes * PARTITIONS))


@dataclass
class NormedRows(nl.NKIObject):
    """Row tiles of 128 rows that a LayerNorm brings into the form of a stationary operand, in their order.

    source: RowSource. norm: BlockNorm. first_row: index of the source's first row among the rows of all images.
    kept_tiles: of how many row tiles, from the first on, the transposes stay in SBUF for later columns of the weight.
    kept: those that did, in a list. standardised: the next row tile if it is in SBUF, minus its mean and over its
    deviation, else None.
    """

    source: RowSource
    norm: BlockNorm
    first_row: int
    kept_tiles: int
    kept: list
    standardised: nl.NkiTensor | None = None

    def prepare(self, index):
        """Load row tile number `index` and standardise it, if there is one and its transpose is not in SBUF."""
        tokens = self.source.all_rows.shape[0]
        first, end = index * PARTITIONS, min(tokens, (index + 1) * PARTITIONS)
        if first < end and index >= len(self.kept):
            self.standardised = load_standardised_rows(provide_rows(self.source, first, end), self.norm.eps)

    def provide(self, index):
        """Return row tile number `index`, normalised and transposed: [k in block, block, row] in SBUF."""
        if index < len(self.kept):
            return self.kept[index]
        if self.standardised is None:
            self.prepare(index)
        transposed = transpose_to_blocks(self.standardised, self.norm, self.first_row + index * PARTITIONS)
        self.standardised = None
        if index < self.kept_tiles:
            self.kept.append(transposed)
        return transposed


def load_standardised_rows(x, eps):
    """Load rows of x [row, H] from HBM into a new SBUF tile, subtract each row's mean, and divide by its deviation.

    eps: float32 [row, 1] in SBUF, added to the variance.
    """
    rows = load(x, x.dtype)
    standardise(rows, rows, eps)
    return rows


def transpose_to_blocks(x, norm, first_row):
    """Return the transpose of standardised rows in a new SBUF tile [k in block, block, row], weight and bias applied.

    x: SBUF tile [row, K]. norm: BlockNorm with weight and bias. first_row: index of the first row among the rows of
    all images.
    """
    if not needs_defined_rows():
        return spread(x, False, norm, first_row)
    depth = x.shape[1]
    transposed = allocate_blocks(depth, blocks(depth), x.shape[0], x.dtype)
    transpose_block_range(transposed, x, 0)
    full = blocks(depth) if depth <= PARTITIONS else depth // PARTITIONS
    # The short block has fewer partitions, so it takes instructions of its own.
    for start, end in ranges(0, full, full) + ranges(full, blocks(depth)):
        rows = transposed[0 : count_block_partitions(depth, start, False), start:end, :]
        weight_blocks(rows, rows, norm, start, first_row)
    return transposed


def load_weights(matrix, start, end, dtype, weight, zero_rows=None):
    """Load blocks start … end - 1 of a WeightMatrix [K, column] into a new SBUF tile [k in block, block, column].

    Nibbles lose their zero points, see `load_centred_blocks`.

    Args:
        dtype: of the rows that the tile meets.
        weight: float32 [k in block, block] in SBUF, by which the rows of the matrix are multiplied, or None.
        zero_rows: result of `load_zero_rows`.
    """
    if matrix.nibbles is not None:
        return load_centred_blocks(matrix, start, end, dtype, zero_rows, weight)
    depth, columns = matrix.elements.shape
    operand_dtype = matrix.elements.dtype
    if weight is None or matrix.block_scales is not None:
        operand_dtype = choose_operand_dtype([matrix], dtype)
    raw = allocate_blocks(depth, end - start, columns, operand_dtype)
    load_block_range(raw, matrix, start)
    if weight is None:
        return raw
    product = raw if raw.dtype == dtype else allocate_blocks(depth, end - start, columns, dtype)
    for block in range(start, end):
        used = count_block_partitions(depth, block, False)
        # A tensor_scalar takes one number per partition, and the norm's weight differs from block to block.
        nisa.tensor_scalar(
            dst=product[0:used, block - start, :],
            data=raw[0:used, block - start, :],
            op0=nl.multiply,
            operand0=weight[0:used, block : block + 1],
        )
    return product
