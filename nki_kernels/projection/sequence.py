"""Sequence parallelism: norms and residuals cut along the sequence over the ranks of a tensor-parallel group.

Each of N ranks owns R = T / N rows. A kernel that takes all rows normalises its own and gathers those of all ranks,
piece by piece: a piece has the same own rows of every rank, [rank, row, H]. A kernel that ends in a sum over ranks
computes row tiles with the same own rows of every rank, [rank, row]. A reduce-scatter then gives each rank its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.collectives as ncc
import nki.language as nl

from nki_kernels.dma import COMPILER, SCALAR, transfer
from nki_kernels.norms.row_tiles import RowNorm
from nki_kernels.projection.row_groups import normalise_tiles, plan_loads, split_by_rank, trigger_loads
from nki_kernels.tiles import PARTITIONS, ranges

GATHERED_AHEAD = 2
"""Pieces that are gathered before the rows of an earlier one are used."""


@dataclass
class RowGather(nl.NKIObject):
    """The all-gather of normalised rows, piece by piece.

    local_rows: [R, H] @ HBM, those of this rank before the norm. staging: the same after it. norm: None if rows need
    none. pieces: (first, end) of own rows. normalised_pieces: the row tiles of each piece that was normalised.
    gathered: how many pieces were gathered.
    """

    local_rows: nl.NkiTensor
    staging: nl.NkiTensor
    norm: RowNorm | None
    ranks: int
    replica_group: ncc.ReplicaGroup
    pieces: list
    normalised_pieces: list
    gathered: int = 0

    def gather_until(self, all_rows, end):
        """Gather the pieces with rows below `end` into all_rows [rank * R, H] @ HBM, and GATHERED_AHEAD more.

        A piece is normalised one piece before it is gathered, so that no engine that triggers a collective waits for a
        norm.
        """
        needed = 0
        while needed < len(self.pieces) and self.ranks * self.pieces[needed][0] < end:
            needed += 1
        while self.gathered < min(len(self.pieces), needed + GATHERED_AHEAD):
            while len(self.normalised_pieces) < min(len(self.pieces), self.gathered + 2):
                piece = self.pieces[len(self.normalised_pieces)]
                self.normalised_pieces.append(normalise_piece(self.local_rows, piece, self.norm))
            gather_piece(all_rows, self, self.pieces[self.gathered], self.normalised_pieces[self.gathered])
            self.gathered += 1


@dataclass
class RowSource(nl.NKIObject):
    """Rows [T, H] in HBM that a product reads, of every rank. gather: the RowGather that fills them, or None."""

    all_rows: nl.NkiTensor
    gather: RowGather | None


def check_ranks(ranks, replica_group, tokens):
    """Refuse a number of ranks that has no group, or does not divide rows."""
    assert ranks <= PARTITIONS, f"sequence_ranks is at most {PARTITIONS}, not {ranks}"
    assert ranks == 1 or replica_group is not None, f"sequence_ranks is {ranks} without a replica_group"
    assert tokens % ranks == 0, (
        f"{ranks} ranks do not divide {tokens} rows; pad them to a multiple of {ranks}"
    )


def whole_rows(x):
    """Return the source of rows [T, H] that every rank has."""
    return RowSource(x, None)


def gathered_rows(x, norm, ranks, replica_group, piece_rows):
    """Return the source of all rows if this rank has x [R, H], in pieces of `piece_rows` rows of each rank."""
    count, hidden = x.shape
    all_rows = nl.ndarray((ranks * count, hidden), dtype=x.dtype, buffer=nl.private_hbm, name="all_rows")
    staging = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="own_rows")
    pieces = ranges(0, count, piece_rows)
    return RowSource(all_rows, RowGather(x, staging, norm, ranks, replica_group, pieces, []))


def rows_of(source, first, end):
    """Return rows first … end of a source, in the order of pieces; gather the missing pieces."""
    if source.gather is not None:
        source.gather.gather_until(source.all_rows, end)
    return source.all_rows[first:end, :]


def normalise_piece(x, piece, norm):
    """Load the row tiles of a piece (first, end) of x, and normalise them if there is a norm."""
    first, last = piece
    tiles = []
    for start, end in ranges(first, last):
        tiles.append(nl.ndarray((end - start, x.shape[1]), dtype=x.dtype, buffer=nl.sbuf))
    # The Scalar engine's queue passes the bulk loads of weights, so that the gather of a piece starts early.
    trigger_loads(plan_loads(tiles, split_by_rank(x[first:last, :], 1)), SCALAR)
    normalise_tiles(tiles, tiles, norm)
    return tiles


def gather_piece(all_rows, gather, piece, tiles):
    """Gather a piece (first, end), of which this rank has the row tiles, from all ranks."""
    first, last = piece
    start = first
    for tile in tiles:
        end = start + tile.shape[0]
        transfer(gather.staging[start:end, :], tile, COMPILER)
        start = end
    ncc.all_gather(
        srcs=[gather.staging[first:last, :]],
        dsts=[all_rows[gather.ranks * first : gather.ranks * last, :]],
        replica_group=gather.replica_group,
        collective_dim=0,
    )


def sequence_rows(source, total, offset, first, count):
    """Map rows first … first + count of a source to the sequence: (index within these, row of the sequence, rows).

    total: rows of each rank, of which those of the source begin at `offset`.
    """
    if source.gather is None:
        return [(0, offset + first, count)]
    ranks = source.gather.ranks
    runs, done = [], 0
    for start, end in source.gather.pieces:
        height = end - start
        while done < count and first + done < ranks * end:
            index = first + done - ranks * start
            run = min(count - done, height - index % height)
            row = index // height * total + offset + start + index % height
            if len(runs) > 0 and runs[len(runs) - 1][1] + runs[len(runs) - 1][2] == row:
                before = runs.pop()
                runs.append((before[0], before[1], before[2] + run))
            else:
                runs.append((done, row, run))
            done += run
    return runs
