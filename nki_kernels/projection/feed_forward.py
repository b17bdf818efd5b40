"""The stages of `mlp`'s schedule: loads, norm and transposes of row groups, and the operands of both products."""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cores import core_columns, core_range, core_rows, divides_columns
from nki_kernels.dma import STATIC
from nki_kernels.norms.row_tiles import RowNorm
from nki_kernels.projection.gated_product import GatedProduct, bias_columns, unit_columns
from nki_kernels.projection.products import add_products
from nki_kernels.projection.residual_product import ResidualProduct, chunk_width
from nki_kernels.projection.row_groups import (
    blocks_tile,
    item_bytes,
    normalise_tiles,
    plan_loads,
    row_tile_height,
    row_tiles,
    share,
    split_by_rank,
    starts,
    transpose_tiles,
    trigger_loads,
)
from nki_kernels.projection.sequence import RowSource, rows_of
from nki_kernels.tiles import BANK, PARTITIONS, blocks, ranges
from nki_kernels.weights import WeightMatrix, weight_columns

INNER_UNIT = 64
"""Two cores divide the intermediate into whole units of so many columns: halves of a block share the array."""

GROUP_TILES = 4
"""Row tiles of the largest group: 512 rows, the columns of the widest moving tile that every chip takes."""

STREAM_BYTES = 48 * 1024
"""Bytes per partition that a group leaves to weights, residuals and results on their way."""


@dataclass
class Weights(nl.NKIObject):
    """w_gate, w_up [H, F], w_down [F, H] and biases [1, F], [1, F], [1, H] @ HBM; w_gate and biases may be None."""

    w_gate: WeightMatrix | None
    w_up: WeightMatrix
    w_down: WeightMatrix
    b_gate: nl.NkiTensor | None
    b_up: nl.NkiTensor | None
    b_down: nl.NkiTensor | None


@dataclass
class CoreShare(nl.NKIObject):
    """What this core computes. Two cores divide the rows; up to 128 rows they divide the columns of both products.

    rows: (first, end) of x, of each rank. inner_columns, columns: (first, end) of the intermediate and of y.
    exchanges: whether cores exchange their intermediates, in tiles of `exchanged_columns`.
    """

    rows: tuple
    inner_columns: tuple
    columns: tuple
    exchanges: bool
    exchanged_columns: int


@dataclass
class FeedForward(nl.NKIObject):
    """What all row groups of one core share.

    norm: None if rows need none. row_gate: [h in block, block, 1], or None. ranks: over which rows are cut.
    """

    rows: RowSource
    norm: RowNorm | None
    gated: GatedProduct
    down: ResidualProduct
    core: CoreShare
    row_gate: nl.NkiTensor | None
    ranks: int
    dtype: object


@dataclass
class RowBuffers(nl.NKIObject):
    """SBUF that row groups use in turn: row tiles [row, H], and their transpose [h in block, block, row]."""

    tiles: list
    transposed: nl.NkiTensor
    tile_height: int


