"""Core 1 allocates the two outputs in the opposite order; shared tensors are paired by order."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-SHARED-ALLOCATION"
CORES = 2


def kernel(x, sick):
    core = nl.program_id(0)
    shapes = [(8, 4), (8, 1)]
    if sick and core == 1:
        shapes.reverse()
    first, second = [
        nl.ndarray(shape, dtype=nl.float32, buffer=nl.shared_hbm, name=f"out{shape[1]}")  # blamed
        for shape in shapes
    ]
    tile = nl.load(x[core * 4 : core * 4 + 4])
    nisa.dma_copy(dst=first[core * 4 : core * 4 + 4], src=tile)
    nisa.dma_copy(dst=second[core * 4 : core * 4 + 4], src=tile[:, 0:1])
    return first, second


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x, x[:, 0:1]
