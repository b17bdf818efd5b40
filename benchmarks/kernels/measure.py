"""The predicted time of a work: its launches, dry, one after another on one core whose neighbours work too."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

import nki_kernels
import simulate
from benchmarks.kernels.works import Work
from model.layers.launch import Argument, Axis, Launch, Value
from model.plan.roofline import Bound, core
from simulate.timing import Reading, dependences, schedule

READINGS = (Reading.program, Reading.scheduled)


@dataclass(frozen=True)
class LaunchTimes:
    """Times of one launch in us by reading, without starting and ending it, and how long each engine is busy in us."""

    times_us: dict[Reading, float]
    busy_us: Counter[str]


@dataclass(frozen=True)
class Measured:
    """A work on a chip: times in us by reading, its floor, and what is busy longest in the program reading.

    The floor is the larger of operations over the Tensor engine's peak and bytes over the core's part of the HBM
    bandwidth, or over what its DMA engines move where that is less; `bound` tells which.
    """

    work: Work
    times_us: dict[Reading, float]
    floor_us: float
    bound: Bound
    busiest: str
    busy_share: float

    def share(self, reading: Reading) -> float:
        """The floor's share of the time."""
        return self.floor_us / self.times_us[reading]

    @property
    def least_share(self) -> float:
        """The share of the slower reading."""
        return min(map(self.share, READINGS))


def shared(chip: simulate.Hardware) -> simulate.Hardware:
    """The chip while all of its cores work: one core's part of a stack of HBM is all that it gets, also alone."""
    return chip.with_numbers(hbm_gb_per_s_per_stack=chip.provenance["hbm_gb_per_s_per_core"])


class Bench:
    """Measures works on one chip. Equal launches are planned once."""

    def __init__(self, target: str) -> None:
        self._chip = shared(simulate.hardware(target))
        self._known: dict[tuple[Any, ...], LaunchTimes] = {}

    def measure(self, work: Work) -> Measured:
        """One work; what a kernel refuses is raised."""
        times = dict.fromkeys(READINGS, 0.0)
        busy: Counter[str] = Counter()
        for launch in work.launches:
            done = self._launched(launch)
            for reading, time_us in done.times_us.items():
                times[reading] += launch.repeat * time_us
            for engine, time_us in done.busy_us.items():
                busy[engine] += launch.repeat * time_us
        ((busiest, busy_us),) = busy.most_common(1)
        floor_us, bound = self._floor(work)
        return Measured(work, times, floor_us, bound, busiest, busy_us / times[Reading.program])

    def _floor(self, work: Work) -> tuple[float, Bound]:
        chip = self._chip
        peaks = core(chip, "bfloat16")
        engines = 1e9 * chip.dma_engine_bytes_per_ns * chip.dma_engines
        compute_s = work.least.operations / peaks.operations_per_s
        memory_s = work.least.bytes / min(peaks.bytes_per_s, engines)
        return 1e6 * max(compute_s, memory_s), Bound.compute if compute_s > memory_s else Bound.bandwidth

    def _launched(self, launch: Launch) -> LaunchTimes:
        arguments = tuple(map(stand_in, launch.arguments))
        key = (
            launch.kernel,
            *((each.shape, str(each.dtype)) if isinstance(each, np.ndarray) else each for each in arguments),
        )
        if key not in self._known:
            self._known[key] = launch_times(
                simulate.launch(
                    getattr(nki_kernels, launch.kernel), [(arguments, {})], self._chip, mode=simulate.Mode.dry
                )
            )
        return self._known[key]


def launch_times(done: simulate.Launch) -> LaunchTimes:
    """The times of a dry launch."""
    waits = dependences(done.streams)
    lines = {each: schedule(done.streams, done.hardware, each, waits) for each in READINGS}
    busy = Counter({name: time_ns / 1e3 for name, time_ns in lines[Reading.program].busy_ns.items()})
    return LaunchTimes({each: line.length_ns / 1e3 for each, line in lines.items()}, busy)


def stand_in(argument: Argument) -> Any:
    """An argument for a dry launch, which looks at shapes and dtypes only: one element seen as many."""
    if isinstance(argument, Value):
        return np.broadcast_to(np.zeros((), argument.dtype), argument.shape)
    return None if isinstance(argument, Axis) else argument
