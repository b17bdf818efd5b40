"""Ranks that share kv heads and divide the positions of their caches: position p is slot p // N of rank p % N of N.

So the shares of a sequence differ by one position at most, however short it is, and block tables are the same on all of
the ranks. Each rank attends for the queries of all of them with its share; then each gets the partial outputs of its
own queries. New keys and values are the same on all ranks: the first one attends with them, and each position is
written by the rank whose slot it is.
"""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.scales import scale_column
from nki_kernels.decode.merge import merged, partial_rows, sink_column
from nki_kernels.decode.sizes import units_in
from nki_kernels.dma import SCALAR, transfer
from nki_kernels.tiles import PARTITIONS, cast, load_repeated


class PositionRanks(nl.NKIObject):
    """The replica group, its number of ranks, and the place of this rank in it: [128, 1] float32."""

    def __init__(self, group, count, place):
        self.group = group
        self.count = count
        self.place = cast(load_repeated(place, PARTITIONS), nl.float32)
        self.partial = None


def expect_ranks(group, count, place):
    """The ranks that divide the positions, or None; their number and place are those of `check_position_ranks`."""
    return PositionRanks(group, count, place) if count > 1 else None


def check_position_ranks(group, count, place):
    """Refuse a group without the number of its ranks, or one that does not divide positions by shifts."""
    if group is None:
        assert count == 1, f"{count} position_ranks, but no position_group"
        return
    assert count >= 1 and count & (count - 1) == 0, (
        f"position_ranks is {count}; a power of two divides positions"
    )
    assert place is not None and place.shape == (1, 1), (
        f"position_rank is [1, 1], not {place if place is None else place.shape}"
    )


def relative_to_rank(first_positions, ranks):
    """Positions [128, n] less the place of this rank: a slot's key is earlier if N * slot is below that."""
    result = nl.ndarray(first_positions.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=first_positions, op0=nl.subtract, operand0=ranks.place)
    return result


def only_on_first_rank(predicate, ranks):
    """A predicate [n, columns] uint8 on the first rank, zero on the others."""
    rows = predicate.shape[0]
    result = nl.ndarray(predicate.shape, dtype=predicate.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=result,
        data=ranks.place[0:rows, :].broadcast(1, predicate.shape[1]),
        op0=nl.equal,
        operand0=0.0,
    )
    nisa.tensor_tensor(dst=result, data1=result, data2=predicate, op=nl.multiply)
    return result


def queries_of_all_ranks(queries, ranks, sizes):
    """Queries [D in part, part, token, own head] of all ranks: [D in part, part, token, head]."""
    height, columns = queries.shape[0], sizes.parts * sizes.tokens * sizes.own_heads
    gathered = nl.ndarray((height, ranks.count * columns), dtype=queries.dtype, buffer=nl.sbuf)
    ncc.all_gather(
        srcs=[queries.reshape((height, columns))],
        dsts=[gathered],
        replica_group=ranks.group,
        collective_dim=1,
    )
    own_share = sizes.own_heads // sizes.kv_heads
    shape = (height, sizes.parts, sizes.tokens, sizes.heads)
    result = nl.ndarray(shape, dtype=queries.dtype, buffer=nl.sbuf)
    every = gathered.reshape((height, ranks.count, sizes.parts * sizes.tokens, sizes.kv_heads, own_share))
    target = result.reshape((height, sizes.parts * sizes.tokens, sizes.kv_heads, ranks.count, own_share))
    for rank in range(ranks.count):
        nisa.tensor_copy(dst=target[:, :, :, rank, :], src=every[:, rank])
    return result


def keep_partial(block, work):
    """Write the partial outputs of a block to what the ranks will exchange: [rank, token, own head, D + 2]."""
    sizes, ranks, box = work.sizes, work.ranks, block[0]
    width, own_share = sizes.depth + 2, sizes.own_heads // sizes.kv_heads
    if ranks.partial is None:
        shape = (ranks.count * sizes.tokens * sizes.own_heads, width)
        ranks.partial = nl.ndarray(shape, dtype=nl.float32, buffer=nl.private_hbm, name="own_partial_outputs")
    rows = nl.ndarray((units_in(box) * sizes.queries, width), dtype=nl.float32, buffer=nl.sbuf)
    partial_rows(rows, block, work.largest_scores, work.ones, sizes)
    target = ranks.partial.reshape(
        (ranks.count, sizes.sequences, sizes.new, sizes.kv_heads, own_share, width)
    )
    target = target[:, box[0] : box[1], :, box[2] : box[3]].permute((1, 3, 2, 0, 4, 5))
    transfer(target, rows, SCALAR)


def merge_ranks(work):
    """Exchange partial outputs, and store what those of this rank's queries make."""
    sizes, ranks, heads = work.sizes, work.ranks, work.sizes.own_heads
    received = nl.ndarray(
        ranks.partial.shape, dtype=nl.float32, buffer=nl.private_hbm, name="all_partial_outputs"
    )
    ncc.all_to_all(srcs=[ranks.partial], dsts=[received], replica_group=ranks.group, collective_dim=0)
    width = sizes.depth + 2
    source = received.reshape((ranks.count, sizes.tokens * heads, width)).permute((1, 0, 2))
    target = work.o.reshape((sizes.tokens, heads, sizes.depth))
    together = PARTITIONS // heads
    for first in range(0, sizes.tokens, together):
        last = min(sizes.tokens, first + together)
        rows = (last - first) * heads
        parts = nl.ndarray((rows, ranks.count, width), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=parts, src=source[first * heads : last * heads])
        sinks = None
        if work.sinks is not None:
            sinks = sink_column(rows, work.sinks.broadcast(0, last - first), work.scale)
        value_scales = None
        if work.step.scales is not None:
            value_scales = scale_column(work.step.scales.values, last - first, heads // sizes.kv_heads)
        result = merged(parts, work.scale, sinks, value_scales, work.o.dtype)
        transfer(target[first:last], result, SCALAR)
