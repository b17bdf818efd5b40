"""Statistics of the errors of a kernel: their RMS and the slope of output on truth, against what rounding predicts.

The bound of `bound` is a worst case and lets systematic errors of the size of one rounding pass. Errors of rounding
average out over many elements, systematic errors do not. Two statistics of the two random trials together use that:

- RMS error. A rounding with unit roundoff u changes a value by at most u relatively; the error is uniform, so its RMS
  is at most u / sqrt(3). With gain g, the factor by which the task enlarges relative errors of its inputs, the squared
  relative RMS is at most the sum of g^2 R u^2 / 3 over the lines that round, R being the roundings of one element.
- Slope. s minimises sum w (output - (1 + s) truth)^2 with w = 1 / (truth^2 + mean truth^2). For 16-bit outputs the
  truth is rounded as well in the difference: the last rounding of a right kernel then cancels except near ties, and a
  factor shows as rounding to the neighbour on one side. A line that rounds n different values changes s by a random
  number of variance at most g^2 R u^2 / (3 n). A rounded constant that all elements share is the same in all trials
  and changes s by at most g R u. Errors that share an index are correlated where intermediate values are shared, so the
  variance is also estimated from the errors, summed by the index of each axis. The largest of these estimates counts.
  Roundings before a nonlinear function add a bias of second order, at most sum g^2 R u^2 / 3; float32 operations
  of the longest chain add at most one roundoff each.

A slope is wrong beyond SIGMAS standard deviations and the biases. Independent errors exceed 6 standard deviations with
a probability of 2e-9. The estimate from sums over G indices is not centred, so that no slope exceeds sqrt(G) of it:
fewer than 36 indices along an axis that agree by chance are no evidence. The RMS of many independent errors has no
spread; RMS_FACTOR covers gains that differ between elements.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulate.isa.plan import Domain, Plan
from simulate.numerics import DType, as_dtype
from simulate.run.stream import READ, Stream
from simulate.testing import roundoff

SIGMAS = 6.0
RMS_FACTOR = 3.0
_LEAST_ELEMENTS = 64
"""Outputs with fewer elements in both trials together have no statistics."""
_FLOAT32 = roundoff("float32")
_FUNCTION_ROUNDINGS = (
    8  # of an activation function in float32, as the tables of functions in numerics are tested
)
_EXACT_BITS = 4  # a constant with so few significant bits was not rounded


@dataclass(frozen=True, slots=True)
class Rounding:
    """Roundings of one line of a kernel into one dtype narrower than float32.

    roundoff: the unit roundoff of the dtype. values: how many different values are rounded. times: mean
    number of roundings of each of them. is_constant: the values are the same in all trials. is_last: the
    results go to HBM as they are.
    """

    roundoff: float
    values: int
    times: float
    is_constant: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class Statistic:
    """RMS error and slope of one output over all trials, each with its bound.

    elements: number of elements that are not 0. rms_truth: RMS of the truth. slope: relative deviation of the
    output from the truth, 0 for a right kernel. rms_allowed, slope_allowed: the bounds of rms and of the
    magnitude of slope.
    """

    elements: int
    rms: float
    rms_allowed: float
    rms_truth: float
    slope: float
    slope_allowed: float


def find_roundings(streams: Sequence[Stream]) -> list[Rounding] | None:
    """Return the roundings of a launch into dtypes narrower than float32, one record for each kernel line and dtype.

    None if floats are rounded to 8 bits or to integers: the model of relative errors does not hold there.
    """
    roundings: list[Rounding] = []
    for stream in streams:
        dtypes = [as_dtype(record.dtype) for record in stream.tensors]
        last = _find_stored_tensors(stream)
        boxes_of_line: dict[tuple[int, DType, bool, bool], Counter[tuple[int, ...]]] = defaultdict(Counter)
        for index in range(len(stream)):
            plan = stream.template(index).plan
            accesses = stream.accesses(index)
            reads = {dtypes[access.tensor] for access in accesses if access.mode == READ}
            floats = {dtype for dtype in reads if dtype.is_float}
            moves = plan.cost.dma is not None or plan.domain is Domain.bits
            for access in accesses:
                dtype = dtypes[access.tensor]
                if access.mode == READ or (moves and floats <= {dtype} and reads):
                    continue
                if not dtype.is_float or dtype.is_packed or dtype.itemsize == 1:
                    if floats and (dtype.is_float or dtype.itemsize < 4):
                        return None
                    continue
                if roundoff(dtype) > _FLOAT32 and (reads or not _is_exact(plan)):
                    key = stream.line_ids[index], dtype, not reads, access.tensor in last
                    box = access.tensor, *access[2:]
                    boxes_of_line[key][box] += 1
        for (_, dtype, is_constant, is_last), boxes in boxes_of_line.items():
            sizes = {box: max(1, (box[2] - box[1]) * (box[4] - box[3]) // dtype.itemsize) for box in boxes}
            values = sum(sizes.values())
            times = sum(sizes[box] * count for box, count in boxes.items()) / values
            roundings.append(
                Rounding(roundoff(dtype), 1 if is_constant else values, times, is_constant, is_last)
            )
    return roundings


def _find_stored_tensors(stream: Stream) -> set[int]:
    """Return the tensors that only DMAs to HBM read, so that the rounding into them is the last one of an output."""
    stored: set[int] = set()
    used: set[int] = set()
    for index in range(len(stream)):
        accesses = stream.accesses(index)
        to_hbm = any(
            access.mode != READ and not stream.tensors[access.tensor].buffer.on_chip for access in accesses
        )
        tensors = {access.tensor for access in accesses if access.mode == READ}
        (stored if to_hbm else used).update(tensors)
    return stored - used


def _is_exact(plan: Plan) -> bool:
    """Return whether an instruction without inputs writes only values of at most four significant bits.

    False if its values cannot be computed here.
    """
    try:
        values = np.unique(np.asarray(plan.compute()[0]).astype(np.float64))
    except (TypeError, ValueError):
        return False
    mantissas = np.frexp(values[np.isfinite(values)])[0] * 2**_EXACT_BITS
    return bool(np.all(mantissas == np.round(mantissas)))


def compute_statistic(
    outputs: Sequence[np.ndarray],
    truths: Sequence[np.ndarray],
    roundings: Sequence[Rounding],
    gain: float,
    contraction: int,
    chain: int,
) -> Statistic | None:
    """Return RMS error and slope of one output in several trials, with what the roundings of the kernel allow.

    Args:
        outputs: The output of each trial, all of one shape.
        truths: The output in float64, of each trial.
        roundings: The roundings of one launch, as `find_roundings` returns them.
        gain: The factor by which the task enlarges relative errors of its inputs, at least 1.
        contraction: The number of products that one element sums in float32.
        chain: The length of the longest chain of instructions.

    Returns:
        None if fewer than 64 finite elements differ from 0, or if their squares overflow.
    """
    truth = np.stack([array.astype(np.float64) for array in truths])
    output = np.stack([array.astype(np.float64) for array in outputs])
    is_narrow = outputs[0].dtype.itemsize == 2
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = truth.astype(outputs[0].dtype).astype(np.float64) if is_narrow else truth
        error, difference = output - truth, output - rounded
    finite = np.isfinite(error) & np.isfinite(difference)
    truth, error, difference = (np.where(finite, array, 0.0) for array in (truth, error, difference))
    elements = int(np.count_nonzero(truth))
    if elements < _LEAST_ELEMENTS:
        return None
    mean_square = float(np.square(truth).sum()) / np.count_nonzero(finite)
    if not 0 < mean_square < math.inf:
        return None
    weights = np.where(finite, 1 / (np.square(truth) + mean_square), 0.0)
    scale = float((weights * np.square(truth)).sum())
    slope = float((weights * difference * truth).sum()) / scale
    rms = math.sqrt(float(np.square(error).sum()) / np.count_nonzero(finite))

    inner = [rounding for rounding in roundings if not rounding.is_last]
    squares = [
        (1.0 if rounding.is_last else gain) ** 2 * rounding.times * rounding.roundoff**2 / 3
        for rounding in roundings
    ]
    second_order = sum(gain**2 * rounding.times * rounding.roundoff**2 / 3 for rounding in inner)
    constants = sum(
        gain * rounding.times * rounding.roundoff for rounding in roundings if rounding.is_constant
    )
    summed = gain * _FLOAT32 * math.sqrt(2 * contraction)
    biased = gain * _FLOAT32 * (chain + _FUNCTION_ROUNDINGS)
    before_last = math.sqrt(second_order) + summed + biased
    variance = 0.0
    for square, rounding in zip(squares, roundings):
        if not rounding.is_constant:
            # A last rounding goes to the other neighbour only where the error before it crosses a tie.
            crossing = min(1.0, before_last / rounding.roundoff) if rounding.is_last and is_narrow else 1.0
            variance += 4 * crossing * square / (rounding.values * len(outputs))
    deviation = max(math.sqrt(variance), _estimate_deviation(weights * truth * difference, scale))
    allowed = SIGMAS * (deviation + summed / math.sqrt(elements)) + constants + second_order + biased
    relative = RMS_FACTOR * math.sqrt(sum(squares) + summed**2) + biased
    root = math.sqrt(mean_square)
    return Statistic(elements, rms, relative * root, root, slope, allowed)


def _estimate_deviation(scores: np.ndarray, scale: float) -> float:
    """Return the standard deviation of the slope, estimated from scores summed by the index of each axis.

    The score of an element is weight * truth * difference. Sums over one index are independent of each other
    where intermediate values are shared along the other axes. They are not centred, so that G sums give at
    least the slope over sqrt(G).

    Args:
        scores: The scores, float64 [trials, *shape of the output].
        scale: The sum of weight * truth**2, by which scores are divided.
    """
    variances = [float(np.square(scores).sum())]
    for axis in range(1, scores.ndim):
        remaining = tuple(other for other in range(1, scores.ndim) if other != axis)
        variances.append(float(np.square(scores.sum(axis=remaining)).sum()))
    return math.sqrt(max(variances)) / scale
