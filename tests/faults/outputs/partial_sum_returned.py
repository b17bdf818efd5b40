"""The sum over the ranks is taken, and each rank's own part is returned."""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-COLLECTIVE-UNREAD"
RANKS = 2


def kernel(x, sick):
    part = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="part")
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="total")
    nisa.dma_copy(dst=part, src=x)
    group = ncc.ReplicaGroup([[0, 1]])
    ncc.all_reduce(srcs=[part], dsts=[total], replica_group=group, op=nl.add)  # blamed
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=part if sick else total)
    return out


def inputs():
    return [(ramp(4, 4),), (3 * ramp(4, 4),)]


def answer(given):
    return [given[0][0] + given[1][0]] * 2
