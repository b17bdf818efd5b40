"""The end of the gated delta rule: each head of o normalised, weighed, and gated by silu(z)."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl


def gate_factors(z, weight):
    """Return weight [rows, width] times silu of z [rows, heads * width]: [rows, heads, width] float32."""
    factors = exponentials(z, weight.shape[1])
    weigh(factors, z, weight)
    return factors


def sums_of_squares(tile, scratch_dtype):
    """Return the sum of the squares of each head of a tile [rows, heads, n]: [rows, heads] float32."""
    rows, heads, size = tile.shape
    squares = nl.ndarray((rows, heads), dtype=nl.float32, buffer=nl.sbuf)
    scratch = nl.ndarray((rows, size), dtype=scratch_dtype, buffer=nl.sbuf)
    for head in range(heads):
        nisa.activation(
            dst=scratch,
            op=nl.square,
            data=tile[:, head, :],
            reduce_op=nl.add,
            reduce_res=squares[:, head : head + 1],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
    return squares


def gated_norm(o, roots, factors, dtype):
    """Return o [rows, heads, width] times the inverse roots of its rows and the factors of its elements."""
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


def exponentials(z, width):
    """Return exp(-z) of rows of heads, [rows, heads, width] float32: the decays need the same table."""
    shape = (z.shape[0], z.shape[1] // width, width)
    factors = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=factors, op=nl.exp, data=z.reshape(shape), scale=-1.0)
    return factors


def weigh(factors, z, weight):
    """Replace the `exponentials` by weight [rows, width] times z / (1 + exp(-z))."""
    rows, heads, width = factors.shape
    nisa.tensor_scalar(dst=factors, data=factors, op0=nl.add, operand0=1.0, op1=nl.power, operand1=-1.0)
    across = weight.reshape((rows, 1, width)).broadcast(1, heads)
    for factor in (z.reshape(factors.shape), across):
        nisa.tensor_tensor(
            dst=factors, data1=factors, data2=factor, op=nl.multiply, engine=nisa.engine.gpsimd
        )
