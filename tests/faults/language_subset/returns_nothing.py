"""A kernel that writes an output and does not return it."""

from __future__ import annotations

import nki
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKI005"


@nki.jit
def sick(x):  # blamed
    copied_out(nl.load(x))


@nki.jit
def kernel(x):
    return copied_out(nl.load(x))


def inputs():
    return (ramp(4, 4),)


def answer(x):
    return x
