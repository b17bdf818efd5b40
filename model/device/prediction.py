"""Predicted times of the launches of a pass.

A pass takes the sum of its kernels, one after another, each with its hand-over to the next, plus starting and ending a
kernel once: a model is compiled into one graph, which has no such overhead between its parts. Overlap between
neighbouring kernels, which a compiler may find, is not counted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import simulate
from simulate.memory import MemoryRegion
from simulate.profile import Profile, profile
from simulate.timing import Reading, Timeline, dependences, schedule


@dataclass(frozen=True)
class Prediction:
    """The prediction of a pass on one target: bracket of times, busy tracks and high-water marks.

    `program_ns` runs engines and DMA queues concurrently, each in program order; the true time should lie between
    `dataflow_ns` and `serial_ns`. `busy_share` is of `program_ns`, per engine and DMA queue, averaged over the ranks.
    Marks are the highest of any kernel, in bytes per partition. `bubble_share` is the part of `program_ns` in which the
    stages of a pipeline wait, on average; 0 without a pipeline. `overlay` is the chip with what an overlay replaces
    there, such as `trn2 with 2 numbers of measured.json`; empty without an overlay.
    """

    target: str
    dataflow_ns: float
    program_ns: float
    serial_ns: float
    busy_share: dict[str, float]
    sbuf_bytes: int
    sbuf_usable_bytes: int
    psum_bytes: int
    psum_usable_bytes: int
    bubble_share: float = 0.0
    overlay: str = ""

    @property
    def busiest_engine(self) -> str:
        """The engine that is busy longest."""
        return self._busiest(queue=False)

    @property
    def busiest_queue(self) -> str:
        """The DMA queue that is busy longest."""
        return self._busiest(queue=True)

    def _busiest(self, queue: bool) -> str:
        names = [name for name in self.busy_share if name.startswith("DMA") == queue]
        return max(names, key=lambda name: self.busy_share[name])


@dataclass(frozen=True)
class KernelTime:
    """One launch of a pass: its time in the program reading, with the hand-over, and its shares of the chip's peaks.

    `mfu` is of the Tensor engines' peak for 16-bit operands, `mbu` of the cores' part of the HBM bandwidth.
    """

    part: str
    kernel: str
    length_ns: float
    mfu: float
    mbu: float
    busiest: str
    busiest_share: float


@dataclass(frozen=True)
class TimedLaunch:
    """One planned launch and its times, with the hand-over to the next launch."""

    launch: simulate.Launch
    timeline: Timeline
    dataflow_ns: float
    program_ns: float
    serial_ns: float

    @classmethod
    def of(cls, launch: simulate.Launch) -> TimedLaunch:
        """A launch scheduled in every reading that a prediction states."""
        waits = dependences(launch.streams)
        dataflow, program, serial = (
            schedule(launch.streams, launch.hardware, reading, waits)
            for reading in (Reading.dataflow, Reading.program, Reading.serial)
        )
        after_ns = launch.hardware.kernel_handover_ns
        times = (each.length_ns + after_ns for each in (dataflow, program, serial))
        return cls(launch, program, *times)

    @cached_property
    def profile(self) -> Profile:
        """Where its time goes."""
        return profile(self.launch.streams, self.launch.hardware, self.launch.kernel)

    def kernel_time(self, part: str) -> KernelTime:
        """The time of this launch, as one of a part of the model."""
        roof, busiest = self.profile.roofline, self.timeline.busiest
        share = self.timeline.busy_ns[busiest] / self.timeline.length_ns if self.timeline.length_ns else 0.0
        return KernelTime(
            part,
            self.launch.kernel,
            self.program_ns,
            roof.mfu,
            roof.mbu,
            without_rank(busiest),
            share,
        )


@dataclass(frozen=True)
class Pass:
    """The planned launches of one pass of a model; layer i lies between the entries i and i + 1 of `layer_ends`."""

    launches: tuple[TimedLaunch, ...]
    layer_ends: tuple[int, ...] = ()

    @property
    def overhead_ns(self) -> float:
        """The time of starting and ending a kernel, which a pass takes once."""
        return self.launches[0].timeline.overhead_ns

    def prediction(self) -> Prediction:
        """Time of the launches one after another, and their use of the chip."""
        chip = self.launches[0].launch.hardware
        overhead = self.overhead_ns
        program = overhead + sum(each.program_ns for each in self.launches)
        busy: defaultdict[str, float] = defaultdict(float)
        for each in self.launches:
            for track, time_ns in each.timeline.busy_ns.items():
                busy[without_rank(track)] += time_ns / len(each.launch.streams)
        return Prediction(
            target=chip.name,
            dataflow_ns=overhead + sum(each.dataflow_ns for each in self.launches),
            program_ns=program,
            serial_ns=overhead + sum(each.serial_ns for each in self.launches),
            busy_share={track: time_ns / program for track, time_ns in busy.items()},
            sbuf_bytes=max(each.launch.high_water_bytes(MemoryRegion.sbuf) for each in self.launches),
            sbuf_usable_bytes=chip.sbuf_usable_bytes_per_partition,
            psum_bytes=max(each.launch.high_water_bytes(MemoryRegion.psum) for each in self.launches),
            psum_usable_bytes=chip.psum_bytes_per_partition,
            overlay=chip.label if chip.replaced else "",
        )

    def part_of_model(self, number: int) -> str:
        """The layer that a launch belongs to, counted from 0; outside of the layers, the launch's kernel."""
        layer = bisect_right(self.layer_ends, number) - 1
        if 0 <= layer < len(self.layer_ends) - 1:
            return f"layer {layer}"
        return self.launches[number].launch.kernel

    def kernel_times(self) -> list[KernelTime]:
        """Every launch in order, with what it makes of the chip."""
        return [each.kernel_time(self.part_of_model(number)) for number, each in enumerate(self.launches)]


def without_rank(track: str) -> str:
    """A track's name without the core it belongs to: "rank 1 DMA q Sync" -> "DMA q Sync"."""
    words = track.split()
    while len(words) > 1 and words[0] in ("rank", "core"):
        words = words[2:]
    return " ".join(words)
