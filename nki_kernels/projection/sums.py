"""Sums over ranks of the chunks of a product, from SBUF to SBUF, while the next chunks are computed.

`residual_product` computes y = residual + sum over ranks of a product + bias, one chunk of rows and columns
of y at a time. This file has the steps of a chunk after its product. The accumulators are rounded into an
SBUF tile `partial`. A collective sums `partial` over the ranks into the SBUF tile `total`. Later bias and
residual are added to `total`, which is stored to y.

Without sequence parallelism the collective is an all-reduce, and every rank has all T rows of y. With it, y
is cut along the sequence over N ranks, and each rank has T / N rows, its own rows. The collective is then a
reduce-scatter over the rows of `partial`, which gives rank r the r-th of N equal parts of a row tile. A row
tile of `partial` therefore has 128 // N own rows of every rank: those of rank 0 on the first partitions, then
those of rank 1, and so on. Kernels load the rows of x in that order.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, STATIC
from nki_kernels.projection.block_loads import load_rows_into, store_rows_from
from nki_kernels.projection.row_groups import count_rows_per_rank
from nki_kernels.tiles import blocks, copy_bank

VECTOR_SHARE = 2
"""The Vector engine copies one of so many PSUM banks to `partial`, the Scalar engine the others."""


@dataclass
class OutputChunk(nl.NKIObject):
    """A chunk of y: some of its rows and columns, and what is added to the product there.

    If rows are cut over N ranks, y, residual and total have this rank's rows only; partial has those of all
    ranks.

    y: a view of y @ HBM, [row, column]. columns: their range (first, end) among all columns of the product.
    residual: the same rows and columns @ HBM, or None. residual_tile: the residual in SBUF, [row in tile, row
    tile, column]; None if there is none, or until it is loaded. bias: [row, column] in SBUF, or None.
    row_scales: for each row tile a float32 column [row, 1] in SBUF that multiplies its rows, or None.
    column_scales: float32 [row, column] in SBUF that multiplies the product, equal rows, or None. gates: GateTile of
    each row tile, which replaces column_scales and bias, or None.
    partial: this rank's rounded product in SBUF, [row in tile, row tile, column]; None before the product and
    once its sum is started. total: the sum of partial over the ranks in SBUF, in the same layout. One rank
    alone leaves partial and total None.
    """

    y: nl.NkiTensor
    columns: tuple
    residual: nl.NkiTensor | None
    residual_tile: nl.NkiTensor | None
    bias: nl.NkiTensor | None
    row_scales: list | None
    column_scales: nl.NkiTensor | None
    partial: nl.NkiTensor | None = None
    total: nl.NkiTensor | None = None
    gates: list | None = None

    def load_residual(self, ranks):
        """Load `residual` from HBM into a new SBUF tile `residual_tile`, in y's dtype.

        Does nothing if there is no residual or if it is in SBUF already. ranks: over how many ranks the rows
        are cut; a row tile has at most 128 // ranks rows of y.
        """
        if self.residual is None or self.residual_tile is not None:
            return
        rows, columns = self.residual.shape
        height = min(rows, count_rows_per_rank(ranks))
        shape = (height, blocks(rows, height), columns)
        self.residual_tile = nl.ndarray(shape, dtype=self.y.dtype, buffer=nl.sbuf)
        load_rows_into(self.residual_tile, self.residual, STATIC)

    def round_partial_sums(self, accumulators, ranks):
        """Copy PSUM accumulators to a new SBUF tile `partial`, rounded to y's dtype; allocate `total` for their sum.

        They are multiplied by `row_scales` and `column_scales`, if there are any.

        Args:
            accumulators: Accumulators that cover the chunk, ordered by row tile.
            ranks: over how many ranks the rows are cut; a row tile of `total` has 1 / ranks of the rows of
                one of `partial`.
        """
        height, tiles = accumulators[0].bank.shape[0], accumulators[len(accumulators) - 1].row_tile + 1
        width = self.y.shape[1]
        self.partial = nl.ndarray((height, tiles, width), dtype=self.y.dtype, buffer=nl.sbuf)
        self.total = nl.ndarray((height // ranks, tiles, width), dtype=self.y.dtype, buffer=nl.sbuf)
        for i in range(len(accumulators)):
            bank, m = accumulators[i].bank, accumulators[i].row_tile
            rows, columns = bank.shape
            start = accumulators[i].first_column
            row_scale = None if self.row_scales is None else self.row_scales[m]
            column_scales = self.select_column_scales(m, rows, start, columns)
            dst = self.partial[0:rows, m, start : start + columns]
            copy_bank(dst, bank, i, VECTOR_SHARE, row_scale, column_scales)

    def select_column_scales(self, m, rows, start, columns):
        """Return the factors of row tile m: a view [rows, columns] from column `start` of the chunk on, or None."""
        scales = self.column_scales if self.gates is None else self.gates[m].factors
        return None if scales is None else scales[0:rows, start : start + columns]

    def select_bias(self, m, rows, start, columns):
        """Return what is added to row tile m: a view [rows, columns] from column `start` of the chunk on, or None."""
        bias = self.bias if self.gates is None else self.gates[m].bias
        return None if bias is None else bias[0:rows, start : start + columns]

    def start_sum(self, replica_group, ranks):
        """Issue the collectives that sum `partial` over the ranks into `total`, both in SBUF; set `partial` to None.

        ranks: over how many ranks the rows are cut. With 1 an all-reduce sums all rows for every rank. With N
        > 1 a reduce-scatter cuts each row tile of `partial` into N equal parts, and rank r receives the sum
        of part r. One collective takes all full row tiles, another one a short last row tile.
        """
        height, tiles, _ = self.partial.shape
        rows = ranks * self.y.shape[0]
        full = rows // height
        sum_over_ranks(
            flatten_row_tiles(self.total[:, 0:full, :]),
            flatten_row_tiles(self.partial[:, 0:full, :]),
            replica_group,
            ranks,
        )
        # The short row tile covers fewer partitions than the others, so it takes a collective of its own.
        if full < tiles:
            short = rows - full * height
            sum_over_ranks(
                self.total[0 : short // ranks, full, :], self.partial[0:short, full, :], replica_group, ranks
            )
        self.partial = None  # nothing reads it any more


@dataclass
class RankSum(nl.NKIObject):
    """How a product is summed over ranks, and the queue of its chunks on their way to y.

    replica_group: the ranks, or None for one rank; then the queue stays empty. sequence_ranks: over how many
    ranks the rows of y are cut; 1: not cut. max_in_flight: the most chunks, at least one, that wait in SBUF
    to be stored. chunks: all chunks appended so far. started, residuals, stored: how many of them, from the
    first on, have their sum started, their residual in SBUF, and their result in y.
    """

    replica_group: ncc.ReplicaGroup | None
    sequence_ranks: int
    max_in_flight: int
    chunks: list
    started: int = 0
    residuals: int = 0
    stored: int = 0

    def append(self, chunk):
        """Append a chunk whose `partial` is written; start the sum over ranks of the chunk before it; store old chunks.

        The oldest ones are stored until at most `max_in_flight` chunks are not. The sum of the appended chunk
        starts with the next call or in `finish`: a collective waits for the product of its chunk, and loads
        after it in the queue would wait as well. So it follows the loads of the next chunk.
        """
        self.start_until(len(self.chunks))
        self.chunks.append(chunk)
        self.store_until(len(self.chunks) - self.max_in_flight)

    def finish(self):
        """Start the sums over ranks that are not started yet, and store all chunks that are not stored yet to y."""
        self.start_until(len(self.chunks))
        self.store_until(len(self.chunks))

    def start_until(self, count):
        """Start the sums over ranks of those of the first `count` chunks whose sums are not started yet."""
        while self.started < count:
            self.chunks[self.started].start_sum(self.replica_group, self.sequence_ranks)
            self.started += 1

    def store_until(self, count):
        """Store those of the first `count` chunks that are not stored yet to y, with bias and residual added.

        Also load the residuals of the first `count` + 1 chunks: a residual is loaded one chunk before it is
        added.
        """
        while self.residuals < min(len(self.chunks), count + 1):
            self.chunks[self.residuals].load_residual(self.sequence_ranks)
            self.residuals += 1
        while self.stored < count:
            store_sum(self.chunks[self.stored])
            self.stored += 1


def flatten_row_tiles(tile):
    """View a tile [row, row tile, column] as [row, row tile * column], because collectives take two dims."""
    return tile.reshape((tile.shape[0], tile.shape[1] * tile.shape[2]))


def sum_over_ranks(total, partial, replica_group, ranks):
    """Issue a collective that sums `partial` [row, column] over the ranks into `total`, both in SBUF.

    ranks: over how many ranks the rows are cut. With 1 an all-reduce writes all rows to `total`; else a
    reduce-scatter writes the rows of this rank, rows / ranks of them.
    """
    if ranks == 1:
        ncc.all_reduce(srcs=[partial], dsts=[total], replica_group=replica_group, op=nl.add)
    else:
        ncc.reduce_scatter(
            srcs=[partial], dsts=[total], replica_group=replica_group, collective_dim=0, op=nl.add
        )


def store_sum(chunk):
    """Add bias and residual, if any, to `total` of a chunk in place, and store it to the chunk's y in HBM.

    With scales of rows and columns the Vector engine reads out all accumulators, so GpSimd adds.
    """
    height, tiles, _ = chunk.total.shape
    is_scaled = chunk.column_scales is not None or chunk.gates is not None
    is_scaled = is_scaled and chunk.row_scales is not None
    engine = nisa.engine.gpsimd if is_scaled else nisa.engine.vector
    for m in range(tiles):  # m: row tile
        rows = min(height, chunk.y.shape[0] - m * height)
        total = chunk.total[0:rows, m, :]
        bias = chunk.select_bias(m, rows, 0, chunk.y.shape[1])
        if bias is not None:
            nisa.tensor_tensor(dst=total, data1=total, data2=bias, op=nl.add, engine=engine)
        if chunk.residual_tile is not None:
            residual = chunk.residual_tile[0:rows, m, :]
            nisa.tensor_tensor(dst=total, data1=total, data2=residual, op=nl.add, engine=engine)
    # This store waits for a collective, and in the queue of bulk loads the next weights would wait with it.
    store_rows_from(chunk.y, chunk.total, COMPILER)
