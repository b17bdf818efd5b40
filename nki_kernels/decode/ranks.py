"""Ranks that share kv heads and divide the positions of their caches: position p is slot p // N of rank p % N of N.

`decode.attend` and `decode.launch` call these functions. The shares of a sequence differ by one position at most,
however short it is, and block tables are the same on all ranks. Each rank attends for the queries of all ranks with
its own slots; then each rank gets the partial outputs of its own queries. New keys and values are the same on all
ranks: the first rank attends with them, and each position is written by the rank whose slot it is.

A *partial output* of a query is a row of D + 2 float32, see `decode.merge`.
"""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.scales import load_scale_column
from nki_kernels.decode.merge import load_sink_column, merge_partials, write_partial_rows
from nki_kernels.decode.sizes import count_units
from nki_kernels.dma import SCALAR, transfer
from nki_kernels.tiles import PARTITIONS, cast, load, load_repeated, ranges


class PositionRanks(nl.NKIObject):
    """Ranks that divide positions: replica group, number, and this rank's index in it, [128, 1] float32 in SBUF."""

    def __init__(self, group, count, index):
        self.group, self.count = group, count
        self.index = cast(load_repeated(index, PARTITIONS), nl.float32)


def subtract_rank(first_positions, ranks):
    """Return `first_positions` [128, n] less this rank's index, a new float32 tile in SBUF.

    Slot s of a rank has position N * s + index. So its key is earlier than a position if N * s is less than the
    result.
    """
    result = nl.ndarray(first_positions.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=first_positions, op0=nl.subtract, operand0=ranks.index)
    return result


def zero_on_other_ranks(predicate, ranks):
    """Return a mask [n, columns] uint8 in SBUF that equals `predicate` on the first rank and is 0 on the others."""
    rows = predicate.shape[0]
    result = nl.ndarray(predicate.shape, dtype=predicate.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=result,
        data=ranks.index[0:rows, :].broadcast(1, predicate.shape[1]),
        op0=nl.equal,
        operand0=0.0,
    )
    nisa.tensor_tensor(dst=result, data1=result, data2=predicate, op=nl.multiply)
    return result


def gather_queries(queries, ranks, sizes):
    """Return the queries of all ranks, [D in tile, tile, token, head] in SBUF, by an all-gather.

    The heads of a kv head are ordered by rank.

    Args:
        queries: this rank's queries, [D in tile, tile, token, local head] in SBUF.
        ranks: `PositionRanks`.
    """
    height, columns = queries.shape[0], sizes.depth_tiles * sizes.tokens * sizes.local_heads
    gathered = nl.ndarray((height, ranks.count * columns), dtype=queries.dtype, buffer=nl.sbuf)
    ncc.all_gather(
        srcs=[queries.reshape((height, columns))],
        dsts=[gathered],
        replica_group=ranks.group,
        collective_dim=1,
    )
    local_share = sizes.local_heads // sizes.kv_heads
    shape = (height, sizes.depth_tiles, sizes.tokens, sizes.heads)
    result = nl.ndarray(shape, dtype=queries.dtype, buffer=nl.sbuf)
    every = gathered.reshape(
        (height, ranks.count, sizes.depth_tiles * sizes.tokens, sizes.kv_heads, local_share)
    )
    target = result.reshape(
        (height, sizes.depth_tiles * sizes.tokens, sizes.kv_heads, ranks.count, local_share)
    )
    # The gather leaves ranks outermost, but a product takes all heads of a kv head as one moving operand.
    for rank in range(ranks.count):
        nisa.tensor_copy(dst=target[:, :, :, rank, :], src=every[:, rank])
    return result


def allocate_partial_outputs(ranks, sizes):
    """Return an uninitialised HBM tensor for the partial outputs that ranks exchange, [row, D + 2] float32.

    Rows are ordered by rank, token and local head: the rank whose queries they are.
    """
    shape = (ranks.count * sizes.tokens * sizes.local_heads, sizes.depth + 2)
    return nl.ndarray(shape, dtype=nl.float32, buffer=nl.private_hbm, name="own_partial_outputs")


def keep_partial(launch, block, ones):
    """Write a block's partial outputs to the rows of `launch.partials` in HBM, which `merge_ranks` exchanges.

    Args:
        block: an `OutputBlock` with all of this rank's keys.
        ones: [128, 128] float32 of ones in SBUF.
    """
    sizes, box = launch.sizes, block.box
    width, local_share = sizes.depth + 2, sizes.local_heads // sizes.kv_heads
    rows = nl.ndarray((count_units(box) * sizes.queries, width), dtype=nl.float32, buffer=nl.sbuf)
    write_partial_rows(rows, launch, block, ones)
    target = launch.partials.reshape(
        (launch.ranks.count, sizes.sequences, sizes.new, sizes.kv_heads, local_share, width)
    )
    target = target[:, box[0] : box[1], :, box[2] : box[3]].permute((1, 3, 2, 0, 4, 5))
    transfer(target, rows, SCALAR)


def merge_ranks(launch):
    """Exchange `launch.partials` among the ranks, and write the outputs of this rank's queries to `launch.o` in HBM.

    The partial outputs of all ranks are received in a new HBM tensor and merged.
    """
    sizes, step, ranks, heads = launch.sizes, launch.step, launch.ranks, launch.sizes.local_heads
    received = nl.ndarray(
        launch.partials.shape, dtype=nl.float32, buffer=nl.private_hbm, name="all_partial_outputs"
    )
    ncc.all_to_all(srcs=[launch.partials], dsts=[received], replica_group=ranks.group, collective_dim=0)
    width = sizes.depth + 2
    source = received.reshape((ranks.count, sizes.tokens * heads, width)).permute((1, 0, 2))
    target = launch.o.reshape((sizes.tokens, heads, sizes.depth))
    for first, last in ranges(0, sizes.tokens, PARTITIONS // heads):
        rows = (last - first) * heads
        partials = load(source[first * heads : last * heads], nl.float32)
        sinks = None
        if step.sinks is not None:
            sinks = load_sink_column(rows, step.sinks.broadcast(0, last - first), launch.scale)
        value_scales = None
        if step.scales is not None:
            value_scales = load_scale_column(step.scales.values, last - first, heads // sizes.kv_heads)
        result = merge_partials(partials, launch.scale, sinks, value_scales, launch.o.dtype)
        transfer(target[first:last], result, SCALAR)
