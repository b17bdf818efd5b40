"""Partial outputs: attention with some of the keys, and how partial outputs of cores and ranks become one.

`decode.item_stages` merges the two cores of a launch with `finish_with_other_core`; `decode.ranks` merges ranks.

A partial output of a query is a row of D + 2 float32: its weighted values and the sum of its weights, both relative
to the largest score among its keys, and that score, m. With M the largest of all partial outputs

    o = sum of exp(scale * (m - M)) * values / sum of exp(scale * (m - M)) * weights

Where a query sees no key, m = LOWEST, so the factor is zero.

A *unit* is one kv head of one sequence. A *block* is a box of units, (first sequence, end, first kv head, end), whose
queries are the rows (unit, new token, head) of one tile.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.scales import load_scale_column
from nki_kernels.decode.products import store, sum_weights, transpose_product
from nki_kernels.decode.sizes import count_units, find_first_unit


def write_partial_rows(result, launch, block, ones):
    """Write the accumulators of a block to `result` [row, D + 2] float32 in SBUF, as one partial output for each query.

    A row is [weighted values | sum of weights | largest score]. Rows are ordered by unit, new token and head. A unit
    is one kv head of one sequence.

    Args:
        launch: the `DecodeLaunch`, whose `largest_scores` have the block's scores.
        block: an `OutputBlock` with all of its keys on this core.
        ones: [128, 128] float32 of ones in SBUF.
    """
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
    """Return outputs [row, D] in SBUF, merged from partial outputs [row, core or rank, D + 2]; these are overwritten.

    Args:
        partials: float32 in SBUF; its weighted values and sums are multiplied by their factors in place.
        scale: what exp multiplies scores by.
        sinks: [row, 1] scores that add to the sum of weights only, or None.
        value_scales: [row, 1], by which outputs are multiplied, or None.
        dtype: of the outputs.
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
    """Return exp(scale * (scores - largest)), float32 in SBUF, of scores [row, n] and bounds `largest` [row, 1]."""
    shifted = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=shifted, data=scores, op0=nl.subtract, operand0=largest)
    result = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=result, op=nl.exp, data=shifted, scale=scale)
    return result


def load_sink_column(rows, source, scale):
    """Load attention sinks into SBUF, divided by `scale` to compare with scores: a column [rows, 1] float32.

    Args:
        source: view of the sinks in HBM with one element for each row, broadcast over new tokens.
    """
    column = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=column, src=source)
    nisa.tensor_scalar(dst=column, data=column, op0=nl.multiply, operand0=1.0 / scale)
    return column


def load_value_scales(scales, box, sizes):
    """Return the value scale of each query's kv head as a column [row, 1] float32 in SBUF, or None without scales.

    A unit is one kv head of one sequence.

    Args:
        scales: `CacheScales`, or None.
        box: (first sequence, end, first kv head, end) of the units; rows are ordered by unit, new token and head.
    """
    if scales is None:
        return None
    return load_scale_column(scales.values[:, box[2] : box[3]], box[1] - box[0], sizes.queries)


def finish_with_other_core(launch, block, ones):
    """Exchange a block's partial outputs with the other core; core 0 merges both and writes the outputs to `launch.o`.

    Args:
        block: an `OutputBlock` with all of its keys on this core.
        ones: [128, 128] float32 of ones in SBUF.
    """
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
