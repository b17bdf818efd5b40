"""Measurements for `nkw calibrate` whose kernels are described in words.

A builder makes a kernel from the words, which is run in the place of the measured one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.fidelity.builders import build
from benchmarks.fidelity.case import NotCovered, chip_of, measured_us
from benchmarks.fidelity.entry import Entry, read_entries
from benchmarks.fidelity.predict import launch_dry, time_us
from nkw.errors import NkwError
from simulate.bundle.entries import Skipped
from simulate.calibrate.measurement import Measurement, Predictor
from simulate.hardware import Hardware
from simulate.run import Launch
from simulate.timing import Timeline


def measurements(path: Path) -> tuple[list[Measurement], list[Skipped]]:
    """Return the measurements in a file that a builder covers, and the skipped entries.

    Entries of low confidence are skipped, and held-out ones, because nothing may be fitted to them. Each skipped
    entry has a reason.

    Raises:
        InvalidArgument: if the file cannot be read or does not hold a JSON list of measurements.
    """
    entries, skipped = [], []
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
            entries.append(Measurement(entry.id, chip.name, measured_ns, 0.0, _predictor(entry)))
    return entries, skipped


def _predictor(entry: Entry) -> Predictor:
    """Return the predictor of an entry's time in ns, from dry launches of the kernels that its builder chooses."""
    case = build(entry)

    def read(chip: Hardware, launches: Sequence[Launch], timelines: Sequence[Timeline]) -> float:
        return 1e3 * time_us(case, chip, launches, timelines)

    return Predictor(lambda: build(entry).chip, lambda: launch_dry(case), case.schedule.reading, read)
