"""Products of rows of fp8 with an fp8 weight at double rate, for `qkv_projection`.

Row tiles of up to 128 rows stream through, and columns of the weight stay in SBUF. A row tile takes the stages of
`paired_rows` one after the other. Stages of successive row tiles overlap, because each needs another engine:

    stage      row tile in step s   engine
    load       s                    DMA
    norm       s - 2                Scalar: sums of squares; Vector: norm's weight, largest magnitudes
    division   s - 3                Scalar; then a DMA transposes
    product    s - 4                Tensor
    delivery   s - 6                Vector: scales; GpSimd: rotation, see `Heads.deliver`

Long rows are normalised in place, one step earlier, because SBUF holds three of their tiles and not four. Where it
holds one tile, a step has all stages of one row tile. Several groups of columns take the transposes that the first one
keeps, if SBUF holds those of all rows; else each quantises the rows again: the elements of fp8 are the same. Rows that
are not rotated get their bias from GpSimd.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import STATIC, SYNC
from nki_kernels.norms.row_tiles import SCRATCH_ELEMENTS, RowNorm, allocate_row_scratch, load_norm
from nki_kernels.projection.heads import Heads
from nki_kernels.projection.normed import divide_columns
from nki_kernels.projection.paired_rows import (
    PAIR_BLOCK,
    PairedRows,
    add_pair_products,
    load_weight_pairs,
)
from nki_kernels.projection.products import allocate_sums, plan_growing_ranges
from nki_kernels.projection.row_groups import (
    count_norm_bytes,
    item_bytes,
    plan_loads,
    split_by_rank,
    trigger_loads,
)
from nki_kernels.projection.sequence import RowSource, provide_rows
from nki_kernels.tiles import BANK, PARTITIONS, blocks, load_repeated, ranges
from nki_kernels.weights import WeightMatrix, select_columns

EARLY_BYTES = 49152
"""Bytes per partition of the weight that are loaded before the first rows are quantised; others follow these rows."""

MAGNITUDE_BYTES = 8192
"""Most bytes per partition of the magnitudes of a row tile that are in SBUF at a time."""

GATHERED_ROW_TILES = 3
"""Row tiles, with the norm's weight, that SBUF holds while rows of several ranks are gathered."""

COLUMN_BYTES = 18
"""Bytes per partition that a column of the result takes on its way to HBM: scales, sums, angles and results."""

KEPT_BYTES = 64
"""Bytes per partition that the columns of numbers of a kept row tile take, each in an aligned place."""


