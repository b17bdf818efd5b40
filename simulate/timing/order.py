"""One order of all events of a launch: that in which the cores ran, which is the order that gave the values.

Streams do not record how cores took turns, but turns are deterministic (`simulate.run.scheduler`): a core runs
until it has to wait in a rendezvous, then the next one that can. So the order is worked out again from the
rendezvous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulate.errors import InvalidArgument
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

    The members of a rendezvous are the given streams that hold its serial, so one core of a launch can be timed
    alone. Raises InvalidArgument where the rendezvous of the streams contradict each other.
    """
    members: dict[int, int] = {}
    for stream in streams:
        for serial in stream.rendezvous.values():
            members[serial] = members.get(serial, 0) + 1
    ahead = [sorted(stream.rendezvous, reverse=True) for stream in streams]
    at = [0] * len(streams)
    arrived: dict[int, list[int]] = {}
    waiting: set[int] = set()
    done: set[int] = set()
    steps: list[Segment] = []
    core: int | None = 0 if streams else None
    while core is not None:
        end = ahead[core].pop() if ahead[core] else len(streams[core])
        if end > at[core]:
            steps.append(Segment(((core, at[core], end),), False))
        at[core] = end
        if end == len(streams[core]):
            done.add(core)
            core = _next(core, len(streams), waiting | done)
            continue
        serial = streams[core].rendezvous[end]
        here = arrived.setdefault(serial, [])
        here.append(core)
        if len(here) < members[serial]:
            waiting.add(core)
            core = _next(core, len(streams), waiting | done)
            continue
        steps.append(Segment(tuple((member, at[member], at[member] + 1) for member in sorted(here)), True))
        for member in here:
            at[member] += 1
        waiting.difference_update(here)
    if waiting:
        held = ", ".join(
            f"stream {core} in rendezvous {streams[core].rendezvous[at[core]]}" for core in sorted(waiting)
        )
        raise InvalidArgument(
            "NKW-TIMING-MEETINGS",
            f"the rendezvous of the streams contradict each other: {held} waits for ever",
        )
    return tuple(steps)


def _next(core: int, count: int, unable: set[int]) -> int | None:
    for step in range(1, count + 1):
        candidate = (core + step) % count
        if candidate not in unable:
            return candidate
    return None
