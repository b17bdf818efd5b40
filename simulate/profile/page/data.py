"""Profile as JSON for its page: columns of numbers, with each text stored once and named by its index.

Times are in ns with one decimal. Events, the instructions and DMAs of a launch, are numbered over all
streams. A track is an engine or a DMA queue; its slices, intervals in which an event occupies it, are in
order of start.
"""

from __future__ import annotations

from collections.abc import Sequence
from linecache import getlines
from types import CodeType
from typing import Any

import numpy as np

from simulate.lines import location
from simulate.profile.basis import CALLED
from simulate.profile.gaps import DONE
from simulate.profile.lines import LineTime
from simulate.profile.moments import format_line, format_tensor, read_source_line
from simulate.profile.profile import Profile
from simulate.profile.text import find_longest, format_gap_group, sum_path_by_line
from simulate.timing import Reading, Reason, SliceKind

_GAPS = 4000  # longest gaps whose cause the timeline shows
_CHAIN = 4000  # longest stretches of the critical path on the page
_ROWS = 60  # most rows of a table
_LINES = 8  # lines of the kernel that a piece of advice names
_AROUND = 3  # lines of source shown around a line that issues instructions

# Start of a sentence about a wait; the name of the event that was waited for follows it.
_SAID = {
    Reason.begin: "nothing is before it",
    Reason.engine: "its engine was held by",
    Reason.operands: "an operand came from",
    Reason.destination: "its destination was read by",
    Reason.order: "its place was written by",
    Reason.table_load: "a table load followed",
    Reason.outstanding: "its DMA queue was full until the end of",
    Reason.pool: "the DMA engines were held by",
    Reason.rendezvous: "it meets",
    Reason.turn: "in turn, it follows",
    Reason.shared: "what it needs shared the DMA engines with",
    Reason.room: "its tile was entered after",
}


def make_page_launch(profile: Profile) -> dict[str, Any]:
    """Return everything that the page shows of a launch, as JSON types; the page's scripts read these keys."""
    timeline = profile.timeline
    names = _Names(profile)
    return {
        "title": profile.title,
        "chip": profile.hardware.label,
        "core": profile.hardware.core,
        "cores": len(profile.streams),
        "reading": profile.reading.value,
        "length": _round_ns(profile.length_ns),
        "overhead": _round_ns(timeline.overhead_ns),
        "host_overhead_ns": _round_ns(profile.hardware.host_overhead_ns),
        "bracket": [
            [reading.value, _round_ns(profile.timelines[reading].length_ns)]
            for reading in (Reading.dataflow, Reading.scheduled, Reading.program, Reading.serial)
        ],
        "basis": [
            [CALLED[confidence], _round_ns(confidence_ns)]
            for confidence, confidence_ns in profile.basis.by_confidence
        ],
        "numbers": [
            [name, CALLED[confidence], _round_ns(number_ns)]
            for name, confidence, number_ns in profile.basis.by_number[:8]
        ],
        "tracks": _make_tracks(profile),
        "events": _make_events(profile, names),
        "ops": list(names.ops),
        "tensors": names.tensors,
        "boxes": list(names.boxes),
        "reasons": [_SAID.get(reason, str(reason)) for reason in Reason],
        "reasonNames": [reason.name.replace("_", " ") for reason in Reason],
        "kinds": [slice_kind.name.replace("_", " ") for slice_kind in SliceKind],
        "path": _make_path(profile),
        "pathLines": [
            [op, line, steps, _round_ns(line_ns), longest_phase.value]
            for op, line, steps, line_ns, longest_phase in sum_path_by_line(
                profile.moments, profile.critical_path
            )[:_ROWS]
        ],
        "gaps": _make_gaps(profile, names),
        "idle": [
            [
                group.track,
                format_gap_group(group),
                group.count,
                _round_ns(group.total_ns),
                _round_ns(group.longest_ns),
            ]
            for group in sorted(profile.idle, key=lambda group: (group.why == DONE, -group.total_ns))[:_ROWS]
        ],
        "traffic": [
            [
                tensor.name,
                list(tensor.shape),
                tensor.dtype,
                tensor.argument,
                tensor.nbytes,
                tensor.read_bytes,
                tensor.written_bytes,
                tensor.needed_bytes,
            ]
            for tensor in profile.traffic[:_ROWS]
        ],
        "roofline": _make_roofline(profile),
        "lineTimes": _make_line_times(profile.lines, names),
        "callers": _make_line_times(profile.calling_lines, names),
        "sources": _make_sources(profile, names),
        "lines": [[format_line(line), read_source_line(line)] for line in names.lines],
        "advice": [
            [_round_ns(advice.length_ns), advice.sentence, list(advice.lines[:_LINES])]
            for advice in profile.advice[:_ROWS]
        ],
        "whatIf": [
            [change.cost_name, change.line, _round_ns(change.length_ns)] for change in profile.what_if[:_ROWS]
        ],
    }


