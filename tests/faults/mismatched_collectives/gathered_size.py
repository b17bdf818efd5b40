"""The destination of a gather has room for one rank."""

from __future__ import annotations

import nki.collectives as ncc
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, inner, ramp

CODE = "NKW-COLLECTIVE-SHAPE"
RANKS = 2


def kernel(x, rank, sick):
    source = inner(x)
    both = nl.ndarray((4 if sick else 8, 4), dtype=x.dtype, buffer=nl.private_hbm, name="both")
    group = ncc.ReplicaGroup([[0, 1]])
    ncc.all_gather(srcs=[source], dsts=[both], replica_group=group, collective_dim=0)  # blamed
    return copied_out(both)


def inputs():
    return [(ramp(4, 4), 0), (ramp(4, 4) + 1, 1)]


def answer(given):
    return [np.concatenate([given[0][0], given[1][0]])] * 2
