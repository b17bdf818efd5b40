"""A shuffle mask for the rows that are there, instead of one for a quadrant."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-SHUFFLE-MASK"


def kernel(x, sick):
    tile = nl.load(x)
    swapped = nl.zeros((32, 4), dtype=nl.float32)
    mask = [1, 0, 3, 2, 5, 4, 7, 6]
    mask = mask if sick else mask + [255] * 24
    nisa.nc_stream_shuffle(dst=swapped, src=tile, shuffle_mask=mask)  # blamed
    return copied_out(swapped[0:8])


def inputs():
    return (ramp(32, 4),)


def answer(x):
    return x[[1, 0, 3, 2, 5, 4, 7, 6]]
