"""Measurements whose kernels are described in words, for `nkw calibrate`: the kernels that builders stand for them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks.fidelity.builders import build
from benchmarks.fidelity.case import Case, NotCovered, chip_of, measured_us
from benchmarks.fidelity.entry import Entry, read_entries
from benchmarks.fidelity.predict import predict
from simulate.bundle.entries import Skipped
from simulate.calibrate.measurement import Measurement
from simulate.errors import NkwError


def measurements(path: Path) -> tuple[list[Measurement], list[Skipped]]:
    """The measurements of high and medium confidence that a builder can stand for, and why others are left out.

    Held-out entries are left out: nothing is fitted to them. Raises InvalidArgument for what is no list.
    """
    found, skipped = [], []
    for entry in read_entries(path):
        if entry.held_out or entry.confidence == "low":
            skipped.append(Skipped(entry.id, "it is held out" if entry.held_out else "its confidence is low"))
            continue
        try:
            build(entry)
            chip = chip_of(entry)
            measured_ns = 1e3 * measured_us(entry, chip)
        except (NotCovered, NkwError) as reason:
            skipped.append(Skipped(entry.id, str(reason).splitlines()[0]))
        except Exception as error:  # a field nobody thought of costs one entry, not the others
            skipped.append(Skipped(entry.id, f"its fields led to {type(error).__name__}: {error!s:.100}"))
        else:
            found.append(Measurement(entry.id, chip.name, measured_ns, 0.0, partial(_predicted_ns, entry)))
    return found, skipped


def _predicted_ns(entry: Entry) -> float:
    """The predicted time by the record that stands for the entry's chip at this moment."""
    case: Case = build(entry)
    reading = case.schedule.reading
    return 1e3 * predict(case, (), reading, probe=False).times_us[reading]
