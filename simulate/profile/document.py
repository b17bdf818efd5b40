"""A profile as a document for `nkw time --json`; `docs/json.md` has the schema."""

from __future__ import annotations

from typing import Any

from simulate.lines import location
from simulate.profile.advice.text import records
from simulate.profile.moments import source
from simulate.profile.profile import Profile
from simulate.timing.timeline import core_label


def document(profile: Profile) -> dict[str, Any]:
    """What the text of a profile says, with all rows of its tables; times in ns, sizes in bytes, shares of 1."""
    timeline, roofline = profile.timeline, profile.roofline
    return {
        "title": profile.title,
        "target": profile.hardware.name,
        "reading": profile.reading.value,
        "length_ns": float(profile.length_ns),
        "overhead_ns": float(timeline.overhead_ns),
        "readings_ns": {each.value: float(found.length_ns) for each, found in profile.timelines.items()},
        "basis_ns": {each.value: float(part) for each, part in profile.basis.by_confidence},
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
                "tensor": each.name,
                "shape": list(each.shape),
                "dtype": each.dtype,
                "argument": each.argument,
                "read_bytes": int(each.read_bytes),
                "written_bytes": int(each.written_bytes),
            }
            for each in profile.traffic
        ],
        "lines": [
            {
                "file": each.line[0].co_filename,
                "line": each.line[1],
                "function": each.line[0].co_name,
                "events": each.events,
                "held_ns": float(each.held_ns),
                "path_ns": float(each.path_ns),
            }
            for each in profile.lines
        ],
        "path": path_parts(profile),
        "what_if": [
            {"halved": each.what, "at": each.line, "length_ns": float(each.length_ns)}
            for each in profile.what_if
        ],
        **records(profile),
    }


def path_parts(profile: Profile) -> list[dict[str, Any]]:
    """The critical path by line, instruction, engine or DMA queue of any core, and phase; the parts add up to it."""
    moments = profile.moments
    sums: dict[tuple[Any, ...], float] = {}
    for each in profile.critical_path:
        label = core_label(profile.streams, moments.stream_number(each.event))
        engine = moments.track(each.event).removeprefix(label).lstrip()
        for phase, part in each.phases:
            key = (moments.line(each.event), moments.op(each.event), engine, phase.value)
            sums[key] = sums.get(key, 0.0) + part
    return [
        {
            "file": location(line).file,
            "line": line[1],
            "function": line[0].co_name,
            "text": source(line),
            "op": op,
            "engine": engine,
            "phase": phase,
            "ns": float(part),
        }
        for (line, op, engine, phase), part in sums.items()
    ]
