"""quantize_mx exists on gen4."""

from __future__ import annotations

import ml_dtypes
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-MX-CHIP"


def kernel(x, sick):
    tile = nl.load(x, dtype=nl.bfloat16)
    result = nl.ndarray((32, 8), dtype=nl.float8_e4m3)
    if sick:
        packed = nl.ndarray((32, 2), dtype=nl.float8_e4m3fn_x4)
        scales = nl.ndarray((4, 2), dtype=nl.uint8)
        nisa.quantize_mx(dst=packed, src=tile, dst_scale=scales)  # blamed
    nisa.tensor_copy(dst=result, src=tile)
    return copied_out(result)


def inputs():
    return (ramp(32, 8) % 8,)


def answer(x):
    return x.astype(ml_dtypes.float8_e4m3)
