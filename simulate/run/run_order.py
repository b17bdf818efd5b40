"""The run order of a launch: one order of all its events, in which the cores ran and computed the values.

Streams record when the core scheduler resumed their core. Segments of the streams are merged in that order, and the
members of a rendezvous form one segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from nkw.errors import InvalidArgument
from simulate.run.stream import Stream


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of events of one stream, or one rendezvous: (stream, first event, end) for each member."""

    members: tuple[tuple[int, int, int], ...]
    rendezvous: bool


def as_streams(streams: Stream | Sequence[Stream]) -> tuple[Stream, ...]:
    """One stream or several, as several. Raises InvalidArgument for anything else."""
    if isinstance(streams, Stream):
        return (streams,)
    if isinstance(streams, Sequence) and all(isinstance(stream, Stream) for stream in streams):
        return tuple(streams)
    raise InvalidArgument(
        "NKW-TIMING-STREAMS",
        f"{type(streams).__name__} is no stream; pass the streams of a launch, launch.streams",
    )


def run_order(streams: Sequence[Stream]) -> tuple[Segment, ...]:
    """The events of `streams`, in the order in which their cores ran.

    A rendezvous takes effect where its last member arrives; its members are the given streams with its serial, so one
    core of a launch can be timed alone. Streams that record no resumption run in the given order, each until it waits.
    Raises InvalidArgument where the rendezvous of the streams contradict each other.
    """
    members: dict[int, int] = {}
    for stream in streams:
        for serial in stream.rendezvous.values():
            members[serial] = members.get(serial, 0) + 1
    stops = [sorted({len(stream), *stream.rendezvous}, reverse=True) for stream in streams]
    resumed = [list(reversed(stream.resumed)) for stream in streams]
    at = [0] * len(streams)
    arrived: dict[int, list[int]] = {}
    segments: list[Segment] = []

    def ready_again(core: int, moment: int) -> tuple[int, int]:
        return (resumed[core].pop()[0] if resumed[core] else moment), core

    ready = sorted(ready_again(core, 0) for core in range(len(streams)))
    while ready:
        moment, core = heappop(ready)
        stream, yields = streams[core], resumed[core]
        while True:
            stop = stops[core][-1]
            end = min(stop, yields[-1][1]) if yields else stop
            if end > at[core]:
                segments.append(Segment(((core, at[core], end),), False))
                at[core] = end
            if end < stop:  # the scheduler let another core run
                heappush(ready, ready_again(core, moment))
                break
            if end == len(stream):
                break
            here = arrived.setdefault(stream.rendezvous[end], [])
            here.append(core)
            if len(here) < members[stream.rendezvous[end]]:
                break
            segments.append(Segment(tuple((m, at[m], at[m] + 1) for m in sorted(here)), True))
            for member in here:
                at[member] += 1
                stops[member].pop()
                if member != core:
                    heappush(ready, ready_again(member, moment))
    waiting = [core for core, stream in enumerate(streams) if at[core] < len(stream)]
    if waiting:
        held = ", ".join(
            f"stream {core} in rendezvous {streams[core].rendezvous[at[core]]}" for core in waiting
        )
        raise InvalidArgument(
            "NKW-TIMING-RENDEZVOUS",
            f"the streams order their rendezvous differently: {held} never completes; pass streams of one launch",
        )
    return tuple(segments)
