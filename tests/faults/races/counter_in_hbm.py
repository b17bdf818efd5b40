"""Both cores store the number of tokens they found in one element."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

CODE = "NKW-RACE"
CORES = 2


def kernel(counts, sick):
    core = nl.program_id(0)
    found = nl.ndarray((1, 2), dtype=nl.int32, buffer=nl.shared_hbm, name="found")
    count = nisa.register_alloc()
    nisa.register_load(dst=count, src=counts[0:1, core : core + 1])
    place = 0 if sick else core
    nisa.register_store(dst=found[0:1, place : place + 1], src=count)  # blamed
    if sick and core == 0:
        nisa.register_store(dst=found[0:1, 1:2], src=count)
    return found


def inputs():
    return (np.array([[3, 5]], np.int32),)


def answer(counts):
    return counts
