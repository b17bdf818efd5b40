"""Predictions for a file of measurements whose kernels are described in words, and their rows for `--json`.

`python -m benchmarks.fidelity` calls it without `--sources`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.fidelity.builders import build
from benchmarks.fidelity.case import NotCovered, chip_of, measured_us
from benchmarks.fidelity.entry import Entry
from benchmarks.fidelity.predict import predict
from benchmarks.fidelity.table import Outcome
from nkw.errors import NkwError
from simulate.timing import Reading


def outcomes(
    entries: Iterable[Entry],
    readings: Sequence[Reading] = tuple(Reading),
    main: Reading | None = None,
    probe: bool = True,
) -> list[Outcome]:
    """Return one outcome per entry, in order: its prediction, or the reason why it is not covered.

    No error of an entry is raised; it becomes that entry's reason.

    Args:
        entries: Measurements to predict.
        readings: Readings to predict besides the main one.
        main: Reading whose error is reported, the same for all entries. None: the reading of each entry's `Schedule`.
        probe: Whether to compute the share of the time that rests on guessed constants. False halves the work.
    """
    return [_outcome(entry, readings, main, probe) for entry in entries]


def _outcome(entry: Entry, readings: Sequence[Reading], main: Reading | None, probe: bool) -> Outcome:
    """Return the outcome of one entry; any exception becomes the reason why the entry is not covered."""
    try:
        case = build(entry)
        measured = measured_us(entry, chip_of(entry))
        reading = main or case.schedule.reading
        prediction = predict(case, readings, reading, probe)
    except NotCovered as reason:
        return Outcome(entry, reason=str(reason))
    except NkwError as error:
        return Outcome(entry, reason=f"its kernel breaks a rule of the chip: {str(error).splitlines()[0]}")
    except (
        Exception
    ) as error:  # a field nobody thought of costs one entry its prediction, not the others theirs
        return Outcome(entry, reason=f"its fields led to {type(error).__name__}: {str(error)[:100]}")
    return Outcome(
        entry,
        schedule=case.schedule,
        reading=reading,
        measured_us=measured,
        predicted_us=dict(prediction.times_us),
        floor_us=prediction.floor_us,
        guessed_share=prediction.guessed_share if probe else None,
        host_overhead_ns=prediction.host_overhead_ns,
    )


def build_rows(outcomes: Sequence[Outcome], held_out: bool = False) -> list[dict[str, Any]]:
    """Return one JSON object per entry, in order.

    `time_us` is the prediction that `error` is computed from, `reading` names its reading, and `predicted_us` has the
    times of all readings. `host_overhead_ns` is the host's share of these times, 0 for times of the device. `reason`
    says why an entry is not covered. Without `held_out`, held-out entries have no times and no errors.
    """
    out: list[dict[str, Any]] = []
    for outcome in outcomes:
        entry = outcome.entry
        row: dict[str, Any] = {
            "id": entry.id,
            "family": entry.family,
            "target": entry.target,
            "confidence": entry.confidence,
            "held_out": entry.held_out,
            "covered": outcome.covered,
        }
        if outcome.schedule is not None:
            row["schedule"] = outcome.schedule.value
        if outcome.predicted_us is None:
            row["reason"] = outcome.reason
        elif held_out or not entry.held_out:
            row |= {
                "reading": outcome.reading.value,
                "measured_us": outcome.measured_us,
                "time_us": outcome.predicted_us[outcome.reading],
                "error": outcome.error(),
                "predicted_us": {reading.value: time for reading, time in sorted_times(outcome)},
                "floor_us": outcome.floor_us,
                "guessed_share": outcome.guessed_share,
                "host_overhead_ns": outcome.host_overhead_ns,
            }
        out.append(row)
    return out


def sorted_times(outcome: Outcome) -> list[tuple[Reading, float]]:
    """Return the pairs (reading, predicted us) of an outcome in the order of the readings."""
    assert outcome.predicted_us is not None
    return [
        (reading, outcome.predicted_us[reading]) for reading in Reading if reading in outcome.predicted_us
    ]
