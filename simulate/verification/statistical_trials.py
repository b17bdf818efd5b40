"""Trials that judge the statistics of the errors of the two random trials together."""

from __future__ import annotations

from collections.abc import Sequence

from simulate.verification.bound import find_largest_finite, longest_chain
from simulate.verification.inputs import is_float
from simulate.verification.statistics import Statistic, compute_statistic, find_roundings
from simulate.verification.trial import Outcome, Trial

RMS, SLOPE = "rms error", "slope - 1"


def judge_statistics(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials of RMS error and slope, judged over launches on random values of one shape together.

    Each has the figures of the output that is closest to its bound. The list is empty if a launch is not
    right or no output has statistics. It has one trial with outcome open if the kernel rounds to 8 bits or to
    integers.

    Args:
        trials: The trials of the launches, with their outputs and truths.
    """
    if any(trial.outcome is not Outcome.right or trial.launch is None for trial in trials):
        return []
    first = trials[0]
    assert first.launch is not None
    if not any(map(is_float, first.outputs)):
        return []
    roundings = find_roundings(first.launch.streams)
    if roundings is None:
        why = "roundings to 8 bits or to integers have no relative error"
        return [Trial(f"{RMS}, {SLOPE}", first.arguments, Outcome.open, why)]
    chain = longest_chain(first.launch.streams)
    statistics: dict[int, Statistic] = {}
    for number, output in enumerate(first.outputs):
        truths = [trial.truth for trial in trials if trial.truth is not None]
        if not is_float(output) or any(trial.outputs[number].shape != output.shape for trial in trials):
            continue
        largest = max(find_largest_finite(truth.arrays[number]) for truth in truths)
        gain = max([1.0, *(truth.magnitudes[number] / largest for truth in truths if largest)])
        seen = compute_statistic(
            [trial.outputs[number] for trial in trials],
            [truth.arrays[number] for truth in truths],
            roundings,
            gain,
            truths[0].contractions[number],
            chain,
        )
        if seen is not None:
            statistics[number] = seen
    if not statistics:
        return []
    return [
        _judge_rms(statistics, len(first.outputs), first.arguments),
        _judge_slope(statistics, len(first.outputs), first.arguments),
    ]


def _judge_rms(statistics: dict[int, Statistic], outputs: int, arguments: str) -> Trial:
    number, seen = max(statistics.items(), key=lambda item: item[1].rms / item[1].rms_allowed)
    outcome, reason = Outcome.right, ""
    if seen.rms > seen.rms_allowed:
        outcome = Outcome.wrong
        reason = (
            f"{_format_output_name(number, outputs)}the RMS error is {seen.rms:.3g} over {seen.elements:,} elements; "
            f"the roundings of the kernel explain up to {seen.rms_allowed:.3g}"
        )
    return Trial(RMS, arguments, outcome, reason, seen.rms, seen.rms_allowed, seen.rms_truth)


def _judge_slope(statistics: dict[int, Statistic], outputs: int, arguments: str) -> Trial:
    number, seen = max(statistics.items(), key=lambda item: abs(item[1].slope) / item[1].slope_allowed)
    outcome, reason = Outcome.right, ""
    if abs(seen.slope) > seen.slope_allowed:
        outcome = Outcome.wrong
        reason = (
            f"{_format_output_name(number, outputs)}the output is the reference times {1 + seen.slope:.7g}, fitted to "
            f"{seen.elements:,} elements; the roundings of the kernel explain 1 +- {seen.slope_allowed:.2g}"
        )
    return Trial(SLOPE, arguments, outcome, reason, abs(seen.slope), seen.slope_allowed)


def _format_output_name(number: int, outputs: int) -> str:
    return f"output {number}: " if outputs > 1 else ""
