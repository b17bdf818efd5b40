"""The Vector engine transposes blocks of 32 by 32."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-TRANSPOSE-VECTOR"


def kernel(x, sick):
    columns = 33 if sick else 32
    tile = nl.load(x[:, 0:columns])
    turned = nl.ndarray((columns, 32), dtype=nl.float32)
    nisa.nc_transpose(dst=turned, data=tile, engine=nisa.engine.vector)  # blamed
    return copied_out(turned)


def inputs():
    return (ramp(32, 33),)


def answer(x):
    return x[:, 0:32].T
