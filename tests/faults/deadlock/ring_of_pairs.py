"""Three ranks exchange in pairs, and each begins with its successor."""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, inner, ramp

CODE = "NKW-DEADLOCK"
RANKS = 3


def kernel(x, rank, sick):
    source = inner(x)
    out = nl.ndarray((3, 4), dtype=x.dtype, buffer=nl.private_hbm, name="sums")
    nisa.dma_copy(dst=out, src=x)
    pairs = [[0, 1], [1, 2], [0, 2]]
    first = [[0, 1], [1, 2], [2, 0]][rank]
    mine = [first, [rank, (rank + 2) % 3]] if sick else [pair for pair in pairs if rank in pair]
    for pair in mine:
        group = ncc.ReplicaGroup([sorted(pair)])
        ncc.all_reduce(srcs=[source], dsts=[out], replica_group=group, op=nl.maximum)  # blamed
    return copied_out(out)


def inputs():
    return [(ramp(3, 4) + rank, rank) for rank in range(3)]


def answer(given):
    return [given[2][0], given[2][0], given[2][0]]
