"""The two steps of a softmax over the free dim, for decode attention.

A row's maximum is subtracted before exp, which takes the form exp(scale * score + bias) of one activation
with bias = -scale * maximum. So the maximum is kept negated and scaled: a running bias is a running minimum.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl


def running_bias(scores, scale, before=None):
    """-scale times the maximum of each row of scores [rows, n]: [rows, 1]; never above `before`, if that is given."""
    rows = scores.shape[0]
    largest = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=scores, axis=1, negate=True)
    bias = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    if before is None:
        nisa.tensor_scalar(dst=bias, data=largest, op0=nl.multiply, operand0=scale)
    else:
        nisa.tensor_scalar(
            dst=bias, data=largest, op0=nl.multiply, operand0=scale, op1=nl.minimum, operand1=before
        )
    return bias


def exponentials(scores, scale, bias, dtype):
    """exp(scale * scores + bias) in `dtype`, and its sum for each row, taken in float32: [rows, n] and [rows, 1]."""
    rows = scores.shape[0]
    weights = nl.ndarray(scores.shape, dtype=dtype, buffer=nl.sbuf)
    total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=weights,
        op=nl.exp,
        data=scores,
        bias=bias,
        scale=scale,
        reduce_op=nl.add,
        reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    return weights, total
