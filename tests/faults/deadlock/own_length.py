"""Every rank reduces once per block of its own batch, and the batches differ in length."""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import inner, ramp

CODE = "NKW-DEADLOCK"
RANKS = 2


def kernel(x, rank, sick):
    blocks = x.shape[0] // 4 if sick else 2
    total = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
    group = ncc.ReplicaGroup([[0, 1]])
    out = nl.ndarray((2, 4, 4), dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    for block in range(blocks):
        first = min(block * 4, x.shape[0] - 4)
        source = inner(x[first : first + 4])
        ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)  # blamed
        nisa.dma_copy(dst=out[block], src=total)
    return out


def inputs():
    return [(ramp(8, 4), 0), (ramp(4, 4) + 1, 1)]


def answer(given):
    (long, _), (short, _) = given
    both = np.stack([long[0:4] + short, long[4:8] + short])
    return [both, both]
