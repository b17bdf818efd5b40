"""Scratch space in HBM is read back before the half that holds the second block was stored."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-UNWRITTEN"


def kernel(x, sick):
    scratch = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)
    tile = nl.load(x)
    stored = 4 if sick else 8
    nisa.dma_copy(dst=scratch[0:stored], src=tile[0:stored])
    back = nl.ndarray(x.shape, dtype=x.dtype)
    nisa.dma_copy(dst=back, src=scratch)  # blamed
    return copied_out(back)


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x
