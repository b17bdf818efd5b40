"""A dict with integer keys."""

from __future__ import annotations

import nki
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKI010"


@nki.jit
def sick(x):
    sizes = {0: 4}  # blamed
    return copied_out(nl.load(x[:, 0 : sizes[0]]))


@nki.jit
def kernel(x):
    sizes = {"columns": 4}
    return copied_out(nl.load(x[:, 0 : sizes["columns"]]))


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return x[:, 0:4]
