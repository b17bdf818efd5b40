"""Sequence parallelism: norms and residuals cut along the sequence over the ranks of a tensor-parallel group.

Each of N ranks owns R = T / N rows. A kernel that takes all rows normalises its own and gathers those of all ranks,
piece by piece: a piece has the same own rows of every rank, [rank, row, H]. A kernel that ends in a sum over ranks
computes row tiles that hold the same own rows of every rank, [rank, row], so that a reduce-scatter gives each its rows.
"""

from __future__ import annotations

import nki.collectives as ncc
import nki.language as nl

from nki_kernels.dma import COMPILER, SCALAR, transfer
from nki_kernels.projection.row_groups import load_all, loads_of, normalise_tiles, of_ranks
from nki_kernels.tiles import PARTITIONS, ranges

GATHERED_AHEAD = 2
"""Pieces that are gathered before the rows of an earlier one are used."""


def check_ranks(ranks, replica_group, tokens):
    """Refuse a number of ranks that has no group, or does not divide rows."""
    assert ranks <= PARTITIONS, f"sequence_ranks is at most {PARTITIONS}, not {ranks}"
    assert ranks == 1 or replica_group is not None, f"sequence_ranks is {ranks} without a replica_group"
    assert tokens % ranks == 0, (
        f"{ranks} ranks do not divide {tokens} rows; pad them to a multiple of {ranks}"
    )


def whole_rows(x):
    """Rows [T, H] that every rank has, as `rows_of` takes them."""
    return {"all": x, "own": None}


def gathered_rows(x, norm, scratch, ranks, replica_group, piece):
    """All rows of which this rank has x [R, H], normalised, as `rows_of` takes them; pieces have `piece` own rows.

    norm: as `load_norm` gives it, or None.
    """
    count, hidden = x.shape
    return {
        "all": nl.ndarray((ranks * count, hidden), dtype=x.dtype, buffer=nl.private_hbm, name="all_rows"),
        "own": x,
        "kept": nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="own_rows"),
        "norm": norm,
        "scratch": scratch,
        "ranks": ranks,
        "group": replica_group,
        "pieces": ranges(0, count, piece),
        "normalised": [],
        "gathered": 0,
    }


def rows_of(rows, first, end):
    """Rows first … end in the order of pieces.

    Pieces are gathered GATHERED_AHEAD before they are used, and normalised one before that: so no engine that triggers
    a collective waits for a norm.
    """
    if rows["own"] is not None:
        pieces = rows["pieces"]
        needed = 0
        while needed < len(pieces) and rows["ranks"] * pieces[needed][0] < end:
            needed += 1
        while rows["gathered"] < min(len(pieces), needed + GATHERED_AHEAD):
            while len(rows["normalised"]) < min(len(pieces), rows["gathered"] + 2):
                rows["normalised"].append(normalised_piece(rows, pieces[len(rows["normalised"])]))
            gather_piece(rows, pieces[rows["gathered"]], rows["normalised"][rows["gathered"]])
            rows["gathered"] += 1
    return rows["all"][first:end, :]


def normalised_piece(rows, piece):
    """The row tiles of a piece of own rows (first, end), normalised."""
    x = rows["own"]
    tiles = []
    for start, end in ranges(piece[0], piece[1]):
        tiles.append(nl.ndarray((end - start, x.shape[1]), dtype=x.dtype, buffer=nl.sbuf))
    load_all(loads_of(tiles, of_ranks(x[piece[0] : piece[1], :], 1)), SCALAR)
    if rows["norm"] is not None:
        normalise_tiles(tiles, tiles, rows["norm"], rows["scratch"])
    return tiles


def gather_piece(rows, piece, tiles):
    """Gather a piece of the own rows of all ranks, of which this rank has the row tiles."""
    first, last = piece
    start = first
    for tile in tiles:
        end = start + tile.shape[0]
        transfer(rows["kept"][start:end, :], tile, COMPILER)
        start = end
    ncc.all_gather(
        srcs=[rows["kept"][first:last, :]],
        dsts=[rows["all"][rows["ranks"] * first : rows["ranks"] * last, :]],
        replica_group=rows["group"],
        collective_dim=0,
    )


def places(rows, total, offset, first, count):
    """Where rows first … first + count of `rows` lie: (their number within these, row of the sequence, how many).

    total: own rows of a rank, of which those of `rows` begin at `offset`.
    """
    if rows["own"] is None:
        return [(0, offset + first, count)]
    ranks = rows["ranks"]
    found = []
    done = 0
    for start, end in rows["pieces"]:
        height = end - start
        while done < count and first + done < ranks * end:
            rank = (first + done - ranks * start) // height
            inside = (first + done - ranks * start) % height
            run = min(count - done, height - inside)
            row = rank * total + offset + start + inside
            if len(found) > 0 and found[len(found) - 1][1] + found[len(found) - 1][2] == row:
                before = found.pop()
                found.append((before[0], before[1], before[2] + run))
            else:
                found.append((done, row, run))
            done += run
    return found
