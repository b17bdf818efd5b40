"""a.T @ b in bfloat16, step by step.

by_tile   one pair of tiles, loaded again for every matmul
rotated   tiles of their own for every matmul
resident  each tile of a and b loaded once
merged    a row of tiles by one DMA
"""

from __future__ import annotations

from typing import Any

from simulate.nki import isa as nisa
from simulate.nki import language as nl


def _stored(c: Any, total: Any, rows: Any, columns: Any) -> None:
    """Store sums in PSUM, rounded to c's dtype, to HBM."""
    result = nl.ndarray((128, 512), dtype=c.dtype)
    nisa.tensor_copy(dst=result, src=total)
    nisa.dma_copy(dst=c[rows, columns], src=result)


def by_tile(a, b):
    """Use one pair of tiles in SBUF."""
    depth, height = a.shape
    c = nl.ndarray((height, b.shape[1]), dtype=a.dtype, buffer=nl.shared_hbm)
    left, right = nl.ndarray((128, 128), dtype=a.dtype), nl.ndarray((128, 512), dtype=b.dtype)
    for m in range(0, height, 128):
        for n in range(0, b.shape[1], 512):
            total = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
            for k in range(0, depth, 128):
                nisa.dma_copy(dst=left, src=a[k : k + 128, m : m + 128])
                nisa.dma_copy(dst=right, src=b[k : k + 128, n : n + 512])
                nisa.nc_matmul(dst=total, stationary=left, moving=right, accumulate=k > 0)
            _stored(c, total, slice(m, m + 128), slice(n, n + 512))
    return c


def rotated(a, b):
    """Use a new pair of tiles for every matmul."""
    depth, height = a.shape
    c = nl.ndarray((height, b.shape[1]), dtype=a.dtype, buffer=nl.shared_hbm)
    for m in range(0, height, 128):
        for n in range(0, b.shape[1], 512):
            total = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
            for k in range(0, depth, 128):
                left, right = nl.load(a[k : k + 128, m : m + 128]), nl.load(b[k : k + 128, n : n + 512])
                nisa.nc_matmul(dst=total, stationary=left, moving=right, accumulate=k > 0)
            _stored(c, total, slice(m, m + 128), slice(n, n + 512))
    return c


def resident(a, b):
    """Keep tiles in SBUF from their first use on."""
    depth, height = a.shape
    c = nl.ndarray((height, b.shape[1]), dtype=a.dtype, buffer=nl.shared_hbm)
    left, right = {}, {}
    for m in range(0, height, 128):
        for n in range(0, b.shape[1], 512):
            total = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
            for k in range(0, depth, 128):
                if (k, m) not in left:
                    left[k, m] = nl.load(a[k : k + 128, m : m + 128])
                if (k, n) not in right:
                    right[k, n] = nl.load(b[k : k + 128, n : n + 512])
                nisa.nc_matmul(dst=total, stationary=left[k, m], moving=right[k, n], accumulate=k > 0)
            _stored(c, total, slice(m, m + 128), slice(n, n + 512))
    return c
