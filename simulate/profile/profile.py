"""Profile of a launch; every analysis runs when its property is first read.

A reading is an assumption on what overlaps in the streams; each gives a timeline. A track is an engine or a
DMA queue of a core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from nkw.terminal import Displayed
from simulate.hardware import Hardware
from simulate.profile.advice import Advice, Bound, bound_launch, make_advice
from simulate.profile.basis import Basis, compute_basis
from simulate.profile.critical_path import Stretch, find_critical_path
from simulate.profile.gaps import Gap, GapGroup, find_gaps, group_gaps
from simulate.profile.lines import LineTime, sum_by_calling_line, sum_by_line
from simulate.profile.moments import Moments
from simulate.profile.roofline import Roofline, compute_roofline
from simulate.profile.traffic import TensorTraffic, sum_traffic
from simulate.profile.what_if import WhatIf, try_halved_costs
from simulate.run.run_order import as_streams
from simulate.run.stream import Stream
from simulate.timing import Dependences, Reading, Timeline, check_reading, dependences, schedule


@dataclass(frozen=True, eq=False, repr=False)
class Profile(Displayed):
    """Analyses of where the time of a launch goes, under one reading of its streams.

    `print` shows the report of `text`; a notebook shows the same report with its headings in bold. `waits`
    are the dependences between the events of the streams.
    """

    title: str
    streams: tuple[Stream, ...]
    hardware: Hardware
    reading: Reading
    waits: Dependences

    @cached_property
    def timelines(self) -> dict[Reading, Timeline]:
        """Timeline under every reading, not only the profiled one."""
        return {reading: schedule(self.streams, self.hardware, reading, self.waits) for reading in Reading}

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the profiled reading."""
        return self.timelines[self.reading]

    @property
    def length_ns(self) -> float:
        """Length of the launch in the profiled reading, in ns."""
        return self.timeline.length_ns

    @cached_property
    def moments(self) -> Moments:
        """Times of every event of the launch."""
        return Moments(self.streams, self.timeline)

    @cached_property
    def critical_path(self) -> tuple[Stretch, ...]:
        """Stretches of the chain of events that decides the length, first event first."""
        return find_critical_path(self.moments)

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """Intervals in which engines and DMA queues are idle, by track, then by time."""
        return find_gaps(self.moments)

    @cached_property
    def idle(self) -> tuple[GapGroup, ...]:
        """Idle time by track and cause, with equal causes merged, in descending order of time for each track."""
        return group_gaps(self.moments, self.gaps)

    @cached_property
    def traffic(self) -> tuple[TensorTraffic, ...]:
        """Bytes to and from HBM, by tensor, in descending order."""
        return sum_traffic(self.streams)

    @cached_property
    def roofline(self) -> Roofline:
        """Rates of FLOP and bytes against the peaks of the cores."""
        return compute_roofline(self.streams, self.hardware, self.length_ns, self.traffic)

    @cached_property
    def lines(self) -> tuple[LineTime, ...]:
        """Time by line of source, in descending order of the line's part of the critical path."""
        return sum_by_line(self.moments, self.critical_path)

    @cached_property
    def calling_lines(self) -> tuple[LineTime, ...]:
        """Time by calling line, including its callees; empty if the launch was recorded without call stacks."""
        return sum_by_calling_line(self.moments, self.critical_path)

    @cached_property
    def basis(self) -> Basis:
        """Parts of the length by the hardware numbers behind them, and by the confidence of these numbers."""
        return compute_basis(self.moments, self.critical_path, self.hardware)

    @cached_property
    def what_if(self) -> tuple[WhatIf, ...]:
        """Lengths of the launch with a single cost halved, for each cost in turn, in ascending order of length."""
        waits = self.waits
        if self.reading is Reading.scheduled:
            waits = dependences(self.streams, every_read=True)
        return try_halved_costs(self.streams, self.hardware, self.reading, waits, self.length_ns, self.lines)

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """Changes of the kernel that would shorten the launch, each timed, in descending order of gain."""
        return make_advice(self.streams, self.hardware, self.reading, self.length_ns)

    @cached_property
    def bounds(self) -> tuple[Bound, ...]:
        """The vendor's seven bounds on the length.

        Empty for several cores, for which the vendor states none.
        """
        if len(self.streams) > 1:
            return ()
        return bound_launch(self.streams[0], self.hardware, self.timeline, self.traffic)

    def __repr__(self) -> str:
        return f"<profile of {self.title}: {self.length_ns / 1e3:.3f} us ({self.reading.value} reading)>"


def profile(
    streams: Stream | Sequence[Stream],
    hardware: Hardware,
    title: str = "",
    reading: Reading = Reading.program,
) -> Profile:
    """Return the profile of a launch from its recorded streams.

    Args:
        streams: A stream, or one for each core of the launch.
        title: Heading of the report; "timeline" if it is empty.
        reading: What the schedule lets overlap.

    Raises:
        InvalidArgument: If `streams` or `reading` is of another type, or if a rendezvous or a requested order
            contradicts the streams.
    """
    check_reading(reading)
    streams = as_streams(streams)
    return Profile(title or "timeline", streams, hardware, reading, dependences(streams))
