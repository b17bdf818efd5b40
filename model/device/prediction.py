"""Predicted times of the launches of a pass: one step of a model, or its part on one micro-batch.

The time of a pass is the sum of the times of its kernels, each with the hand-over to the next kernel, plus the overhead
of starting and ending one kernel: a model is compiled into one graph, which starts once. Overlap between neighbouring
kernels, which a compiler may find, is not counted.
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
    """Prediction of a pass on one target: bracket of times, busy tracks and high-water marks.

    dataflow_ns   lower bound of the time: only dependences order instructions
    program_ns    time with engines and DMA queues running concurrently, each in program order
    serial_ns     upper bound of the time: one instruction after another
    busy_share    share of `program_ns` by engine and DMA queue, averaged over the ranks
    sbuf_bytes, psum_bytes  high-water mark of any kernel, in bytes per partition
    bubble_share  share of `program_ns` in which the stages of a pipeline wait, on average; 0 without a pipeline
    lnc           physical cores of a rank that work in the largest launch
    overlay       chip and number of values that an overlay replaces, such as `trn2 with 2 numbers of measured.json`;
                  empty without an overlay
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
    lnc: int = 1

    @property
    def busiest_engine(self) -> str:
        """Name of the compute engine with the largest share of busy time."""
        return self._find_busiest(is_queue=False)

    @property
    def busiest_queue(self) -> str:
        """Name of the DMA queue with the largest share of busy time."""
        return self._find_busiest(is_queue=True)

    def _find_busiest(self, is_queue: bool) -> str:
        tracks = [track for track in self.busy_share if track.startswith("DMA") == is_queue]
        return max(tracks, key=self.busy_share.__getitem__)


@dataclass(frozen=True)
class KernelTime:
    """Time of one launch of a pass, and its shares of the chip's peaks.

    section        "layer 3", or the kernel of a launch outside of the layers
    length_ns      time with the hand-over to the next launch; engines and DMA queues run in program order
    mfu            share of the Tensor engines' peak for 16-bit operands
    mbu            share of the HBM bandwidth of the cores
    busiest        engine or DMA queue that is busy longest, for `busiest_share` of the time
    """

    section: str
    kernel: str
    length_ns: float
    mfu: float
    mbu: float
    busiest: str
    busiest_share: float


@dataclass(frozen=True)
class TimedLaunch:
    """Planned launch with its times in ns; each includes the hand-over to the next launch.

    `timeline` is that of the program reading. `dataflow_ns`, `program_ns` and `serial_ns` are explained in
    `Prediction`.
    """

    launch: simulate.Launch
    timeline: Timeline
    dataflow_ns: float
    program_ns: float
    serial_ns: float

    @classmethod
    def schedule(cls, launch: simulate.Launch) -> TimedLaunch:
        """Schedule a planned launch in the three readings, and return it with its times."""
        waits = dependences(launch.streams)
        dataflow, program, serial = (
            schedule(launch.streams, launch.hardware, reading, waits)
            for reading in (Reading.dataflow, Reading.program, Reading.serial)
        )
        handover_ns = launch.hardware.kernel_handover_ns
        times = (timeline.length_ns + handover_ns for timeline in (dataflow, program, serial))
        return cls(launch, program, *times)

    @cached_property
    def profile(self) -> Profile:
        """Profile of the launch: the time of every line of the kernel, and its roofline."""
        return profile(self.launch.streams, self.launch.hardware, self.launch.kernel)

    def kernel_time(self, section: str) -> KernelTime:
        """Return the time of this launch and its shares of the chip's peaks.

        Args:
            section: Name of the part of the model, such as "layer 3", which the result repeats.
        """
        roof, busiest = self.profile.roofline, self.timeline.busiest
        share = self.timeline.busy_ns[busiest] / self.timeline.length_ns if self.timeline.length_ns else 0.0
        return KernelTime(
            section,
            self.launch.kernel,
            self.program_ns,
            roof.mfu,
            roof.mbu,
            remove_rank(busiest),
            share,
        )


@dataclass(frozen=True)
class Pass:
    """Planned launches of one pass of a model, in order.

    Layer i has the launches from index `layer_ends[i]` up to but not including `layer_ends[i + 1]`. Launches before and
    after belong to the embedding and the head.
    """

    launches: tuple[TimedLaunch, ...]
    layer_ends: tuple[int, ...] = ()

    @property
    def busy_cores(self) -> int:
        """Largest number of physical cores of a rank that have instructions in a single launch."""
        return max(
            len({stream.core for stream in timed.launch.streams if len(stream)}) for timed in self.launches
        )

    @property
    def overhead_ns(self) -> float:
        """Time in ns of starting and ending a kernel, which a pass takes once."""
        return self.launches[0].timeline.overhead_ns

    def prediction(self) -> Prediction:
        """Return the prediction for all launches one after another: times, busy engines and queues, and memory."""
        chip = self.launches[0].launch.hardware
        overhead = self.overhead_ns
        program = overhead + sum(timed.program_ns for timed in self.launches)
        busy: defaultdict[str, float] = defaultdict(float)
        for timed in self.launches:
            for track, time_ns in timed.timeline.busy_ns.items():
                busy[remove_rank(track)] += time_ns / len(timed.launch.streams)
        return Prediction(
            target=chip.name,
            dataflow_ns=overhead + sum(timed.dataflow_ns for timed in self.launches),
            program_ns=program,
            serial_ns=overhead + sum(timed.serial_ns for timed in self.launches),
            busy_share={track: time_ns / program for track, time_ns in busy.items()},
            sbuf_bytes=max(timed.launch.high_water_bytes(MemoryRegion.sbuf) for timed in self.launches),
            sbuf_usable_bytes=chip.sbuf_usable_bytes_per_partition,
            psum_bytes=max(timed.launch.high_water_bytes(MemoryRegion.psum) for timed in self.launches),
            psum_usable_bytes=chip.psum_bytes_per_partition,
            overlay=chip.label if chip.replaced else "",
            lnc=self.busy_cores,
        )

    def find_section(self, index: int) -> str:
        """Return "layer N" (from 0) for the launch at an index inside of a layer; otherwise the name of its kernel."""
        layer = bisect_right(self.layer_ends, index) - 1
        if 0 <= layer < len(self.layer_ends) - 1:
            return f"layer {layer}"
        return self.launches[index].launch.kernel

    def kernel_times(self) -> list[KernelTime]:
        """Return the times of all launches in order."""
        return [timed.kernel_time(self.find_section(index)) for index, timed in enumerate(self.launches)]


def remove_rank(track: str) -> str:
    """Return the name of a track without its rank and core: "rank 1 DMA q Sync" -> "DMA q Sync"."""
    words = track.split()
    while len(words) > 1 and words[0] in ("rank", "core"):
        words = words[2:]
    return " ".join(words)
