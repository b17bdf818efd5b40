"""Two of four ranks take the columns of the rank grid for its rows."""

from __future__ import annotations

import nki.collectives as ncc
import nki.language as nl

from tests.faults.data import copied_out, inner, ramp

CODE = "NKW-DEADLOCK"
RANKS = 4


def kernel(x, rank, sick):
    source = inner(x)
    total = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    group = ncc.ReplicaGroup(columns if sick and rank in (1, 2) else rows)
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)  # blamed
    return copied_out(total)


def inputs():
    return [(ramp(4, 4) + rank, rank) for rank in range(4)]


def answer(given):
    low, high = given[0][0] + given[1][0], given[2][0] + given[3][0]
    return [low, low, high, high]
