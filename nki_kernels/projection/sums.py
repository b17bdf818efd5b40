"""Sums over ranks of the chunks of a product, from SBUF to SBUF, while the next chunks are computed.

A chunk that was summed gets the residual and the bias and is stored. A job is what `residual_product` gives; of rows
that are cut over the ranks (see `sequence`) each rank gets its own.
"""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, STATIC
from nki_kernels.projection.block_loads import load_rows_into, store_rows_from
from nki_kernels.projection.normalised_rows import to_sbuf
from nki_kernels.projection.row_groups import own_height
from nki_kernels.tiles import blocks

VECTOR_SHARE = 2
"""The Vector engine reads out one of so many PSUM banks that are summed."""


def load_residual(job, first, end, column, last):
    """A part of the residual, as [row in block, block, column]."""
    height = min(end - first, own_height(job["ranks"]))
    tile = nl.ndarray(
        (height, blocks(end - first, height), last - column), dtype=job["y"].dtype, buffer=nl.sbuf
    )
    load_rows_into(tile, job["residual"][first:end, column:last], STATIC)
    return tile


def store_last_sums(job):
    """Store the chunks whose sums over ranks are still under way."""
    start_sum(job)
    count = len(job["sums"])
    for number in range(max(0, count - job["ahead"]), count):
        prepare_sum(job, number)
    for number in range(max(0, count - job["ahead"]), count):
        store_sum(job, number)


def sum_of_banks(sums, shape, dtype, ranks, factors):
    """Copy the banks of a chunk to SBUF, for `start_sum`.

    factors: a column for each row tile that multiplies its rows, or None.

    Returns: the sum of this rank, and an empty tile for the sum over the ranks: all of the shape, or this rank's rows.
    """
    height, tiles, width = shape
    height = min(height, sums[0][0].shape[0])
    partial = nl.ndarray((height, tiles, width), dtype=dtype, buffer=nl.sbuf)
    total = nl.ndarray((height // ranks, tiles, width), dtype=dtype, buffer=nl.sbuf)
    for number in range(len(sums)):
        bank, tile, start = sums[number]
        count, columns = bank.shape
        factor = None if factors is None else factors[tile]
        to_sbuf(partial[0:count, tile, start : start + columns], bank, number, VECTOR_SHARE, factor)
    return partial, total


def start_sum(job):
    """Start the sum over the ranks of the last chunk, if it has not started; a short row tile has its own collective.

    The collective waits for the chunk's product, and loads behind it in the queue would wait as well. So it starts
    after the loads of the next chunk.
    """
    if job["unstarted"] is None:
        return
    partial, total, rows = job["unstarted"]
    job["unstarted"] = None
    replica_group, ranks = job["replica_group"], job["ranks"]
    height, tiles, width = partial.shape
    full = rows // height
    if full > 0:
        source = partial[:, 0:full, :].reshape((height, full * width))
        collect(total[:, 0:full, :].reshape((height // ranks, full * width)), source, replica_group, ranks)
    if full < tiles:
        count = rows - full * height
        collect(total[0 : count // ranks, full, :], partial[0:count, full, :], replica_group, ranks)


def collect(total, partial, replica_group, ranks):
    """The sum of a tile over the ranks, or its rows that belong to this rank."""
    if ranks == 1:
        ncc.all_reduce(srcs=[partial], dsts=[total], replica_group=replica_group, op=nl.add)
    else:
        ncc.reduce_scatter(
            srcs=[partial], dsts=[total], replica_group=replica_group, collective_dim=0, op=nl.add
        )


def prepare_sum(job, number):
    """Load the residual of a chunk, if there is one and it is not in SBUF."""
    if number >= 0 and job["residual"] is not None and job["sums"][number][1] is None:
        first, end, column, last = job["sums"][number][4]
        job["sums"][number][1] = load_residual(job, first, end, column, last)


def store_sum(job, number):
    """Add the residual and the bias to a chunk that was summed over the ranks, and store it; none if below 0."""
    if number < 0:
        return
    total, before, bias, target, _ = job["sums"][number]
    rows = target.shape[0]
    height = total.shape[0]
    for tile in range(total.shape[1]):
        count = min(height, rows - tile * height)
        own = total[0:count, tile, :]
        if bias is not None:
            nisa.tensor_tensor(dst=own, data1=own, data2=bias[0:count, :], op=nl.add)
        if before is not None:
            nisa.tensor_tensor(dst=own, data1=own, data2=before[0:count, tile, :], op=nl.add)
    store_rows_from(target, total, COMPILER)
