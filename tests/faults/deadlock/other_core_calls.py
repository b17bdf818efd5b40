"""Core 0 of one rank and core 1 of the other call the collective; cores meet by their number."""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import inner, ramp

CODE = "NKW-DEADLOCK"
RANKS = 2
CORES = 2


def kernel(x, rank, sick):
    core = nl.program_id(0)
    out = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    if core == (rank if sick else 0):
        source = inner(x)
        total = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
        group = ncc.ReplicaGroup([[0, 1]])
        ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)  # blamed
        nisa.dma_copy(dst=out, src=total)
    return out


def inputs():
    return [(ramp(4, 4), 0), (ramp(4, 4) + 1, 1)]


def answer(given):
    return [given[0][0] + given[1][0]] * 2
