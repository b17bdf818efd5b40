"""The feed-forward block of a decode step, from hidden states in SBUF to rows in HBM.

`decoder_layer_decode` calls `prepare_feed_forward` before its attention block and `compute_feed_forward` after it.

Hidden states lie as in `decode.hidden`: partition p holds C = ceil(H / 128) neighbouring elements of every row. Once
normalised, they are the moving operand of the gate and up product, whose weights have the same layout. Meanwhile the
residual goes through HBM to the layout of y's rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.column_scales import load_on_rows
from nki_kernels.decode.hidden import store_hidden
from nki_kernels.dma import SCALAR, transfer
from nki_kernels.norms.blocks import load_column
from nki_kernels.norms.norm import Norm
from nki_kernels.norms.runs import RowFactors, normalise_runs, sum_squares, write_weighted
from nki_kernels.projection.chunk_starts import ChunkStarts, plan_chunk_start
from nki_kernels.projection.early_pieces import (
    load_early_bytes,
    load_early_pieces,
    unpack_early_pieces,
)
from nki_kernels.projection.feed_forward import build_gated_product
from nki_kernels.projection.gated_product import (
    GatedProduct,
    compute_unit,
    count_piece_blocks,
    count_unit_columns,
)
from nki_kernels.projection.grouped_gate import (
    accumulate_group_unit,
    count_group_blocks,
    create_unit,
    finish_group_unit,
    load_group_scales,
    plan_gate_groups,
)
from nki_kernels.projection.grouped_product import (
    GroupLayout,
    list_pieces,
    load_operands,
    multiply_in_groups,
    plan_groups,
)
from nki_kernels.projection.residual_product import (
    MovingWeight,
    ResidualProduct,
    compute_chunk,
    count_chunk_columns,
)
from nki_kernels.projection.row_groups import allocate_transposed, list_starts
from nki_kernels.projection.sums import RankSum
from nki_kernels.tiles import blocks, broadcast_row, count_block_partitions

SUMS_IN_FLIGHT = 8
"""Chunks of output columns whose sums over the ranks may be under way before the first of them is stored."""

EARLY_ELEMENTS = 65536
"""Elements per partition of the weights of 8 bits that are loaded while outputs of attention are summed over ranks.

