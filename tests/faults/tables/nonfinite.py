"""NaN and infinities that a kernel makes out of finite inputs and returns."""

from __future__ import annotations

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault

LARGE = 5 * ramp(8, 16)  # up to 150; exp overflows float32 above 88.7
EMPTY_ROW = np.where(np.arange(8)[:, None] == 3, 0, ramp(8, 4) + 1).astype(np.float32)
MASK = np.where(np.arange(8)[:, None] == 5, 0, np.arange(16) % 2)[:, :].astype(np.float32)


def softmax(x):
    raised = np.exp(x - x.max(1, keepdims=True))
    return raised * (np.float32(1) / raised.sum(1, keepdims=True))


@fault("NKW-NONFINITE", LARGE, answer=softmax)
def exp_without_maximum(x, sick):
    """The exponentials of a softmax overflow, because the row's maximum is not subtracted."""
    tile, raised = nl.load(x), nl.ndarray((8, 16), dtype=nl.float32)
    most, total = nl.ndarray((8, 1), dtype=nl.float32), nl.ndarray((8, 1), dtype=nl.float32)
    nisa.tensor_reduce(dst=most, data=tile, op=nl.maximum, axis=1, negate=True)
    if sick:
        nisa.memset(most, value=0.0)
    nisa.activation(dst=raised, op=nl.exp, data=tile, bias=most)  # blamed
    nisa.tensor_reduce(dst=total, data=raised, op=nl.add, axis=1)
    nisa.reciprocal(dst=total, data=total)
    nisa.tensor_scalar(dst=raised, data=raised, op0=nl.multiply, operand0=total)
    return copied_out(raised)


@fault("NKW-NONFINITE", LARGE, answer=lambda x: np.exp(x - np.float32(150)).astype(ml_dtypes.bfloat16))
def exp_into_bfloat16(x, sick):
    """The exponential of a bfloat16 tile overflows, as bfloat16 has the exponents of float32."""
    out = nl.ndarray((8, 16), dtype=nl.bfloat16)
    nisa.activation(dst=out, op=nl.exp, data=nl.load(x), bias=0.0 if sick else -150.0)  # blamed
    return copied_out(out)


@fault(
    "NKW-NONFINITE",
    ramp(8, 16),
    MASK,
    answer=lambda x, mask: np.where(mask == 1, x, -3e4) - np.where(mask == 1, x, -3e4).max(1, keepdims=True),
)
def masked_row(x, mask, sick):
    """A row of scores is masked with -inf altogether, and its maximum is subtracted: inf - inf."""
    tile, keep = nl.load(x), nl.load(mask)
    scores = nl.full((8, 16), float("-inf") if sick else -3e4, dtype=nl.float32)
    chosen = nl.ndarray((8, 16), dtype=nl.uint8)
    nisa.tensor_copy(dst=chosen, src=keep)
    nisa.tensor_copy_predicated(dst=scores, src=tile, predicate=chosen)
    most = nl.ndarray((8, 1), dtype=nl.float32)
    nisa.tensor_reduce(dst=most, data=scores, op=nl.maximum, axis=1)
    nisa.tensor_scalar(dst=scores, data=scores, op0=nl.subtract, operand0=most)  # blamed
    return copied_out(scores)


@fault(
    "NKW-NONFINITE",
    EMPTY_ROW,
    answer=lambda x: x * (np.float32(1) / np.maximum(x.sum(1, keepdims=True), np.float32(1))),
)
def row_of_zeros(x, sick):
    """A row of zeros is divided by its sum: 0 times infinity."""
    tile, total = nl.load(x), nl.ndarray((8, 1), dtype=nl.float32)
    nisa.tensor_reduce(dst=total, data=tile, op=nl.add, axis=1)
    if not sick:
        nisa.tensor_scalar(dst=total, data=total, op0=nl.maximum, operand0=1.0)
    nisa.reciprocal(dst=total, data=total)  # blamed
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=total)
    return copied_out(tile)


@fault(
    "NKW-NONFINITE",
    ramp(8, 4),
    answer=lambda x: np.float32(1) / np.sqrt(x + np.float32(1)),
)
def root_of_a_negative_number(x, sick):
    """The constant below the root has the wrong sign."""
    tile = nl.load(x)
    nisa.tensor_scalar(
        dst=tile,
        data=tile,
        op0=nl.add,
        operand0=-1.5 if sick else 1.0,
    )
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.rsqrt, operand0=None)  # blamed
    return copied_out(tile)


@fault("NKW-NONFINITE", ramp(4, 4), answer=lambda x: (x * np.float32(2.0**40)).sum(1, keepdims=True))
def squares_overflow(x, sick):
    """The sum of squares of large values exceeds float32; the reduction makes the infinity."""
    tile, total = nl.load(x), nl.ndarray((4, 1), dtype=nl.float32)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0**123 if sick else 2.0**40)
    nisa.tensor_reduce(dst=total, data=tile, op=nl.add, axis=1)  # blamed
    return copied_out(total)


@fault("NKW-NONFINITE", ramp(4, 4) + 1, answer=lambda x: x / x)
def difference_of_equal_numbers(x, sick):
    """A ratio has a denominator that is zero everywhere, in a loop over column blocks and through PSUM."""
    tile = nl.load(x)
    for block in range(2):
        columns = tile[:, block * 2 : block * 2 + 2]
        lower = nl.ndarray((4, 2), dtype=nl.float32, buffer=nl.psum)
        nisa.tensor_tensor(dst=lower, data1=columns, data2=columns, op=nl.subtract if sick else nl.maximum)
        upper = nl.ndarray((4, 2), dtype=nl.float32)
        nisa.tensor_copy(dst=upper, src=lower)
        nisa.reciprocal(dst=upper, data=upper)  # blamed
        nisa.tensor_tensor(dst=columns, data1=columns, data2=upper, op=nl.multiply)
    return copied_out(tile)
