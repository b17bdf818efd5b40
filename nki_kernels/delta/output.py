"""The end of the gated delta rule: each head of o normalised, weighed, and gated by silu(z)."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl


def gate_factors(z, weight):
    """weight [rows, width] times silu of z [rows, heads * width]: [rows, heads, width] float32."""
    rows, width = weight.shape
    heads = z.shape[1] // width
    factors = silu(z, (rows, heads, width))
    across = weight.reshape((rows, 1, width)).broadcast(1, heads)
    nisa.tensor_tensor(dst=factors, data1=factors, data2=across, op=nl.multiply, engine=nisa.engine.gpsimd)
    return factors


def inverse_roots(o, eps):
    """1 / sqrt(mean of the squares + eps) of each head of o [rows, heads, width]: [rows, heads]."""
    rows, heads, width = o.shape
    squares = nl.ndarray((rows, heads), dtype=nl.float32, buffer=nl.sbuf)
    scratch = nl.ndarray((rows, width), dtype=o.dtype, buffer=nl.sbuf)
    for head in range(heads):
        nisa.activation(
            dst=scratch,
            op=nl.square,
            data=o[:, head, :],
            reduce_op=nl.add,
            reduce_res=squares[:, head : head + 1],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
    nisa.tensor_scalar(
        dst=squares, data=squares, op0=nl.multiply, operand0=1.0 / width, op1=nl.add, operand1=eps
    )
    nisa.tensor_scalar(dst=squares, data=squares, op0=nl.power, operand0=-0.5)
    return squares


def gated_norm(o, roots, factors, dtype):
    """o [rows, heads, width] times the inverse roots of its rows and the factors of its elements."""
    y = nl.ndarray(o.shape, dtype=dtype, buffer=nl.sbuf)
    for head in range(o.shape[1]):
        nisa.scalar_tensor_tensor(
            dst=y[:, head, :],
            data=o[:, head, :],
            op0=nl.multiply,
            operand0=roots[:, head : head + 1],
            op1=nl.multiply,
            operand1=factors[:, head, :],
        )
    return y


def silu(z, shape):
    """z / (1 + exp(-z)) in float32; by exp, whose table the decays need as well."""
    factors = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=factors, op=nl.exp, data=z.reshape(shape), scale=-1.0)
    nisa.tensor_scalar(dst=factors, data=factors, op0=nl.add, operand0=1.0, op1=nl.power, operand1=-1.0)
    nisa.tensor_tensor(
        dst=factors, data1=factors, data2=z.reshape(shape), op=nl.multiply, engine=nisa.engine.gpsimd
    )
    return factors