Half as many for more than FEW_ROWS rows, whose other tiles take more of SBUF.
"""

FEW_ROWS = 32


@dataclass
class FeedForwardOperands(nl.NKIObject):
    """Operands of the feed-forward block that depend on no hidden state.

    norm_column: the norm's weight in SBUF, [partition, C] as the hidden states lie. down: the last product; its
    residual [T, H] in HBM is written by `compute_feed_forward`. layout: how it divides its columns into groups, see
    `projection.grouped_product`; None for a plain weight, and where there are no such groups. weighted: hidden states
    times the norm's weight, [partition, C, column] in SBUF, with zeros behind the rows. paired: whether hidden states
    lie in paired runs, because gate and up have 4 bits. square_sums: [partition,
    column] float32, the same of sums of squares. Both are None before `load_scales`, and for a plain weight.
    early_bytes: first weights of 4 bits that are not unpacked yet; None before they are loaded, and for other weights.
    """

    norm: Norm
    norm_column: nl.NkiTensor
    gated: GatedProduct
    down: ResidualProduct
    layout: GroupLayout | None
    paired: bool
    weighted: nl.NkiTensor | None = None
    square_sums: nl.NkiTensor | None = None
    early_bytes: list | None = None

    def load_scales(self):
        """Load the scales of gate and up, and zero what no row fills; do nothing for plain weights.

        A kernel calls it behind the products of its projection, which need not wait for these loads, and before
        GpSimd addresses new keys, which takes long.
        """
        if self.gated.layout is None:
            self.gated.load_scales()
        else:
            load_group_scales(self.gated)
        if self.down.scales is not None:
            columns = self.down.y.shape[0]
            if self.layout is not None:
                columns = self.layout.width
            elif self.gated.layout is not None:
                columns = self.gated.layout.width
            self.allocate_rows(columns)

    def load_early_weights(self):
        """Begin to load the first weights of gate and up, see EARLY_ELEMENTS, if the weights have scales.

        Do nothing if that is done.
        """
        if self.weighted is not None and self.early_bytes is None and self.gated.early_pieces is None:
            rows = self.weighted.shape[2]
            most = EARLY_ELEMENTS if rows <= FEW_ROWS else EARLY_ELEMENTS // 2
            if not self.paired:
                load_early_pieces(self.gated, rows, self.weighted.dtype, most)
                return
            end_column = min(self.gated.inner, count_unit_columns(self.gated, rows))
            if self.gated.layout is None:
                count = count_piece_blocks(self.gated, end_column, self.weighted.dtype)
            else:
                count = count_group_blocks(create_unit(self.gated, 0))
            self.early_bytes = load_early_bytes(self.gated, end_column, count, most)

    def unpack_early_weights(self, most):
        """Convert up to `most` early pieces of 4 bits to operands, while the Vector engine would wait for sums."""
        if self.early_bytes is not None:
            unpack_early_pieces(self.gated, self.early_bytes[0:most], self.weighted.dtype)
            self.early_bytes = self.early_bytes[most:]

    def load_down_scales(self):
        """Load the scales of the last product onto the rows, if it takes no groups; do nothing if that is done."""
        if self.down.scales is not None and self.down.column_scales is None and self.layout is None:
            self.down.column_scales = load_on_rows(self.down.scales, self.down.y.shape[0])

    def allocate_rows(self, columns):
        """Allocate `weighted` and `square_sums` for `columns` columns, with zeros in those beyond the rows of y."""
        rows, hidden = self.down.y.shape
        height, count = count_block_partitions(hidden, 0, True), blocks(hidden)
        self.weighted = nl.ndarray((height, count, columns), dtype=self.down.y.dtype, buffer=nl.sbuf)
        self.square_sums = nl.ndarray((height, columns), dtype=nl.float32, buffer=nl.sbuf)
        if columns > rows:
            nisa.memset(dst=self.weighted[:, :, rows:columns], value=0.0, engine=nisa.engine.gpsimd)
            nisa.memset(dst=self.square_sums[:, rows:columns], value=0.0, engine=nisa.engine.gpsimd)


def prepare_feed_forward(norm, weights, activation, replica_group, y):
    """Return the block's operands; the norm's weight and the biases are loaded into SBUF, the large weights are not.

    A kernel calls it first, so that these small loads are not delayed by caches and weights. Scales follow later, see
    `FeedForwardOperands.load_scales`.

    Args:
        norm: the `Norm` before the block.
        weights: `Weights` of `projection.feed_forward`: up, down, gate or None, and their biases or None.
        activation: the activation function of the gate, or of the up product without a gate.
        replica_group: ranks over which the block is summed, or None.
        y: the result [T, H] in HBM, in the dtype of the hidden states.
    """
    rows, hidden = y.shape
    paired = weights.w_up.nibbles is not None
    norm_column = load_column(norm.weight, 0.0, True, paired)
    gated = build_gated_product(weights, (0, weights.w_up.elements.shape[1]), activation, in_runs=True)
    gated.layout = plan_gate_groups(gated.weights, rows, gated.biases)
    bias = None if weights.b_down is None else broadcast_row(weights.b_down, rows, y.dtype, 0.0)
    rank_sum = RankSum(replica_group, 1, SUMS_IN_FLIGHT, [])
    scales = weights.w_down.scales
    residual = nl.ndarray(y.shape, dtype=y.dtype, buffer=nl.shared_hbm)
    down = ResidualProduct(y, residual, MovingWeight([weights.w_down]), bias, rank_sum, None, None, scales)
    is_grouped = scales is not None and replica_group is None and bias is None
    layout = plan_groups(rows, hidden) if is_grouped else None
    return FeedForwardOperands(norm, norm_column, gated, down, layout, paired)


def compute_feed_forward(tile, operands):
    """Write hidden states plus their feed-forward block, summed over the ranks, to the `y` [T, H] of the operands.

    Args:
        tile: hidden states in SBUF, [partition, row, element] as `decode.hidden` lays them out.
        operands: `FeedForwardOperands`.
    """
    gated, down, layout = operands.gated, operands.down, operands.layout
    rows, hidden = down.y.shape
    if down.scales is None:
        x = normalise_runs(tile, hidden, operands.norm, operands.norm_column)
    else:
        x = weight_rows(tile, operands)
    store_hidden(down.residual, tile, operands.paired)
    grouped = None
    if layout is None:
        residual_tile = nl.ndarray((rows, 1, hidden), dtype=down.y.dtype, buffer=nl.sbuf)
        # This load waits for the store, so Scalar triggers it: the queue of the weights must wait for no result.
        transfer(residual_tile.reshape((rows, hidden)), down.residual, SCALAR)
        down.keep_residual(residual_tile)
        operands.load_down_scales()
    else:
        grouped = load_operands(down, layout, None)
    intermediate = allocate_transposed(gated.inner, rows if layout is None else x.shape[2], x.dtype)
    chunks = list_starts(hidden, count_chunk_columns(rows)) if layout is None else []
    starts = []
    for column in chunks:
        starts.append(plan_chunk_start(down, [intermediate], column))
    starts += [None]
    first_pieces = compute_units(operands, x, intermediate, starts)
    for index in range(len(chunks)):
        compute_chunk(down, [intermediate], 0, chunks[index], starts[index], starts[index + 1])
    if layout is not None:
        multiply_in_groups(down, grouped, [intermediate], layout, first_pieces)
    down.rank_sum.finish()


def compute_units(operands, x, intermediate, starts):
    """Compute all units of gate and up; return the first pieces of the last product's weight that are in SBUF by then.

    Of weights of 4 bits pieces of the next product are unpacked before sums are read out, for which the Vector engine
    would wait. Those of a last product in groups are returned in a list.

    Args:
        operands: `FeedForwardOperands`.
        x: [partition, C, column] in SBUF.
        intermediate: [f in block, block, row] in SBUF, which is written.
        starts: ChunkStarts of the last product, the last of which is None.
    """
    gated, pieces = operands.gated, []
    units = list_starts(gated.inner, count_unit_columns(gated, x.shape[2]))
    for index in range(len(units)):
        is_last = index + 1 == len(units)
        next_chunk = starts[0] if is_last else None
        if next_chunk is not None and gated.layout is None:
            # The Tensor engine takes longer for stationary weights than the Vector engine for unpacking them.
            next_chunk = ChunkStarts(starts[0 : len(starts) - 1])
        if gated.layout is None:
            compute_unit(
                gated, intermediate, x, units[index], [], None if is_last else units[index + 1], next_chunk
            )
            continue
        unit = accumulate_group_unit(gated, x, units[index])
        if is_last and operands.layout is not None:
            pieces.append(list_pieces(operands.down, operands.layout)[0].load(intermediate.shape[0], x.dtype))
        if next_chunk is not None:
            next_chunk.load()
        finish_group_unit(gated, unit, intermediate)
    return pieces


def weight_rows(tile, operands):
    """Return hidden states times the norm's weight, [partition, C, column] in SBUF, and set `gated.row_factors`.

    Weights of 8 bits arrive in half the time, so products begin before 1 / rms is known, and their sums are multiplied
    by it. Columns beyond the rows of the tile are zeros.

    Args:
        tile: hidden states in SBUF, [partition, row, C].
        operands: `FeedForwardOperands` whose scales are loaded.
    """
    rows = tile.shape[1]
    weighted = operands.weighted[:, :, 0:rows]
    write_weighted(weighted, tile.permute((0, 2, 1)), operands.norm_column, operands.paired)
    sum_squares(tile, operands.square_sums[:, 0:rows])
    operands.gated.set_factors(RowFactors(operands.square_sums, operands.gated.hidden, operands.norm.eps))
    return operands.weighted
