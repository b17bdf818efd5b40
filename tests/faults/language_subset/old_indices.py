"""Index tiles of Beta 1."""

from __future__ import annotations

import nki
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKI023"


@nki.jit
def sick(x):
    rows = nl.arange(4)  # blamed
    return copied_out(nl.load(x[rows]))


@nki.jit
def kernel(x):
    return copied_out(nl.load(x[0:4]))


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x[0:4]
