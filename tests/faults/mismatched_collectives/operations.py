"""One rank gathers while the other one reduces."""

from __future__ import annotations

import nki.collectives as ncc
import nki.language as nl

from tests.faults.data import copied_out, inner, ramp

CODE = "NKW-RENDEZVOUS"
RANKS = 2


def kernel(x, rank, sick):
    source = inner(x)
    total = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
    both = nl.ndarray((8, 4), dtype=x.dtype, buffer=nl.private_hbm, name="both")
    group = ncc.ReplicaGroup([[0, 1]])
    if sick and rank == 1:
        ncc.all_gather(srcs=[source], dsts=[both], replica_group=group, collective_dim=0)
        return copied_out(both)
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)  # blamed
    return copied_out(total)


def inputs():
    return [(ramp(4, 4), 0), (ramp(4, 4) + 1, 1)]


def answer(given):
    return [given[0][0] + given[1][0]] * 2
