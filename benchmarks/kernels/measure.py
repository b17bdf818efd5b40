"""Predicted times of works: the launches of a work run dry, one after another, and their times are added up.

On one core, the core has its share of the HBM bandwidth, as if the other cores of its stack worked too. On both cores
of a logical core (LNC 2), each core has its own share, 358 GB/s on trn2, which does not depend on other cores.
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
    """Times of one launch in us by reading, without starting and ending the kernel; busy time of each engine in us."""

    times_us: dict[Reading, float]
    busy_us: Counter[str]


@dataclass(frozen=True)
class Floor:
    """Lower bound of the time of a work in us, and which resource sets it.

    It is the larger of two times: operations at the peak of the Tensor engines, and bytes at the cores' share of the
    HBM bandwidth or at the rate of their DMA engines, whichever is less. On two cores it is half of the bound on one.
    """

    time_us: float
    bound: Bound


@dataclass(frozen=True)
class Measured:
    """A work's times on a chip.

    times_us: time by reading in us. busiest: engine or queue that is busy longest in program order. busy_share: its
    busy time over the whole time.
    """

    work: Work
    times_us: dict[Reading, float]
    floor: Floor
    busiest: str
    busy_share: float

    def share(self, reading: Reading) -> float:
        """Return the floor over the time under a reading."""
        return self.floor.time_us / self.times_us[reading]

    @property
    def least_share(self) -> float:
        """The floor over the time of the slower reading."""
        return min(map(self.share, READINGS))


@dataclass(frozen=True)
class Refused:
    """A work that a kernel refuses or does not divide on two cores, with its floor and the reason."""

    work: Work
    floor: Floor
    reason: str


class NotDivided(Exception):
    """A launch in which each core of a logical core does the whole work."""


def shared(chip: simulate.Hardware) -> simulate.Hardware:
    """Return the chip with the HBM bandwidth that one core gets while all cores of the stack are working."""
    return chip.with_numbers(hbm_gb_per_s_per_stack=chip.provenance["hbm_gb_per_s_per_core"])


class Bench:
    """Measures works on one chip, on one core or on the two of a logical core.

    Launches with equal kernel, shapes, dtypes and options are run once and remembered.
    """

    def __init__(self, target: str, cores: int = 1) -> None:
        self._chip = shared(simulate.hardware(target))
        self._cores = cores
        self._known: dict[tuple[Any, ...], LaunchTimes] = {}

    def measure(self, work: Work) -> Measured:
        """Return the times of a work.

        Errors of its kernels are raised, and NotDivided if both cores do all of a launch.
        """
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
        """Return the times of a work, or a `Refused` with the reason if a kernel refuses it or does not divide it."""
        try:
            return self.measure(work)
        except (NotDivided, AssertionError, simulate.NkwError) as error:
            return Refused(work, self._floor(work), str(error).splitlines()[0])

    def _floor(self, work: Work) -> Floor:
        """Return the lower bound of the time of a work on this chip and number of cores."""
        chip = self._chip
        peaks = compute_core_peaks(chip, "bfloat16")
        engines = 1e9 * chip.dma_engine_bytes_per_ns * chip.dma_engines
        compute_s = work.least.operations / peaks.operations_per_s
        memory_s = work.least.bytes / min(peaks.bytes_per_s, engines)
        bound = Bound.compute if compute_s > memory_s else Bound.bandwidth
        return Floor(1e6 * max(compute_s, memory_s) / self._cores, bound)

    def _launched(self, launch: Launch) -> LaunchTimes:
        """Return the times of one launch, from an earlier equal launch if there was one."""
        arguments = create_stand_ins(launch)
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
            self._known[key] = compute_launch_times(done)
        return self._known[key]


def _check_divided(kernel: str, done: simulate.Launch) -> None:
    """Raise NotDivided if a result of the launch is written more than once, which means by each core."""
    for tensor in sum_traffic(done.streams):
        if not tensor.argument and not tensor.reads and tensor.writes > 1:
            raise NotDivided(f"{kernel} does not divide its work: each core writes all of {tensor.name}")


def compute_launch_times(done: simulate.Launch) -> LaunchTimes:
    """Return the times of a dry launch in us; an engine's busy time is that of the core where it is busier."""
    waits = dependences(done.streams)
    lines = {reading: schedule(done.streams, done.hardware, reading, waits) for reading in READINGS}
    busy: Counter[str] = Counter()
    for track, time_ns in lines[Reading.program].busy_ns.items():
        engine = track.partition("core ")[2].partition(" ")[2] or track
        busy[engine] = max(busy[engine], time_ns / 1e3)
    return LaunchTimes({reading: line.length_ns / 1e3 for reading, line in lines.items()}, busy)


def create_stand_ins(launch: Launch) -> tuple[Any, ...]:
    """Return the arguments of a launch for a dry run, in the order of the kernel's parameters."""
    arguments = {parameter: stand_in(argument) for parameter, argument in launch.arguments.items()}
    return bind_arguments(launch.kernel, arguments)


def stand_in(argument: Argument) -> Any:
    """Return an argument for a dry run, which reads shapes and dtypes only.

    A tensor becomes a read-only array of its shape that shares one zero; an `Axis` becomes None; other values stay.
    """
    if isinstance(argument, Value):
        return np.broadcast_to(np.zeros((), argument.dtype), argument.shape)
    return None if isinstance(argument, Axis) else argument
