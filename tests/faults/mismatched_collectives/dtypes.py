"""Rank 1 reduces in bfloat16."""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-RENDEZVOUS"
RANKS = 2


def kernel(x, rank, sick):
    kind = nl.bfloat16 if sick and rank == 1 else nl.float32
    source = nl.ndarray((4, 4), dtype=kind, buffer=nl.private_hbm, name="source")
    nisa.dma_copy(dst=source, src=x)
    total = nl.ndarray((4, 4), dtype=kind, buffer=nl.private_hbm, name="total")
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=ncc.ReplicaGroup([[0, 1]]), op=nl.add)  # blamed
    return copied_out(total)


def inputs():
    return [(ramp(4, 4), 0), (ramp(4, 4) + 1, 1)]


def answer(given):
    return [given[0][0] + given[1][0]] * 2
