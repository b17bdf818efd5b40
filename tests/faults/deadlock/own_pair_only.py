"""Each rank lists the pair in which it sends, instead of the whole permutation."""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, inner, ramp

CODE = "NKW-DEADLOCK"
RANKS = 2


def kernel(x, rank, sick):
    source = inner(x)
    moved = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="moved")
    nisa.dma_copy(dst=moved, src=x)
    pairs = [(rank, 1 - rank)] if sick else [(0, 1), (1, 0)]
    ncc.collective_permute(srcs=[source], dsts=[moved], source_target_pairs=pairs)  # blamed
    return copied_out(moved)


def inputs():
    return [(ramp(4, 4), 0), (ramp(4, 4) + 1, 1)]


def answer(given):
    return [given[1][0], given[0][0]]
