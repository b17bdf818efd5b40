"""The end of the gated delta rule: each head of o normalised, weighed, and gated by silu(z).

y = o / rms(o) * weight * silu(z), for each head. Both kernels call the functions here. silu(z) is z / (1 +
exp(-z)): the decays need exp as well, so the Scalar engine loads no other table.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl


def compute_gate_factors(z, weight):
    """Return weight times silu(z), a new float32 SBUF tile [rows, heads, width].

    Args:
        z: [rows, heads * width] in SBUF.
        weight: [rows, width] in SBUF, the same on each row.
    """
    factors = compute_exponentials(z, weight.shape[1])
    finish_gate_factors(factors, z, weight)
    return factors


def sum_squares(tile, scratch_dtype):
    """Return the sums of squares over the last dim of a tile [rows, heads, n]: [rows, heads] float32 in SBUF.

    Args:
        scratch_dtype: dtype of the squares that the instruction also writes, to a tile which nothing reads.
    """
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


def apply_gated_norm(o, roots, factors, dtype):
    """Return o * roots * factors as a new SBUF tile [rows, heads, width] of a dtype.

    Args:
        o: [rows, heads, width], in SBUF or PSUM.
        roots: [rows, heads] float32, 1 / rms(o) of each head.
        factors: [rows, heads, width] float32, from `compute_gate_factors`.
    """
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


def compute_exponentials(z, width):
    """Return exp(-z) of z [rows, heads * width], a new float32 SBUF tile [rows, heads, width]."""
    shape = (z.shape[0], z.shape[1] // width, width)
    factors = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=factors, op=nl.exp, data=z.reshape(shape), scale=-1.0)
    return factors


def finish_gate_factors(factors, z, weight):
    """Replace `factors`, exp(-z) from `compute_exponentials`, by weight * z / (1 + exp(-z)), in place.

    Args:
        z: [rows, heads * width] in SBUF.
        weight: [rows, width] in SBUF, the same on each row.
    """
    rows, heads, width = factors.shape
    nisa.tensor_scalar(dst=factors, data=factors, op0=nl.add, operand0=1.0, op1=nl.power, operand1=-1.0)
    across = weight.reshape((rows, 1, width)).broadcast(1, heads)
    for factor in (z.reshape(factors.shape), across):
        nisa.tensor_tensor(
            dst=factors, data1=factors, data2=factor, op=nl.multiply, engine=nisa.engine.gpsimd
        )
