"""Tiles are kept in a dict under the numbers of a loop."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKI010"


@nki.jit
def sick(x):
    halves = {}
    for half in range(2):
        halves[half] = nl.load(x[:, half * 4 : half * 4 + 4])  # blamed
    nisa.tensor_tensor(dst=halves[0], data1=halves[0], data2=halves[1], op=nl.add)
    return copied_out(halves[0])


@nki.jit
def kernel(x):
    halves = []
    for half in range(2):
        halves.append(nl.load(x[:, half * 4 : half * 4 + 4]))
    nisa.tensor_tensor(dst=halves[0], data1=halves[0], data2=halves[1], op=nl.add)
    return copied_out(halves[0])


def inputs():
    return (ramp(8, 8),)


def answer(x):
    return x[:, :4] + x[:, 4:]
