"""The ranks call two collectives in opposite orders."""

from __future__ import annotations

import nki.collectives as ncc
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, inner, ramp

CODE = "NKW-RENDEZVOUS"
RANKS = 2


def kernel(x, rank, sick):
    source = inner(x)
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="total")
    most = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="most")
    group = ncc.ReplicaGroup([[0, 1]])
    calls = [(nl.add, total), (nl.maximum, most)]
    if sick and rank == 1:
        calls.reverse()
    for op, result in calls:
        ncc.all_reduce(srcs=[source], dsts=[result], replica_group=group, op=op)  # blamed
    return copied_out(total), copied_out(most)


def inputs():
    return [(ramp(4, 4), 0), (ramp(4, 4) + 1, 1)]


def answer(given):
    return [(given[0][0] + given[1][0], np.maximum(given[0][0], given[1][0]))] * 2
