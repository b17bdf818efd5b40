"""Operands in a memory that the instruction's engine does not reach."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


@fault("NKW-BUFFER", ramp(5, 4), ramp(5, 6), answer=lambda a, b: a.T @ b)
def dma_from_psum(a, b, sick):
    """A DMA reads PSUM."""
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)
    result = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)
    out = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=sums if sick else result)  # blamed
    return out


@fault("NKW-GPSIMD-PSUM", ramp(5, 4), ramp(5, 6), answer=lambda a, b: a.T @ b)
def gpsimd_on_psum(a, b, sick):
    """GpSimd adds up a PSUM tile."""
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)
    total = nl.zeros((4, 6), dtype=nl.float32)
    engine = nisa.engine.gpsimd if sick else nisa.engine.vector
    nisa.tensor_tensor(dst=total, data1=total, data2=sums, op=nl.add, engine=engine)  # blamed
    return copied_out(total)


@fault("NKW-BUFFER", ramp(5, 4), ramp(5, 6), answer=lambda a, b: a.T @ b)
def matmul_into_sbuf(a, b, sick):
    """The Tensor engine writes SBUF."""
    left, right = nl.load(a), nl.load(b)
    result = nl.ndarray((4, 6), dtype=nl.float32)
    sums = result if sick else nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)  # blamed
    nisa.tensor_copy(dst=result, src=sums)
    return copied_out(result)


@fault("NKW-BUFFER", ramp(5, 4), ramp(5, 6), answer=lambda a, b: a.T @ b)
def matmul_on_hbm(a, b, sick):
    """The weights of a matmul are left in HBM."""
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=a if sick else left, moving=right)  # blamed
    return copied_out(sums)


@fault("NKW-FILL", ramp(4, 4), answer=lambda x: x)
def memset_of_hbm(x, sick):
    """nl.zeros in HBM: no engine fills HBM, a DMA does."""
    buffer = nl.shared_hbm if sick else nl.sbuf
    start = nl.zeros((4, 4), dtype=nl.float32, buffer=buffer)  # blamed
    nisa.tensor_tensor(dst=start, data1=start, data2=nl.load(x), op=nl.add)
    return copied_out(start)


@fault("NKW-GPSIMD-PSUM", ramp(4, 8), answer=lambda x: x**2)
def power_of_a_sum(x, sick):
    """A power is computed by GpSimd, whatever engine is named, and its input lies in PSUM."""
    tile = nl.load(x)
    sums = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.psum)
    nisa.tensor_copy(dst=sums, src=tile)
    result = nl.ndarray((4, 8), dtype=nl.float32)
    data = sums if sick else tile
    nisa.tensor_scalar(dst=result, data=data, op0=nl.power, operand0=2.0)  # blamed
    return copied_out(result)


@fault("NKW-ONE-PSUM-INPUT", ramp(4, 8), (ramp(4, 8) % 2).astype(np.uint8), answer=lambda x, mask: x * mask)
def predicate_beside_its_source(x, mask, sick):
    """Source and predicate of a predicated copy both lie in PSUM."""
    source = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.psum)
    nisa.tensor_copy(dst=source, src=nl.load(x))
    chosen = nl.load(mask)
    if sick:
        psum_mask = nl.ndarray((4, 8), dtype=nl.uint8, buffer=nl.psum)
        nisa.tensor_copy(dst=psum_mask, src=chosen)
        chosen = psum_mask
    result = nl.zeros((4, 8), dtype=nl.float32)
    nisa.tensor_copy_predicated(dst=result, src=source, predicate=chosen)  # blamed
    return copied_out(result)


@fault("NKW-BUFFER", ramp(5, 4) % 4, ramp(5, 6) % 4, answer=lambda a, b: (a.T @ b).T @ (a.T @ b))
def stationary_in_psum(a, b, sick):
    """The result of one matmul is the stationary operand of the next, straight from PSUM."""
    left, right = nl.load(a), nl.load(b)
    first = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=first, stationary=left, moving=right)
    kept = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=kept, src=first)
    second = nl.ndarray((6, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=second, stationary=first if sick else kept, moving=kept)  # blamed
    return copied_out(second)


@fault("NKW-ONE-PSUM-INPUT", ramp(5, 4), ramp(5, 6), answer=lambda a, b: 2 * (a.T @ b))
def two_psum_inputs(a, b, sick):
    """Both inputs of an addition lie in PSUM."""
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)
    copied = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=copied, src=sums)
    total = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_tensor(dst=total, data1=sums, data2=sums if sick else copied, op=nl.add)  # blamed
    return copied_out(total)


@fault("NKW-BUFFER", ramp(4, 4), answer=lambda x: x + 1)
def vector_on_hbm(x, sick):
    """A computation on an HBM tensor that was never loaded."""
    tile = nl.load(x)
    result = nl.ndarray((4, 4), dtype=nl.float32)
    nisa.tensor_scalar(dst=result, data=x if sick else tile, op0=nl.add, operand0=1.0)  # blamed
    return copied_out(result)
