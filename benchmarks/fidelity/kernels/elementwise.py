"""Kernels without a contraction: vector addition, SiLU, the update step of AdamW. Tensors are in HBM."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import PARTITIONS, constant, load, sbuf, store


def add_column_chunks(a, b, chunk, mode="none"):
    """Return a + b for vectors [N, 1], `chunk` elements at a time, one per partition; b is the scalar operand."""
    total = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    for first in range(0, a.shape[0], chunk):
        left = load(a[first : first + chunk, :], mode)
        right = load(b[first : first + chunk, :], mode)
        result = sbuf((chunk, 1), a.dtype)
        nisa.tensor_scalar(dst=result, data=left, op0=nl.add, operand0=right)
        store(total[first : first + chunk, :], result, mode)
    return total


def add_streams(a, b, width, mode="none"):
    """Return a + b for matrices [128, N / 128], `width` columns at a time."""
    total = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    for first in range(0, a.shape[1], width):
        left = load(a[:, first : first + width], mode)
        right = load(b[:, first : first + width], mode)
        result = sbuf((PARTITIONS, width), a.dtype)
        nisa.tensor_tensor(dst=result, data1=left, data2=right, op=nl.add)
        store(total[:, first : first + width], result, mode)
    return total


def silu(x, width=1024, chunk=512):
    """Return x / (1 + exp(-x)), in tiles of 128 rows and `width` columns; one instruction handles `chunk` columns.

    exp is computed on the Scalar engine, the remaining steps on the Vector engine.
    """
    rows, columns = x.shape
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    zero = constant((PARTITIONS, 1), 0.0)
    for row in range(0, rows, PARTITIONS):
        for column in range(0, columns, width):
            tile = load(x[row : row + PARTITIONS, column : column + width])
            result = sbuf(tile.shape, x.dtype)
            for first in range(0, width, chunk):
                data = tile[:, first : first + chunk]
                curve = sbuf((PARTITIONS, chunk), nl.float32)
                nisa.activation(dst=curve, op=nl.exp, data=data, scale=-1.0, bias=zero)
                nisa.tensor_scalar(dst=curve, data=curve, op0=nl.add, operand0=1.0)
                nisa.reciprocal(dst=curve, data=curve)
                nisa.tensor_tensor(
                    dst=result[:, first : first + chunk], data1=data, data2=curve, op=nl.multiply
                )
            nisa.dma_copy(dst=out[row : row + PARTITIONS, column : column + width], src=result)
    return out


def adamw(theta, gradient, mean, square, width=1024, chunk=512):
    """Return the parameters theta after one AdamW step with fixed hyperparameters; the moments are not stored.

    Tiles have 128 rows and `width` columns; one instruction handles `chunk` columns. Each multiply and each add is an
    instruction: scales by constants on the Scalar engine, sums and products of two tiles on the Vector engine.
    """
    rows, columns = theta.shape
    out = nl.ndarray(theta.shape, dtype=theta.dtype, buffer=nl.shared_hbm)
    zero = constant((PARTITIONS, 1), 0.0)
    for row in range(0, rows, PARTITIONS):
        high = min(PARTITIONS, rows - row)
        for column in range(0, columns, width):
            box = (slice(row, row + high), slice(column, column + width))
            tiles = [load(tensor[box]) for tensor in (theta, mean, square, gradient)]
            result = sbuf((high, width), theta.dtype)
            for first in range(0, width, chunk):
                last = first + chunk
                _adamw_step(result[:, first:last], [tile[:, first:last] for tile in tiles], zero[0:high, :])
            nisa.dma_copy(dst=out[box], src=result)
    return out


def _adamw_step(result, tiles, zero):
    """Set `result` to the new parameters; `tiles` are the parameters, the first and second moments, and the gradient.

    `zero` is a bias tile [rows, 1]. All are in SBUF.
    """
    theta, mean, square, gradient = tiles
    shape = theta.shape
    decayed, step, moment, scaled_gradient, inverse = [sbuf(shape, nl.float32) for _ in range(5)]
    nisa.activation(dst=decayed, op=nl.copy, data=theta, scale=1.0e-5)
    nisa.tensor_tensor(dst=decayed, data1=theta, data2=decayed, op=nl.subtract)
    nisa.activation(dst=step, op=nl.copy, data=mean, scale=0.9)
    nisa.activation(dst=scaled_gradient, op=nl.copy, data=gradient, scale=0.1)
    nisa.tensor_tensor(dst=step, data1=step, data2=scaled_gradient, op=nl.add)
    nisa.activation(dst=step, op=nl.copy, data=step, scale=0.01)
    nisa.activation(dst=moment, op=nl.copy, data=square, scale=0.999)
    squares = sbuf(shape, nl.float32)
    nisa.activation(dst=squares, op=nl.copy, data=gradient, scale=0.001)
    nisa.tensor_tensor(dst=squares, data1=squares, data2=gradient, op=nl.multiply)
    nisa.tensor_tensor(dst=moment, data1=moment, data2=squares, op=nl.add)
    nisa.activation(dst=inverse, op=nl.sqrt, data=moment, scale=1000.0, bias=zero)
    nisa.tensor_scalar(dst=inverse, data=inverse, op0=nl.add, operand0=1.0e-8)
    nisa.reciprocal(dst=inverse, data=inverse)
    nisa.tensor_tensor(dst=step, data1=step, data2=inverse, op=nl.multiply)
    nisa.tensor_tensor(dst=result, data1=decayed, data2=step, op=nl.subtract)
