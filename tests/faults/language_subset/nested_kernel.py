"""A kernel calls another function under @nki.jit."""

from __future__ import annotations

import nki
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKI008"


@nki.jit
def doubled(tile):
    return nl.add(tile, tile)


def added(tile):
    return nl.add(tile, tile)


@nki.jit
def sick(x):
    return copied_out(doubled(nl.load(x)))  # blamed


@nki.jit
def kernel(x):
    return copied_out(added(nl.load(x)))


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x + x
