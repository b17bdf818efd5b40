"""Idle time of every engine and DMA queue: each gap with the event that ended it and the cause of its wait.

A track is an engine or a DMA queue. A slice is an interval in which an event occupies a track.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulate.profile.moments import Moments, format_line, format_tensor
from simulate.run.stream import READ
from simulate.timing import Reason, SliceKind

FIRST_BYTE = "first byte"
DONE = "nothing left to do"

# why, op, line, cause_op, cause_line, cause_track, tensor
_Texts = tuple[str, str, str, str, str, str, str]


@dataclass(frozen=True, slots=True)
class Gap:
    """Interval in which a track is idle, in ns.

    `track` is the index of the track in the timeline. `event` ends the gap, or is None if no event follows.
    `why` is the sentence of a `Reason`, or FIRST_BYTE or DONE. `cause` is the event that `event` waited for,
    or None. `tensor` is the (stream index, tensor index) of a tensor that both access, or None. Events are
    numbered over all streams.
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
        """Length of the gap in ns."""
        return self.end_ns - self.start_ns


def find_gaps(moments: Moments, shortest_ns: float = 0.0) -> tuple[Gap, ...]:
    """Return the gaps longer than `shortest_ns` of all tracks with slices, by track and then by time.

    The time before the first slice and after the last one counts too. Slices of length 0 end no gap.
    """
    timeline = moments.timeline
    gaps: list[Gap] = []
    for track in range(len(timeline.tracks)):
        rows = np.flatnonzero((timeline.track == track) & (timeline.end_ns > timeline.start_ns))
        if not len(rows):
            continue
        rows = rows[np.argsort(timeline.start_ns[rows], kind="stable")]
        starts = timeline.start_ns[rows]
        reached = np.maximum.accumulate(np.concatenate([[0.0], timeline.end_ns[rows]]))
        for index in np.flatnonzero(starts - reached[:-1] > shortest_ns).tolist():
            gaps.append(
                _explain_gap(moments, track, int(rows[index]), float(reached[index]), float(starts[index]))
            )
        if timeline.length_ns - reached[-1] > shortest_ns:
            gaps.append(Gap(track, float(reached[-1]), timeline.length_ns, DONE))
    return tuple(gaps)


def _explain_gap(moments: Moments, track: int, row: int, start_ns: float, end_ns: float) -> Gap:
    """Return the gap of a track between two times, with the cause of the event that ends it.

    Args:
        row: Index of the slice in the timeline that ends the gap.
    """
    timeline, causes = moments.timeline, moments.timeline.causes
    event = timeline.bases[int(timeline.stream[row])] + int(timeline.event[row])
    reason, cause = Reason(int(causes.reason[event])), int(causes.event[event])
    if timeline.slice_kind[row] == SliceKind.transfer:
        if causes.pool[event] >= 0:
            reason, cause = Reason.pool, int(causes.pool[event])
        elif moments.start[event] <= start_ns:
            return Gap(track, start_ns, end_ns, FIRST_BYTE, event)
    if cause < 0:
        return Gap(track, start_ns, end_ns, str(reason), event)
    return Gap(track, start_ns, end_ns, str(reason), event, cause, find_common_tensor(moments, event, cause))


def find_common_tensor(moments: Moments, event: int, cause: int) -> tuple[int, int] | None:
    """Return the (stream index, tensor index) of a tensor for which an event waited for another event.

    Prefers tensors that `event` reads over those that it writes. Tensors that both events only read do not
    count. Returns None for streams of different ranks, or if no tensor is shared.

    Args:
        event: Number over all streams of the event that waited.
        cause: Number over all streams of the event that it waited for.
    """
    stream, _ = moments.stream_of(event)
    cause_stream, _ = moments.stream_of(cause)
    if cause_stream.rank != stream.rank:
        return None
    touched = {access.tensor: access.mode != READ for access in moments.accesses(cause)}
    accesses = sorted(moments.accesses(event), key=lambda access: access.mode != READ)
    number = moments.stream_number(event)
    for access in accesses:
        if access.tensor in touched and (touched[access.tensor] or access.mode != READ):
            return number, access.tensor
    return None


@dataclass(frozen=True, slots=True)
class GapGroup:
    """Gaps of a track that the same line ended for the same cause; times in ns, texts as reports print them.

    `op` and `line` are of the events that ended the gaps; `cause_op`, `cause_line` and `cause_track` of the
    events waited for; `tensor` is what both access. A text is empty if it is unknown.
    """

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


def group_gaps(moments: Moments, gaps: Sequence[Gap]) -> tuple[GapGroup, ...]:
    """Merge gaps with equal texts, such as those that a loop repeats.

    Return groups by track, longest total first.
    """
    sums: dict[tuple[int, _Texts], list[float]] = {}
    for gap in gaps:
        totals = sums.setdefault((gap.track, _describe_gap(moments, gap)), [0, 0.0, 0.0])
        totals[0] += 1
        totals[1] += gap.length_ns
        totals[2] = max(totals[2], gap.length_ns)
    ordered = sorted(sums.items(), key=lambda entry: (entry[0][0], -entry[1][1], entry[0][1]))
    tracks = moments.timeline.tracks
    return tuple(
        GapGroup(tracks[track], *texts, int(count), total, longest)
        for (track, texts), (count, total, longest) in ordered
    )


def _describe_gap(moments: Moments, gap: Gap) -> _Texts:
    """Return the texts that gaps of a group have in common, with names of events and tensors as reports print them.

    They are (why, op, line, op of the cause, line of the cause, track of the cause, tensor); a text is empty
    if it is unknown.
    """
    event, cause = gap.event, gap.cause
    return (
        gap.why,
        "" if event is None else moments.op(event),
        "" if event is None else format_line(moments.line(event)),
        "" if cause is None else moments.op(cause),
        "" if cause is None else format_line(moments.line(cause)),
        "" if cause is None else moments.track(cause),
        "" if gap.tensor is None else format_tensor(moments.streams, *gap.tensor),
    )
