"""nc_transpose moves bits; it does not round to bfloat16 on the way."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-SAME-DTYPE"


def kernel(x, sick):
    tile = nl.load(x)
    turned = nl.ndarray((6, 4), dtype=nl.bfloat16 if sick else nl.float32)
    nisa.nc_transpose(dst=turned, data=tile, engine=nisa.engine.vector)  # blamed
    return copied_out(turned)


def inputs():
    return (ramp(4, 6),)


def answer(x):
    return x.T
