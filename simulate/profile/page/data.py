"""A profile as the data of its page: columns of plain numbers, texts once each.

Times are ns with one decimal. Events are numbered over all streams; slices of a track come in order of start.
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
from simulate.profile.moments import named, source, tensor_label
from simulate.profile.profile import Profile
from simulate.profile.text import gap_sentence, longest, path_by_line
from simulate.timing import Reading, Reason, SliceKind

_GAPS = 4000  # the longest gaps that the timeline explains
_CHAIN = 4000  # the longest stretches of the critical path that the page holds
_ROWS = 60  # rows of tables
_LINES = 8  # lines of the kernel that a piece of advice names
_AROUND = 3  # lines of source around one that issues instructions

# What an event waited for; the event that it waited for follows.
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


def part_data(profile: Profile) -> dict[str, Any]:
    """Everything that the page shows of one launch."""
    timeline = profile.timeline
    names = _Names(profile)
    return {
        "title": profile.title,
        "chip": profile.hardware.label,
        "core": profile.hardware.core,
        "cores": len(profile.streams),
        "reading": profile.reading.value,
        "length": _ns(profile.length_ns),
        "overhead": _ns(timeline.overhead_ns),
        "host_overhead_ns": _ns(profile.hardware.host_overhead_ns),
        "bracket": [
            [each.value, _ns(profile.timelines[each].length_ns)]
            for each in (Reading.dataflow, Reading.scheduled, Reading.program, Reading.serial)
        ],
        "basis": [[CALLED[each], _ns(part)] for each, part in profile.basis.by_confidence],
        "numbers": [
            [name, CALLED[confidence], _ns(part)] for name, confidence, part in profile.basis.by_number[:8]
        ],
        "tracks": _tracks(profile),
        "events": _events(profile, names),
        "ops": list(names.ops),
        "tensors": names.tensors,
        "boxes": list(names.boxes),
        "reasons": [_SAID.get(reason, str(reason)) for reason in Reason],
        "reasonNames": [reason.name.replace("_", " ") for reason in Reason],
        "kinds": [kind.name.replace("_", " ") for kind in SliceKind],
        "path": _path(profile),
        "pathLines": [
            [op, line, steps, _ns(total), mostly.value]
            for op, line, steps, total, mostly in path_by_line(profile.moments, profile.critical_path)[:_ROWS]
        ],
        "gaps": _gaps(profile, names),
        "idle": [
            [group.track, gap_sentence(group), group.count, _ns(group.total_ns), _ns(group.longest_ns)]
            for group in sorted(profile.idle, key=lambda group: (group.why == DONE, -group.total_ns))[:_ROWS]
        ],
        "traffic": [
            [
                t.name,
                list(t.shape),
                t.dtype,
                t.argument,
                t.nbytes,
                t.read_bytes,
                t.written_bytes,
                t.needed_bytes,
            ]
            for t in profile.traffic[:_ROWS]
        ],
        "roofline": _roofline(profile),
        "lineTimes": _line_times(profile.lines, names),
        "callers": _line_times(profile.calling_lines, names),
        "sources": _sources(profile, names),
        "lines": [[named(line), source(line)] for line in names.lines],
        "advice": [
            [_ns(each.length_ns), each.sentence, list(each.lines[:_LINES])] for each in profile.advice[:_ROWS]
        ],
        "whatIf": [[each.what, each.line, _ns(each.length_ns)] for each in profile.what_if[:_ROWS]],
    }


class _Names:
    """Numbers for the texts of several streams."""

    def __init__(self, profile: Profile) -> None:
        self.streams = profile.streams
        self.ops: dict[str, int] = {}
        self.lines: dict[tuple[CodeType, int], int] = {}
        self.tensors: list[list[Any]] = []
        self.boxes: dict[tuple[int, ...], int] = {}
        self._tensors: dict[tuple[int, int], int] = {}

    def op(self, name: str) -> int:
        """The number of an instruction's name."""
        return self.ops.setdefault(name, len(self.ops))

    def line(self, line: tuple[CodeType, int]) -> int:
        """The number of a line."""
        return self.lines.setdefault(line, len(self.lines))

    def tensor(self, stream: int, serial: int) -> int:
        """The number of a tensor."""
        key = (self.streams[stream].rank, serial)
        number = self._tensors.setdefault(key, len(self.tensors))
        if number == len(self.tensors):
            record = self.streams[stream].tensors[serial]
            label = tensor_label(self.streams, stream, serial)
            self.tensors.append([label, list(record.shape), record.dtype, record.buffer.value])
        return number

    def box(self, stream: int, row: tuple[int, ...]) -> int:
        """The number of an operand's box: tensor, kind, rows and bytes."""
        key = (self.tensor(stream, row[0] >> 2), row[0] & 3, *row[1:])
        return self.boxes.setdefault(key, len(self.boxes))


