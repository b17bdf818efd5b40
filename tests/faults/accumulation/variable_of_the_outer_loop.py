"""accumulate looks at the variable of the loop over column blocks instead of the contraction."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp

CODE = "NKW-PSUM-UNSTARTED"


def kernel(a, b, sick):
    out = nl.ndarray((4, 12), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    for n in range(1, 2) if sick else range(2):
        sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name=f"sums{n}")
        for k in range(2):
            left, right = nl.load(a[k]), nl.load(b[k, :, n * 6 : n * 6 + 6])
            goes_on = n > 0 if sick else k > 0
            nisa.nc_matmul(dst=sums, stationary=left, moving=right, accumulate=goes_on)  # blamed
        result = nl.ndarray((4, 6), dtype=nl.float32)
        nisa.tensor_copy(dst=result, src=sums)
        nisa.dma_copy(dst=out[:, n * 6 : n * 6 + 6], src=result)
    return out


def inputs():
    return ramp(2, 5, 4), ramp(2, 5, 12)


def answer(a, b):
    return np.einsum("kpm,kpn->mn", a, b)
