"""Drawing one of a row's candidates: temperature, top-k, top-p and min-p as data, then the inverse cumulative sum.

`sample` calls this file. Candidates are the K largest logits of a row: [rows, K], one row per partition, best first.
All parameters are tiles [rows, 1], so the instructions are the same whatever they hold. Masked candidates, whose logits
are below MASKED, have a weight of 0. The first candidate always keeps its weight.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.sampling.top_k import take_largest
from nki_kernels.tiles import MASKED, filled

LEAST_TEMPERATURE = 1.0e-6
"""Lower temperatures draw as this one does; 0 takes the first candidate."""

LARGEST_UNIFORM = 1.0 - 2.0**-24
"""The largest float32 below 1: times any sum it is below that sum, so a draw never passes the last candidate."""

BEYOND_IDS = 2.0**25
"""Moves an id, which is below 2^24, behind all others."""

LEAST_EXPONENT = -200.0
"""exp of it is 0 in float32; lower arguments need not be asked of a table."""


def allocate_column(rows):
    """Allocate a float32 tile [rows, 1] in SBUF."""
    return nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)


def prepare_parameters(temperature, top_k, top_p):
    """Return the parameters of `compute_candidate_weights`, three float32 tiles [rows, 1] in SBUF.

    These are 1 / temperature, for at least LEAST_TEMPERATURE; top_k, or 1 where the temperature is 0; and
    top_p, plus 1 where it is 1 or more, so that rounding of sums drops no candidate. The arguments are tiles
    [rows, 1] as well.
    """
    rows = temperature.shape[0]
    floored = allocate_column(rows)
    inverse = allocate_column(rows)
    positive = allocate_column(rows)
    beyond_one = allocate_column(rows)
    kept_count = allocate_column(rows)
    share = allocate_column(rows)
    nisa.tensor_scalar(dst=floored, data=temperature, op0=nl.maximum, operand0=LEAST_TEMPERATURE)
    nisa.reciprocal(dst=inverse, data=floored)
    nisa.tensor_scalar(dst=positive, data=temperature, op0=nl.greater, operand0=0.0)
    nisa.scalar_tensor_tensor(
        dst=beyond_one, data=top_k, op0=nl.subtract, operand0=1.0, op1=nl.multiply, operand1=positive
    )
    nisa.tensor_scalar(dst=kept_count, data=beyond_one, op0=nl.add, operand0=1.0)
    nisa.scalar_tensor_tensor(
        dst=share, data=top_p, op0=nl.greater_equal, operand0=1.0, op1=nl.add, operand1=top_p
    )
    return inverse, kept_count, share


def sum_cumulatively(weights):
    """Return the cumulative sums of weights [rows, K] along a row, inclusive, as np.cumsum: float32 in SBUF."""
    rows, count = weights.shape
    ones = filled((rows, count), 1.0)
    sums = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor_scan(dst=sums, data0=ones, data1=weights, initial=0.0, op0=nl.multiply, op1=nl.add)
    return sums


def keep_where(weights, data, operator, bound):
    """Return weights where operator(data, bound) holds, else 0: a new float32 tile in SBUF.

    Args:
        data: tile of the shape of `weights`.
        operator: a comparison, such as nl.less.
        bound: [rows, 1], or a number.
    """
    kept = nl.ndarray(weights.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=kept, data=data, op0=operator, operand0=bound, op1=nl.multiply, operand1=weights
    )
    return kept


def compute_candidate_weights(values, parameters, min_p):
    """Return the weight of each candidate for the draw, [rows, K] float32 in SBUF, 0 for those that are dropped.

    A weight is exp((value - best) / temperature). Candidates whose value is not above MASKED are dropped,
    then what top-k, top-p and min-p drop, in this order. The first candidate always stays, with weight 1.

    Args:
        values: the candidates' logits, [rows, K], descending.
        parameters: the result of `prepare_parameters`.
        min_p: [rows, 1]: weights below it are dropped.
    """
    rows, count = values.shape
    inverse, kept_count, share = parameters
    below_best = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    exponents = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    weights = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=below_best,
        data=values,
        op0=nl.subtract,
        operand0=values[:, 0:1],
        op1=nl.multiply,
        operand1=inverse,
    )
    nisa.tensor_scalar(dst=exponents, data=below_best, op0=nl.maximum, operand0=LEAST_EXPONENT)
    nisa.activation(dst=weights, op=nl.exp, data=exponents)
    rank = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=rank, pattern=[[1, count]])
    weights = keep_where(weights, values, nl.greater, MASKED)
    weights = keep_where(weights, rank, nl.less, kept_count)
    nisa.memset(dst=weights[:, 0:1], value=1.0)
    sums = sum_cumulatively(weights)
    limit = allocate_column(rows)
    nisa.tensor_tensor(dst=limit, data1=sums[:, count - 1 : count], data2=share, op=nl.multiply)
    ahead = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    # Below every limit: a top_p of 0, or a product that underflows, still keeps the best candidate.
    nisa.memset(dst=ahead[:, 0:1], value=-1.0)
    nisa.tensor_copy(dst=ahead[:, 1:count], src=sums[:, 0 : count - 1])
    weights = keep_where(weights, ahead, nl.less, limit)
    return keep_where(weights, weights, nl.greater_equal, min_p)


def draw(weights, ids, uniform):
    """Draw a candidate of each row in proportion to its weight; return its id, [rows, 1] float32 in SBUF.

    That is the first candidate, in ascending order of ids, whose cumulative weight is above uniform times the
    sum of all weights.

    Args:
        weights: [rows, K] float32.
        ids: [rows, K], whole numbers below 2^24 in float32.
        uniform: [rows, 1], random numbers from 0 to 1.
    """
    rows, count = ids.shape
    backwards = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    # The search is descending, so negated ids come out in ascending order.
    nisa.tensor_scalar(dst=backwards, data=ids, op0=nl.multiply, operand0=-1.0)
    in_order = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    indices = nl.ndarray((rows, count), dtype=nl.uint32, buffer=nl.sbuf)
    take_largest(in_order, indices, backwards, backwards)
    ordered = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.nc_n_gather(dst=ordered, data=weights, indices=indices)
    sums = sum_cumulatively(ordered)
    drawn = allocate_column(rows)
    nisa.scalar_tensor_tensor(
        dst=drawn,
        data=uniform,
        op0=nl.minimum,
        operand0=LARGEST_UNIFORM,
        op1=nl.multiply,
        operand1=sums[:, count - 1 : count],
    )
    behind = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=behind, data=sums, op0=nl.less_equal, operand0=drawn, op1=nl.multiply, operand1=-BEYOND_IDS
    )
    negated = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=negated, data1=behind, data2=in_order, op=nl.add)
    chosen = allocate_column(rows)
    # Negated ids up to the drawn sum are 2^25 lower, so the maximum is the lowest id whose sum is above it.
    nisa.tensor_reduce(dst=chosen, op=nl.maximum, data=negated, axis=1, negate=True)
    return chosen


def select_value(chosen, ids, values):
    """Return the value of each row's chosen candidate, [rows, 1] float32 in SBUF.

    Args:
        chosen: id of the candidate, [rows, 1] float32.
        ids, values: of all candidates, [rows, K] float32; the ids of a row are all different.
    """
    only = nl.ndarray(values.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=only, data=ids, op0=nl.equal, operand0=chosen, op1=nl.multiply, operand1=values
    )
    value = allocate_column(values.shape[0])
    nisa.tensor_reduce(dst=value, op=nl.add, data=only, axis=1)
    return value
