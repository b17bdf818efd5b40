"""Sums over ranks of the chunks of a product, from SBUF to SBUF, while the next chunks are computed.

The rounded partial sums of a chunk enter an all-reduce. If y is cut over the ranks (see `sequence`), they enter a
reduce-scatter, which gives each rank its rows: a row tile over N ranks holds 128 // N consecutive rows of every rank,
one rank after another. Later the residual and the bias are added, and the chunk is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, STATIC
from nki_kernels.projection.block_loads import load_rows_into, store_rows_from
from nki_kernels.projection.row_groups import rows_per_rank
from nki_kernels.tiles import blocks, copy_bank

VECTOR_SHARE = 2
"""The Vector engine reads out one of so many PSUM banks that are summed."""


@dataclass
class OutputChunk(nl.NKIObject):
    """Rows and columns of y, and what is added to their accumulators.

    y: a view of y @ HBM. columns: (first, end) of the whole y. residual: the same rows and columns @ HBM, or None.
    residual_tile: the residual in SBUF, [row in tile, row tile, column]; None if there is none, or until it is loaded.
    bias: [row, column] in SBUF, or None. row_scales: for each row tile a float32 column that multiplies its rows, or
    None. partial, total: this rank's sum, until the sum over the ranks is started, and that sum, in the layout of
    residual_tile; None for one rank.
    """

    y: nl.NkiTensor
    columns: tuple
    residual: nl.NkiTensor | None
    residual_tile: nl.NkiTensor | None
    bias: nl.NkiTensor | None
    row_scales: list | None
    partial: nl.NkiTensor | None = None
    total: nl.NkiTensor | None = None

    def load_residual(self, ranks):
        """Load the residual, if there is one and it is not in SBUF yet."""
        if self.residual is None or self.residual_tile is not None:
            return
        rows, columns = self.residual.shape
        height = min(rows, rows_per_rank(ranks))
        shape = (height, blocks(rows, height), columns)
        self.residual_tile = nl.ndarray(shape, dtype=self.y.dtype, buffer=nl.sbuf)
        load_rows_into(self.residual_tile, self.residual, STATIC)

    def round_partial_sums(self, accumulators, ranks):
        """Copy the accumulators to `partial`, rounded to y's dtype, and allocate `total`."""
        height, tiles = accumulators[0].bank.shape[0], accumulators[len(accumulators) - 1].row_tile + 1
        width = self.y.shape[1]
        self.partial = nl.ndarray((height, tiles, width), dtype=self.y.dtype, buffer=nl.sbuf)
        self.total = nl.ndarray((height // ranks, tiles, width), dtype=self.y.dtype, buffer=nl.sbuf)
        for i in range(len(accumulators)):
            bank, m = accumulators[i].bank, accumulators[i].row_tile
            rows, columns = bank.shape
            start = accumulators[i].first_column
            row_scale = None if self.row_scales is None else self.row_scales[m]
            copy_bank(self.partial[0:rows, m, start : start + columns], bank, i, VECTOR_SHARE, row_scale)

    def start_sum(self, replica_group, ranks):
        """Start the sum of `partial` into `total` in SBUF: all-reduce, or reduce-scatter of rows over `ranks` > 1."""
        height, tiles, _ = self.partial.shape
        rows = ranks * self.y.shape[0]
        full = rows // height
        collect(flat(self.total[:, 0:full, :]), flat(self.partial[:, 0:full, :]), replica_group, ranks)
        # The short row tile covers fewer partitions than the others, so it takes a collective of its own.
        if full < tiles:
            short = rows - full * height
            collect(
                self.total[0 : short // ranks, full, :], self.partial[0:short, full, :], replica_group, ranks
            )
        self.partial = None  # nothing reads it any more


@dataclass
class RankSum(nl.NKIObject):
    """How a product is summed over ranks, and the queue of its chunks.

    replica_group: None for one rank. sequence_ranks: over how many ranks the rows of y are cut; 1: not cut.
    max_in_flight: how many sums, at least one, may be under way before the first chunk is stored.
    chunks: all chunks so far. Of the first of them, the sums of `started` are started, `residuals` have their residual
    and `stored` are stored.
    """

    replica_group: ncc.ReplicaGroup | None
    sequence_ranks: int
    max_in_flight: int
    chunks: list
    started: int = 0
    residuals: int = 0
    stored: int = 0

    def append(self, chunk):
        """Append a chunk that has its partial sums; start the sum of the chunk before, and store chunks that are due.

        A collective waits for the product of its chunk, and loads after it in the queue would wait as well. So it
        starts after the loads of the next chunk.
        """
        self.start_until(len(self.chunks))
        self.chunks.append(chunk)
        self.store_until(len(self.chunks) - self.max_in_flight)

    def finish(self):
        """Store all chunks."""
        self.start_until(len(self.chunks))
        self.store_until(len(self.chunks))

    def start_until(self, count):
        """Start the sums of the first `count` chunks."""
        while self.started < count:
            self.chunks[self.started].start_sum(self.replica_group, self.sequence_ranks)
            self.started += 1

    def store_until(self, count):
        """Store the first `count` chunks. The residual of a chunk is loaded one chunk earlier."""
        while self.residuals < min(len(self.chunks), count + 1):
            self.chunks[self.residuals].load_residual(self.sequence_ranks)
            self.residuals += 1
        while self.stored < count:
            store_sum(self.chunks[self.stored])
            self.stored += 1


def flat(tile):
    """View [row, row tile, column] as [row, row tile * column]."""
    return tile.reshape((tile.shape[0], tile.shape[1] * tile.shape[2]))


def collect(total, partial, replica_group, ranks):
    """Sum a tile over the ranks into `total`, or the rows of it that belong to this rank."""
    if ranks == 1:
        ncc.all_reduce(srcs=[partial], dsts=[total], replica_group=replica_group, op=nl.add)
    else:
        ncc.reduce_scatter(
            srcs=[partial], dsts=[total], replica_group=replica_group, collective_dim=0, op=nl.add
        )


def store_sum(chunk):
    """Add the residual and the bias to a chunk that was summed over the ranks, and store it."""
    height, tiles, _ = chunk.total.shape
    for m in range(tiles):  # m: row tile
        rows = min(height, chunk.y.shape[0] - m * height)
        total = chunk.total[0:rows, m, :]
        if chunk.bias is not None:
            nisa.tensor_tensor(dst=total, data1=total, data2=chunk.bias[0:rows, :], op=nl.add)
        if chunk.residual_tile is not None:
            nisa.tensor_tensor(dst=total, data1=total, data2=chunk.residual_tile[0:rows, m, :], op=nl.add)
    # This store waits for a collective, and in the queue of bulk loads the next weights would wait with it.
    store_rows_from(chunk.y, chunk.total, COMPILER)
