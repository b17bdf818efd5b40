"""Queries, keys and values of a decode step from hidden states in SBUF, into the layouts that attention takes.

The weights of queries and keys are the stationary operands, so that their heads come with D on the partitions; the
rows are stationary for the values, which come with tokens there. Nothing is transposed and nothing goes through HBM.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.products import allocate_blocks, plan_growing_ranges
from nki_kernels.tiles import ACCUMULATOR_BANKS, BANK, PARTITIONS, blocks, in_block, ranges
from nki_kernels.weights import WeightMatrix, load_runs_into


class Projected(nl.NKIObject):
    """Heads of queries, then of keys, [D in tile, tile, head, token] in `dtype`, and values [token, Hk * D]."""

    def __init__(self, sizes):
        shape = (min(sizes.depth, PARTITIONS), sizes.depth_tiles, sizes.heads + sizes.kv_heads, sizes.tokens)
        self.heads = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)
        width = sizes.kv_heads * sizes.depth
        self.values = nl.ndarray((sizes.tokens, width), dtype=sizes.dtype, buffer=nl.sbuf)


def plan_column_groups(sizes):
    """Return columns of w_qkv whose products accumulate together: (first head, end, first column of values, end).

    All of them where the PSUM banks of one product hold those of all heads, and as many those of the values.
    """
    heads, width = sizes.heads + sizes.kv_heads, sizes.kv_heads * sizes.depth
    most = BANK // sizes.tokens * ACCUMULATOR_BANKS // sizes.depth_tiles * sizes.together
    if heads <= most and width <= 2 * BANK:
        return [(0, heads, 0, width)]
    groups = []
    for first, end in ranges(0, heads, most):
        groups.append((first, end, 0, 0))
    for first, end in ranges(0, width, ACCUMULATOR_BANKS * BANK):
        groups.append((0, 0, first, end))
    return groups


def project(rows, w_qkv, sizes, scales):
    """Return [q | k | v] of rows [partition, C, token], times `scales`, see `reciprocal_roots`."""
    result = Projected(sizes)
    hidden = w_qkv.shape[0]
    first_value = (sizes.heads + sizes.kv_heads) * sizes.depth
    for first, end, left, right in plan_column_groups(sizes):
        sums = allocate_head_sums(end - first, sizes)
        panels = ranges(0, right - left, BANK)
        banks = []
        for start, stop in panels:
            banks.append(nl.ndarray((sizes.tokens, stop - start), dtype=nl.float32, buffer=nl.psum))
        columns = first * sizes.depth, end * sizes.depth
        if right > left:
            columns = first_value + left, first_value + right
            if end > first:
                columns = first * sizes.depth, first_value + right
        width = columns[1] - columns[0]
        # Parts of the weight grow from one block on, so the first products begin while most of it is on its way.
        for start, stop in plan_growing_ranges(blocks(hidden), width, 1):
            weights = allocate_blocks(hidden, stop - start, width, sizes.dtype)
            load_runs_into(weights, WeightMatrix(w_qkv[:, columns[0] : columns[1]]), start)
            add_heads(sums, weights, rows, start, hidden, sizes)
            value_weights = weights[:, :, width - (right - left) : width]
            add_values(banks, value_weights, panels, rows, start, hidden)
        read_heads(result.heads, sums, first, scales[0], sizes)
        for panel in range(len(panels)):
            start, stop = left + panels[panel][0], left + panels[panel][1]
            target = result.values[:, start:stop]
            # Tokens lie on the partitions here, so the Scalar engine applies a scale per partition as it evicts.
            nisa.activation(dst=target, op=nl.copy, data=banks[panel], scale=scales[1])
    return result


def allocate_head_sums(heads, sizes):
    """Return the first head, the end, and a PSUM tile [D in tile, tile, heads, token] of as many heads as a bank holds.

    Short heads lie beside each other on the partitions, `sizes.together` of them.
    """
    tiles = []
    most = sizes.together * (BANK // (sizes.tokens * sizes.depth_tiles))
    for first, end in ranges(0, heads, most):
        height = min(sizes.together * sizes.depth, PARTITIONS)
        shape = (height, sizes.depth_tiles, blocks(end - first, sizes.together), sizes.tokens)
        tiles.append((first, end, nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)))
    return tiles


def add_heads(sums, weights, rows, first, hidden, sizes):
    """Add what blocks of the weights, from block `first` on, contribute to the heads."""
    for within in range(weights.shape[1]):
        block = first + within
        used = in_block(hidden, block, True)
        for first_head, end_head, tile in sums:
            for head in range(first_head, end_head, sizes.together):
                count = min(sizes.together, end_head - head)
                for d in range(sizes.depth_tiles):
                    height = min(PARTITIONS, count * sizes.depth - d * PARTITIONS)
                    column = head * sizes.depth + d * PARTITIONS
                    nisa.nc_matmul(
                        dst=tile[0:height, d, (head - first_head) // sizes.together, :],
                        stationary=weights[0:used, within, column : column + height],
                        moving=rows[0:used, block, :],
                        accumulate=block > 0,
                    )


def add_values(banks, weights, panels, rows, first, hidden):
    """Add what blocks of the weights, from block `first` on, contribute to the values."""
    for within in range(weights.shape[1]):
        block = first + within
        used = in_block(hidden, block, True)
        for panel in range(len(panels)):
            start, stop = panels[panel]
            nisa.nc_matmul(
                dst=banks[panel],
                stationary=rows[0:used, block, :],
                moving=weights[0:used, within, start:stop],
                accumulate=block > 0,
            )


def read_heads(heads, sums, first, scale, sizes):
    """Copy the heads of `sums` from PSUM times scale [128, token] to `heads`, where they begin at head `first`."""
    for first_head, end_head, tile in sums:
        for offset in range(min(sizes.together, end_head - first_head)):
            for d in range(sizes.depth_tiles):
                start = offset * sizes.depth
                height = min(PARTITIONS, sizes.depth - d * PARTITIONS)
                target = heads[
                    0:height, d, first + first_head + offset : first + end_head : sizes.together, :
                ]
                count = target.shape[1]
                # Tokens lie along the free dimension here, so their scales are a tile, and the Vector engine evicts.
                factor = scale[start : start + height, :].expand_dim(1).broadcast(1, count)
                source = tile[start : start + height, d, 0:count, :]
                nisa.tensor_tensor(dst=target, data1=source, data2=factor, op=nl.multiply)
