"""Arguments outside the range of an activation function."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


@fault(
    "NKW-FUNCTION-RANGE",
    np.full((4, 2), 0.25, np.float32),
    ramp(4, 2),
    answer=lambda x, y: np.zeros((4, 2), np.float32),
)
def angle_of_a_ratio(x, y, sick):
    """The angle of a vector as the arctangent of y / x, which has no bound where x is small."""
    across, up = nl.load(x), nl.load(y)
    ratio = nl.ndarray((4, 2), dtype=nl.float32)
    nisa.reciprocal(dst=ratio, data=across)
    nisa.tensor_tensor(dst=ratio, data1=ratio, data2=up, op=nl.multiply)
    if not sick:
        nisa.tensor_scalar(dst=ratio, data=ratio, op0=nl.minimum, operand0=0.0)
    nisa.activation(dst=ratio, op=nl.arctan, data=ratio)  # blamed
    return copied_out(ratio)


@fault(
    "NKW-FUNCTION-RANGE",
    np.tile(np.array([[0, 1]], np.float32), (4, 4)),
    answer=lambda x: np.zeros_like(x) + 0.0,
)
def logarithm_of_zero(x, sick):
    """The logarithm of a probability that may be zero."""
    tile = nl.load(x)
    if not sick:
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.maximum, operand0=1.0)
    nisa.activation(dst=tile, op=nl.log, data=tile)  # blamed
    return copied_out(tile)


@fault("NKW-FUNCTION-RANGE", np.repeat(np.float32([[0], [1], [1], [1]]), 3, axis=1), answer=lambda x: x / 2)
def norm_of_a_padding_row(x, sick):
    """The reciprocal root of a row of zeros: epsilon is added on the wrong side of it."""
    tile = nl.load(x)
    sums = nl.ndarray((4, 1), dtype=nl.float32)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=tile, axis=1)
    scale = nl.ndarray((4, 1), dtype=nl.float32)
    shift = 0.0 if sick else 1.0
    nisa.activation(dst=scale, op=nl.rsqrt, data=sums, bias=shift)  # blamed
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=scale)
    return copied_out(tile)


@fault(
    "NKW-FUNCTION-RANGE",
    np.ones((4, 4), np.float32),
    np.repeat(np.float32([[1], [1], [0], [1]]), 4, axis=1),
    answer=lambda x, mask: mask / 4,
)
def reciprocal_of_an_empty_sum(x, mask, sick):
    """A row that is masked out sums to zero, and the softmax divides by it."""
    tile, kept = nl.load(x), nl.load(mask)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=kept, op=nl.multiply)
    sums = nl.ndarray((4, 1), dtype=nl.float32)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=tile, axis=1)
    if not sick:
        nisa.tensor_scalar(dst=sums, data=sums, op0=nl.maximum, operand0=1.0)
    nisa.activation(dst=sums, op=nl.reciprocal, data=sums)  # blamed
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=sums)
    return copied_out(tile)


@fault(
    "NKW-FUNCTION-RANGE",
    np.array([[4], [9], [3], [1]], np.float32),
    np.array([[0], [0], [3.5], [0]], np.float32),
    answer=lambda x, means: np.array([[2], [3], [0], [1]], np.float32),
)
def root_of_a_negative_variance(x, means, sick):
    """The variance as mean of squares less square of the mean comes out below zero."""
    squares, mean = nl.load(x), nl.load(means)
    variance = nl.ndarray((4, 1), dtype=nl.float32)
    nisa.tensor_tensor(dst=variance, data1=squares, data2=mean, op=nl.subtract)
    if not sick:
        nisa.tensor_scalar(dst=variance, data=variance, op0=nl.maximum, operand0=0.0)
    nisa.activation(dst=variance, op=nl.sqrt, data=variance)  # blamed
    return copied_out(variance)


@fault("NKW-FUNCTION-RANGE", ramp(4, 8) % 4, answer=lambda x: x)
def scaled_sine(x, sick):
    """The data lie within pi; scale is applied before the function and takes them out of it."""
    tile = nl.load(x)
    result = nl.ndarray((4, 8), dtype=nl.float32)
    factor = 4.0 if sick else 0.0
    nisa.activation(dst=result, op=nl.sin, data=tile, scale=factor)  # blamed
    nisa.tensor_tensor(dst=result, data1=result, data2=tile, op=nl.add)
    return copied_out(result)


@fault("NKW-FUNCTION-RANGE", np.tile(np.arange(8, dtype=np.float32), (4, 1)), answer=lambda x: x)
def sine_of_positions(x, sick):
    """Rotary angles grow with the position; the sine of the Scalar engine ends at pi."""
    angles = nl.load(x)
    result = nl.ndarray((4, 8), dtype=nl.float32)
    data = angles if sick else angles[:, 0:1].broadcast(1, 8)
    nisa.activation(dst=result, op=nl.sin, data=data)  # blamed
    if not sick:
        nisa.tensor_tensor(dst=result, data1=result, data2=angles, op=nl.add)
    return copied_out(result)
