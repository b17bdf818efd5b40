"""Compute a softmax: exponentiate scores less their maximum, and sum each row on the way."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def softmax(scores):
    tile = nl.load(scores)
    negated = nl.ndarray((scores.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    sums = nl.ndarray((scores.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=negated, op=nl.maximum, data=tile, axis=1, negate=True)
    nisa.activation_reduce(dst=tile, op=nl.exp, data=tile, reduce_op=nl.add, reduce_res=sums, bias=negated)
    nisa.reciprocal(dst=sums, data=sums)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=sums)
    probabilities = nl.ndarray(scores.shape, dtype=scores.dtype, buffer=nl.shared_hbm)
    nl.store(probabilities, tile)
    return probabilities


scores = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
expected = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
np.testing.assert_allclose(softmax(scores), expected, rtol=1e-5)