class _Names:
    """Indices of instruction names, lines, tensors and operand boxes in the lists of the page, for all streams.

    Each method returns the index of its argument, and adds the argument to the list if it is new.
    """

    def __init__(self, profile: Profile) -> None:
        self.streams = profile.streams
        self.ops: dict[str, int] = {}
        self.lines: dict[tuple[CodeType, int], int] = {}
        self.tensors: list[list[Any]] = []
        self.boxes: dict[tuple[int, ...], int] = {}
        self._tensors: dict[tuple[int, int], int] = {}

    def op(self, name: str) -> int:
        """Return the index of an instruction's name in `ops`, where it is added if it is new."""
        return self.ops.setdefault(name, len(self.ops))

    def line(self, line: tuple[CodeType, int]) -> int:
        """Return the index of a kernel line in `lines`, where it is added if it is new."""
        return self.lines.setdefault(line, len(self.lines))

    def tensor(self, stream: int, serial: int) -> int:
        """Return the index of a tensor in `tensors`, where it is added if it is new.

        Ranks number tensors separately.

        Args:
            stream: Index of the stream.
            serial: Index of the tensor in the stream.
        """
        key = (self.streams[stream].rank, serial)
        number = self._tensors.setdefault(key, len(self.tensors))
        if number == len(self.tensors):
            record = self.streams[stream].tensors[serial]
            label = format_tensor(self.streams, stream, serial)
            self.tensors.append([label, list(record.shape), record.dtype, record.buffer.value])
        return number

    def box(self, stream: int, row: tuple[int, ...]) -> int:
        """Return the index of an operand's box in `boxes`, where it is added if it is new.

        A box is the tensor, the kind of access, and first and end of rows and of bytes.

        Args:
            stream: Index of the stream.
            row: Operand as the stream stores it: tensor and kind in the first number, then first and end of
                rows and bytes.
        """
        key = (self.tensor(stream, row[0] >> 2), row[0] & 3, *row[1:])
        return self.boxes.setdefault(key, len(self.boxes))


def _make_line_times(times: Sequence[LineTime], names: _Names) -> list[list[Any]]:
    """Return rows of (index of the line, events, ns of engines and queues, ns of the critical path)."""
    return [
        [
            names.line(line_time.line),
            line_time.events,
            _round_ns(line_time.held_ns),
            _round_ns(line_time.path_ns),
        ]
        for line_time in times
    ]


def _make_tracks(profile: Profile) -> list[dict[str, Any]]:
    """Return the slices of every track that has any, as columns in order of start."""
    timeline = profile.timeline
    number = np.array(timeline.bases)[timeline.stream] + timeline.event
    tracks = []
    for track, name in enumerate(timeline.tracks):
        rows = np.flatnonzero(timeline.track == track)
        rows = rows[np.argsort(timeline.start_ns[rows], kind="stable")]
        if not len(rows):
            continue
        start = np.round(timeline.start_ns[rows], 1)
        tracks.append(
            {
                "name": name,
                "number": track,
                "busy": _round_ns(timeline.busy_ns[name]),
                "start": start.tolist(),
                "length": np.round(np.round(timeline.end_ns[rows], 1) - start, 1).tolist(),
                "event": number[rows].tolist(),
                "kind": timeline.slice_kind[rows].tolist(),
            }
        )
    return tracks


