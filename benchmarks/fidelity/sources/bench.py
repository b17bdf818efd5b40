"""Predicted times of public kernels: each is launched dry in a forked process and scheduled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.fidelity.case import NotCovered, Schedule
from benchmarks.fidelity.predict import floor_ns
from benchmarks.fidelity.sources.clones import Clone
from benchmarks.fidelity.sources.forked import run_forked
from benchmarks.fidelity.sources.launches import build_launch
from benchmarks.fidelity.sources.source import Source, one_line
from nkw.errors import InvalidArgument, NkwError
from nkw.process import Limits
from simulate.hardware import hardware
from simulate.run.machine import Mode
from simulate.run.stream import Stream
from simulate.timing import Reading, dependences, schedule
from simulate.world import launch

_SECONDS, _MEMORY_BYTES = 900, 12 * 2**30
"""Of one entry: some ten times what the largest of the published ones takes."""


@dataclass(frozen=True)
class Outcome:
    """Predicted device times of one source, including the kernel's start and end, or the reason why there are none.

    reading: the reading whose time is compared with the measurement. predicted_us: times by reading, empty without a
    prediction. floor_us: lower bound from the peak rates, without start and end. work: for each core, counts of
    events, DMAs, their bytes and descriptors, and FLOP; and the busy time of each engine in us under `reading`.
    schedule: what decided the order of the measured kernel.
    """

    source: Source
    reason: str = ""
    reading: Reading = Reading.program
    predicted_us: Mapping[Reading, float] = field(default_factory=dict)
    floor_us: float = 0.0
    work: Mapping[str, Any] = field(default_factory=dict)
    schedule: Schedule | None = None

    @property
    def covered(self) -> bool:
        """Whether the kernel ran and has predicted times."""
        return bool(self.predicted_us)

    def time_us(self, reading: Reading | None = None) -> float:
        """Return the predicted time in us under a reading, by default `self.reading`."""
        return self.predicted_us[reading or self.reading]

    def error(self, reading: Reading | None = None) -> float:
        """Return the relative error: predicted time over measured time, minus 1; the reading is as in `time_us`."""
        return self.time_us(reading) / self.source.measured_us - 1.0


def predict_sources(
    sources: Iterable[Source],
    clones: Mapping[str, Clone],
    readings: Sequence[Reading] = tuple(Reading),
    main: Reading | None = None,
) -> list[Outcome]:
    """Return one outcome per source, in order. No error of a kernel is raised; it becomes the reason of its outcome.

    Args:
        sources: Published launches.
        clones: Clones by repository, from `recognise_clones`.
        readings: Readings to predict besides the main one.
        main: Reading whose error is reported, the same for all. None: the reading of each kernel's `Schedule`.
    """
    _prepare()
    return [_outcome(source, clones, readings, main) for source in sources]


def _prepare() -> None:
    """Install the simulator as `nki` in this process, so that the forked processes need not import it again."""
    import simulate

    simulate.install("simulate")


def _outcome(
    source: Source, clones: Mapping[str, Clone], readings: Sequence[Reading], main: Reading | None
) -> Outcome:
    """Predict a source in a forked process limited to `_SECONDS` and `_MEMORY_BYTES`, and return its outcome.

    The outcome has a reason instead of times if the process ends without a result.
    """
    limits = Limits(_SECONDS, _MEMORY_BYTES)
    result = run_forked(lambda: _predicted(source, clones, readings, main), _SECONDS, limits)
    if result is None:
        most = f"{_SECONDS} s and {_MEMORY_BYTES >> 30} GiB"
        return Outcome(source, f"its launch ended without a result, as it does beyond {most}")
    if "reason" in result:
        return Outcome(source, result["reason"])
    times = {Reading(name): time_us for name, time_us in result["predicted_us"].items()}
    measured_schedule = Schedule(result["schedule"])
    return Outcome(
        source,
        "",
        main or measured_schedule.reading,
        times,
        result["floor_us"],
        result["work"],
        measured_schedule,
    )


def _predicted(
    source: Source, clones: Mapping[str, Clone], readings: Sequence[Reading], main: Reading | None
) -> dict[str, Any]:
    """Return the fields of an outcome as a JSON object, or an object with a `reason` for any exception of the kernel.

    It runs in the forked process.
    """
    try:
        return _placed(source, clones, readings, main)
    except NotCovered as reason:
        return {"reason": str(reason)}
    except NkwError as error:
        return {"reason": f"its kernel breaks a rule: {str(error).splitlines()[0][:160]}"}
    except (Exception, SystemExit) as error:
        return {"reason": f"its kernel raises {type(error).__name__}: {str(error)[:100]}"}


def _placed(
    source: Source, clones: Mapping[str, Clone], readings: Sequence[Reading], main: Reading | None
) -> dict[str, Any]:
    """Launch a source dry, schedule it under each reading, and return the fields of its outcome as a JSON object.

    Raises NotCovered for an unknown target or a launch that cannot be built.
    """
    try:
        chip = hardware(source.target)
    except InvalidArgument:
        raise NotCovered(f"target {source.target!r:.40} names no chip") from None
    source_launch = build_launch(source, clones)
    done = launch(
        source_launch.kernel, [((), source_launch.arguments)], chip, source.lnc, Mode.dry, has_grid=True
    )
    waits = dependences(done.streams)
    counts = main or source_launch.schedule.reading
    wanted = dict.fromkeys((counts, *readings))
    placed = {reading: schedule(done.streams, done.hardware, reading, waits) for reading in wanted}
    around_ns = placed[counts].overhead_ns
    return {
        "schedule": source_launch.schedule.value,
        "predicted_us": {
            reading.value: (timeline.length_ns + around_ns) / 1000.0 for reading, timeline in placed.items()
        },
        "floor_us": max(floor_ns(done.hardware, stream) for stream in done.streams) / 1000.0,
        "work": {
            "cores": [_work(stream) for stream in done.streams],
            "around_us": around_ns / 1000.0,
            "busy_us": {name: ns / 1000.0 for name, ns in placed[counts].busy_ns.items()},
        },
    }


def _work(stream: Stream) -> dict[str, int]:
    """Return counts of one core's stream: events, FLOP, DMAs, DMA bytes and DMA descriptors."""
    costs = [stream.costs[number] for number in stream.cost_ids]
    dmas = [cost.dma for cost in costs if cost.dma is not None]
    return {
        "events": len(stream),
        "flops": int(np.sum([cost.flops for cost in costs])),
        "dmas": len(dmas),
        "dma_bytes": sum(dma.bytes for dma in dmas),
        "dma_descriptors": sum(dma.descriptors for dma in dmas),
    }


