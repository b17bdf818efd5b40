"""z = GELU(x w + bias), in one launch with the activation on chip, or in two with x w + bias in HBM between."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import (
    BANK,
    PARTITIONS,
    broadcast,
    constant,
    evacuate,
    load,
    ones_row,
    psum,
    sbuf,
    store,
)


def gemm(x_t, w, bias, activation, resident, mode="none"):
    """Return z [M, N] = activation(x w + bias) for x_t [K, M], w [K, N] and bias [1, N], all in HBM.

    A load whose address does not change inside a loop is moved out of the loop, as the compiler does. The Tensor
    engine broadcasts the bias to all partitions for each output tile.

    Args:
        x_t: Transpose of x; its tiles are loaded once per row of output tiles.
        w: Weights.
        bias: Bias.
        activation: "gelu", "tanh" (GELU from multiplies and a sigmoid), or None.
        resident: w is loaded once and stays in SBUF. Else it is loaded for each row of output tiles, alternately
            through
            two hardware queues if `mode` is "hwdge".
        mode: Name of the dge_mode.
    """
    depth, rows = x_t.shape
    columns = w.shape[1]
    z = nl.ndarray((rows, columns), dtype=x_t.dtype, buffer=nl.shared_hbm)
    zero = constant((PARTITIONS, 1), 0.0)
    ones = ones_row(x_t.dtype)
    biases = load(bias, mode)
    kept = {}
    for m in range(0, rows, PARTITIONS):
        left = []
        for k in range(depth // PARTITIONS):
            tile = x_t[k * PARTITIONS : (k + 1) * PARTITIONS, m : m + PARTITIONS]
            left.append(load(tile, mode))
        for n in range(0, columns, BANK):
            bank = psum((PARTITIONS, BANK))
            for k in range(len(left)):
                if not resident or (k, n) not in kept:
                    tile = w[k * PARTITIONS : (k + 1) * PARTITIONS, n : n + BANK]
                    kept[k, n] = load(tile, mode, not resident and k % 2 == 1)
                nisa.nc_matmul(dst=bank, stationary=left[k], moving=kept[k, n], accumulate=k > 0)
            y = evacuate(bank, z.dtype)
            spread = broadcast(biases[:, n : n + BANK], ones)
            nisa.tensor_tensor(dst=y, data1=y, data2=spread, op=nl.add)
            if activation == "gelu":
                nisa.activation(dst=y, op=nl.gelu, data=y, bias=zero)
            if activation == "tanh":
                y = tanh_gelu(y, zero)
            store(z[m : m + PARTITIONS, n : n + BANK], y, mode)
    return z


def gelu(y, mode="none"):
    """Return z = GELU(y) for y in HBM, tile by tile; `mode` names the dge_mode."""
    rows, columns = y.shape
    z = nl.ndarray(y.shape, dtype=y.dtype, buffer=nl.shared_hbm)
    zero = constant((PARTITIONS, 1), 0.0)
    for m in range(0, rows, PARTITIONS):
        for n in range(0, columns, BANK):
            tile = load(y[m : m + PARTITIONS, n : n + BANK], mode)
            nisa.activation(dst=tile, op=nl.gelu, data=tile, bias=zero)
            store(z[m : m + PARTITIONS, n : n + BANK], tile, mode)
    return z


def tanh_gelu(x, zero):
    """Return 0.5 x (1 + tanh(0.798 (x + 0.0447 x^3))) as a new SBUF tile, with tanh(v) as 2 sigmoid(2 v) - 1."""
    cube = sbuf(x.shape, x.dtype)
    nisa.tensor_tensor(dst=cube, data1=x, data2=x, op=nl.multiply)
    nisa.tensor_tensor(dst=cube, data1=cube, data2=x, op=nl.multiply)
    nisa.tensor_scalar(dst=cube, data=cube, op0=nl.multiply, operand0=0.044715)
    nisa.tensor_tensor(dst=cube, data1=cube, data2=x, op=nl.add)
    nisa.tensor_scalar(dst=cube, data=cube, op0=nl.multiply, operand0=0.7978845608)
    curve = sbuf(x.shape, x.dtype)
    nisa.activation(dst=curve, op=nl.sigmoid, data=cube, scale=2.0, bias=zero)
    nisa.tensor_scalar(dst=curve, data=curve, op0=nl.multiply, operand0=2.0, op1=nl.add, operand1=-1.0)
    half = sbuf(x.shape, x.dtype)
    nisa.tensor_scalar(dst=half, data=x, op0=nl.multiply, operand0=0.5)
    nisa.tensor_scalar(dst=curve, data=curve, op0=nl.add, operand0=1.0)
    nisa.tensor_tensor(dst=curve, data1=half, data2=curve, op=nl.multiply)
    return curve
