"""Run order of a launch: one order of all its events, in which the cores ran and computed the values.

Streams record when the core scheduler resumed their core. A segment is a run of consecutive events of one core, or
one rendezvous of several cores. Segments of the streams are merged in the order of the resumptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from nkw.errors import InvalidArgument
from simulate.run.stream import Stream


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive events of one stream, or the events of one rendezvous.

    members: (stream's index, first event, end) for each stream that takes part, by index; a rendezvous has one event
    each.
    """

    members: tuple[tuple[int, int, int], ...]
    is_rendezvous: bool


def as_streams(streams: Stream | Sequence[Stream]) -> tuple[Stream, ...]:
    """Return one stream, or a sequence of streams, as a tuple.

    Raises:
        InvalidArgument: The argument is no stream and no sequence of streams.
    """
    if isinstance(streams, Stream):
        return (streams,)
    if isinstance(streams, Sequence) and all(isinstance(stream, Stream) for stream in streams):
        return tuple(streams)
    raise InvalidArgument(
        "NKW-TIMING-STREAMS",
        f"{type(streams).__name__} is no stream; pass the streams of a launch, launch.streams",
    )


def merge_segments(streams: Sequence[Stream]) -> tuple[Segment, ...]:
    """Return the events of all streams as segments, in the order in which their cores ran.

    A rendezvous takes effect when its last member arrives. Its members are the passed streams with its serial number,
    so one core of a launch can be timed alone. Streams that record no resumption run one after another until they
    wait.

    Raises:
        InvalidArgument: The streams order their rendezvous differently, so that one never completes.
    """
    members: dict[int, int] = {}
    for stream in streams:
        for serial in stream.rendezvous.values():
            members[serial] = members.get(serial, 0) + 1
    stops = [sorted({len(stream), *stream.rendezvous}, reverse=True) for stream in streams]
    resumed = [list(reversed(stream.resumed)) for stream in streams]
    positions = [0] * len(streams)
    arrived: dict[int, list[int]] = {}
    segments: list[Segment] = []

    def resume_key(core: int, moment: int) -> tuple[int, int]:
        return (resumed[core].pop()[0] if resumed[core] else moment), core

    ready = sorted(resume_key(core, 0) for core in range(len(streams)))
    while ready:
        moment, core = heappop(ready)
        stream, yields = streams[core], resumed[core]
        while True:
            stop = stops[core][-1]
            end = min(stop, yields[-1][1]) if yields else stop
            if end > positions[core]:
                segments.append(Segment(((core, positions[core], end),), False))
                positions[core] = end
            if end < stop:  # the scheduler let another core run
                heappush(ready, resume_key(core, moment))
                break
            if end == len(stream):
                break
            arrived_cores = arrived.setdefault(stream.rendezvous[end], [])
            arrived_cores.append(core)
            if len(arrived_cores) < members[stream.rendezvous[end]]:
                break
            segments.append(
                Segment(tuple((m, positions[m], positions[m] + 1) for m in sorted(arrived_cores)), True)
            )
            for member in arrived_cores:
                positions[member] += 1
                stops[member].pop()
                if member != core:
                    heappush(ready, resume_key(member, moment))
    unfinished = [core for core, stream in enumerate(streams) if positions[core] < len(stream)]
    if unfinished:
        blocked = ", ".join(
            f"stream {core} in rendezvous {streams[core].rendezvous[positions[core]]}" for core in unfinished
        )
        raise InvalidArgument(
            "NKW-TIMING-RENDEZVOUS",
            f"the streams order their rendezvous differently: {blocked} never completes; pass streams of one launch",
        )
    return tuple(segments)
