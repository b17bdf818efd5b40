"""Profile as a JSON document for `nkw time --json`; `docs/json.md` has the schema."""

from __future__ import annotations

from typing import Any

from simulate.lines import location
from simulate.profile.advice.text import make_advice_records
from simulate.profile.moments import read_source_line
from simulate.profile.profile import Profile
from simulate.timing.timeline import format_core_label


def make_document(profile: Profile) -> dict[str, Any]:
    """Return a profile as plain JSON types for `time --json`, with all rows of its tables.

    Times are in ns, sizes in bytes, shares between 0 and 1.
    """
    timeline, roofline = profile.timeline, profile.roofline
    return {
        "title": profile.title,
        "target": profile.hardware.name,
        "reading": profile.reading.value,
        "length_ns": float(profile.length_ns),
        "overhead_ns": float(timeline.overhead_ns),
        "readings_ns": {
            reading.value: float(timeline.length_ns) for reading, timeline in profile.timelines.items()
        },
        "basis_ns": {
            confidence.value: float(basis_ns) for confidence, basis_ns in profile.basis.by_confidence
        },
        "tracks": [{"name": name, "busy_ns": float(timeline.busy_ns[name])} for name in timeline.tracks],
        "roofline": {
            "length_ns": float(roofline.least_ns),
            "bound": roofline.bound,
            "flops": int(roofline.flops),
            "hbm_bytes": int(roofline.hbm_bytes),
            "needed_bytes": int(roofline.needed_bytes),
            "dma_bytes": int(roofline.dma_bytes),
            "mfu": float(roofline.mfu),
            "mbu": float(roofline.mbu),
        },
        "traffic": [
            {
                "tensor": tensor.name,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "argument": tensor.argument,
                "read_bytes": int(tensor.read_bytes),
                "written_bytes": int(tensor.written_bytes),
            }
            for tensor in profile.traffic
        ],
        "lines": [
            {
                "file": line_time.line[0].co_filename,
                "line": line_time.line[1],
                "function": line_time.line[0].co_name,
                "events": line_time.events,
                "held_ns": float(line_time.held_ns),
                "path_ns": float(line_time.path_ns),
            }
            for line_time in profile.lines
        ],
        "path": sum_path(profile),
        "what_if": [
            {"halved": change.cost_name, "at": change.line, "length_ns": float(change.length_ns)}
            for change in profile.what_if
        ],
        **make_advice_records(profile),
    }


def sum_path(profile: Profile) -> list[dict[str, Any]]:
    """Return the critical path summed by line, instruction, engine or DMA queue, and phase, as rows of JSON types.

    Equal engines of several cores share a row. The `ns` of all rows add up to the length of the launch.
    """
    moments = profile.moments
    sums: dict[tuple[Any, ...], float] = {}
    for stretch in profile.critical_path:
        label = format_core_label(profile.streams, moments.stream_number(stretch.event))
        engine = moments.track(stretch.event).removeprefix(label).lstrip()
        for phase, phase_ns in stretch.phases:
            key = (moments.line(stretch.event), moments.op(stretch.event), engine, phase.value)
            sums[key] = sums.get(key, 0.0) + phase_ns
    return [
        {
            "file": location(line).file,
            "line": line[1],
            "function": line[0].co_name,
            "text": read_source_line(line),
            "op": op,
            "engine": engine,
            "phase": phase,
            "ns": float(phase_ns),
        }
        for (line, op, engine, phase), phase_ns in sums.items()
    ]
