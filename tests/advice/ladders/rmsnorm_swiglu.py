"""RMSNorm and SwiGLU, silu(n @ gate) * (n @ up) with n = rmsnorm(x) * weight, step by step.

one_buffer  products in float32: weights are loaded through one tile for each matrix, and cast
wide        a weight tile of its own for each step of the contraction
narrow      products in bfloat16, which the weights have in HBM

In program order `wide` takes 5 us more than scheduled: the activation of a block of columns stands before the casts of
the next block, and the Tensor engine waits for those.
"""

from __future__ import annotations

from typing import Any

from simulate.nki import isa as nisa
from simulate.nki import language as nl

_ENGINES = nisa.engine.vector, nisa.engine.scalar  # cast the tiles of gate and of up


def _normed(x: Any, weight: Any, dtype: Any) -> Any:
    """Return the blocks of n.T [128, 128 * hidden / 128]: rmsnorm(x) * weight, transposed by the Tensor engine."""
    rows, hidden = x.shape
    scales = nl.ndarray((rows, hidden), dtype=nl.float32)
    nisa.dma_copy(dst=scales, src=weight.ap(pattern=[[0, rows], [1, hidden]]))
    tile = nl.load(x)
    squares = nl.ndarray((rows, hidden), dtype=nl.float32)
    norm = nl.ndarray((rows, 1), dtype=nl.float32)
    reset = nisa.reduce_cmd.reset_reduce
    nisa.activation(squares, nl.square, tile, reduce_op=nl.add, reduce_res=norm, reduce_cmd=reset)
    nisa.activation(dst=norm, op=nl.rsqrt, data=norm, scale=1.0 / hidden)
    normed = nl.ndarray((rows, hidden), dtype=dtype)
    nisa.scalar_tensor_tensor(
        dst=normed, data=tile, op0=nl.multiply, operand0=norm, op1=nl.multiply, operand1=scales
    )
    turned = nl.ndarray((128, hidden), dtype=dtype)
    for k in range(hidden // 128):
        transposed = nl.ndarray((128, 128), dtype=dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=transposed, data=normed[:, k * 128 : (k + 1) * 128])
        nisa.tensor_copy(dst=turned[:, k * 128 : (k + 1) * 128], src=transposed)
    return turned


def _activated(out: Any, sums: Any, columns: Any) -> None:
    """Store silu of the first sums times the second to HBM."""
    result = nl.ndarray((128, 512), dtype=nl.float32)
    nisa.activation(dst=result, op=nl.silu, data=sums[0])
    nisa.tensor_tensor(dst=result, data1=result, data2=sums[1], op=nl.multiply)
    nisa.dma_copy(dst=out[:, columns], src=result)


def one_buffer(x, weight, gate, up):
    """Multiply in float32; all weights pass through one tile for each matrix."""
    out = nl.ndarray((x.shape[0], gate.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    turned = _normed(x, weight, nl.float32)
    raw = [nl.ndarray((128, 512), dtype=gate.dtype) for _ in range(2)]
    for n in range(gate.shape[1] // 512):
        columns = slice(n * 512, (n + 1) * 512)
        sums = [nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum) for _ in range(2)]
        for k in range(x.shape[1] // 128):
            rows = slice(k * 128, (k + 1) * 128)
            for total, weights, tile, engine in zip(sums, (gate, up), raw, _ENGINES):
                nisa.dma_copy(dst=tile, src=weights[rows, columns])
                moving = nl.ndarray((128, 512), dtype=nl.float32)
                nisa.tensor_copy(dst=moving, src=tile, engine=engine)
                nisa.nc_matmul(dst=total, stationary=turned[:, rows], moving=moving, accumulate=k > 0)
        _activated(out, sums, columns)
    return out


def wide(x, weight, gate, up):
    """Multiply in float32; each weight tile has bytes of its own."""
    out = nl.ndarray((x.shape[0], gate.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    turned = _normed(x, weight, nl.float32)
    for n in range(gate.shape[1] // 512):
        columns = slice(n * 512, (n + 1) * 512)
        sums = [nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum) for _ in range(2)]
        for k in range(x.shape[1] // 128):
            rows = slice(k * 128, (k + 1) * 128)
            for total, weights, engine in zip(sums, (gate, up), _ENGINES):
                tile = nl.load(weights[rows, columns])
                moving = nl.ndarray((128, 512), dtype=nl.float32)
                nisa.tensor_copy(dst=moving, src=tile, engine=engine)
                nisa.nc_matmul(dst=total, stationary=turned[:, rows], moving=moving, accumulate=k > 0)
        _activated(out, sums, columns)
    return out


def narrow(x, weight, gate, up):
    """Multiply in bfloat16."""
    out = nl.ndarray((x.shape[0], gate.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    turned = _normed(x, weight, gate.dtype)
    for n in range(gate.shape[1] // 512):
        columns = slice(n * 512, (n + 1) * 512)
        sums = [nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum) for _ in range(2)]
        for k in range(x.shape[1] // 128):
            rows = slice(k * 128, (k + 1) * 128)
            for total, weights in zip(sums, (gate, up)):
                tile = nl.load(weights[rows, columns])
                nisa.nc_matmul(dst=total, stationary=turned[:, rows], moving=tile, accumulate=k > 0)
        _activated(out, sums, columns)
    return out
