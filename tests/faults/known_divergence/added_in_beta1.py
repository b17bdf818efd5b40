"""A bias is added with `+=` to a sum in PSUM, where only the results of matmuls accumulate."""

from __future__ import annotations

from neuronxcc import nki
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl

from tests.faults.data import ramp

CODE = "NKW-BETA1-UPDATE"


@nki.jit
def kernel(a, b, bias, sick):
    out = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.shared_hbm)
    sums = nl.zeros((4, 6), dtype=nl.float32, buffer=nl.psum)
    for k in nl.affine_range(2):
        sums += nisa.nc_matmul(nl.load(a[k]), nl.load(b[k]))
    added = nl.load(bias)
    if sick:
        sums += added  # blamed
        nl.store(out, nl.copy(sums))
    else:
        nl.store(out, nl.add(sums, added))
    return out


def inputs():
    return ramp(2, 5, 4), ramp(2, 5, 6), ramp(4, 6)


def answer(a, b, bias):
    return a[0].T @ b[0] + a[1].T @ b[1] + bias
