"""Sequence parallelism: norms and residuals cut along the sequence over the ranks of a tensor-parallel group.

Each of N ranks owns R = T / N consecutive rows of the sequence, its own rows. A kernel that multiplies all T
rows normalises its own rows and all-gathers those of the other ranks, piece by piece. A piece is a range
first … end - 1 of own rows, the same range on every rank. Gathered rows [T, H] are therefore in the order of
pieces: within a piece [rank, row], first the rows of rank 0. `map_to_sequence` maps that order back to the
sequence. A kernel that ends in a sum over ranks computes row tiles [rank, row] likewise, and a reduce-scatter
gives each rank its rows, see `sums`.
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
"""Number of pieces that are gathered ahead of those whose rows are used."""


@dataclass
class RowGather(nl.NKIObject):
    """The all-gather of normalised rows of N ranks, piece by piece, and how far it has come.

    local_rows: [R, H] @ HBM, this rank's own rows before the norm. staging: [R, H] @ HBM, the same rows after
    the norm, from which collectives read. norm: RowNorm, or None if rows need none. ranks: N. pieces: ranges
    (first, end) of own rows. normalised_pieces: for each piece normalised so far, its list of SBUF row tiles.
    gathered: how many pieces are gathered so far.
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
        """Issue the all-gathers of the pieces that have rows below `end`, and of the GATHERED_AHEAD pieces after them.

        A piece is one range of rows of every rank. Pieces that are gathered already are skipped. The gathers
        write all_rows [row, H] @ HBM: piece by piece, and within a piece rank by rank. `end` is a row in that
        order. A piece is normalised one piece before it is gathered, so that no engine that triggers a
        collective waits for a norm.
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
    """Rows of every rank that a product reads, in HBM; `provide_rows` returns a range of them.

    all_rows: [row, H] @ HBM, in the order of the sequence without a gather, else in the order of pieces.
    gather: the RowGather that fills all_rows on demand, or None.
    """

    all_rows: nl.NkiTensor
    gather: RowGather | None


def check_ranks(ranks, replica_group, tokens):
    """Raise AssertionError if the rows of `tokens` tokens cannot be cut over `ranks` ranks.

    Refused are more than 128 ranks, more than one rank without a group, and a number that does not divide
    `tokens`.
    """
    assert ranks <= PARTITIONS, f"sequence_ranks is at most {PARTITIONS}, not {ranks}"
    assert ranks == 1 or replica_group is not None, (
        f"sequence_ranks is {ranks} without a replica_group; pass the ReplicaGroup of these ranks"
    )
    assert tokens % ranks == 0, (
        f"{ranks} ranks do not divide {tokens} rows; pad them to a multiple of {ranks}"
    )


def use_whole_rows(x):
    """Return a RowSource of rows x [T, H] in HBM, all of which this rank has already."""
    return RowSource(x, None)


def plan_gathered_rows(x, norm, ranks, replica_group, piece_rows):
    """Return a RowSource of the rows of all ranks, of which this rank has x [R, H] in HBM.

    Two HBM buffers are allocated; nothing is normalised or gathered yet. norm: RowNorm applied before the
    gather, or None. piece_rows: rows of each rank in a piece.
    """
    count, hidden = x.shape
    all_rows = nl.ndarray((ranks * count, hidden), dtype=x.dtype, buffer=nl.private_hbm, name="all_rows")
    staging = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="own_rows")
    pieces = ranges(0, count, piece_rows)
    return RowSource(all_rows, RowGather(x, staging, norm, ranks, replica_group, pieces, []))


def provide_rows(source, first, end):
    """Return a view of rows first … end - 1 of a RowSource in HBM; issue the all-gathers that are still missing for it.

    Gathered rows are in the order of pieces, each of which is one range of rows of every rank, those of rank
    0 first. Some pieces after the rows are gathered ahead.
    """
    if source.gather is not None:
        source.gather.gather_until(source.all_rows, end)
    return source.all_rows[first:end, :]


def normalise_piece(x, piece, norm):
    """Load rows of x [R, H] from HBM into new SBUF row tiles of up to 128 rows, and normalise them; return the tiles.

    piece: range (first, end) of the rows. norm: RowNorm, or None to leave the rows as they are.
    """
    first, last = piece
    tiles = []
    for start, end in ranges(first, last):
        tiles.append(nl.ndarray((end - start, x.shape[1]), dtype=x.dtype, buffer=nl.sbuf))
    # The Scalar engine's queue passes the bulk loads of weights, so that the gather of a piece starts early.
    trigger_loads(plan_loads(tiles, split_by_rank(x[first:last, :], 1)), SCALAR)
    normalise_tiles(tiles, tiles, norm)
    return tiles


def gather_piece(all_rows, gather, piece, tiles):
    """Store this rank's rows of a piece to `gather.staging`, and all-gather the piece into `all_rows`, both in HBM.

    For N ranks they go to rows N * first … N * end - 1 of all_rows, those of rank 0 first. piece: range
    (first, end) of own rows. tiles: SBUF row tiles that hold these rows.
    """
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


def map_to_sequence(source, total, offset, first, count):
    """Return where rows first … first + count - 1 of a RowSource are in the sequence, as runs (index, row, rows).

    A run has `rows` consecutive rows of the sequence, from `row` on. Its `index` counts the rows of the
    source from `first` to the run. Gathered rows are in the order of pieces, each of which is one range of
    rows of every rank, those of rank 0 first.

    Args:
        source: RowSource, maybe of a part of the rows of each rank.
        total: rows of each rank in the sequence.
        offset: the row of each rank at which the source begins.
        first: first row in the source.
        count: number of rows.
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
