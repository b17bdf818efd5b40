"""Everything that a profile says of one launch, worked out when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from nkw.terminal import Displayed
from simulate.hardware import Hardware
from simulate.profile.advice import Advice, Bound, advice, bounds
from simulate.profile.basis import Basis, basis
from simulate.profile.critical_path import Stretch, critical_path
from simulate.profile.gaps import Gap, GapGroup, gaps, grouped
from simulate.profile.lines import LineTime, calling_lines, lines
from simulate.profile.moments import Moments
from simulate.profile.roofline import Roofline, roofline
from simulate.profile.traffic import TensorTraffic, traffic
from simulate.profile.what_if import WhatIf, what_if
from simulate.run.run_order import as_streams
from simulate.run.stream import Stream
from simulate.timing import Dependences, Reading, Timeline, check_reading, dependences, schedule


@dataclass(frozen=True, eq=False, repr=False)
class Profile(Displayed):
    """Where the time of one launch goes, under one reading of its streams.

    `print` shows the report of `text`, a notebook the same report with its headings in bold.
    """

    title: str
    streams: tuple[Stream, ...]
    hardware: Hardware
    reading: Reading
    waits: Dependences

    @cached_property
    def timelines(self) -> dict[Reading, Timeline]:
        """The timeline of every reading."""
        return {each: schedule(self.streams, self.hardware, each, self.waits) for each in Reading}

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline of the reading that is profiled."""
        return self.timelines[self.reading]

    @property
    def length_ns(self) -> float:
        """Its length."""
        return self.timeline.length_ns

    @cached_property
    def moments(self) -> Moments:
        """When every event does what."""
        return Moments(self.streams, self.timeline)

    @cached_property
    def critical_path(self) -> tuple[Stretch, ...]:
        """The chain of events that decides the length."""
        return critical_path(self.moments)

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """Idle time of engines and DMA queues, one by one."""
        return gaps(self.moments)

    @cached_property
    def idle(self) -> tuple[GapGroup, ...]:
        """Idle time by cause."""
        return grouped(self.moments, self.gaps)

    @cached_property
    def traffic(self) -> tuple[TensorTraffic, ...]:
        """Bytes to and from HBM by tensor."""
        return traffic(self.streams)

    @cached_property
    def roofline(self) -> Roofline:
        """Rates against the peaks of the chip."""
        return roofline(self.streams, self.hardware, self.length_ns, self.traffic)

    @cached_property
    def lines(self) -> tuple[LineTime, ...]:
        """Time by line of source."""
        return lines(self.moments, self.critical_path)

    @cached_property
    def calling_lines(self) -> tuple[LineTime, ...]:
        """Time by calling line, with all that it calls."""
        return calling_lines(self.moments, self.critical_path)

    @cached_property
    def basis(self) -> Basis:
        """What the length rests on."""
        return basis(self.moments, self.critical_path, self.hardware)

    @cached_property
    def what_if(self) -> tuple[WhatIf, ...]:
        """What halving one cost at a time would gain."""
        waits = self.waits
        if self.reading is Reading.scheduled:
            waits = dependences(self.streams, every_read=True)
        return what_if(self.streams, self.hardware, self.reading, waits, self.length_ns, self.lines)

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """Changes of the kernel that would shorten the launch, each timed, the largest gain first."""
        return advice(self.streams, self.hardware, self.reading, self.length_ns)

    @cached_property
    def bounds(self) -> tuple[Bound, ...]:
        """The vendor's bounds; none for several cores, for which the vendor states none."""
        if len(self.streams) > 1:
            return ()
        return bounds(self.streams[0], self.hardware, self.timeline, self.traffic)

    def __repr__(self) -> str:
        return f"<profile of {self.title}: {self.length_ns / 1e3:.3f} us ({self.reading.value} reading)>"


def profile(
    streams: Stream | Sequence[Stream],
    hardware: Hardware,
    title: str = "",
    reading: Reading = Reading.program,
) -> Profile:
    """The profile of one launch.

    Raises InvalidArgument for what is no stream or no reading, and for rendezvous or requested orders that contradict
    the streams.
    """
    check_reading(reading)
    streams = as_streams(streams)
    return Profile(title or "timeline", streams, hardware, reading, dependences(streams))
