"""Timelines as text: where the time of a kernel goes, and the whole timeline line by line."""

from __future__ import annotations

from collections.abc import Sequence

from simulate.hardware import Hardware
from simulate.run.location import location
from simulate.run.stream import Stream
from simulate.timing.dependences import dependences
from simulate.timing.order import as_streams
from simulate.timing.readings import Reading
from simulate.timing.schedule import schedule
from simulate.timing.timeline import Kind, Timeline


def report(
    streams: Stream | Sequence[Stream],
    hardware: Hardware,
    title: str = "",
    reading: Reading = Reading.program,
    lines: int = 8,
) -> str:
    """Length with its bracket, engines, DMA, matmul rate and the `lines` kernel lines that take most time.

    Rates are over the length, so they say how much of the chip the kernel uses. Peaks are per core: matmul of
    16-bit operands at the full clock, and all DMA engines of the core.
    """
    streams = as_streams(streams)
    waits = dependences(streams)
    timelines = {each: schedule(streams, hardware, each, waits) for each in Reading}
    timeline = timelines[reading]
    out = [f"{title or 'timeline'}: {_us(timeline.length_ns)} us ({reading.value} reading)"]
    bounds = " <= ".join(
        f"{each.value} {_us(timelines[each].length_ns)} us"
        for each in (Reading.dataflow, Reading.scheduled, Reading.program, Reading.serial)
    )
    out += [bounds, f"starting and ending the kernel: {_us(timeline.overhead_ns)} us on top", ""]
    out += _tracks(timeline) + [""] + _rates(streams, hardware, timeline)
    ranked = _lines(streams, timeline)
    if ranked:
        out += ["", f"{'line':<48s}{'events':>8s}{'us':>14s}{'share':>9s}"]
        total = sum(busy for _, _, busy in ranked)
        for where, events, busy in ranked[:lines]:
            out.append(f"{_fit(where, 47):<48s}{events:>8d}{_us(busy):>14s}{_share(busy, total):>9s}")
    return "\n".join(line.rstrip() for line in out) + "\n"


def listing(streams: Stream | Sequence[Stream], timeline: Timeline) -> str:
    """The timeline as text, one slice a line in order of start; for comparing runs."""
    streams = as_streams(streams)
    out = [f"{'start us':>12s} {'end us':>12s} {'ready us':>12s}  {'track':<22s} event"]
    for piece in timeline.by_start():
        stream = streams[piece.stream]
        op = stream.op_names[stream.ops[piece.event]]
        what = "table load for " if piece.kind is Kind.table_load else ""
        out.append(
            f"{piece.start_ns / 1000:12.4f} {piece.end_ns / 1000:12.4f} {piece.ready_ns / 1000:12.4f}  "
            f"{piece.track:<22s} {what}{op} #{piece.event}"
        )
    return "\n".join(out) + "\n"


def _tracks(timeline: Timeline) -> list[str]:
    out = [f"{'track':<30s}{'busy us':>14s}{'busy':>9s}{'idle us':>14s}{'slices':>10s}"]
    counts = [0] * len(timeline.tracks)
    for number in timeline.track.tolist():
        counts[number] += 1
    for name, count in zip(timeline.tracks, counts):
        busy = timeline.busy_ns[name]
        share = _share(busy, timeline.length_ns)
        out.append(f"{name:<30s}{_us(busy):>14s}{share:>9s}{_us(timeline.idle_ns[name]):>14s}{count:>10d}")
    return out


def _rates(streams: Sequence[Stream], hardware: Hardware, timeline: Timeline) -> list[str]:
    moved = flops = transfers = 0
    for stream in streams:
        for cost_id in stream.cost_ids:
            cost = stream.costs[cost_id]
            flops += cost.flops
            if cost.dma is not None:
                moved += cost.dma.bytes
                transfers += 1
    length = timeline.length_ns
    dma_peak = len(streams) * hardware.dma_engines * hardware.dma_engine_bytes_per_ns
    array = hardware.contraction_max * hardware.stationary_free_max
    flops_peak = len(streams) * 2 * array * hardware.tensor_clock_ghz  # per ns
    moved_rate, flops_rate = (moved / length, flops / length) if length else (0.0, 0.0)
    return [
        f"DMA     {moved / 1e6:12.3f} MB in {transfers} transfers, {moved_rate:.1f} GB/s, "
        f"{_share(moved_rate, dma_peak)} of {dma_peak:.0f}",
        f"matmul  {flops / 1e9:12.3f} GFLOP, {flops_rate / 1e3:.2f} TFLOP/s, "
        f"{_share(flops_rate, flops_peak)} of {flops_peak / 1e3:.1f}",
    ]


def _lines(streams: Sequence[Stream], timeline: Timeline) -> list[tuple[str, int, float]]:
    """Kernel lines with their events and the time these hold engines and DMA queues, the longest first."""
    durations = (timeline.end_ns - timeline.start_ns).tolist()
    held: dict[tuple[object, int], list[float]] = {}
    for number, event, kind, duration in zip(
        timeline.stream.tolist(), timeline.event.tolist(), timeline.kind.tolist(), durations
    ):
        stream = streams[number]
        entry = held.setdefault(stream.lines[stream.line_ids[event]], [0.0, 0.0])
        entry[0] += kind in (Kind.instruction, Kind.trigger)
        entry[1] += duration
    named = [(str(location(line)), int(events), busy) for line, (events, busy) in held.items()]  # type: ignore[arg-type]
    return sorted(named, key=lambda entry: (-entry[2], entry[0]))


def _us(nanoseconds: float) -> str:
    return f"{nanoseconds / 1000:.3f}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[-(width - 3) :]
