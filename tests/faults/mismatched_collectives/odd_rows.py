"""Five rows do not scatter over two ranks."""

from __future__ import annotations

import nki.collectives as ncc
import nki.language as nl

from tests.faults.data import copied_out, inner, ramp

CODE = "NKW-COLLECTIVE-SHAPE"
RANKS = 2


def kernel(x, rank, sick):
    source = inner(x if sick else x[0:4])
    part = nl.ndarray((2, 4), dtype=x.dtype, buffer=nl.private_hbm, name="part")
    group = ncc.ReplicaGroup([[0, 1]])
    ncc.reduce_scatter(srcs=[source], dsts=[part], replica_group=group, collective_dim=0, op=nl.add)  # blamed
    return copied_out(part)


def inputs():
    return [(ramp(5, 4), 0), (ramp(5, 4) + 1, 1)]


def answer(given):
    total = (given[0][0] + given[1][0])[0:4]
    return [total[0:2], total[2:4]]