@dataclass
class Prefetch(nl.NKIObject):
    """The next row group, which is loaded and normalised while the units of the present group are multiplied.

    tiles: its row tiles. loads: PlannedLoad, triggered during the first `load_units` units. The norm follows, before
    the other `norm_units`. normalised, transposed: how many row tiles are so far.
    """

    tiles: list
    loads: list
    load_units: int
    norm_units: int
    normalised: int = 0
    transposed: int = 0

    def loads_during(self, unit):
        """Return the loads to trigger during a unit."""
        return share(self.loads, unit, self.load_units)

    def normalise_until(self, unit, norm):
        """Normalise the row tiles that are due before a unit. After the last unit, pass the number of units."""
        shares = max(0, unit - self.load_units + 1)
        due = min(len(self.tiles), len(self.tiles) * shares // self.norm_units)
        tiles = self.tiles[self.normalised : due]
        normalise_tiles(tiles, tiles, norm)
        self.normalised = due

    def transpose_next(self, count, buffers):
        """Transpose the next `count` row tiles, as far as there are any."""
        tiles = self.tiles[self.transposed : self.transposed + count]
        transpose_tiles(buffers.transposed, tiles, self.transposed * buffers.tile_height)
        self.transposed += len(tiles)


def core_share(tokens, hidden, inner, ranks):
    """Return the share of this core in an MLP of `tokens` rows, which are cut over so many ranks."""
    exchanges = divides_columns(tokens)
    return CoreShare(
        core_rows(tokens // ranks, ranks),
        core_columns(tokens, inner, INNER_UNIT),
        core_columns(tokens, hidden, BANK),
        exchanges,
        core_range(inner, INNER_UNIT, 0)[1] if exchanges else 0,
    )


def allocate_row_buffers(rows, hidden, dtype, tile_height):
    """Allocate the buffers of row groups of up to `rows` rows of `hidden` elements."""
    tiles = []
    for _ in range(blocks(rows, tile_height)):
        tiles.append(nl.ndarray((min(rows, tile_height), hidden), dtype=dtype, buffer=nl.sbuf))
    return RowBuffers(tiles, blocks_tile(hidden, rows, dtype), tile_height)


def gated_product(weights, columns, activation, in_runs):
    """Return the gate and up product for columns (first, end) of the intermediate; load their biases."""
    first, end = columns
    matrices = [weight_columns(weights.w_up, first, end)]
    if weights.w_gate is not None:
        matrices = [weight_columns(weights.w_gate, first, end), weight_columns(weights.w_up, first, end)]
    b_gate = None if weights.b_gate is None else weights.b_gate[:, first:end]
    b_up = None if weights.b_up is None else weights.b_up[:, first:end]
    biases = [bias_columns(b_gate), bias_columns(b_up)]
    return GatedProduct(matrices, biases, activation, in_runs, weights.w_up.elements.shape[0], end - first)


def down_parts(w_down, core):
    """Return w_down's rows for this core's intermediate and, if cores exchange theirs, for the other core's."""
    matrices = [w_down.submatrix(core.inner_columns, core.columns)]
    if core.exchanges:
        rows_of_other = core_range(w_down.elements.shape[0], INNER_UNIT, 1 - nl.program_id(0))
        matrices.append(w_down.submatrix(rows_of_other, core.columns))
    return matrices


def unit_starts(ffn, groups, m):
    """Return the first column of each unit of the gate and up product of row group m, if there is one."""
    if m >= len(groups):
        return []
    return starts(ffn.gated.inner, unit_columns(ffn.gated, ffn.ranks * groups[m].rows))


def chunk_starts(ffn, groups, m):
    """Return the first column of each chunk of the down product of row group m, if there is one."""
    if m < 0:
        return []
    return starts(ffn.down.y.shape[1], chunk_width(ffn.ranks * groups[m].rows, ffn.ranks))


def units_due(chunk, chunks, units):
    """Return how many units are issued before chunk `chunk` of `chunks`, so that both alternate evenly."""
    return units if chunks == 0 else min(units, chunk * units // chunks + 1)


def prepare_first_group(ffn, group, buffers):
    """Load, normalise and transpose the first row group. Few rows also stay in SBUF, as the residual."""
    tiles = row_tiles(buffers.tiles, ffn.ranks * group.rows, buffers.tile_height)
    trigger_loads(plan_loads(tiles, rows_of_group(ffn, group)), STATIC)
    normalised = tiles
    if ffn.ranks == 1 and ffn.down.residual is not None and residual_fits(ffn):
        if ffn.norm is not None:
            # The norm must not overwrite these rows, because they are added as the residual.
            normalised = [nl.ndarray(tiles[0].shape, dtype=ffn.dtype, buffer=nl.sbuf)]
        first, end = ffn.core.columns
        ffn.down.keep_residual(tiles[0][:, first:end].reshape((group.rows, 1, end - first)))
    normalise_tiles(normalised, tiles, ffn.norm)
    transpose_tiles(buffers.transposed, normalised, 0)


def plan_prefetch(ffn, groups, m, buffers, units):
    """Plan the loads of row group m, if there is one, during `units` units of the group before."""
    tiles, loads = [], []
    if m < len(groups):
        tiles = row_tiles(buffers.tiles, ffn.ranks * groups[m].rows, buffers.tile_height)
        loads = plan_loads(tiles, rows_of_group(ffn, groups[m]))
    # The second half of the units is left to the norm, which waits for these loads.
    load_units = max(1, units // 2)
    return Prefetch(tiles, loads, load_units, max(1, units - load_units))


def rows_of_group(ffn, group):
    """Return the rows of a group in HBM, [rank, row, H]."""
    first, end = group.first_row, group.first_row + group.rows
    return split_by_rank(rows_of(ffn.rows, ffn.ranks * first, ffn.ranks * end), ffn.ranks)


def append_row_scales(ffn, x):
    """Append to the row scales of `down`, for each row tile of x, sigmoid(x @ row_gate): [row, 1] float32."""
    if ffn.row_gate is None:
        return
    for first, end in ranges(0, x.shape[2], row_tile_height(ffn.ranks)):
        bank = nl.ndarray((end - first, 1), dtype=nl.float32, buffer=nl.psum)
        add_products([[bank]], x, [(first, end)], ffn.row_gate, [(0, 1)], 0, ffn.gated.hidden)
        row_scale = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=row_scale, op=nl.sigmoid, data=bank)
        ffn.down.row_scales.append(row_scale)


def allocate_intermediate(ffn, rows):
    """Allocate this core's intermediate [f in block, block, row]. Cores exchange tiles of one size, padded with 0."""
    inner, exchanged = ffn.gated.inner, ffn.core.exchanged_columns
    if not ffn.core.exchanges:
        return blocks_tile(inner, rows, ffn.dtype)
    result = blocks_tile(exchanged, rows, ffn.dtype)
    full = inner // PARTITIONS
    if full * PARTITIONS < exchanged:
        nisa.memset(dst=result[:, full:, :], value=0.0)
    return result


def tiles_per_group(hidden, inner, dtype, resident_bytes, ranks):
    """Return the row tiles of the largest group that fits in SBUF beside `resident_bytes` per partition.

    A group needs its row tiles, their transposes and two intermediates. The result is 0 if one row tile does not fit:
    then there is room for one intermediate only, and groups do not overlap.
    """
    if ranks > 1:
        resident_bytes += 2 * item_bytes(dtype) * hidden  # rows of this rank on their way to the others
    tile_bytes = item_bytes(dtype) * 2 * (blocks(hidden) + blocks(inner)) * PARTITIONS
    return min(GROUP_TILES, (nl.tile_size.sbuf_fmax_bytes - STREAM_BYTES - resident_bytes) // tile_bytes)


def residual_fits(ffn):
    """Return whether all rows are one row tile that fits into SBUF beside its normalised copy."""
    rows, hidden = ffn.rows.all_rows.shape
    elements = 3 * hidden + (blocks(hidden) + blocks(ffn.gated.inner)) * rows
    used_bytes = item_bytes(ffn.dtype) * elements + STREAM_BYTES
    return rows <= PARTITIONS and used_bytes <= nl.tile_size.sbuf_fmax_bytes
