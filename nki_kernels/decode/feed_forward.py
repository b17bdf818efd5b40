"""The feed-forward block of a decode step, from hidden states in SBUF to rows in HBM, for kernels that do more.

Hidden states have the layout "runs", see `hidden`. Once normalised, they are the moving operand of the gate and up
product, whose weights are loaded in runs too. Meanwhile the residual goes through HBM to the layout of y's rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.collectives as ncc
import nki.language as nl

from nki_kernels.decode.hidden import store_hidden
from nki_kernels.dma import SCALAR, transfer
from nki_kernels.norms.blocks import column_of
from nki_kernels.norms.norm import Norm
from nki_kernels.norms.runs import normalised_runs
from nki_kernels.projection.feed_forward import build_gated_product
from nki_kernels.projection.gated_product import GatedProduct, compute_unit, count_unit_columns
from nki_kernels.projection.residual_product import (
    MovingWeight,
    ResidualProduct,
    compute_chunk,
    count_chunk_columns,
)
from nki_kernels.projection.row_groups import blocks_tile, list_starts
from nki_kernels.projection.sums import RankSum
from nki_kernels.tiles import on_every_row
from nki_kernels.weights import WeightMatrix

SUMS_IN_FLIGHT = 8
"""Chunks whose sums over the ranks may be under way before the first of them is stored."""


@dataclass
class FeedForwardOperands(nl.NKIObject):
    """What the block needs that depends on no hidden state.

    norm_column: weight of the norm in runs, [partition, C]. w_down: [F, H]. bias: [row, H] in SBUF, or None.
    """

    norm: Norm
    norm_column: nl.NkiTensor
    gated: GatedProduct
    w_down: WeightMatrix
    bias: nl.NkiTensor | None
    replica_group: ncc.ReplicaGroup | None


def prepare_feed_forward(norm, weights, activation, replica_group, rows, dtype):
    """Load the small operands of the block, which a kernel triggers first. weights: Weights of `feed_forward`."""
    norm_column = column_of(norm.weight, 0.0, True)
    gated = build_gated_product(weights, (0, weights.w_up.elements.shape[1]), activation, in_runs=True)
    bias = None if weights.b_down is None else on_every_row(weights.b_down, rows, dtype, 0.0)
    return FeedForwardOperands(norm, norm_column, gated, weights.w_down, bias, replica_group)


def compute_feed_forward(y, tile, operands):
    """Compute the block for hidden states in SBUF into rows y [T, H] of HBM, with residual and sum over the ranks."""
    rows, hidden = y.shape
    gated = operands.gated
    residual = nl.ndarray(y.shape, dtype=y.dtype, buffer=nl.shared_hbm)
    x = normalised_runs(tile, hidden, operands.norm, operands.norm_column)
    store_hidden(residual, tile)
    residual_tile = nl.ndarray((rows, 1, hidden), dtype=y.dtype, buffer=nl.sbuf)
    # This load waits for the store, so Scalar triggers it: the queue of the weights must wait for no result.
    transfer(residual_tile.reshape((rows, hidden)), residual, SCALAR)
    rank_sum = RankSum(operands.replica_group, 1, SUMS_IN_FLIGHT, [])
    weight = MovingWeight([operands.w_down])
    down = ResidualProduct(y, None, weight, operands.bias, rank_sum, residual_tile)
    intermediate = blocks_tile(gated.inner, rows, x.dtype)
    for column in list_starts(gated.inner, count_unit_columns(gated, rows)):
        compute_unit(gated, intermediate, x, column, [])
    for column in list_starts(hidden, count_chunk_columns(rows)):
        compute_chunk(down, [intermediate], 0, column)
    rank_sum.finish()
