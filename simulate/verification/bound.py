"""Bound on the error of a right kernel, derived from its reference, its dtypes and its stream.

`simulate.testing.tolerance` turns four facts into a bound; here each of them is found, none is chosen:

- magnitude: the largest value of the truth or, where that is more, how far the truth moves when all inputs are off by
  one float32 roundoff, over that roundoff. This is the condition of the task: 1 for a sum without cancellation, |x| for
  exp(x), the mean over the deviation for a normalised row.
- contraction: how many elements of the arguments one element of the result combines, but not more than the extents of
  the arguments together, as no axis is contracted twice; and the longest chain of instructions of the kernel, each of
  which rounds once.
- through: the narrowest float dtype of arguments and results. It comes from the task and not from the kernel, so a
  kernel that keeps float32 sums in bfloat16 gains nothing by it.
- roundings: one into the result's dtype, and those into `through` on the kernel's longest chain of instructions, but
  not more than one for every float array among the arguments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from simulate.run.exits import convert_exits
from simulate.run.stream import READ, Stream
from simulate.testing import roundoff
from simulate.verification.inputs import Call, convert_results, is_float, nudge, poison

_NUDGE = roundoff("float32")
_NUDGES = 3  # of which the median counts: a comparison that tips over in one of them is no condition

Reference = Callable[..., Any]


@dataclass(frozen=True)
class Truth:
    """Results of the reference in float64, and the magnitude and contraction of each for `tolerance`."""

    arrays: Sequence[np.ndarray]
    magnitudes: Sequence[float]
    contractions: Sequence[int]


def compute_truth(reference: Reference, call: Call, contractions: Sequence[int]) -> Truth:
    """Return the reference's results in float64 with their terms; errors of the reference are not caught.

    Args:
        reference: The reference, which is called four times.
        call: The arguments.
        contractions: For each result, how many elements one of its elements combines; stored unchanged.
    """
    arrays = call_reference(reference, call)
    return Truth(arrays, _compute_magnitudes(reference, call, arrays), contractions)


def call_reference(reference: Reference, call: Call) -> Sequence[np.ndarray]:
    """Call the reference with the floats of a call in float64, and return its results as arrays."""
    return _call_quietly(reference, call.widen_floats())


def find_result_dtypes(reference: Reference, call: Call) -> list[Any]:
    """Call the reference with the arguments in their own dtypes and return the dtype of each result.

    The dtype of a result that is not a float is None. The list is empty if the reference raises an error for
    these dtypes.
    """
    try:
        return [
            result.dtype if is_float(result) else None
            for result in _call_quietly(reference, call.copy_arrays())
        ]
    except Exception:  # numpy has no bfloat16 of its own; many of its functions refuse it
        return []


def _call_quietly(reference: Reference, call: Call) -> Sequence[np.ndarray]:
    with np.errstate(all="ignore"), convert_exits("the reference"):
        return convert_results(reference(*call.args, **call.keywords), "reference")


def _compute_magnitudes(reference: Reference, call: Call, arrays: Sequence[np.ndarray]) -> list[float]:
    moved = [_call_quietly(reference, nudge(call.widen_floats(), _NUDGE, seed)) for seed in range(_NUDGES)]
    magnitudes = []
    for number, truth in enumerate(arrays):
        with np.errstate(invalid="ignore"):
            steps = [np.abs(outputs[number].astype(np.float64) - truth) / _NUDGE for outputs in moved]
        magnitudes.append(max(find_largest_finite(truth), find_largest_finite(_compute_median(*steps))))
    return magnitudes


def _compute_median(one: np.ndarray, two: np.ndarray, three: np.ndarray) -> np.ndarray:
    """Return the elementwise median of three arrays, NaN where any has NaN; np.median takes 20 times as long."""
    return np.maximum(np.minimum(one, two), np.minimum(np.maximum(one, two), three))


def find_largest_finite(array: np.ndarray) -> float:
    """Return the largest magnitude of the finite elements, 0.0 if there are none."""
    values = np.abs(array.astype(np.float64))
    return float(values[np.isfinite(values)].max(initial=0.0))


def count_contractions(reference: Reference, call: Call, arrays: Sequence[np.ndarray]) -> list[int]:
    """Return, for each result, how many elements of the arguments one of its elements combines.

    NaN is put into one element of an argument at a time, and the NaN in the results are counted. No count
    exceeds the sum of the different extents of the float arguments; that sum is returned if the reference
    removes or refuses NaN.

    Args:
        reference: The reference.
        call: The arguments.
        arrays: What the reference returns for the call.
    """
    together = sum({size for array in call.floats for size in array.shape})
    combined = [0.0] * len(arrays)
    wide = call.widen_floats()
    for position, array in enumerate(call.arrays):
        if not is_float(array):
            continue
        try:
            tries = [
                _call_quietly(reference, poison(wide, position, element))
                for element in {0, array.size // 2, array.size - 1}
            ]
        except Exception:  # a reference that refuses NaN
            return [together] * len(arrays)
        for number, truth in enumerate(arrays):
            reached = max(_count_new_nan(attempt[number], truth) for attempt in tries)
            # A reference that removes NaN, such as np.nan_to_num, shows nothing: the extents are what is left to go by.
            combined[number] += reached * array.size / max(1, truth.size) if reached else together
    return [min(together, int(np.ceil(count))) for count in combined]


def _count_new_nan(tried: np.ndarray, truth: np.ndarray) -> int:
    if not is_float(tried) or tried.shape != truth.shape:
        return 0
    return int(np.count_nonzero(np.isnan(tried) & ~np.isnan(truth)))


def longest_chain(streams: Iterable[Stream], into: Any = None) -> int:
    """Return the length of the longest chain of dependent instructions in a launch, 0 without instructions.

    In a chain each instruction reads a tensor that the instruction before it wrote.

    Args:
        streams: The streams of the launch.
        into: Count only instructions that round into this dtype; None counts all. A DMA between two tensors
            of the dtype moves bits and rounds nothing.
    """
    chains: dict[tuple[int, int], int] = defaultdict(int)
    for stream in streams:
        dtypes = [record.dtype for record in stream.tensors]
        for index in range(len(stream)):
            accesses = stream.accesses(index)
            reads = [access.tensor for access in accesses if access.mode == READ]
            before = max((chains[stream.rank, tensor] for tensor in reads), default=0)
            moves = stream.costs[stream.cost_ids[index]].dma is not None
            for written in (access.tensor for access in accesses if access.mode != READ):
                rounds = into is None or (
                    dtypes[written] == into
                    and not (moves and all(dtypes[tensor] == into for tensor in reads))
                )
                key = stream.rank, written
                chains[key] = max(chains[key], before + rounds)
    return max(chains.values(), default=0)


class Terms(NamedTuple):
    """Terms of the bound of one output, in the order of the arguments of `compare` and `tolerance`."""

    magnitude: float
    contraction: int
    roundings: int
    through: Any


def derive_terms(
    output: np.ndarray, number: int, truth: Truth, call: Call, streams: Sequence[Stream], chain: int
) -> Terms:
    """Return the terms of the bound of one output of a kernel.

    Args:
        output: The output.
        number: Its index among the outputs.
        truth: The results of the reference.
        call: The arguments.
        streams: The streams of the launch.
        chain: The length of the longest chain of its instructions.
    """
    dtypes = [array.dtype for array in call.floats]
    through = find_narrowest(dtypes + ([output.dtype] if is_float(output) else []))
    rounded = longest_chain(streams, through.name) - (output.dtype == through)
    roundings = 1 + max(0, min(len(dtypes), rounded))
    return Terms(truth.magnitudes[number], truth.contractions[number] + chain, roundings, through)


def saturate(exact: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Return the truth with a signed infinity wherever it exceeds the range of the output's dtype.

    The truth is returned unchanged if the output has an integer or bool dtype.
    """
    if not is_float(output):
        return exact
    with np.errstate(invalid="ignore"):
        return np.where(
            np.isfinite(exact) & (np.abs(exact) > float(ml_dtypes.finfo(output.dtype).max)),
            np.copysign(np.inf, exact),
            exact,
        )


def find_narrowest(dtypes: Iterable[Any]) -> Any:
    """Return the float dtype with the largest roundoff, float32 if none is narrower."""
    return max([np.dtype(np.float32), *(np.dtype(dtype) for dtype in dtypes)], key=_get_coarseness)


def _get_coarseness(dtype: Any) -> float:
    return 0.0 if dtype == np.float64 else roundoff(dtype)


def is_narrower(dtype: Any, other: Any) -> bool:
    """Return whether `dtype` rounds more coarsely than `other`; both are float dtypes."""
    return _get_coarseness(np.dtype(dtype)) > _get_coarseness(np.dtype(other))
