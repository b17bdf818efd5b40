"""Rank 1 has nothing to add and leaves the all-reduce out."""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, inner, ramp

CODE = "NKW-DEADLOCK"
RANKS = 2


def kernel(x, rank, sick):
    source = inner(x)
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="total")
    nisa.dma_copy(dst=total, src=x)
    group = ncc.ReplicaGroup([[0, 1]])
    if rank == 0 or not sick:
        ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)  # blamed
    return copied_out(total)


def inputs():
    return [(ramp(4, 4), 0), (ramp(4, 4) + 1, 1)]


def answer(given):
    return [given[0][0] + given[1][0]] * 2
