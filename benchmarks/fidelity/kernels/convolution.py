"""Convolutions with stride 1 and no padding: 3 x 3 as matmuls over filter taps, and depthwise ones along the width.

A 3 x 3 convolution has x [C_in, H, W], w [C_out, C_in, 3, 3] and bias [C_out, 1], all in HBM. A filter tap is one of
the nine positions of a filter.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import PARTITIONS, evacuate, load, psum, sbuf

TAPS = 9


def by_taps(x, w, bias, pooled=False):
    """Return the 3 x 3 convolution [C_out, H - 2, W - 2] plus bias, pooled if asked.

    For each pair of output rows and each 128 output channels, 9 C_in / 128 matmuls add up in one PSUM bank. Weights
    are transposed once on the Tensor engine and stay in SBUF. Input rows are loaded for each filter row and pair of
    output rows. pooled: the maximum of each 2 x 2 outputs is stored, and H and W of the result are halved.
    """
    channels_in, channels_out = x.shape[0], w.shape[0]
    out, weights, biases, rows, columns = _prepared(x, w, bias, pooled)
    for row in range(0, rows, 2):
        count = min(2, rows - row)
        strips = [
            [load(x[k : k + PARTITIONS, row + i : row + i + count, :]) for i in range(3)]
            for k in range(0, channels_in, PARTITIONS)
        ]
        for m in range(channels_out // PARTITIONS):
            bank = psum((PARTITIONS, count, columns))
            first = True
            for k in range(len(strips)):
                for i in range(3):
                    for j in range(3):
                        moving = strips[k][i][:, :, j : j + columns]
                        stationary = weights[m, k, i * 3 + j]
                        nisa.nc_matmul(dst=bank, stationary=stationary, moving=moving, accumulate=not first)
                        first = False
            result = evacuate(bank, x.dtype)
            nisa.tensor_scalar(
                dst=result, data=result, op0=nl.add, operand0=biases[m], engine=nisa.vector_engine
            )
            channels = slice(m * PARTITIONS, (m + 1) * PARTITIONS)
            if pooled:
                _store_pooled(out[channels, row // 2, :], result)
            else:
                nisa.dma_copy(dst=out[channels, row : row + count, :], src=result)
    return out


def by_copied_taps(x, w, bias, pooled=False):
    """Return the result of `by_taps`; the Scalar engine copies the input of each tap to a contiguous tile.

    The four input rows of a pair of output rows are loaded once. The copy for a tap serves all output channels, whose
    sums are accumulated in separate PSUM banks. H must be even.
    """
    channels_in, channels_out = x.shape[0], w.shape[0]
    out, weights, biases, rows, columns = _prepared(x, w, bias, pooled)
    for row in range(0, rows, 2):
        banks = [psum((PARTITIONS, 2, columns)) for _ in range(channels_out // PARTITIONS)]
        first = True
        for k in range(channels_in // PARTITIONS):
            strip = load(x[k * PARTITIONS : (k + 1) * PARTITIONS, row : row + 4, :])
            for i in range(3):
                for j in range(3):
                    moving = evacuate(strip[:, i : i + 2, j : j + columns], x.dtype)
                    for m in range(len(banks)):
                        stationary = weights[m, k, i * 3 + j]
                        nisa.nc_matmul(
                            dst=banks[m], stationary=stationary, moving=moving, accumulate=not first
                        )
                    first = False
        for m in range(len(banks)):
            result = sbuf((PARTITIONS, 2, columns), x.dtype)
            nisa.tensor_scalar(
                dst=result, data=banks[m], op0=nl.add, operand0=biases[m], engine=nisa.vector_engine
            )
            channels = slice(m * PARTITIONS, (m + 1) * PARTITIONS)
            if pooled:
                _store_pooled(out[channels, row // 2, :], result)
            else:
                nisa.dma_copy(dst=out[channels, row : row + 2, :], src=result)
    return out


def depthwise(x, w):
    """Return each channel convolved with its own filter along the width: [batch, channels, width - taps + 1].

    x is [batch, channels, width], w [channels, taps]. Each instruction handles one tap of 128 channels.
    """
    batches, channels, width = x.shape
    taps = w.shape[1]
    columns = width - taps + 1
    out = nl.ndarray((batches, channels, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    for batch in range(batches):
        for row in range(0, channels, PARTITIONS):
            rows = slice(row, row + PARTITIONS)
            tile, filters = load(x[batch, rows, :]), load(w[rows, :])
            total = sbuf((PARTITIONS, columns), nl.float32)
            nisa.tensor_scalar(dst=total, data=tile[:, 0:columns], op0=nl.multiply, operand0=filters[:, 0:1])
            for tap in range(1, taps):
                nisa.scalar_tensor_tensor(
                    dst=total,
                    data=tile[:, tap : tap + columns],
                    op0=nl.multiply,
                    operand0=filters[:, tap : tap + 1],
                    op1=nl.add,
                    operand1=total,
                )
            nisa.dma_copy(dst=out[batch, rows, :], src=total)
    return out


def by_positions(x, w):
    """Return the result of `depthwise`, one output position at a time: the products with the filter, and their sum."""
    batches, channels, width = x.shape
    taps = w.shape[1]
    columns = width - taps + 1
    out = nl.ndarray((batches, channels, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    for batch in range(batches):
        for row in range(0, channels, PARTITIONS):
            rows = slice(row, row + PARTITIONS)
            tile, filters = load(x[batch, rows, :]), load(w[rows, :])
            total = sbuf((PARTITIONS, columns), x.dtype)
            for i in range(columns):
                products = sbuf((PARTITIONS, taps), nl.float32)
                nisa.tensor_tensor(dst=products, data1=tile[:, i : i + taps], data2=filters, op=nl.multiply)
                nisa.tensor_reduce(dst=total[:, i : i + 1], op=nl.add, data=products, axis=1)
            nisa.dma_copy(dst=out[batch, rows, :], src=total)
    return out


def _prepared(x, w, bias, pooled):
    """Prepare a 3 x 3 convolution.

    Returns:
        The output tensor in HBM; the transposed filters of `_weights`; the biases as SBUF tiles [128, 1]; the numbers
        of rows and columns of an output channel before pooling.
    """
    channels_out = w.shape[0]
    rows, columns = x.shape[1] - 2, x.shape[2] - 2
    shape = (channels_out, rows // 2, columns // 2) if pooled else (channels_out, rows, columns)
    out = nl.ndarray(shape, dtype=x.dtype, buffer=nl.shared_hbm)
    weights = _weights(w)
    biases = [load(bias[m : m + PARTITIONS, :]) for m in range(0, channels_out, PARTITIONS)]
    return out, weights, biases, rows, columns


def _weights(w):
    """Return the filters as SBUF tiles [128 input channels, 128 output channels], transposed on the Tensor engine.

    The dict's keys are (tile of output channels, tile of input channels, tap).
    """
    channels_out, channels_in = w.shape[0], w.shape[1]
    flat = w.reshape((channels_out, channels_in, TAPS))
    out = {}
    for m in range(channels_out // PARTITIONS):
        tile = load(flat[m * PARTITIONS : (m + 1) * PARTITIONS, :, :])
        for k in range(channels_in // PARTITIONS):
            for tap in range(TAPS):
                bank = psum((PARTITIONS, PARTITIONS), w.dtype)
                nisa.nc_transpose(dst=bank, data=tile[:, k * PARTITIONS : (k + 1) * PARTITIONS, tap])
                out[m, k, tap] = evacuate(bank, w.dtype)
    return out


def _store_pooled(out, result):
    """Store the maxima of each 2 x 2 elements of `result` [128, 2, columns] to `out` [128, columns / 2] in HBM."""
    columns = result.shape[2]
    taller = sbuf((PARTITIONS, columns), result.dtype)
    nisa.tensor_tensor(dst=taller, data1=result[:, 0, :], data2=result[:, 1, :], op=nl.maximum)
    pooled = sbuf((PARTITIONS, columns // 2), result.dtype)
    nisa.tensor_tensor(dst=pooled, data1=taller[:, 0:columns:2], data2=taller[:, 1:columns:2], op=nl.maximum)
    nisa.dma_copy(dst=out, src=pooled)
