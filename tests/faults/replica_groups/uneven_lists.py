"""Three ranks in lists of two and one: the gather of the rank alone does not fill its destination."""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, inner, ramp

CODE = "NKW-COLLECTIVE-SHAPE"
RANKS = 3


def kernel(x, rank, sick):
    source = inner(x)
    both = nl.ndarray((8, 4), dtype=x.dtype, buffer=nl.private_hbm, name="both")
    nisa.dma_copy(dst=both[0:4], src=source)
    nisa.dma_copy(dst=both[4:8], src=source)
    group = ncc.ReplicaGroup([[0, 1], [2]])
    if sick or rank < 2:
        ncc.all_gather(srcs=[source], dsts=[both], replica_group=group, collective_dim=0)  # blamed
    return copied_out(both)


def inputs():
    return [(ramp(4, 4) + rank, rank) for rank in range(3)]


def answer(given):
    (a, _), (b, _), (c, _) = given
    return [np.concatenate([a, b]), np.concatenate([a, b]), np.concatenate([c, c])]
