"""Timeline as text, a line for each slice, which the stored timelines of the tests compare."""

from __future__ import annotations

from collections.abc import Sequence

from simulate.run.run_order import as_streams
from simulate.run.stream import Stream
from simulate.timing.timeline import SliceKind, Timeline


def listing(streams: Stream | Sequence[Stream], timeline: Timeline) -> str:
    """Return a timeline as text for comparing runs: a header, then a line for each slice in the order of start.

    A line has start, end and readiness of the result in us, the track, the instruction and the event within its stream.
    """
    streams = as_streams(streams)
    out = [f"{'start us':>12s} {'end us':>12s} {'ready us':>12s}  {'track':<22s} event"]
    for piece in timeline.by_start():
        stream = streams[piece.stream]
        op = stream.op_names[stream.ops[piece.event]]
        prefix = "table load for " if piece.slice_kind is SliceKind.table_load else ""
        out.append(
            f"{piece.start_ns / 1000:12.4f} {piece.end_ns / 1000:12.4f} {piece.ready_ns / 1000:12.4f}  "
            f"{piece.track:<22s} {prefix}{op} #{piece.event}"
        )
    return "\n".join(out) + "\n"
