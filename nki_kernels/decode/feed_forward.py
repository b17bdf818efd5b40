"""The feed-forward block of a decode step, from hidden states in SBUF to rows in HBM.

`decoder_layer_decode` calls `prepare_feed_forward` before its attention block and `compute_feed_forward` after it.

Hidden states lie as in `decode.hidden`: partition p holds C = ceil(H / 128) neighbouring elements of every row. Once
normalised, they are the moving operand of the gate and up product, whose weights have the same layout. Meanwhile the
residual goes through HBM to the layout of y's rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.collectives as ncc
import nki.language as nl

from nki_kernels.decode.hidden import store_hidden
from nki_kernels.dma import SCALAR, transfer
from nki_kernels.norms.blocks import load_column
from nki_kernels.norms.norm import Norm
from nki_kernels.norms.runs import normalise_runs
from nki_kernels.projection.feed_forward import build_gated_product
from nki_kernels.projection.gated_product import GatedProduct, compute_unit, count_unit_columns
from nki_kernels.projection.residual_product import (
    MovingWeight,
    ResidualProduct,
    compute_chunk,
    count_chunk_columns,
)
from nki_kernels.projection.row_groups import allocate_transposed, list_starts
from nki_kernels.projection.sums import RankSum
from nki_kernels.tiles import broadcast_row
from nki_kernels.weights import WeightMatrix

SUMS_IN_FLIGHT = 8
"""Chunks of output columns whose sums over the ranks may be under way before the first of them is stored."""


@dataclass
class FeedForwardOperands(nl.NKIObject):
    """Operands of the feed-forward block that depend on no hidden state.

    norm_column: the norm's weight in SBUF, [partition, C] as the hidden states lie. w_down: [F, H]. bias: the last
    product's bias on every row, [row, H] in SBUF, or None. replica_group: ranks over which y is summed, or None.
    """

    norm: Norm
    norm_column: nl.NkiTensor
    gated: GatedProduct
    w_down: WeightMatrix
    bias: nl.NkiTensor | None
    replica_group: ncc.ReplicaGroup | None


def prepare_feed_forward(norm, weights, activation, replica_group, rows, dtype):
    """Return the block's operands; the norm's weight and the biases are loaded into SBUF, the large weights are not.

    A kernel calls it first, so that these small loads are not delayed by caches and weights.

    Args:
        norm: the `Norm` before the block.
        weights: `Weights` of `projection.feed_forward`: up, down, gate or None, and their biases or None.
        activation: the activation function of the gate, or of the up product without a gate.
        replica_group: ranks over which the block is summed, or None.
        rows: number of rows of the hidden states.
        dtype: dtype of the hidden states.
    """
    norm_column = load_column(norm.weight, 0.0, True)
    gated = build_gated_product(weights, (0, weights.w_up.elements.shape[1]), activation, in_runs=True)
    bias = None if weights.b_down is None else broadcast_row(weights.b_down, rows, dtype, 0.0)
    return FeedForwardOperands(norm, norm_column, gated, weights.w_down, bias, replica_group)


def compute_feed_forward(y, tile, operands):
    """Write hidden states plus their feed-forward block, summed over the ranks, to `y` [T, H] in HBM.

    Args:
        tile: hidden states in SBUF, [partition, row, element] as `decode.hidden` lays them out.
        operands: `FeedForwardOperands`.
    """
    rows, hidden = y.shape
    gated = operands.gated
    residual = nl.ndarray(y.shape, dtype=y.dtype, buffer=nl.shared_hbm)
    x = normalise_runs(tile, hidden, operands.norm, operands.norm_column)
    store_hidden(residual, tile)
    residual_tile = nl.ndarray((rows, 1, hidden), dtype=y.dtype, buffer=nl.sbuf)
    # This load waits for the store, so Scalar triggers it: the queue of the weights must wait for no result.
    transfer(residual_tile.reshape((rows, hidden)), residual, SCALAR)
    rank_sum = RankSum(operands.replica_group, 1, SUMS_IN_FLIGHT, [])
    weight = MovingWeight([operands.w_down])
    down = ResidualProduct(y, None, weight, operands.bias, rank_sum, residual_tile)
    intermediate = allocate_transposed(gated.inner, rows, x.dtype)
    for column in list_starts(gated.inner, count_unit_columns(gated, rows)):
        compute_unit(gated, intermediate, x, column, [])
    for column in list_starts(hidden, count_chunk_columns(rows)):
        compute_chunk(down, [intermediate], 0, column)
    rank_sum.finish()