def _line_times(times: Sequence[LineTime], names: _Names) -> list[list[Any]]:
    return [[names.line(each.line), each.events, _ns(each.held_ns), _ns(each.path_ns)] for each in times]


def _tracks(profile: Profile) -> list[dict[str, Any]]:
    timeline = profile.timeline
    number = np.array(timeline.bases)[timeline.stream] + timeline.event
    out = []
    for track, name in enumerate(timeline.tracks):
        rows = np.flatnonzero(timeline.track == track)
        rows = rows[np.argsort(timeline.start_ns[rows], kind="stable")]
        if not len(rows):
            continue
        start = np.round(timeline.start_ns[rows], 1)
        out.append(
            {
                "name": name,
                "number": track,
                "busy": _ns(timeline.busy_ns[name]),
                "start": start.tolist(),
                "length": np.round(np.round(timeline.end_ns[rows], 1) - start, 1).tolist(),
                "event": number[rows].tolist(),
                "kind": timeline.kind[rows].tolist(),
            }
        )
    return out


def _events(profile: Profile, names: _Names) -> dict[str, Any]:
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


def _path(profile: Profile) -> list[list[Any]]:
    """The longest stretches of the critical path in order of time: event, start, end, reason, its phases."""
    path = profile.critical_path
    return [
        [
            path[at].event,
            _ns(path[at].start_ns),
            _ns(path[at].end_ns),
            int(path[at].reason),
            [[phase.value, _ns(part)] for phase, part in path[at].phases],
        ]
        for at in longest(path, _CHAIN)
    ]


def _gaps(profile: Profile, names: _Names) -> list[list[Any]]:
    """The longest gaps, each with its sentence's parts: track, start, end, why, event, cause, tensor (or -1)."""
    found = sorted(profile.gaps, key=lambda gap: (-gap.length_ns, gap.track, gap.start_ns))[:_GAPS]
    return [
        [
            gap.track,
            _ns(gap.start_ns),
            _ns(gap.end_ns),
            gap.why,
            -1 if gap.event is None else gap.event,
            -1 if gap.cause is None else gap.cause,
            -1 if gap.tensor is None else names.tensor(*gap.tensor),
        ]
        for gap in found
    ]


def _roofline(profile: Profile) -> dict[str, Any]:
    roof = profile.roofline
    return {
        "flops": roof.flops,
        "hbmBytes": roof.hbm_bytes,
        "neededBytes": roof.needed_bytes,
        "dmaBytes": roof.dma_bytes,
        "transfers": roof.transfers,
        "peaks": [[name, round(peak, 3)] for name, peak in roof.peaks],
        "peak": round(roof.peak, 3),
        "ownPeak": round(roof.own_peak, 3),
        "hbmPeak": round(roof.hbm_peak, 3),
        "dmaPeak": round(roof.dma_peak, 3),
        "least": _ns(roof.least_ns),
        "bound": roof.bound,
    }


def _sources(profile: Profile, names: _Names) -> list[dict[str, Any]]:
    """Files whose lines issue instructions, with the lines around: [number, text, line or -1]; None is a cut."""
    files: dict[str, dict[int, int]] = {}
    labels = {}
    for each in (*profile.lines, *profile.calling_lines):
        code, number = each.line
        files.setdefault(code.co_filename, {})[number] = names.line(each.line)
        labels[code.co_filename] = location(each.line).file
    out = []
    for path in sorted(files, key=lambda path: labels[path]):
        text, used = getlines(path), files[path]
        shown = sorted(
            {
                at
                for number in used
                for at in range(max(1, number - _AROUND), min(len(text), number + _AROUND) + 1)
            }
        )
        rows: list[list[Any] | None] = []
        for at in shown:
            if rows and rows[-1] is not None and rows[-1][0] != at - 1:
                rows.append(None)
            rows.append([at, text[at - 1].rstrip("\n"), used.get(at, -1)])
        if rows:
            out.append({"file": labels[path], "rows": rows})
    return out


def _ns(value: float) -> float:
    return round(float(value), 1)
