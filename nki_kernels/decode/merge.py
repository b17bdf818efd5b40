"""Partial outputs: attention with some of the keys, and how partial outputs of cores and ranks become one.

A partial output of a query is a row of D + 2 float32: its weighted values and the sum of its weights, both relative to
the largest score among its keys, and that score, m. With M the largest of all partial outputs

    o = sum of exp(scale * (m - M)) * values / sum of exp(scale * (m - M)) * weights

Where a query sees no key, m = LOWEST, so the factor is zero.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.scales import load_scale_column
from nki_kernels.decode.products import store, sum_weights, transpose_product
from nki_kernels.decode.sizes import count_units, find_first_unit


def write_partial_rows(result, launch, block, ones):
    """Write a block of queries as partial outputs [row, D + 2]."""
    sizes, box = launch.sizes, block.box
    rows, depth = count_units(box) * sizes.queries, sizes.depth
    for d in range(sizes.depth_tiles):
        bank, start, stop = transpose_product(block.product, d, rows, sizes)
        nisa.tensor_copy(dst=result[:, start:stop], src=bank)
    nisa.tensor_copy(dst=result[:, depth : depth + 1], src=sum_weights(block, ones))
    first = find_first_unit(box, sizes)
    row = launch.largest_scores[:, first : first + count_units(box)].reshape((1, rows))
    bank = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.psum)
    # The largest scores lie in one row, so a transpose puts each on the partition of its query's outputs.
    nisa.nc_transpose(dst=bank, data=row)
    nisa.tensor_copy(dst=result[:, depth + 1 : depth + 2], src=bank)


def merge_partials(partials, scale, sinks, value_scales, dtype):
    """Return outputs [row, D] of partial outputs [row, core or rank, D + 2].

    sinks: a score [row, 1] that adds to the sum of weights, or None. The factors are multiplied into `partials`.
    value_scales: [row, 1], by which outputs are multiplied, or None.
    """
    rows, _, width = partials.shape
    depth = width - 2
    scores = partials[:, :, depth + 1]
    largest = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=scores, axis=1)
    # A sink counts for the maximum too, so that its exp cannot overflow.
    if sinks is not None:
        nisa.tensor_tensor(dst=largest, data1=largest, data2=sinks, op=nl.maximum)
    factors = compute_relative_weights(scores, largest, scale)
    weighted = partials[:, :, 0 : depth + 1]
    nisa.tensor_tensor(
        dst=weighted, data1=weighted, data2=factors.expand_dim(2).broadcast(2, depth + 1), op=nl.multiply
    )
    total = nl.ndarray((rows, depth + 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=weighted.permute((0, 2, 1)), axis=2)
    weights = total[:, depth : depth + 1]
    if sinks is not None:
        nisa.tensor_tensor(
            dst=weights, data1=weights, data2=compute_relative_weights(sinks, largest, scale), op=nl.add
        )
    inverse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=weights)
    if value_scales is not None:
        nisa.tensor_tensor(dst=inverse, data1=inverse, data2=value_scales, op=nl.multiply)
    result = nl.ndarray((rows, depth), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=total[:, 0:depth], op0=nl.multiply, operand0=inverse)
    return result


def compute_relative_weights(scores, largest, scale):
    """Return exp(scale * (scores - largest)) of scores [row, n] and their bounds [row, 1]."""
    shifted = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=shifted, data=scores, op0=nl.subtract, operand0=largest)
    result = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=result, op=nl.exp, data=shifted, scale=scale)
    return result


def load_sink_column(rows, source, scale):
    """Load a view of sinks as a column [rows, 1] of scores, in units of the scale."""
    column = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=column, src=source)
    nisa.tensor_scalar(dst=column, data=column, op0=nl.multiply, operand0=1.0 / scale)
    return column


def load_value_scales(scales, box, sizes):
    """Return the scales of values of rows (unit, new token, head) of a block [rows, 1], or None without scales."""
    if scales is None:
        return None
    return load_scale_column(scales.values[:, box[2] : box[3]], box[1] - box[0], sizes.queries)


def finish_with_other_core(launch, block, ones):
    """Exchange the partial outputs of a block with the other core; the first core stores what they make."""
    sizes, step, box = launch.sizes, launch.step, block.box
    rows = count_units(box) * sizes.queries
    core = nl.program_id(0)
    partials = nl.ndarray((rows, 2, sizes.depth + 2), dtype=nl.float32, buffer=nl.sbuf)
    write_partial_rows(partials[:, 0, :], launch, block, ones)
    nisa.sendrecv(
        src=partials[:, 0, :],
        dst=partials[:, 1, :],
        send_to_rank=1 - core,
        recv_from_rank=1 - core,
        pipe_id=0,
    )
    if core == 0:
        sinks = None
        if step.sinks is not None:
            heads = step.sinks.reshape((1, sizes.kv_heads, 1, sizes.share))[:, box[2] : box[3]]
            sinks = load_sink_column(rows, heads.broadcast(2, sizes.new), launch.scale)
        value_scales = load_value_scales(step.scales, box, sizes)
        store(
            merge_partials(partials, launch.scale, sinks, value_scales, launch.o.dtype), launch.o, box, sizes
        )
