"""One rank adds, the other one takes the maximum."""

from __future__ import annotations

import nki.collectives as ncc
import nki.language as nl

from tests.faults.data import copied_out, inner, ramp

CODE = "NKW-RENDEZVOUS"
RANKS = 2


def kernel(x, rank, sick):
    source = inner(x)
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="total")
    op = nl.maximum if sick and rank == 1 else nl.add
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=ncc.ReplicaGroup([[0, 1]]), op=op)  # blamed
    return copied_out(total)


def inputs():
    return [(ramp(4, 4), 0), (ramp(4, 4) + 1, 1)]


def answer(given):
    return [given[0][0] + given[1][0]] * 2
