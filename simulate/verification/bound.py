"""The bound on the error of a right kernel, derived from its reference, its dtypes and its stream.

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
from simulate.verification.inputs import Call, is_float, nudged, poisoned, results

_NUDGE = roundoff("float32")
_NUDGES = 3  # of which the median counts: a comparison that tips over in one of them is no condition

Reference = Callable[..., Any]


@dataclass(frozen=True)
class Truth:
    """What the reference returns in float64, and for each result the terms of the tolerance, see `tolerance`."""

    arrays: Sequence[np.ndarray]
    magnitudes: Sequence[float]
    contractions: Sequence[int]


def truth_of(reference: Reference, call: Call, contractions: Sequence[int]) -> Truth:
    """The truth for a call and its terms. Raises what the reference raises."""
    arrays = answer(reference, call)
    return Truth(arrays, _magnitudes(reference, call, arrays), contractions)


def answer(reference: Reference, call: Call) -> Sequence[np.ndarray]:
    """What the reference returns for a call with its floats in float64."""
    return _quietly(reference, call.widened())


def own_precision(reference: Reference, call: Call) -> list[Any]:
    """The dtype of each result of the reference, called with the arguments in their own dtypes.

    None stands for a result that is no float. The list is empty where the reference refuses these dtypes.
    """
    try:
        return [each.dtype if is_float(each) else None for each in _quietly(reference, call.copied())]
    except Exception:  # numpy has no bfloat16 of its own; many of its functions refuse it
        return []


def _quietly(reference: Reference, call: Call) -> Sequence[np.ndarray]:
    with np.errstate(all="ignore"), convert_exits("the reference"):
        return results(reference(*call.args, **call.keywords), "reference")


def _magnitudes(reference: Reference, call: Call, arrays: Sequence[np.ndarray]) -> list[float]:
    moved = [_quietly(reference, nudged(call.widened(), _NUDGE, seed)) for seed in range(_NUDGES)]
    found = []
    for number, truth in enumerate(arrays):
        with np.errstate(invalid="ignore"):
            steps = [np.abs(each[number].astype(np.float64) - truth) / _NUDGE for each in moved]
        found.append(max(largest_finite(truth), largest_finite(_median(*steps))))
    return found


def _median(one: np.ndarray, two: np.ndarray, three: np.ndarray) -> np.ndarray:
    """The middle one of three values, NaN where one of them is; np.median sorts and takes 20 times as long."""
    return np.maximum(np.minimum(one, two), np.minimum(np.maximum(one, two), three))


def largest_finite(array: np.ndarray) -> float:
    """Return the largest magnitude of the finite elements, 0.0 where there are none."""
    values = np.abs(array.astype(np.float64))
    return float(values[np.isfinite(values)].max(initial=0.0))


def contractions_of(reference: Reference, call: Call, arrays: Sequence[np.ndarray]) -> list[int]:
    """For each result, the elements that one element of it combines: counted by the NaN that one element spreads.

    `arrays` is what the reference returns for the call.
    """
    together = sum({size for array in call.floats for size in array.shape})
    combined = [0.0] * len(arrays)
    wide = call.widened()
    for place, array in enumerate(call.arrays):
        if not is_float(array):
            continue
        try:
            tries = [
                _quietly(reference, poisoned(wide, place, element))
                for element in {0, array.size // 2, array.size - 1}
            ]
        except Exception:  # a reference that refuses NaN
            return [together] * len(arrays)
        for number, truth in enumerate(arrays):
            reached = max(_new_nan(each[number], truth) for each in tries)
            # A reference that removes NaN, such as np.nan_to_num, shows nothing: the extents are what is left to go by.
            combined[number] += reached * array.size / max(1, truth.size) if reached else together
    return [min(together, int(np.ceil(each))) for each in combined]


def _new_nan(tried: np.ndarray, truth: np.ndarray) -> int:
    if not is_float(tried) or tried.shape != truth.shape:
        return 0
    return int(np.count_nonzero(np.isnan(tried) & ~np.isnan(truth)))


def longest_chain(streams: Iterable[Stream], into: Any = None) -> int:
    """The length of the longest chain of instructions in a launch.

    In a chain each instruction reads a tensor that the instruction before it wrote. With `into`, only instructions
    that round into this dtype count. A DMA between two tensors of the dtype moves bits and rounds nothing.
    """
    chains: dict[tuple[int, int], int] = defaultdict(int)
    for stream in streams:
        dtypes = [record.dtype for record in stream.tensors]
        for index in range(len(stream)):
            accesses = stream.accesses(index)
            reads = [each.tensor for each in accesses if each.mode == READ]
            before = max((chains[stream.rank, tensor] for tensor in reads), default=0)
            moves = stream.costs[stream.cost_ids[index]].dma is not None
            for written in (each.tensor for each in accesses if each.mode != READ):
                rounds = into is None or (
                    dtypes[written] == into
                    and not (moves and all(dtypes[tensor] == into for tensor in reads))
                )
                key = stream.rank, written
                chains[key] = max(chains[key], before + rounds)
    return max(chains.values(), default=0)


class Terms(NamedTuple):
    """The terms of the bound of one output, see `simulate.testing.tolerance`."""

    magnitude: float
    contraction: int
    roundings: int
    through: Any


def terms_of(
    output: np.ndarray, number: int, truth: Truth, call: Call, streams: Sequence[Stream], chain: int
) -> Terms:
    """The terms for output `number` of a kernel; `chain` is the longest chain of its instructions."""
    dtypes = [each.dtype for each in call.floats]
    through = narrowest(dtypes + ([output.dtype] if is_float(output) else []))
    rounded = longest_chain(streams, through.name) - (output.dtype == through)
    roundings = 1 + max(0, min(len(dtypes), rounded))
    return Terms(truth.magnitudes[number], truth.contractions[number] + chain, roundings, through)


def stored(exact: np.ndarray, output: np.ndarray) -> np.ndarray:
    """The truth with an infinity where the output's dtype has no value as large."""
    if not is_float(output):
        return exact
    with np.errstate(invalid="ignore"):
        return np.where(
            np.isfinite(exact) & (np.abs(exact) > float(ml_dtypes.finfo(output.dtype).max)),
            np.copysign(np.inf, exact),
            exact,
        )


def narrowest(dtypes: Iterable[Any]) -> Any:
    """The float dtype with the largest roundoff, float32 where there is none."""
    return max([np.dtype(np.float32), *(np.dtype(each) for each in dtypes)], key=_coarseness)


def _coarseness(dtype: Any) -> float:
    return 0.0 if dtype == np.float64 else roundoff(dtype)


def narrower(dtype: Any, other: Any) -> bool:
    """Whether a float dtype rounds more coarsely than another one."""
    return _coarseness(np.dtype(dtype)) > _coarseness(np.dtype(other))