def _plain(value: Any) -> Any:
    """Return a bool, an int or a string unchanged, and any other value as one line of text; JSON has no NaN."""
    return value if isinstance(value, (bool, int, str)) else one_line(value)


def build_source_rows(outcomes: Sequence[Outcome], clones: Mapping[str, Clone]) -> list[dict[str, Any]]:
    """Return one JSON object per source, in order.

    `time_us` is the prediction that `error` is computed from, `reading` names its reading, and `predicted_us` has the
    times of all readings. `host_overhead_ns` is 0, because all these times are the device's. A source without a
    prediction has a `reason` instead.
    """
    out = []
    for outcome in outcomes:
        source = outcome.source
        row: dict[str, Any] = {
            "number": source.number,
            "kernel": source.kernel,
            "launch": {name: _plain(value) for name, value in source.fields().items()},
            "repo": source.repo,
            "target": source.target,
            "measured_us": source.measured_us,
            "covered": outcome.covered,
        }
        if outcome.covered:
            assert outcome.schedule is not None
            row |= {
                "commit": clones[source.repo].commit,
                "schedule": outcome.schedule.value,
                "reading": outcome.reading.value,
                "time_us": outcome.time_us(),
                "error": outcome.error(),
                "predicted_us": {reading.value: time_us for reading, time_us in outcome.predicted_us.items()},
                "floor_us": outcome.floor_us,
                "host_overhead_ns": 0.0,
                "work": dict(outcome.work),
            }
        else:
            row["reason"] = outcome.reason
        out.append(row)
    return out
