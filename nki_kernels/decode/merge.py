"""Partial outputs: attention with a part of the keys, and how the parts of cores and ranks become one output.

A partial output of a query is a row of D + 2 float32: its weighted values and the sum of its weights, both relative to
the largest score among the part's keys, and that score, m. With M the largest of all parts

    o = sum of exp(scale * (m - M)) * values / sum of exp(scale * (m - M)) * weights

A part of which a query sees no key has m = LOWEST, so its factor is zero.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.scales import scale_column
from nki_kernels.decode.products import product_rows, store, weight_sums
from nki_kernels.decode.sizes import first_unit, units_in


def largest_scores(sizes):
    """The largest score of every query of a launch: [1, unit, new token, head]."""
    shape = (1, sizes.sequences * sizes.kv_heads, sizes.new, sizes.share)
    return nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)


def partial_rows(result, block, largest, ones, sizes):
    """Write a block of queries as partial outputs [row, D + 2]."""
    box, product, _ = block
    rows, depth = units_in(box) * sizes.queries, sizes.depth
    for d in range(sizes.parts):
        bank, start, stop = product_rows(product, d, rows, sizes)
        nisa.tensor_copy(dst=result[:, start:stop], src=bank)
    nisa.tensor_copy(dst=result[:, depth : depth + 1], src=weight_sums(block, ones))
    first = first_unit(box, sizes)
    row = largest[:, first : first + units_in(box)].reshape((1, rows))
    bank = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=bank, data=row)
    nisa.tensor_copy(dst=result[:, depth + 1 : depth + 2], src=bank)


def merged(parts, scale, sinks, value_scales, dtype):
    """Partial outputs [row, part, D + 2] as outputs [row, D]; sinks: a score [row, 1] that takes part in the sum, or
    None.

    The factors are multiplied into `parts`. value_scales: [row, 1], by which outputs are multiplied, or None.
    """
    rows, _, width = parts.shape
    depth = width - 2
    scores = parts[:, :, depth + 1]
    largest = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=scores, axis=1)
    if sinks is not None:
        nisa.tensor_tensor(dst=largest, data1=largest, data2=sinks, op=nl.maximum)
    factors = relative(scores, largest, scale)
    weighted = parts[:, :, 0 : depth + 1]
    nisa.tensor_tensor(
        dst=weighted, data1=weighted, data2=factors.expand_dim(2).broadcast(2, depth + 1), op=nl.multiply
    )
    total = nl.ndarray((rows, depth + 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=weighted.permute((0, 2, 1)), axis=2)
    weights = total[:, depth : depth + 1]
    if sinks is not None:
        nisa.tensor_tensor(dst=weights, data1=weights, data2=relative(sinks, largest, scale), op=nl.add)
    inverse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=weights)
    if value_scales is not None:
        nisa.tensor_tensor(dst=inverse, data1=inverse, data2=value_scales, op=nl.multiply)
    result = nl.ndarray((rows, depth), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=total[:, 0:depth], op0=nl.multiply, operand0=inverse)
    return result


def relative(scores, largest, scale):
    """exp(scale * (scores - largest)) of scores [row, n] and their bounds [row, 1]."""
    shifted = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=shifted, data=scores, op0=nl.subtract, operand0=largest)
    result = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=result, op=nl.exp, data=shifted, scale=scale)
    return result


def sink_column(rows, source, scale):
    """Sinks as scores, in units of the scale, below each other: the column [rows, 1] that a view of them becomes."""
    column = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=column, src=source)
    nisa.tensor_scalar(dst=column, data=column, op0=nl.multiply, operand0=1.0 / scale)
    return column


def value_scales_of_rows(scales, box, sizes):
    """Return the scales of values of rows (unit, new token, head) of a block [rows, 1], or None without scales."""
    if scales is None:
        return None
    return scale_column(scales.values[:, box[2] : box[3]], box[1] - box[0], sizes.queries)


def finish_with_other_core(block, o, work):
    """Exchange the partial outputs of a block with the other core; the first core stores what they make."""
    sizes, box = work.sizes, block[0]
    rows = units_in(box) * sizes.queries
    core = nl.program_id(0)
    parts = nl.ndarray((rows, 2, sizes.depth + 2), dtype=nl.float32, buffer=nl.sbuf)
    partial_rows(parts[:, 0, :], block, work.largest_scores, work.ones, sizes)
    nisa.sendrecv(
        src=parts[:, 0, :], dst=parts[:, 1, :], send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0
    )
    if core == 0:
        sinks = None
        if work.sinks is not None:
            heads = work.sinks.reshape((1, sizes.kv_heads, 1, sizes.share))[:, box[2] : box[3]]
            sinks = sink_column(rows, heads.broadcast(2, sizes.new), work.scale)
        value_scales = value_scales_of_rows(work.step.scales, box, sizes)
        store(merged(parts, work.scale, sinks, value_scales, o.dtype), o, box, sizes)