def _make_events(profile: Profile, names: _Names) -> dict[str, Any]:
    """Return the columns of all events: instruction, line, cause, reason, ready time and operand boxes.

    The boxes of event i are `boxes[ends[i - 1]:ends[i]]`, those of event 0 `boxes[:ends[0]]`.
    """
    ops: list[int] = []
    lines: list[int] = []
    boxes: list[int] = []
    ends: list[int] = []
    for number, stream in enumerate(profile.streams):
        op_numbers = [names.op(name) for name in stream.op_names]
        line_numbers = [names.line(line) for line in stream.lines]
        ops += [op_numbers[op] for op in stream.ops]
        lines += [line_numbers[line] for line in stream.line_ids]
        ends += [len(boxes) + end // 5 for end in stream.row_ends]
        rows = np.frombuffer(stream.rows, np.int64).reshape(-1, 5).tolist() if len(stream.rows) else []
        boxes += [names.box(number, tuple(row)) for row in rows]
    causes = profile.timeline.causes
    return {
        "op": ops,
        "line": lines,
        "cause": causes.event.tolist(),
        "reason": causes.reason.tolist(),
        "ready": np.round(np.array(profile.moments.ready), 1).tolist(),
        "boxes": boxes,
        "ends": ends,
    }


def _make_path(profile: Profile) -> list[list[Any]]:
    """Return the 4,000 longest stretches of the critical path in order of time: event, start, end, reason, phases."""
    path = profile.critical_path
    return [
        [
            path[index].event,
            _round_ns(path[index].start_ns),
            _round_ns(path[index].end_ns),
            int(path[index].reason),
            [[phase.value, _round_ns(phase_ns)] for phase, phase_ns in path[index].phases],
        ]
        for index in find_longest(path, _CHAIN)
    ]


def _make_gaps(profile: Profile, names: _Names) -> list[list[Any]]:
    """Return the 4,000 longest gaps, longest first: track, start, end, why, event, cause, tensor.

    -1 stands for None.
    """
    longest_gaps = sorted(profile.gaps, key=lambda gap: (-gap.length_ns, gap.track, gap.start_ns))[:_GAPS]
    return [
        [
            gap.track,
            _round_ns(gap.start_ns),
            _round_ns(gap.end_ns),
            gap.why,
            -1 if gap.event is None else gap.event,
            -1 if gap.cause is None else gap.cause,
            -1 if gap.tensor is None else names.tensor(*gap.tensor),
        ]
        for gap in longest_gaps
    ]


def _make_roofline(profile: Profile) -> dict[str, Any]:
    """Return the fields of the roofline under the names that the page's scripts read."""
    roof = profile.roofline
    return {
        "flops": roof.flops,
        "hbmBytes": roof.hbm_bytes,
        "neededBytes": roof.needed_bytes,
        "dmaBytes": roof.dma_bytes,
        "transfers": roof.transfers,
        "peaks": [[name, round(peak, 3)] for name, peak in roof.peaks],
        "peak": round(roof.peak, 3),
        "ownPeak": round(roof.operand_peak, 3),
        "hbmPeak": round(roof.hbm_peak, 3),
        "dmaPeak": round(roof.dma_peak, 3),
        "least": _round_ns(roof.least_ns),
        "bound": roof.bound,
    }


def _make_sources(profile: Profile, names: _Names) -> list[dict[str, Any]]:
    """Return the source files of the kernel: name and rows of [line number, text, index of the line or -1].

    Only lines near those that issue instructions are included; None in place of a row marks an omission.
    """
    files: dict[str, dict[int, int]] = {}
    labels = {}
    for line_time in (*profile.lines, *profile.calling_lines):
        code, number = line_time.line
        files.setdefault(code.co_filename, {})[number] = names.line(line_time.line)
        labels[code.co_filename] = location(line_time.line).file
    sources = []
    for path in sorted(files, key=lambda path: labels[path]):
        text, used = getlines(path), files[path]
        shown = sorted(
            {
                shown_number
                for number in used
                for shown_number in range(max(1, number - _AROUND), min(len(text), number + _AROUND) + 1)
            }
        )
        rows: list[list[Any] | None] = []
        for shown_number in shown:
            if rows and rows[-1] is not None and rows[-1][0] != shown_number - 1:
                rows.append(None)
            rows.append([shown_number, text[shown_number - 1].rstrip("\n"), used.get(shown_number, -1)])
        if rows:
            sources.append({"file": labels[path], "rows": rows})
    return sources


def _round_ns(time_ns: float) -> float:
    """Round a time in ns to one decimal."""
    return round(float(time_ns), 1)
