"""Pairs of kernels for kinds of advice that no ladder shows: one that gets the advice, and one that follows it."""

from __future__ import annotations

from typing import Any

from simulate.nki import isa as nisa
from simulate.nki import language as nl


def turned_on_tensor(a):
    """Turn each tile of a [height, width] bfloat16 by the Tensor engine: [width, height]."""
    height, width = a.shape
    out = nl.ndarray((width, height), dtype=a.dtype, buffer=nl.shared_hbm)
    for m in range(0, height, 128):
        tile = nl.load(a[m : m + 128])
        for n in range(0, width, 128):
            bank = nl.ndarray((128, 128), dtype=a.dtype, buffer=nl.psum)
            nisa.nc_transpose(dst=bank, data=tile[:, n : n + 128])
            result = nl.ndarray((128, 128), dtype=a.dtype)
            nisa.tensor_copy(dst=result, src=bank)
            for _ in range(4):
                nisa.activation(dst=result, op=nl.exp, data=result)
                nisa.tensor_tensor(dst=result, data1=result, data2=result, op=nl.add)
            nisa.dma_copy(dst=out[n : n + 128, m : m + 128], src=result)
    return out


def turned_by_dma(a):
    """Turn the same tiles with dma_transpose."""
    height, width = a.shape
    out = nl.ndarray((width, height), dtype=a.dtype, buffer=nl.shared_hbm)
    for m in range(0, height, 128):
        for n in range(0, width, 128):
            result = nl.ndarray((128, 128), dtype=a.dtype)
            nisa.dma_transpose(dst=result, src=a[m : m + 128, n : n + 128])
            for _ in range(4):
                nisa.activation(dst=result, op=nl.exp, data=result)
                nisa.tensor_tensor(dst=result, data1=result, data2=result, op=nl.add)
            nisa.dma_copy(dst=out[n : n + 128, m : m + 128], src=result)
    return out


def _copied(a: Any, engines: Any) -> Any:
    """Sum eight products of a with itself, each read out of PSUM by one of `engines`."""
    out = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.shared_hbm)
    tile = nl.load(a)
    result = nl.ndarray((128, 32, 512), dtype=nl.bfloat16)
    for number in range(32):
        total = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=total, stationary=tile[:, 0:128], moving=tile)
        nisa.tensor_copy(dst=result[:, number, :], src=total, engine=engines[number % len(engines)])
    nisa.dma_copy(dst=out, src=result[:, 31, :])
    return out


def copies_on_vector(a):
    """Make all copies on the Vector engine."""
    return _copied(a, (nisa.engine.vector,))


def copies_on_two_engines(a):
    """Make every second copy on the Scalar engine."""
    return _copied(a, (nisa.engine.vector, nisa.engine.scalar))
