"""The predicted time of a work: its launches, dry, one after another, on one core whose neighbours work too.

Or on both cores of a logical core (LNC 2). Then each has its own part of the HBM bandwidth, 358 GB/s on trn2: nothing
is left of the stack that they share, so it does not matter whether neighbours work.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

import nki_kernels
import simulate
from benchmarks.kernels.works import Work
from model.device.binding import bind_arguments
from model.layers.launch import Argument, Axis, Launch, Value
from model.plan.roofline import Bound, compute_core_peaks
from simulate.profile.traffic import sum_traffic
from simulate.timing import Reading, dependences, schedule

READINGS = (Reading.program, Reading.scheduled)


@dataclass(frozen=True)
class LaunchTimes:
    """Times of one launch in us by reading, without starting and ending it, and how long each engine is busy in us."""

    times_us: dict[Reading, float]
    busy_us: Counter[str]


@dataclass(frozen=True)
class Floor:
    """The least time of a work in us.

    The larger of operations over the Tensor engines' peak and bytes over the cores' part of the HBM bandwidth, or over
    what their DMA engines move where that is less; `bound` tells which. On two cores it is half of that on one.
    """

    time_us: float
    bound: Bound


@dataclass(frozen=True)
class Measured:
    """A work on a chip: times in us by reading, its floor, and what is busy longest in the program reading."""

    work: Work
    times_us: dict[Reading, float]
    floor: Floor
    busiest: str
    busy_share: float

    def share(self, reading: Reading) -> float:
        """Return the floor's share of the time under a reading."""
        return self.floor.time_us / self.times_us[reading]

    @property
    def least_share(self) -> float:
        """The share of the slower reading."""
        return min(map(self.share, READINGS))


@dataclass(frozen=True)
class Refused:
    """A work that one of its kernels does not do on two cores, and why."""

    work: Work
    floor: Floor
    reason: str


class NotDivided(Exception):
    """Both cores of a logical core do the whole work of a launch."""


def shared(chip: simulate.Hardware) -> simulate.Hardware:
    """Return the chip while all of its cores work: a core gets its share of a stack of HBM only, also alone."""
    return chip.with_numbers(hbm_gb_per_s_per_stack=chip.provenance["hbm_gb_per_s_per_core"])


class Bench:
    """Measures works on one chip, on one core or on the two of a logical core. Equal launches are planned once."""

    def __init__(self, target: str, cores: int = 1) -> None:
        self._chip = shared(simulate.hardware(target))
        self._cores = cores
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
        return Measured(work, times, self._floor(work), busiest, busy_us / times[Reading.program])

    def measure_if_divided(self, work: Work) -> Measured | Refused:
        """One work, or why a kernel does not divide it."""
        try:
            return self.measure(work)
        except (NotDivided, AssertionError, simulate.NkwError) as error:
            return Refused(work, self._floor(work), str(error).splitlines()[0])

    def _floor(self, work: Work) -> Floor:
        chip = self._chip
        peaks = compute_core_peaks(chip, "bfloat16")
        engines = 1e9 * chip.dma_engine_bytes_per_ns * chip.dma_engines
        compute_s = work.least.operations / peaks.operations_per_s
        memory_s = work.least.bytes / min(peaks.bytes_per_s, engines)
        bound = Bound.compute if compute_s > memory_s else Bound.bandwidth
        return Floor(1e6 * max(compute_s, memory_s) / self._cores, bound)

    def _launched(self, launch: Launch) -> LaunchTimes:
        arguments = stand_ins(launch)
        key = (
            launch.kernel,
            *(
                (argument.shape, str(argument.dtype)) if isinstance(argument, np.ndarray) else argument
                for argument in arguments
            ),
        )
        if key not in self._known:
            kernel = getattr(nki_kernels, launch.kernel)
            done = simulate.launch(
                kernel, [(arguments, {})], self._chip, self._cores, mode=simulate.Mode.dry, trips=0
            )
            if self._cores > 1:
                _check_divided(launch.kernel, done)
            self._known[key] = launch_times(done)
        return self._known[key]


def _check_divided(kernel: str, done: simulate.Launch) -> None:
    """Raise NotDivided where a result is written more than once: by each core."""
    for tensor in sum_traffic(done.streams):
        if not tensor.argument and not tensor.reads and tensor.writes > 1:
            raise NotDivided(f"{kernel} does not divide its work: each core writes all of {tensor.name}")


def launch_times(done: simulate.Launch) -> LaunchTimes:
    """Return the times of a dry launch in us; an engine is busy as long as that of the busier core."""
    waits = dependences(done.streams)
    lines = {reading: schedule(done.streams, done.hardware, reading, waits) for reading in READINGS}
    busy: Counter[str] = Counter()
    for track, time_ns in lines[Reading.program].busy_ns.items():
        engine = track.partition("core ")[2].partition(" ")[2] or track
        busy[engine] = max(busy[engine], time_ns / 1e3)
    return LaunchTimes({reading: line.length_ns / 1e3 for reading, line in lines.items()}, busy)


def stand_ins(launch: Launch) -> tuple[Any, ...]:
    """Return the arguments of a launch for a dry run, in the order of the kernel's signature."""
    arguments = {parameter: stand_in(argument) for parameter, argument in launch.arguments.items()}
    return bind_arguments(launch.kernel, arguments)


def stand_in(argument: Argument) -> Any:
    """Return an argument for a dry launch, which looks at shapes and dtypes only: one element seen as many."""
    if isinstance(argument, Value):
        return np.broadcast_to(np.zeros((), argument.dtype), argument.shape)
    return None if isinstance(argument, Axis) else argument
