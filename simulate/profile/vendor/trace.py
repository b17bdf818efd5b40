"""A device profile as slices and counters of a trace, beside those of a prediction.

A physical core is a process named `measured core N`, an engine or DMA queue a thread of it. The first event stands at
the start of the trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from simulate.files import Named
from simulate.profile.vendor.dma import queue_label
from simulate.profile.vendor.engines import CORE, PLACES, SPAN, engine_name
from simulate.profile.vendor.errors import Broken, refusing
from simulate.profile.vendor.read import tables_of
from simulate.profile.vendor.tables import Kind, Names, Tables
from simulate.timing.timeline import TRACKS
from simulate.timing.trace import LANES_MAX, Lanes, slice_event, thread_events, title_event

MOST_SLICES = 1_000_000
"""Rows of one table that a trace can show; a viewer needs some hundred bytes for each."""
_FIRST_PROCESS = 1_000_000  # beyond the ranks of a prediction
_COUNTERS = {
    "PendingDma": ("value", "pending DMAs"),
    "SbufUsage": ("avg_util_percent", "SBUF average fullness"),
    "PsumUsage": ("avg_util_percent", "PSUM average fullness"),
}


class _Track:
    """Numbers of threads, and which of them have been named."""

    def __init__(self) -> None:
        self.numbers = {name: place for place, name in enumerate(TRACKS)}
        self.named: set[tuple[int, int]] = set()
        self.lanes: dict[tuple[int, str], Lanes] = {}

    def thread(self, process: int, track: str, start: int, end: int) -> int:
        """The thread for a slice; slices of a track come in order of start."""
        number = self.numbers.setdefault(track, len(self.numbers))
        lane = self.lanes.setdefault((process, track), Lanes()).take(start, end)
        return 1 + number * LANES_MAX + lane


def measured_events(path: Named) -> Iterator[dict[str, Any]]:
    """The events of the profile at `path`; none for a summary. Raises InvalidArgument as `read_profile` does."""
    with refusing(path):
        tables = tables_of(Path(path))
        if tables is None:
            return
        rows = [*_instructions(tables), *_transfers(tables)]
        if not rows:
            return
        base = min(row[1] for row in rows)
        tracks = _Track()
        for track, start, end, core, name, category, details in sorted(rows, key=lambda row: row[1:3]):
            process = _FIRST_PROCESS + core
            if (process, 0) not in tracks.named:
                tracks.named.add((process, 0))
                yield title_event("process_name", process, 0, f"measured core {core}")
            thread = tracks.thread(process, track, start, end)
            yield from thread_events(tracks.named, process, thread, track)
            yield slice_event(name, category, process, thread, start - base, end - base, details)
        yield from _counters(tables, base)


_Row = tuple[str, int, int, int, str, str, dict[str, Any]]


def _instructions(tables: Tables) -> Iterator[_Row]:
    names = Names()
    needed = {**SPAN, "engine": Kind.text, "opcode": Kind.text}
    optional = {**CORE, **dict.fromkeys(PLACES, Kind.text)}
    _limited(tables, "Instruction")
    for batch in tables.batches("Instruction", needed, optional, names):
        place = np.where(batch[PLACES[0]] >= 0, batch[PLACES[0]], batch[PLACES[1]])
        columns = (*(batch[name] for name in needed), batch["pcore_idx"], place)
        for start, end, engine, opcode, core, line in zip(*(column.tolist() for column in columns)):
            yield (
                engine_name(names.of(engine)),
                start,
                end,
                max(core, 0),
                names.of(opcode),
                "instruction",
                {"line": names.of(line)},
            )


def _transfers(tables: Tables) -> Iterator[_Row]:
    names = Names()
    needed = {**SPAN, "queue_name": Kind.text, "transfer_bytes": Kind.whole}
    optional = {**CORE, "variable": Kind.text}
    _limited(tables, "DmaPacketAggregated")
    for batch in tables.batches("DmaPacketAggregated", needed, optional, names):
        columns = (*(batch[name] for name in needed), batch["pcore_idx"], batch["variable"])
        for start, end, queue, size, core, variable in zip(*(column.tolist() for column in columns)):
            yield (
                queue_label(names.of(queue)),
                start,
                end,
                max(core, 0),
                names.of(variable) or "DMA",
                "DMA",
                {"bytes": size, "queue": names.of(queue)},
            )


def _counters(tables: Tables, base: int) -> Iterator[dict[str, Any]]:
    for table, (column, name) in _COUNTERS.items():
        _limited(tables, table)
        for batch in tables.batches(table, {"timestamp": Kind.time, column: Kind.number}, CORE):
            for when, value, core in zip(
                *(batch[each].tolist() for each in ("timestamp", column, "pcore_idx"))
            ):
                if value >= 0:
                    process, at = _FIRST_PROCESS + max(core, 0), max(when - base, 0) / 1000
                    yield {
                        "name": name,
                        "ph": "C",
                        "pid": process,
                        "tid": 0,
                        "ts": at,
                        "args": {"value": value},
                    }


def _limited(tables: Tables, table: str) -> None:
    if tables.count(table) > MOST_SLICES:
        raise Broken(f"{table} has more than {MOST_SLICES:,} rows, too many for a trace; leave --trace out")
