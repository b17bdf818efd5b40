"""The feed-forward block of a decode step, from hidden states in SBUF to rows in HBM, for kernels that do more.

Hidden states lie in runs, see `hidden`. So they are the moving operand of the gated product as they are, once they are
normalised, and its weights are loaded in runs too. The residual reaches the rows of the last product through HBM, while
the gated product is computed.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.hidden import reciprocal_roots, store_hidden
from nki_kernels.dma import SCALAR, transfer
from nki_kernels.projection.feed_forward import overlap
from nki_kernels.projection.gated_product import bias_columns
from nki_kernels.projection.normalised_rows import on_every_row
from nki_kernels.projection.residual_product import residual_product
from nki_kernels.projection.rows import column_of
from nki_kernels.projection.sums import store_last_sums

SUMS_AHEAD = 8
"""Chunks whose sums over the ranks may be under way before the first of them is stored."""


def prepare_feed_forward(norm_weight, weights, biases, function, replica_group, rows, dtype):
    """What the block needs that depends on no hidden state: small loads, which a kernel triggers first.

    weights, biases: those of gate, up and down.
    """
    w_gate, w_up, w_down = weights
    b_gate, b_up, b_down = biases
    return {
        "weight": column_of(norm_weight, 0.0, True),
        "norm": None,
        "scratch": None,
        "weights": [w_up] if w_gate is None else [w_gate, w_up],
        "biases": [bias_columns(b_gate), bias_columns(b_up)],
        "down": w_down,
        "after": None if b_down is None else on_every_row(b_down, rows, dtype, 0.0),
        "function": function,
        "replica_group": replica_group,
        "ranks": 1,
        "exchanges": False,
        "runs": True,
    }


def feed_forward(y, tile, stage, eps):
    """The block for hidden states in SBUF into rows y [T, H] of HBM, their sum over the ranks and residual included."""
    rows, hidden = y.shape
    between = nl.ndarray(y.shape, dtype=y.dtype, buffer=nl.shared_hbm)
    stage["blocks"] = normalised_blocks(tile, stage["weight"], hidden, eps)
    store_hidden(between, tile)
    kept = nl.ndarray((rows, 1, hidden), dtype=y.dtype, buffer=nl.sbuf)
    transfer(kept.reshape((rows, hidden)), between, SCALAR)
    job = residual_product(y, None, [stage["down"]], stage["after"], stage["replica_group"], ahead=SUMS_AHEAD)
    job["kept"] = kept
    group = 0, rows
    inner = overlap(stage, job, group, None, None, [], [])
    overlap(stage, job, None, group, inner, [], [])
    store_last_sums(job)


def normalised_blocks(tile, weight, hidden, eps):
    """Hidden states times 1 / rms of their row and the weight, as an operand of products: [partition, C, row]."""
    height, rows, count = tile.shape
    weighted = nl.ndarray((height, count, rows), dtype=nl.float32, buffer=nl.sbuf)
    factor = weight.expand_dim(2).broadcast(2, rows)
    nisa.tensor_tensor(dst=weighted, data1=tile.permute((0, 2, 1)), data2=factor, op=nl.multiply)
    roots = reciprocal_roots(tile, hidden, eps)[0]
    result = nl.ndarray(weighted.shape, dtype=tile.dtype, buffer=nl.sbuf)
    scale = roots[0:height, :].expand_dim(1).broadcast(1, count)
    nisa.tensor_tensor(dst=result, data1=weighted, data2=scale, op=nl.multiply)
    return result
