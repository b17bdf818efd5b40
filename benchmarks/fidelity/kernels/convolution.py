"""3 x 3 convolution, stride 1, no padding: x [C_in, H, W] and w [C_out, C_in, 3, 3], as matmuls over filter taps."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import PARTITIONS, evacuate, load, psum, sbuf

TAPS = 9


def by_taps(x, w, bias, pooled=False):
    """Per pair of output rows and 128 output channels one sum of 9 x C_in / 128 matmuls.

    Weights are transposed once on the Tensor engine and stay; input rows come once per filter row and pair of
    output rows. bias [C_out, 1] is added on the Vector engine; pooled: the maximum of 2 x 2 outputs is kept.
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
    """Compute the sums of `by_taps`, with the input rows of every tap copied to a contiguous tile by the Scalar engine.

    A pair of output rows loads four input rows once; the copy of a tap serves all output channels, whose sums grow side
    by side in banks of their own.
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
    """Each channel with its own filter along the width: x [batch, channels, width], w [channels, taps]."""
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
    """As `depthwise`, one output position at a time: the products with the filter, and their sum."""
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
    """Allocate the output, load weights and biases; return these and an output channel's rows and columns, unpooled."""
    channels_out = w.shape[0]
    rows, columns = x.shape[1] - 2, x.shape[2] - 2
    shape = (channels_out, rows // 2, columns // 2) if pooled else (channels_out, rows, columns)
    out = nl.ndarray(shape, dtype=x.dtype, buffer=nl.shared_hbm)
    weights = _weights(w)
    biases = [load(bias[m : m + PARTITIONS, :]) for m in range(0, channels_out, PARTITIONS)]
    return out, weights, biases, rows, columns


def _weights(w):
    """By (output tile, input tile, tap): the filter tap with the input channels on the partitions."""
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
    columns = result.shape[2]
    taller = sbuf((PARTITIONS, columns), result.dtype)
    nisa.tensor_tensor(dst=taller, data1=result[:, 0, :], data2=result[:, 1, :], op=nl.maximum)
    pooled = sbuf((PARTITIONS, columns // 2), result.dtype)
    nisa.tensor_tensor(dst=pooled, data1=taller[:, 0:columns:2], data2=taller[:, 1:columns:2], op=nl.maximum)
    nisa.dma_copy(dst=out, src=pooled)