@dataclass
class Overlap(nl.NKIObject):
    """How the stages of successive row tiles overlap.

    norm, division, product, delivery: steps between the load of a row tile and these stages. row_tiles, fp8_tiles: row
    tiles, and row tiles of fp8 with their transposes, that are in SBUF at one time. in_place: whether rows are
    normalised in their own tile.
    """

    norm: int
    division: int
    product: int
    delivery: int
    row_tiles: int
    fp8_tiles: int
    in_place: bool

    def count_columns(self, hidden, dtype, kept_rows):
        """Return how many columns of the weight fit in SBUF beside rows of `hidden` elements of `dtype`.

        kept_rows: rows of `hidden` elements of `dtype` on each partition that the norm takes.
        """
        itemsize = item_bytes(dtype)
        used_bytes = hidden * (itemsize * (self.row_tiles + kept_rows) + self.fp8_tiles)
        used_bytes += MAGNITUDE_BYTES + itemsize * SCRATCH_ELEMENTS
        free_bytes = nl.tile_size.sbuf_fmax_bytes - used_bytes
        return max(0, free_bytes // count_column_bytes(hidden))


def count_column_bytes(hidden):
    """Return the bytes per partition of a column of the weight with `hidden` elements, and of the column of results."""
    return 2 * blocks(hidden, PAIR_BLOCK) + COLUMN_BYTES


def choose_overlap(rows, hidden, dtype, kept_rows, columns):
    """Return the Overlap of the most stages with which all columns fit in SBUF, or at least one PSUM bank of them.

    rows, columns: rows and columns of the result. The other arguments are those of `Overlap.count_columns`.
    """
    if rows > PARTITIONS:
        # Rows are quantised again for each group of columns, so one group with fewer stages comes first.
        for least in (columns, min(columns, BANK)):
            for overlap in (Overlap(2, 3, 4, 6, 4, 3, False), Overlap(1, 2, 3, 5, 3, 3, True)):
                if overlap.count_columns(hidden, dtype, kept_rows) >= least:
                    return overlap
    return Overlap(0, 0, 0, 0, 1, 2, True)


@dataclass
class QuantisedProduct(nl.NKIObject):
    """Product of all row tiles with one group of columns.

    source: RowSource of x. norm: RowNorm, or None for rows that need none. w: WeightMatrix with the columns of the
    group. first_column, panels: the group's first column and the ranges of its columns that share a PSUM bank, counted
    from there. heads: Heads. tiles: ranges (first, end) of rows. magnitudes: SBUF tile [row, column] that magnitudes
    overwrite. overlap: Overlap. kept: PairedRows of all row tiles with their transposes, which the first group appends
    for the later ones, or None if each group quantises the rows. is_first: whether this is the first group.

    prepared: PairedRows of the row tiles so far, None for those that are delivered. pieces: loaded pieces of the
    weight, as `load_weight_pairs` returns them. sums: for each row tile that is multiplied its PSUM tiles, None once
    delivered.
    """

    source: RowSource
    norm: RowNorm | None
    w: WeightMatrix
    first_column: int
    panels: list
    heads: Heads
    tiles: list
    magnitudes: nl.NkiTensor
    overlap: Overlap
    kept: list | None
    is_first: bool
    prepared: list
    pieces: list
    sums: list

    def run(self):
        """Issue all stages of all row tiles."""
        if self.overlap.delivery == 0:
            for index in range(len(self.tiles)):
                self.process_tile(index)
        else:
            for step in range(len(self.tiles) + self.overlap.delivery):
                self.issue_step(step)

    def process_tile(self, index):
        """Issue all stages of row tile number `index`, one after the other."""
        self.load_rows(index)
        if index == 0:
            self.load_weight(nl.tile_size.sbuf_fmax_bytes)
        self.load_angles(index)
        if self.is_quantised(index):
            rows = self.prepared[index]
            rows.measure()
            rows.normalise(self.magnitudes, True)
            rows.find_largest()
            rows.choose_scale()
            rows.divide()
            rows.transpose()
        self.multiply(index)
        self.deliver(index)

    def issue_step(self, step):
        """Issue the stages of step number `step`.

        The order matters on the engines that serve two stages: a stage of short instructions whose result another
        engine awaits comes first. Fast modes of the Vector engine exclude GpSimd, so the delivery, which rotates on
        GpSimd, comes right before the slow search for the largest magnitudes.
        """
        overlap = self.overlap
        normalised, divided = step - overlap.norm, step - overlap.division
        multiplied, delivered = step - overlap.product, step - overlap.delivery
        if self.is_quantised(divided):
            self.prepared[divided].choose_scale()
        if self.has_tile(step):
            self.load_rows(step)
        if step == 1:
            self.load_weight(EARLY_BYTES)
        if self.has_tile(normalised):
            self.load_angles(normalised)
        if self.is_quantised(normalised):
            self.prepared[normalised].measure()
        if self.is_quantised(divided):
            self.prepared[divided].divide()
        if self.is_quantised(normalised):
            self.prepared[normalised].normalise(self.magnitudes, overlap.in_place)
        if self.has_tile(delivered):
            self.deliver(delivered)
        if self.is_quantised(normalised):
            self.prepared[normalised].find_largest()
        if self.is_quantised(divided):
            self.prepared[divided].transpose()
        if divided == 0:
            self.load_weight(nl.tile_size.sbuf_fmax_bytes)
        if self.has_tile(multiplied):
            self.multiply(multiplied)

    def has_tile(self, index):
        """Return whether there is a row tile number `index`."""
        return index >= 0 and index < len(self.tiles)

    def is_quantised(self, index):
        """Return whether there is a row tile number `index`, which this group quantises."""
        return self.has_tile(index) and (self.is_first or self.kept is None)

    def load_rows(self, index):
        """Load row tile number `index`, unless it is kept, and the positions of its rows if heads are rotated."""
        first, end = self.tiles[index]
        row_numbers = None
        if self.heads.angles.cos is not None:
            row_numbers = self.heads.load_row_numbers(first, end - first)
        if not self.is_quantised(index):
            kept = self.kept[index]
            kept.row_numbers = row_numbers
            self.prepared.append(kept)
            return
        x = provide_rows(self.source, first, end)
        rows = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
        trigger_loads(plan_loads([rows], split_by_rank(x, 1)), STATIC)
        norm = self.norm
        if norm is not None:
            norm = norm.select(self.heads.first_row + first, end - first)
        self.prepared.append(PairedRows(rows, norm, self.w.elements.dtype, row_numbers))

    def load_weight(self, most_bytes):
        """Load further pieces of the weight, up to `most_bytes` of each partition in all, and at first its scales."""
        depth, columns = self.w.elements.shape
        if len(self.pieces) == 0:
            height = min(PARTITIONS, self.tiles[0][1])
            self.heads.column_scales = load_repeated(self.w.scales, height)
        block_ranges = plan_growing_ranges(blocks(depth, PAIR_BLOCK), 2 * columns, 2)
        for first, end in block_ranges[len(self.pieces) :]:
            if len(self.pieces) == 0 or 2 * columns * end <= most_bytes:
                self.pieces.append(load_weight_pairs(self.w, first, end))

    def load_angles(self, index):
        """Gather the angles of row tile number `index` if heads are rotated."""
        rows = self.prepared[index]
        if rows.row_numbers is not None:
            rows.angles = self.heads.load_angles(rows.row_numbers)

    def multiply(self, index):
        """Multiply row tile number `index` by all pieces of the weight."""
        first, end = self.tiles[index]
        sums = allocate_sums([(0, end - first)], self.panels)[0]
        block = 0
        for piece in self.pieces:
            add_pair_products(
                sums, self.prepared[index].transposed, piece, self.panels, block, self.w.elements.shape[0]
            )
            block += piece.shape[1]
        if self.kept is None:
            self.prepared[index].transposed = None
        elif self.is_first:
            self.kept.append(self.prepared[index])
        self.sums.append(sums)

    def deliver(self, index):
        """Finish and store the sums of row tile number `index`."""
        rows = self.prepared[index]
        end_column = self.first_column + self.w.elements.shape[1]
        self.heads.loaded_angles = rows.angles
        self.heads.deliver(
            self.tiles[index][0],
            self.first_column,
            end_column,
            self.sums[index],
            self.panels,
            rows.compute_row_factor(),
        )
        # The next group of columns gathers the angles of a kept row tile again.
        rows.angles = None
        self.prepared[index], self.sums[index] = None, None


def project_quantised(source, norm, w, columns, heads):
    """Compute norm(x) @ w for rows in fp8; hand each finished PSUM tile to `heads.deliver`, which stores it.

    Args:
        source: RowSource of x [T, H] @ HBM.
        norm: Norm; one without a weight leaves rows as they are.
        w: WeightMatrix [H, columns] of float8_e4m3 or float8_e4m3fn with scales.
        columns: range (first, end) of columns of w.
        heads: Heads. If heads.head is not 0, a tile has whole heads of so many columns.
    """
    x = source.all_rows
    tokens, hidden = x.shape
    height = min(tokens, PARTITIONS)
    row_norm, kept_rows = None, 0
    if norm.weight is not None:
        scratch = allocate_row_scratch(height, hidden, x.dtype)
        row_norm = load_norm(norm, scratch, x.dtype, heads.rank_rows)
        kept_rows = count_norm_bytes(row_norm)
        kept_rows = blocks(kept_rows, hidden * item_bytes(x.dtype))
    elif source.gather is not None:
        kept_rows = GATHERED_ROW_TILES
    overlap = choose_overlap(tokens, hidden, x.dtype, kept_rows, columns[1] - columns[0])
    resident = overlap.count_columns(hidden, x.dtype, kept_rows)
    least = max(heads.head, PARTITIONS)
    assert resident >= least, (
        f"qkv_projection has room for {resident} columns of w_qkv beside rows of {hidden} elements that are quantised, "
        f"and takes at least {least}; pass rows of fewer elements, or leave quantises_rows out"
    )
    searched = min(hidden, MAGNITUDE_BYTES // item_bytes(x.dtype))
    magnitudes = nl.ndarray((height, searched), dtype=x.dtype, buffer=nl.sbuf)
    heads.rotation_engine, heads.queue = nisa.engine.gpsimd, SYNC
    if heads.angles.cos is None:
        heads.bias_engine = nisa.engine.gpsimd
    groups, bank = divide_columns(columns, heads.head, resident)
    tiles = ranges(0, tokens)
    free_bytes = (resident - (groups[0][1] - groups[0][0])) * count_column_bytes(hidden)
    kept_bytes = len(tiles) * (2 * blocks(hidden, PAIR_BLOCK) * PARTITIONS + KEPT_BYTES)
    kept = [] if len(groups) > 1 and kept_bytes <= free_bytes else None
    for first, end in groups:
        weight, panels = select_columns(w, first, end), ranges(0, end - first, bank)
        product = QuantisedProduct(
            source,
            row_norm,
            weight,
            first,
            panels,
            heads,
            tiles,
            magnitudes,
            overlap,
            kept,
            first == columns[0],
            [],
            [],
            [],
        )
        product.run()
