"""PSUM banks: addresses off their borders, results across them, more of them than there are."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


@fault("NKW-ADDRESS", ramp(5, 4), ramp(5, 8), answer=lambda a, b: a.T @ b)
def address_between_banks(a, b, sick):
    """An explicit PSUM address that is no bank."""
    left, right = nl.load(a), nl.load(b)
    address = (0, 1024 if sick else 2048)
    sums = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.psum, address=address)  # blamed
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)
    return copied_out(sums)


@fault("NKW-ADDRESS", ramp(5, 4), ramp(5, 16), answer=lambda a, b: a.T @ b)
def bank_number_as_address(a, b, sick):
    """The second number of a PSUM address is a byte, and gets the number of the bank."""
    left, right = nl.load(a), nl.load(b)
    result = nl.ndarray((4, 16), dtype=nl.float32)
    for bank in range(2):
        offset = bank if sick else bank * 2048
        sums = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.psum, address=(0, offset))  # blamed
        columns = slice(bank * 8, bank * 8 + 8)
        nisa.nc_matmul(dst=sums, stationary=left, moving=right[:, columns])
        nisa.tensor_copy(dst=result[:, columns], src=sums)
    return copied_out(result)


@fault("NKW-PSUM-BANK", ramp(5, 4), ramp(4, 5, 200), answer=lambda a, b: np.einsum("km,hkn->mhn", a, b))
def heads_across_the_border(a, b, sick):
    """Heads of 200 columns lie side by side in one PSUM tile, and the third crosses into the next bank."""
    left = nl.load(a)
    width = 200 if sick else 256
    sums = nl.ndarray((4, 4, width), dtype=nl.float32, buffer=nl.psum)
    result = nl.ndarray((4, 4, 200), dtype=nl.float32)
    for head in range(4):
        columns = sums[:, head, 0:200]
        nisa.nc_matmul(dst=columns, stationary=left, moving=nl.load(b[head]))  # blamed
        nisa.tensor_copy(dst=result[:, head], src=columns)
    return copied_out(result)


@fault("NKW-PSUM-BANK", ramp(5, 4), ramp(5, 128), answer=lambda a, b: a.T @ b)
def last_column(a, b, sick):
    """Only the last column of a result reaches into the next bank."""
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 600), dtype=nl.float32, buffer=nl.psum)
    start = 385 if sick else 384
    nisa.nc_matmul(dst=sums[:, start : start + 128], stationary=left, moving=right)  # blamed
    return copied_out(sums[:, start : start + 128])


@fault("NKW-ADDRESS", ramp(5, 4), ramp(5, 512), answer=lambda a, b: a.T @ b)
def ninth_bank(a, b, sick):
    """PSUM has eight banks; the address names a ninth."""
    left, right = nl.load(a), nl.load(b)
    bank = 8 if sick else 7
    sums = nl.ndarray((4, 512), dtype=nl.float32, buffer=nl.psum, address=(0, bank * 2048))  # blamed
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)
    return copied_out(sums)


@fault("NKW-PSUM-BANK", ramp(5, 4), ramp(5, 512), answer=lambda a, b: a.T @ b)
def over_two_banks(a, b, sick):
    """A matmul writes to columns that straddle two banks."""
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 1024), dtype=nl.float32, buffer=nl.psum)
    start = 256 if sick else 512
    nisa.nc_matmul(dst=sums[:, start : start + 512], stationary=left, moving=right)  # blamed
    return copied_out(sums[:, start : start + 512])


@fault("NKW-PSUM-BANK", ramp(5, 4), ramp(5, 300), answer=lambda a, b: a.T @ b)
def strided_result(a, b, sick):
    """A result with a stride of two ends beyond its bank, though it has 300 columns only."""
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 600), dtype=nl.float32, buffer=nl.psum)
    view = sums[:, 0:600:2] if sick else sums[:, 0:300]
    nisa.nc_matmul(dst=view, stationary=left, moving=right)  # blamed
    return copied_out(view)


@fault("NKW-PSUM-BANK", ramp(64, 64), ramp(64, 480), answer=lambda a, b: (a.T @ b)[:, 0:64] + a + a.T)
def transposed_at_the_edge(a, b, sick):
    """A transpose is appended behind a result, over the end of its bank."""
    left, right = nl.load(a), nl.load(b)
    both = nl.ndarray((64, 1024), dtype=nl.float32, buffer=nl.psum)
    start = 480 if sick else 512
    nisa.nc_matmul(dst=both[:, 0:480], stationary=left, moving=right)
    turned = both[:, start : start + 64]
    nisa.nc_transpose(dst=turned, data=left, engine=nisa.engine.tensor)  # blamed
    result = nl.ndarray((64, 64), dtype=nl.float32)
    nisa.tensor_tensor(dst=result, data1=turned, data2=left, op=nl.add)
    nisa.tensor_tensor(dst=result, data1=both[:, 0:64], data2=result, op=nl.add)
    return copied_out(result)
