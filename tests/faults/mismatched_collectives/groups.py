"""Rank 1 believes that the group is listed the other way round."""

from __future__ import annotations

import nki.collectives as ncc
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, inner, ramp

CODE = "NKW-DEADLOCK"
RANKS = 2


def kernel(x, rank, sick):
    source = inner(x)
    both = nl.ndarray((8, 4), dtype=x.dtype, buffer=nl.private_hbm, name="both")
    members = [1, 0] if sick and rank == 1 else [0, 1]
    group = ncc.ReplicaGroup([members])
    ncc.all_gather(srcs=[source], dsts=[both], replica_group=group, collective_dim=0)  # blamed
    return copied_out(both)


def inputs():
    return [(ramp(4, 4), 0), (ramp(4, 4) + 1, 1)]


def answer(given):
    return [np.concatenate([given[0][0], given[1][0]])] * 2
