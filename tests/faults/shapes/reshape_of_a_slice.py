"""Columns of a wider tile cannot be joined over rows of a third dim."""

from __future__ import annotations

import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-RESHAPE-LAYOUT"


def kernel(x, sick):
    tile = nl.load(x)
    part = tile[:, :, 0:2] if sick else tile[:, 0:2, :]
    view = part.reshape((4, part.size // 4))  # blamed
    return copied_out(view)


def inputs():
    return (ramp(4, 3, 4),)


def answer(x):
    return x[:, 0:2].reshape(4, 8)
