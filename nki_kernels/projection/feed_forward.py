"""The stages of `mlp`'s schedule: loads, norm and transposes of row groups, and the operands of both products.

`mlp` computes y = x + (activation(n @ w_gate + b_gate) * (n @ w_up + b_up)) @ w_down + b_down, where n =
norm(x). The intermediate, n @ w_gate and n @ w_up activated and multiplied, has F columns. The *gate and up
product* computes it in *units* of columns, see `gated_product`. The *down product* multiplies it by w_down
and computes y in *chunks* of columns, see `residual_product`. A *row group* is up to four row tiles of 128
rows, see `row_groups`. `feed_forward_pipeline` has the loop over groups, units and chunks, and calls the
functions of this file.

If x is cut along the sequence over N ranks, a group has rows of every rank: row tiles are [rank * row, H].
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from nki_kernels.cores import (
    divides_columns,
    find_core_blocks,
    find_core_columns,
    find_core_range,
    find_core_rows,
)
from nki_kernels.dma import STATIC
from nki_kernels.nibbles import RUN_ROWS
from nki_kernels.norms.blocks import BlockNorm
from nki_kernels.norms.norm import Norm
from nki_kernels.norms.row_tiles import RowNorm
from nki_kernels.projection.few_rows import keep_residual_rows, load_few_rows
from nki_kernels.projection.gated_product import GatedProduct, count_unit_columns, load_bias_columns
from nki_kernels.projection.grouped_product import GroupedOperands, GroupLayout, load_operands
from nki_kernels.projection.products import add_products
from nki_kernels.projection.quantised_rows import (
    IntermediateQuantiser,
    RowPreparation,
    RowQuantiser,
    SpreadFactors,
    UnitMagnitudes,
)
from nki_kernels.projection.residual_product import ResidualProduct, count_chunk_columns
from nki_kernels.projection.row_groups import (
    allocate_transposed,
    count_tile_rows,
    item_bytes,
    list_starts,
    normalise_tiles,
    plan_loads,
    select_share,
    split_by_rank,
    transpose_tiles,
    trigger_loads,
    view_row_tiles,
)
from nki_kernels.projection.sequence import RowSource, provide_rows
from nki_kernels.projection.static_rows import StaticIntermediates, StaticQuantiser
from nki_kernels.tiles import BANK, PARTITIONS, blocks, filled, ranges
from nki_kernels.weights import (
    WeightMatrix,
    has_block_scales,
    load_blocks,
    load_blocks_into,
    select_columns,
)

INNER_UNIT = 64
"""Two cores divide the intermediate into whole units of so many columns: halves of a block share the array."""

GROUP_TILES = 4
"""Row tiles of the largest group: 512 rows, the columns of the widest moving tile that every chip takes."""

GATE_TERMS = 3
"""Numbers of bfloat16 whose sum is a float32 number of a row_gate: 8 binary places each."""

STREAM_BYTES = 48 * 1024
"""Bytes of each partition that a row group leaves to tiles on their way: weights, residuals and results."""


@dataclass
class Weights(nl.NKIObject):
    """Operands of both products @ HBM: w_gate, w_up [H, F], w_down [F, H]; b_gate, b_up [1, F], b_down [1, H].

    w_gate is None in a plain block without a gate; a bias that is not given is None.
    """

    w_gate: WeightMatrix | None
    w_up: WeightMatrix
    w_down: WeightMatrix
    b_gate: nl.NkiTensor | None
    b_up: nl.NkiTensor | None
    b_down: nl.NkiTensor | None

    def list_gated(self):
        """Return the WeightMatrix of gate, if there is one, and that of up."""
        return [self.w_up] if self.w_gate is None else [self.w_gate, self.w_up]

    def list_matrices(self):
        """Return the WeightMatrix of gate, if there is one, and those of up and down."""
        matrices = self.list_gated()
        matrices.append(self.w_down)
        return matrices


@dataclass
class CoreShare(nl.NKIObject):
    """What this core computes. Two cores divide the rows; up to 128 rows they divide the columns of both products.

    rows: (first, end) of x; of rows that are cut over ranks, (first, end) of each rank's rows. inner_columns:
    (first, end) of the intermediate. columns: (first, end) of y. exchanges: whether the cores send each other
    their columns of the intermediate. exchanged_columns: columns of the tile that each core sends, 0 without
    an exchange; the tile of the core with fewer columns is padded.
    """

    rows: tuple
    inner_columns: tuple
    columns: tuple
    exchanges: bool
    exchanged_columns: int


@dataclass
class FeedForward(nl.NKIObject):
    """What all row groups of one core share.

    rows: RowSource of x. norm: RowNorm, or None if rows need none. block_norm: BlockNorm with the weight and the bias
    that `norm` lacks, or None. gated: the gate and up product. down: the
    down product. row_gate: what `load_row_gate` returns, or None. ranks: over how many ranks the rows are
    cut. dtype: x's dtype. few_rows: whether `load_few_rows` loads x. run_norm: the Norm of such rows, or
    None. groups: GroupLayout of the down product, or None if it is computed in chunks of `residual_product`.
    grouped: its operands in SBUF, once they are loaded. quantiser: RowQuantiser of rows that are multiplied in
    fp8, or None. static: the same StaticQuantiser as `quantiser` if rows have static scales, else None. maxima_group:
    the ranks that share the row maxima of the intermediate, or None.
    """

    rows: RowSource
    norm: RowNorm | None
    gated: GatedProduct
    down: ResidualProduct
    core: CoreShare
    row_gate: nl.NkiTensor | None
    ranks: int
    dtype: object
    few_rows: bool = False
    run_norm: Norm | None = None
    groups: GroupLayout | None = None
    grouped: GroupedOperands | None = None
    quantiser: RowQuantiser | None = None
    static: StaticQuantiser | None = None
    block_norm: BlockNorm | None = None
    maxima_group: ncc.ReplicaGroup | None = None


@dataclass
class RowBuffers(nl.NKIObject):
    """SBUF tiles that all row groups use one after the other.

    tiles: row tiles [row, H] of a group. transposed: the transpose of their rows, [h in block, block, row].
    tile_height: rows of a full row tile. norm: BlockNorm that is applied to the transposes, or None.
    """

    tiles: list
    transposed: nl.NkiTensor
    tile_height: int
    norm: BlockNorm | None = None


@dataclass
class Prefetch(nl.NKIObject):
    """The next row group, which is loaded and normalised while the units of the present group are multiplied.

    tiles: SBUF row tiles of the next group; empty after the last group. loads: its PlannedLoads, issued
    during the first `load_units` units of the present group. norm_units: number of later units, before which
    the tiles are normalised. first_row: index of the first row among the rows of all images. preparation:
    RowPreparation of rows that are quantised, else None. normalised, transposed: how many tiles are normalised and
    transposed so far. ready: how many tiles were prepared two chunks ago and one chunk ago.
    """

    tiles: list
    loads: list
    load_units: int
    norm_units: int
    first_row: int
    preparation: RowPreparation | None = None
    ready: tuple = (0, 0)
    normalised: int = 0
    transposed: int = 0

    def select_loads(self, unit):
        """Return the PlannedLoads to issue during a unit of the present group; an empty list once all are issued."""
        return select_share(self.loads, unit, self.load_units)

    def normalise_until(self, unit, norm):
        """Normalise in place the row tiles that are due before unit number `unit` and not normalised yet.

        None are due before the first `load_units` units, and all are due after the last unit, when `unit` is
        the number of units. norm: RowNorm, or None: then the tiles stay as they are. Rows that are quantised
        take the same share of the steps of their preparation.
        """
        shares = max(0, unit - self.load_units + 1)
        due = min(len(self.tiles), len(self.tiles) * shares // self.norm_units)
        if self.preparation is not None:
            steps = self.preparation.count_steps()
            self.preparation.advance_until(min(steps, steps * shares // self.norm_units))
            return
        tiles = self.tiles[self.normalised : due]
        normalise_tiles(tiles, tiles, norm)
        self.normalised = due

    def prepare_until(self, chunk, chunks):
        """Issue the steps of the preparation that are due before chunk number `chunk` of `chunks` of the down product.

        All are due in the first two thirds of the chunks.
        """
        steps = self.preparation.count_steps()
        self.ready = (self.ready[1], self.preparation.count_ready())
        self.preparation.advance_until(min(steps, blocks(3 * steps * chunk, 2 * chunks)))

    def transpose_ready(self, buffers):
        """Transpose a row tile that was prepared two chunks ago and is not transposed yet into `buffers.transposed`."""
        self.transpose_next(min(1, self.ready[0] - self.transposed), buffers)

    def transpose_next(self, count, buffers):
        """Transpose the next `count` row tiles, or all that remain if they are fewer, into `buffers.transposed`."""
        tiles = self.tiles[self.transposed : self.transposed + count]
        row = self.transposed * buffers.tile_height
        transpose_tiles(buffers.transposed, tiles, row, buffers.norm, self.first_row + row)
        self.transposed += len(tiles)


def find_inner_range(weights, core):
    """Return (first, end) of the columns of the intermediate that physical core number `core` of two takes.

    Those of weights with block scales are whole blocks. Packed rows of 4 bits are divided between runs, or, of fewer
    rows than two runs have, between blocks. weights: Weights.
    """
    inner = weights.w_down.count_rows()
    if has_block_scales(weights.list_matrices()):
        return find_core_blocks(inner, core)
    unit = INNER_UNIT
    if weights.w_down.nibbles is not None:
        unit = RUN_ROWS if inner > RUN_ROWS else PARTITIONS
    return find_core_range(inner, unit, core)


def assign_core_share(tokens, outputs, weights, ranks):
    """Return the CoreShare of this core: which rows and columns of an MLP it computes.

    All of them on one core. Two cores take half of the rows each; up to 128 rows, they take half of the
    columns of the intermediate and of y each, and exchange their intermediates.

    tokens: number of rows, those of all ranks together. outputs: columns of y. weights: Weights. ranks: over how
    many ranks the rows are cut.
    """
    exchanges = divides_columns(tokens)
    inner_columns = (0, weights.w_down.count_rows())
    if exchanges:
        inner_columns = find_inner_range(weights, nl.program_id(0))
    return CoreShare(
        find_core_rows(tokens // ranks, ranks),
        inner_columns,
        find_core_columns(tokens, outputs, BANK, has_block_scales(weights.list_matrices())),
        exchanges,
        find_inner_range(weights, 0)[1] if exchanges else 0,
    )


def allocate_row_buffers(rows, hidden, dtype, tile_height, operand_dtype):
    """Return RowBuffers in SBUF for row groups of up to `rows` rows of `hidden` elements.

    dtype, operand_dtype: of the row tiles and of their transposes. tile_height: rows of a full row tile.
    """
    tiles = []
    for _ in range(blocks(rows, tile_height)):
        tiles.append(nl.ndarray((min(rows, tile_height), hidden), dtype=dtype, buffer=nl.sbuf))
    return RowBuffers(tiles, allocate_transposed(hidden, rows, operand_dtype), tile_height)


def build_gated_product(weights, columns, activation, in_runs):
    """Return the GatedProduct for columns (first, end) of the intermediate, with its biases loaded into SBUF.

    weights: Weights, of which these columns of w_gate and w_up are used. activation: function of the Scalar
    engine. in_runs: whether x has element h of a row on partition h // C, block h % C, where C = ceil(H /
    128); else it is on partition h % 128, block h // 128.
    """
    first, end = columns
    matrices = []
    for weight in weights.list_gated():
        matrices.append(select_columns(weight, first, end))
    b_gate = None if weights.b_gate is None else weights.b_gate[:, first:end]
    b_up = None if weights.b_up is None else weights.b_up[:, first:end]
    biases = [load_bias_columns(b_gate), load_bias_columns(b_up)]
    return GatedProduct(
        matrices, biases, [None, None], activation, in_runs, weights.w_up.count_rows(), end - first
    )


def cut_down_weight(weights, core):
    """Return w_down for this core's columns of y: a list of WeightMatrix, one for each core's part of the intermediate.

    The first has the rows that meet this core's columns of the intermediate. A second one has the rows that
    meet the other core's columns, if the cores exchange their intermediates. weights: Weights.
    """
    w_down = weights.w_down
    matrices = [w_down.submatrix(core.inner_columns, core.columns)]
    if core.exchanges:
        rows_of_other = find_inner_range(weights, 1 - nl.program_id(0))
        matrices.append(w_down.submatrix(rows_of_other, core.columns))
    return matrices


def list_unit_starts(ffn, groups, m):
    """Return the first column of each unit of row group m's gate and up product; an empty list without a group m.

    A unit is the columns of the intermediate whose sums fill half of the PSUM banks.
    """
    if m >= len(groups):
        return []
    return list_starts(ffn.gated.inner, count_unit_columns(ffn.gated, ffn.ranks * groups[m].rows))


def list_chunk_starts(ffn, groups, m):
    """Return the first column of each chunk of row group m, in this core's columns of y; an empty list if m < 0.

    A chunk is the columns of y whose sums fill half of the PSUM banks.
    """
    if m < 0:
        return []
    return list_starts(ffn.down.y.shape[1], count_chunk_columns(ffn.ranks * groups[m].rows, ffn.ranks))


def count_due_units(chunk, chunks, units, leading=1):
    """Return how many of `units` units to issue before chunk number `chunk`, so that units and chunks alternate evenly.

    Units are steps of the gate and up product, chunks those of the down product. All units are due if there
    are no chunks, or after the last chunk. leading: units before the first chunk.
    """
    return units if chunks == 0 else min(units, chunk * units // chunks + leading)


def prepare_rows(ffn, groups):
    """Return RowBuffers whose `transposed` has the normalised rows of the first group; load the scales of gate and up.

    Few rows come from `load_few_rows`, are one group, and have no row tiles. For a down product in groups
    of columns, or a gate and up product in groups, rows of zeros follow up to the width of a group.
    """
    if not ffn.few_rows:
        height = count_tile_rows(ffn.ranks)
        operand_dtype = ffn.dtype if ffn.quantiser is None else ffn.gated.find_element_dtype()
        rows = ffn.ranks * groups[0].rows
        buffers = allocate_row_buffers(rows, ffn.gated.hidden, ffn.dtype, height, operand_dtype)
        buffers.norm = ffn.block_norm
        prepare_first_group(ffn, groups[0], buffers)
        ffn.gated.load_scales()
        if ffn.static is not None:
            ffn.static.multiply_weight_scales(ffn.gated.scales)
        return buffers
    rows = ffn.rows.all_rows
    columns = rows.shape[0]
    if ffn.groups is not None and not ffn.down.weight.matrices[0].scales_rows:
        columns = ffn.groups.width
    elif ffn.gated.layout is not None:
        columns = ffn.gated.layout.width
    x, row_tile = load_few_rows(rows, ffn.run_norm, ffn.gated, columns)
    first, end = ffn.core.columns
    residual_rows = None if row_tile is None else row_tile[:, first:end]
    if ffn.groups is None:
        keep_residual_rows(ffn.down, residual_rows)
    else:
        if ffn.down.weight.matrices[0].scales_rows:
            residual_rows = None  # GpSimd would copy them while copies of rows wait for it
        ffn.grouped = load_operands(ffn.down, ffn.groups, residual_rows)
    return RowBuffers([], x, PARTITIONS)


def prepare_first_group(ffn, group, buffers):
    """Load, normalise and transpose the first row group into `buffers`.

    If all rows fit in one row tile of one rank, see `can_keep_residual`, they also become the residual of the
    down product and stay in SBUF. Their norm is then written to a tile of its own.
    """
    tiles = view_row_tiles(buffers.tiles, ffn.ranks * group.rows, buffers.tile_height)
    first_row = ffn.core.rows[0] + group.first_row
    trigger_loads(plan_loads(tiles, provide_group_rows(ffn, group)), STATIC)
    normalised, copies = tiles, False
    if ffn.ranks == 1 and ffn.down.residual is not None and can_keep_residual(ffn):
        if ffn.norm is not None or ffn.quantiser is not None:
            # The norm must not overwrite these rows, because they are added as the residual.
            normalised, copies = [nl.ndarray(tiles[0].shape, dtype=ffn.dtype, buffer=nl.sbuf)], True
        first, end = ffn.core.columns
        ffn.down.keep_residual(tiles[0][:, first:end].reshape((group.rows, 1, end - first)))
    if ffn.quantiser is None:
        normalise_tiles(normalised, tiles, ffn.norm)
    else:
        preparation = RowPreparation(ffn.quantiser, tiles, normalised, ffn.norm, copies, [], [], 0, first_row)
        preparation.advance_until(preparation.count_steps())
    transpose_tiles(buffers.transposed, normalised, 0, buffers.norm, first_row)


def plan_prefetch(ffn, groups, m, buffers, units):
    """Return the Prefetch of row group m into `buffers`, to be issued during `units` units of the group before.

    Nothing is loaded yet. If there is no group m, the Prefetch has no tiles and no loads. If rows are
    gathered from other ranks, the all-gathers of the group are issued now.
    """
    tiles, loads, first_row = [], [], 0
    if m < len(groups):
        first_row = ffn.core.rows[0] + groups[m].first_row
        tiles = view_row_tiles(buffers.tiles, ffn.ranks * groups[m].rows, buffers.tile_height)
        loads = plan_loads(tiles, provide_group_rows(ffn, groups[m]))
    # The second half of the units is left to the norm, which waits for these loads.
    load_units = max(1, units // 2)
    preparation = None
    if ffn.quantiser is not None:
        preparation = RowPreparation(ffn.quantiser, tiles, tiles, ffn.norm, False, [], [], 0, first_row)
    return Prefetch(tiles, loads, load_units, max(1, units - load_units), first_row, preparation)


def provide_group_rows(ffn, group):
    """Return a view of the rows of a RowGroup in HBM, [rank, row, H]; issue the all-gathers that these rows need."""
    first, end = group.first_row, group.first_row + group.rows
    return split_by_rank(provide_rows(ffn.rows, ffn.ranks * first, ffn.ranks * end), ffn.ranks)


def load_row_gate(row_gate, dtype, quantises_rows):
    """Load a row_gate [H, 1] @ HBM as an operand of products with rows: [h in block, block, term] in SBUF.

    One term in `dtype`; of float32 beside rows of fp8, which products do not mix, three terms in bfloat16 whose sum is
    the gate.
    """
    if not quantises_rows or dtype != nl.float32:
        return load_blocks(WeightMatrix(row_gate), dtype, STATIC)
    hidden = row_gate.shape[0]
    remainder = filled((min(PARTITIONS, hidden), blocks(hidden), 1), 0.0)
    load_blocks_into(remainder, WeightMatrix(row_gate), STATIC)
    shape = (remainder.shape[0], remainder.shape[1], GATE_TERMS)
    terms = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    for term in range(GATE_TERMS):
        rounded = terms[:, :, term : term + 1]
        nisa.tensor_copy(dst=rounded, src=remainder)
        nisa.tensor_tensor(dst=remainder, data1=remainder, data2=rounded, op=nl.subtract)
    return terms


def append_row_scales(ffn, x, first_tile):
    """Append sigmoid(x @ row_gate) of each row tile to `ffn.down.row_scales`, a float32 SBUF tile [row, 1] for each.

    Does nothing without a row_gate. x: transposed rows of a group in SBUF, [h in block, block, row]. first_tile:
    index of the group's first row tile among all tiles, whose scales multiply rows that are quantised.
    """
    if ffn.row_gate is None:
        return
    tiles = ranges(0, x.shape[2], count_tile_rows(ffn.ranks))
    for index in range(len(tiles)):
        first, end = tiles[index]
        terms = ffn.row_gate.shape[2]
        bank = nl.ndarray((end - first, terms), dtype=nl.float32, buffer=nl.psum)
        add_products([[bank]], x, [(first, end)], ffn.row_gate, [(0, terms)], 0, ffn.gated.hidden)
        row_scale = nl.ndarray((end - first, 1), dtype=nl.float32, buffer=nl.sbuf)
        if terms > 1:
            nisa.tensor_reduce(dst=row_scale, op=nl.add, data=bank, axis=1)
            bank = row_scale
        scale = 1.0 if ffn.quantiser is None else ffn.quantiser.columns[first_tile + index]
        nisa.activation(dst=row_scale, op=nl.sigmoid, data=bank, scale=scale)
        ffn.down.row_scales.append(row_scale)


def spread_row_scales(ffn, group_rows, first_tile):
    """Let the gate and up product multiply gate by the scales of a group's rows, if each row has one.

    group_rows: rows of the group, those of all ranks. first_tile: index of its first row tile among all tiles.
    """
    if ffn.quantiser is not None and ffn.static is None:
        count = blocks(group_rows, count_tile_rows(ffn.ranks))
        diagonals = ffn.quantiser.diagonals[first_tile : first_tile + count]
        ffn.gated.row_factors = SpreadFactors(ffn.quantiser.spread(diagonals))


def plan_magnitudes(ffn, rows):
    """Return the UnitMagnitudes of an intermediate of `rows` rows whose units are measured one by one, or None."""
    if ffn.quantiser is None or ffn.static is not None or rows <= PARTITIONS // 2:
        return None
    return UnitMagnitudes(ffn.gated.inner, count_unit_columns(ffn.gated, rows) // PARTITIONS)


def plan_quantisation(ffn, intermediates, first_tile, magnitudes):
    """Return the IntermediateQuantiser or StaticIntermediates of a row group, nothing issued yet; None without any.

    Args:
        ffn: FeedForward.
        intermediates: SBUF tiles [f in block, block, row], one for each core's columns.
        first_tile: index of the group's first row tile among all tiles.
        magnitudes: result of `plan_magnitudes`, with all units.
    """
    if ffn.quantiser is None:
        return None
    inner = ffn.core.exchanged_columns if ffn.core.exchanges else ffn.gated.inner
    row_ranges = ranges(0, intermediates[0].shape[2], count_tile_rows(ffn.ranks))
    if ffn.static is not None:
        static, dtype = ffn.static.intermediate, ffn.gated.find_element_dtype()
        return StaticIntermediates(static, intermediates, inner, dtype, row_ranges, 0, [])
    columns = None
    if ffn.gated.gate_factors_only:
        columns = ffn.quantiser.columns[first_tile : first_tile + len(row_ranges)]
    exchanges, group = ffn.core.exchanges, ffn.maxima_group
    return IntermediateQuantiser(
        ffn.quantiser,
        intermediates,
        inner,
        row_ranges,
        columns,
        exchanges,
        0,
        None,
        [],
        [],
        [],
        group,
        None,
        magnitudes,
    )


def finish_quantisation(ffn, pending, first_tile):
    """Return a group's intermediates in fp8, and append their scales to the row scales of the down product.

    The scales multiply those of a row gate, if there is one.

    Args:
        ffn: FeedForward.
        pending: IntermediateQuantiser of the group.
        first_tile: index of the group's first row tile among all tiles.
    """
    results, scales = pending.finish()
    for index in range(len(scales)):
        if ffn.row_gate is None:
            ffn.down.row_scales.append(scales[index])
        else:
            gate = ffn.down.row_scales[first_tile + index]
            nisa.tensor_tensor(dst=gate, data1=gate, data2=scales[index], op=nl.multiply)
    return results


def allocate_intermediate(ffn, rows):
    """Allocate an SBUF tile [f in block, block, row] for this core's columns of the intermediate and `rows` rows.

    If the cores exchange intermediates, the tile has `exchanged_columns` columns on both cores, and blocks
    that this core does not fill are zeroed.
    """
    inner, exchanged = ffn.gated.inner, ffn.core.exchanged_columns
    if not ffn.core.exchanges:
        return allocate_transposed(inner, rows, ffn.dtype)
    result = allocate_transposed(exchanged, rows, ffn.dtype)
    full = inner // PARTITIONS
    if full * PARTITIONS < exchanged:
        nisa.memset(dst=result[:, full:, :], value=0.0)
    return result


def count_tiles_per_group(hidden, inner, dtype, resident_bytes, ranks):
    """Return how many row tiles the largest group has that fits in SBUF: at most GROUP_TILES; 0 or less if none fits.

    A group takes its row tiles, their transposes and two intermediates. With 0 or less, the caller must take one row
    tile at a time with one intermediate, so that groups do not overlap.

    hidden, inner: columns of x and of the intermediate. resident_bytes: bytes of each partition that are
    taken already. ranks: over how many ranks the rows are cut; with several, two rows of x on each partition,
    on their way to the others, are taken too.
    """
    if ranks > 1:
        resident_bytes += 2 * item_bytes(dtype) * hidden  # rows of this rank on their way to the others
    tile_bytes = item_bytes(dtype) * 2 * (blocks(hidden) + blocks(inner)) * PARTITIONS
    return min(GROUP_TILES, (nl.tile_size.sbuf_fmax_bytes - STREAM_BYTES - resident_bytes) // tile_bytes)


def can_keep_residual(ffn):
    """Return whether all rows are one row tile that fits in SBUF beside its normalised copy and its transpose."""
    rows, hidden = ffn.rows.all_rows.shape
    elements = 3 * hidden + (blocks(hidden) + blocks(ffn.gated.inner)) * rows
    used_bytes = item_bytes(ffn.dtype) * elements + STREAM_BYTES
    return rows <= PARTITIONS and used_bytes <= nl.tile_size.sbuf_fmax_bytes
