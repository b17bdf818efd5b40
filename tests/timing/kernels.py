"""Small kernels to time, and their launches without numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from simulate.hardware import hardware
from simulate.nki import collectives
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.run import Launch, Mode
from simulate.world import launch

BF16 = ml_dtypes.bfloat16


def matmul_exp(a, b):
    """Compute exp(a.T @ b / 100) by tiles of 128 x 512, loading every operand tile when it is needed."""
    contraction, rows = a.shape
    columns = b.shape[1]
    out = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.shared_hbm)
    for m in range(rows // 128):
        for n in range(columns // 512):
            total = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
            for k in range(contraction // 128):
                stationary = nl.load(a[k * 128 : (k + 1) * 128, m * 128 : (m + 1) * 128])
                moving = nl.load(b[k * 128 : (k + 1) * 128, n * 512 : (n + 1) * 512])
                nisa.nc_matmul(dst=total, stationary=stationary, moving=moving, accumulate=k > 0)
            result = nl.ndarray((128, 512), dtype=nl.float32)
            nisa.activation(dst=result, op=nl.exp, data=total, scale=0.01)
            nisa.dma_copy(dst=out[m * 128 : (m + 1) * 128, n * 512 : (n + 1) * 512], src=result)
    return out


def same_tiles(a):
    """Issue matmuls of one pair of tiles already in SBUF, each into a PSUM tile of its own."""
    out = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.shared_hbm)
    stationary, moving = nl.load(a[:, 0:128]), nl.load(a)
    for _ in range(64):
        total = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=total, stationary=stationary, moving=moving)
    result = nl.ndarray((128, 512), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=total)
    nisa.dma_copy(dst=out, src=result)
    return out


def summed(a):
    """Return the sum of a over two ranks."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    local = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=local, src=a)
    collectives.all_reduce([local], [out], collectives.ReplicaGroup([[0, 1]]), nl.add)
    return out


def halves(a):
    """Copy a by the two cores of one rank, each its own rows."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    first = nl.program_id(0) * 128
    nisa.dma_copy(dst=out[first : first + 128, :], src=nl.load(a[first : first + 128, :]))
    return out


def rmsnorm_swiglu(x, weight, gate, up):
    """Compute silu(n @ gate) * (n @ up), n = rmsnorm(x) * weight; weights have one queue, results another."""
    rows, hidden = x.shape
    out = nl.ndarray((rows, gate.shape[1]), dtype=gate.dtype, buffer=nl.shared_hbm)
    ones = nl.ndarray((1, 128), dtype=nl.float32)
    nisa.memset(dst=ones, value=1.0)
    scales = nl.ndarray((128, hidden), dtype=nl.float32)
    for n in range(hidden // 512):
        columns = slice(n * 512, (n + 1) * 512)
        spread = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=spread, stationary=ones, moving=nl.load(weight[:, columns]))
        nisa.tensor_copy(dst=scales[:, columns], src=spread)
    for m in range(rows // 128):
        tile = nl.load(x[m * 128 : (m + 1) * 128, :])
        squares = nl.ndarray((128, hidden), dtype=nl.float32)
        norm = nl.ndarray((128, 1), dtype=nl.float32)
        reset = nisa.reduce_cmd.reset_reduce
        nisa.activation(squares, nl.square, tile, reduce_op=nl.add, reduce_res=norm, reduce_cmd=reset)
        nisa.activation(dst=norm, op=nl.rsqrt, data=norm, scale=1.0 / hidden)
        normed = nl.ndarray((128, hidden), dtype=gate.dtype)
        nisa.scalar_tensor_tensor(
            dst=normed, data=tile, op0=nl.multiply, operand0=norm, op1=nl.multiply, operand1=scales
        )
        turned = nl.ndarray((128, hidden), dtype=gate.dtype)
        for k in range(hidden // 128):
            transposed = nl.ndarray((128, 128), dtype=gate.dtype, buffer=nl.psum)
            nisa.nc_transpose(dst=transposed, data=normed[:, k * 128 : (k + 1) * 128])
            nisa.tensor_copy(dst=turned[:, k * 128 : (k + 1) * 128], src=transposed)
        for n in range(gate.shape[1] // 512):
            columns = slice(n * 512, (n + 1) * 512)
            sums = [nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum) for _ in range(2)]
            for k in range(hidden // 128):
                for total, weights in zip(sums, (gate, up)):
                    moving = nl.load(weights[k * 128 : (k + 1) * 128, columns])
                    stationary = turned[:, k * 128 : (k + 1) * 128]
                    nisa.nc_matmul(dst=total, stationary=stationary, moving=moving, accumulate=k > 0)
            result = nl.ndarray((128, 512), dtype=nl.float32)
            nisa.activation(dst=result, op=nl.silu, data=sums[0])
            nisa.tensor_tensor(dst=result, data1=result, data2=sums[1], op=nl.multiply)
            nisa.dma_copy(dst=out[m * 128 : (m + 1) * 128, columns], src=result)
    return out


def dry(
    kernel: Callable[..., Any], *arrays: np.ndarray, target: str = "trn2", ranks: int = 1, cores: int = 1
) -> Launch:
    """Launch a kernel without computing numbers."""
    return launch(kernel, [(arrays, {})] * ranks, hardware(target), cores, Mode.dry)


def zeros(rows: int, columns: int, dtype: Any = np.float32) -> np.ndarray:
    """Return an argument of which only shape and dtype matter."""
    return np.zeros((rows, columns), dtype)
