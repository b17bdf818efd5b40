"""An address in the middle of SBUF leaves no gap for the tile that the compiler has to place."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-MEM-PLACEMENT"
TARGET = "trn1"


def kernel(x, sick):
    fixed = nl.ndarray((1, 4), dtype=nl.float32, name="fixed", address=(0, 90112 if sick else 0))
    large = nl.ndarray((1, 30000), dtype=nl.float32, name="large")  # blamed
    nisa.dma_copy(dst=fixed, src=x[:, 0:4])
    nisa.dma_copy(dst=large, src=x)
    nisa.tensor_tensor(dst=fixed, data1=fixed, data2=large[:, 0:4], op=nl.add)
    return copied_out(fixed)


def inputs():
    return (ramp(1, 30000),)


def answer(x):
    return 2 * x[:, 0:4]
