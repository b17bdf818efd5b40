"""Idle time of every engine and DMA queue, each gap with the event that ended it and the cause of its wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulate.profile.moments import Moments, named, tensor_label
from simulate.run.stream import READ
from simulate.timing import Reason, SliceKind

FIRST_BYTE = "first byte"
DONE = "nothing left to do"

# why, op, line, cause_op, cause_line, cause_track, tensor
_Texts = tuple[str, str, str, str, str, str, str]


@dataclass(frozen=True, slots=True)
class Gap:
    """An interval in which a track is idle.

    `event` ends it (None: nothing follows); `why` is the sentence of a `Reason`, or FIRST_BYTE or DONE; `cause` is
    the event that was waited for, `tensor` the (stream, serial) that both touch. Events are numbered over all streams.
    """

    track: int
    start_ns: float
    end_ns: float
    why: str
    event: int | None = None
    cause: int | None = None
    tensor: tuple[int, int] | None = None

    @property
    def length_ns(self) -> float:
        """End less start."""
        return self.end_ns - self.start_ns


def gaps(moments: Moments, shortest_ns: float = 0.0) -> tuple[Gap, ...]:
    """The gaps longer than `shortest_ns` of all tracks that have a slice, track by track in order of time.

    What takes no time ends no gap.
    """
    timeline = moments.timeline
    found: list[Gap] = []
    for track in range(len(timeline.tracks)):
        rows = np.flatnonzero((timeline.track == track) & (timeline.end_ns > timeline.start_ns))
        if not len(rows):
            continue
        rows = rows[np.argsort(timeline.start_ns[rows], kind="stable")]
        starts = timeline.start_ns[rows]
        reached = np.maximum.accumulate(np.concatenate([[0.0], timeline.end_ns[rows]]))
        for at in np.flatnonzero(starts - reached[:-1] > shortest_ns).tolist():
            found.append(_ended(moments, track, int(rows[at]), float(reached[at]), float(starts[at])))
        if timeline.length_ns - reached[-1] > shortest_ns:
            found.append(Gap(track, float(reached[-1]), timeline.length_ns, DONE))
    return tuple(found)


def _ended(moments: Moments, track: int, row: int, start: float, end: float) -> Gap:
    timeline, causes = moments.timeline, moments.timeline.causes
    event = timeline.bases[int(timeline.stream[row])] + int(timeline.event[row])
    reason, cause = Reason(int(causes.reason[event])), int(causes.event[event])
    if timeline.kind[row] == SliceKind.transfer:
        if causes.pool[event] >= 0:
            reason, cause = Reason.pool, int(causes.pool[event])
        elif moments.start[event] <= start:
            return Gap(track, start, end, FIRST_BYTE, event)
    if cause < 0:
        return Gap(track, start, end, str(reason), event)
    return Gap(track, start, end, str(reason), event, cause, common_tensor(moments, event, cause))


def common_tensor(moments: Moments, event: int, cause: int) -> tuple[int, int] | None:
    """The tensor for which an event waited for another one: one that the first reads, else writes."""
    stream, _ = moments.stream_of(event)
    other, _ = moments.stream_of(cause)
    if other.rank != stream.rank:
        return None
    touched = {access.tensor: access.kind != READ for access in moments.accesses(cause)}
    mine = sorted(moments.accesses(event), key=lambda access: access.kind != READ)
    number = moments.stream_number(event)
    for access in mine:
        if access.tensor in touched and (touched[access.tensor] or access.kind != READ):
            return number, access.tensor
    return None


@dataclass(frozen=True, slots=True)
class GapGroup:
    """Gaps of one track that one line ended for one cause; texts as reports print them, lengths in ns."""

    track: str
    why: str
    op: str
    line: str
    cause_op: str
    cause_line: str
    cause_track: str
    tensor: str
    count: int
    total_ns: float
    longest_ns: float


def grouped(moments: Moments, found: Sequence[Gap]) -> tuple[GapGroup, ...]:
    """Gaps that a loop repeats, as one: track by track, the most idle time first."""
    sums: dict[tuple[int, _Texts], list[float]] = {}
    for gap in found:
        entry = sums.setdefault((gap.track, _texts(moments, gap)), [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += gap.length_ns
        entry[2] = max(entry[2], gap.length_ns)
    ordered = sorted(sums.items(), key=lambda item: (item[0][0], -item[1][1], item[0][1]))
    tracks = moments.timeline.tracks
    return tuple(
        GapGroup(tracks[track], *texts, int(count), total, longest)
        for (track, texts), (count, total, longest) in ordered
    )


def _texts(moments: Moments, gap: Gap) -> _Texts:
    event, cause = gap.event, gap.cause
    return (
        gap.why,
        "" if event is None else moments.op(event),
        "" if event is None else named(moments.line(event)),
        "" if cause is None else moments.op(cause),
        "" if cause is None else named(moments.line(cause)),
        "" if cause is None else moments.track(cause),
        "" if gap.tensor is None else tensor_label(moments.streams, *gap.tensor),
    )
