"""Sums in PSUM that are started, added to, kept or read at the wrong time."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


@fault("NKW-PSUM-UNSTARTED", ramp(2, 5, 4), ramp(2, 5, 6), answer=lambda a, b: a[0].T @ b[0] + a[1].T @ b[1])
def add_to_nothing(a, b, sick):
    """accumulate=True from the first block on."""
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    for k in range(2):
        left, right = nl.load(a[k]), nl.load(b[k])
        started = True if sick else k > 0
        nisa.nc_matmul(dst=sums, stationary=left, moving=right, accumulate=started)  # blamed
    return copied_out(sums)


@fault("NKW-MATMUL-RESULT-DTYPE", ramp(5, 4), ramp(5, 6), answer=lambda a, b: a.T @ b)
def bfloat16_psum(a, b, sick):
    """PSUM of trn2 accumulates float32 only."""
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 6), dtype=nl.bfloat16 if sick else nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)  # blamed
    return copied_out(sums)


@fault("NKW-PSUM-INIT", ramp(5, 4), ramp(5, 6), ramp(4, 6), answer=lambda a, b, bias: a.T @ b + bias)
def bias_in_psum(a, b, bias, sick):
    """The bias is copied to PSUM for the matmul to add to it."""
    left, right, added = nl.load(a), nl.load(b), nl.load(bias)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="sums")
    if sick:
        nisa.tensor_copy(dst=sums, src=added)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)  # blamed
    result = nl.ndarray((4, 6), dtype=nl.float32)
    if sick:
        nisa.tensor_copy(dst=result, src=sums)
    else:
        nisa.tensor_tensor(dst=result, data1=sums, data2=added, op=nl.add)
    return copied_out(result)


@fault("NKW-PSUM-INIT", ramp(2, 5, 4), ramp(2, 5, 6), answer=lambda a, b: a[0].T @ b[0] + a[1].T @ b[1])
def cleared_by_memset(a, b, sick):
    """A memset to zero replaces the first accumulation; before gen4 the matmul may not add to it."""
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="sums")
    if sick:
        nisa.memset(dst=sums, value=0.0)
    for k in range(2):
        left, right = nl.load(a[k]), nl.load(b[k])
        nisa.nc_matmul(dst=sums, stationary=left, moving=right)  # blamed
    return copied_out(sums)


@fault("NKW-PSUM-REOPENED", ramp(5, 4), ramp(5, 6), answer=lambda a, b: 2 * (a.T @ b))
def halves_reopened(a, b, sick):
    """Only the left half of a PSUM tile is read too early and added to again."""
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 12), dtype=nl.float32, buffer=nl.psum, name="sums")
    result = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.nc_matmul(dst=sums[:, 0:6], stationary=left, moving=right)
    if sick:
        nisa.tensor_copy(dst=result, src=sums[:, 0:6])
    nisa.nc_matmul(dst=sums[:, 0:6], stationary=left, moving=right)  # blamed
    nisa.tensor_copy(dst=result, src=sums[:, 0:6])
    return copied_out(result)


@fault(
    "NKW-PSUM-UNSTARTED",
    ramp(4, 5, 4),
    ramp(4, 5, 6),
    answer=lambda a, b: np.einsum("ckpm,ckpn->cmn", a.reshape(2, 2, 5, 4), b.reshape(2, 2, 5, 6)),
    cores=2,
)
def contraction_split_over_cores(a, b, sick):
    """Each core sums its half of the contraction, and accumulate=(k > 0) never starts on core 1."""
    core = nl.program_id(0)
    out = nl.ndarray((2, 4, 6), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="sums")
    for k in range(core * 2, core * 2 + 2):
        left, right = nl.load(a[k]), nl.load(b[k])
        goes_on = k > 0 if sick else k > core * 2
        nisa.nc_matmul(dst=sums, stationary=left, moving=right, accumulate=goes_on)  # blamed
    result = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)
    nisa.dma_copy(dst=out[core], src=result)
    return out


@fault("NKW-PSUM-UNREAD", ramp(3, 5, 4), ramp(3, 5, 6), answer=lambda a, b: np.einsum("kpm,kpn->mn", a, b))
def read_before_the_last(a, b, sick):
    """The sum is copied out in the last iteration but one, before the last block is added."""
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="sums")
    result = nl.ndarray((4, 6), dtype=nl.float32)
    for k in range(3):
        left, right = nl.load(a[k]), nl.load(b[k])
        nisa.nc_matmul(dst=sums, stationary=left, moving=right, accumulate=k > 0)
        if k == (1 if sick else 2):
            nisa.tensor_copy(dst=result, src=sums)  # blamed
    return copied_out(result)


@fault("NKW-PSUM-INIT", ramp(2, 5, 4), ramp(2, 5, 6), answer=lambda a, b: 2 * (a[0].T @ b[0]) + a[1].T @ b[1])
def rescaled_in_place(a, b, sick):
    """An online softmax rescales the sum where it lies in PSUM, and the next matmul adds to it."""
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="sums")
    total = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.nc_matmul(dst=sums, stationary=nl.load(a[0]), moving=nl.load(b[0]))
    if sick:
        nisa.tensor_scalar(dst=sums, data=sums, op0=nl.multiply, operand0=2.0)
    else:
        nisa.tensor_scalar(dst=total, data=sums, op0=nl.multiply, operand0=2.0)
        sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="more")
    nisa.nc_matmul(dst=sums, stationary=nl.load(a[1]), moving=nl.load(b[1]))  # blamed
    if sick:
        nisa.tensor_copy(dst=total, src=sums)
    else:
        nisa.tensor_tensor(dst=total, data1=total, data2=sums, op=nl.add)
    return copied_out(total)


@fault("NKW-PSUM-UNREAD", ramp(2, 5, 4), ramp(2, 5, 6), answer=lambda a, b: a[0].T @ b[0] + a[1].T @ b[1])
def started_every_time(a, b, sick):
    """accumulate=False for every block of the contraction: only the last block is left."""
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="sums")
    for k in range(2):
        left, right = nl.load(a[k]), nl.load(b[k])
        goes_on = False if sick else k > 0
        nisa.nc_matmul(dst=sums, stationary=left, moving=right, accumulate=goes_on)  # blamed
    return copied_out(sums)


@fault("NKW-PSUM-REOPENED", ramp(2, 5, 4), ramp(5, 6), answer=lambda a, b: np.einsum("mki,kj->mij", a, b))
def tile_outside_the_loop(a, b, sick):
    """One PSUM tile serves all row blocks with accumulate=None, and every block adds to it."""
    right = nl.load(b)
    out = nl.ndarray((2, 4, 6), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="sums")
    for m in range(2):
        left = nl.load(a[m])
        fresh = None if sick else False
        nisa.nc_matmul(dst=sums, stationary=left, moving=right, accumulate=fresh)  # blamed
        result = nl.ndarray((4, 6), dtype=nl.float32)
        nisa.tensor_copy(dst=result, src=sums)
        nisa.dma_copy(dst=out[m], src=result)
    return out


@fault(
    "NKW-PSUM-UNSTARTED", ramp(2, 5, 4), ramp(2, 5, 12), answer=lambda a, b: np.einsum("kpm,kpn->mn", a, b)
)
def variable_of_the_outer_loop(a, b, sick):
    """accumulate tests the variable of the loop over column blocks instead of the contraction."""
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


@fault("NKW-PSUM-UNSTARTED", ramp(5, 4), ramp(5, 6), answer=lambda a, b: 2 * (a.T @ b))
def wider_than_started(a, b, sick):
    """The second matmul adds to columns that the first did not reach."""
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    columns = 4 if sick else 6
    nisa.nc_matmul(dst=sums[:, 0:columns], stationary=left, moving=right[:, 0:columns], accumulate=False)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right, accumulate=True)  # blamed
    return copied_out(sums)


def _sums(a, b):
    return np.einsum("kpm,kpn->mn", a, b)


@fault("NKW-PSUM-OPEN", ramp(2, 5, 4) % 5, ramp(2, 5, 6) % 5, answer=lambda a, b: _sums(a, b) * 2)
def copied_out_in_each_round(a, b, sick):
    """The partial sums of each round are added up; the second contains the first."""
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    total = nl.zeros((4, 6), dtype=nl.float32)
    for k in range(2):
        nisa.nc_matmul(dst=sums, stationary=nl.load(a[k]), moving=nl.load(b[k]), accumulate=k > 0)
        if sick or k == 1:
            nisa.tensor_tensor(dst=total, data1=total, data2=sums, op=nl.add)  # blamed
    if not sick:
        nisa.tensor_tensor(dst=total, data1=total, data2=sums, op=nl.add)
    return copied_out(total)


@fault(
    "NKW-PSUM-OPEN",
    ramp(2, 5, 4) % 5,
    ramp(2, 5, 6) % 5,
    answer=lambda a, b: _sums(a, b) - _sums(a, b).max(1)[:, None],
)
def maximum_before_the_last_matmul(a, b, sick):
    """The row maximum is taken of the first block's sums, and subtracted from all."""
    sums, most = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum), nl.ndarray((4, 1), dtype=nl.float32)
    left, right = [nl.load(a[k]) for k in range(2)], [nl.load(b[k]) for k in range(2)]
    nisa.nc_matmul(dst=sums, stationary=left[0], moving=right[0], accumulate=False)
    if not sick:
        nisa.nc_matmul(dst=sums, stationary=left[1], moving=right[1], accumulate=True)
    nisa.tensor_reduce(dst=most, data=sums, op=nl.maximum, axis=1)  # blamed
    if sick:
        nisa.nc_matmul(dst=sums, stationary=left[1], moving=right[1], accumulate=True)
    out = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_scalar(dst=out, data=sums, op0=nl.subtract, operand0=most)
    return copied_out(out)


@fault("NKW-PSUM-OPEN", ramp(3, 5, 4) % 5, ramp(5, 6) % 5, answer=lambda a, b: np.einsum("kpm,pn->kmn", a, b))
def products_of_rounds_in_one_slot(a, b, sick):
    """Three products go to one slot of a PSUM tile, each onto the one before, and each is stored."""
    out = nl.ndarray((3, 4, 6), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    right, bank = nl.load(b), nl.ndarray((4, 3, 6), dtype=nl.float32, buffer=nl.psum)
    for k in range(3):
        slot = bank[:, 0 if sick else k]
        nisa.nc_matmul(dst=slot, stationary=nl.load(a[k]), moving=right, accumulate=sick and k > 0)
        result = nl.ndarray((4, 6), dtype=nl.float32)
        nisa.tensor_copy(dst=result, src=slot)  # blamed
        nisa.dma_copy(dst=out[k], src=result)
    return out
