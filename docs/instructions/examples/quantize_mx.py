"""Quantise a matrix to MXFP8 and read its scales."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def quantise(x):
    """Return the scale bytes of x: one for every 8 partitions and 4 columns."""
    rows, columns = x.shape
    packed = nl.ndarray((rows, columns // 4), dtype=nl.float8_e4m3fn_x4, buffer=nl.sbuf)
    scales = nl.ndarray((rows, columns // 4), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.quantize_mx(dst=packed, src=nl.load(x), dst_scale=scales)
    out = nl.ndarray((4, columns // 4), dtype=nl.uint8, buffer=nl.shared_hbm)
    nl.store(out, scales[:4])
    return out


x = np.ones((32, 8), dtype=nl.bfloat16)
x[8:16] = 256  # the second group of 8 partitions
exponents = np.array([0, 8, 0, 0]) - 7  # floor(log2(largest)) - (8 - 1)
np.testing.assert_array_equal(quantise(x), np.repeat(127 + exponents[:, None], 2, axis=1))
