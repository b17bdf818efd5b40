"""A device profile as slices and counters of a trace, beside those of a prediction.

A physical core is a process named `measured core N`, an engine or DMA queue a thread of it. The first event stands at
the start of the trace. Rows of the table Flow are arrows where both ends are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nkw.files import Named
from simulate.profile.vendor.dma import queue_label
from simulate.profile.vendor.engines import CORE, PLACES, SPAN, engine_name, span
from simulate.profile.vendor.errors import Broken, refusing
from simulate.profile.vendor.read import tables_of
from simulate.profile.vendor.tables import Batch, Kind, Names, Tables
from simulate.timing.flows import Place, arrow
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


# Table, the columns that tell track and name of a slice, and the word by which Flow names the table.
_DRAWN = (
    ("Instruction", "engine", "opcode", "instruction"),
    ("DmaPacketAggregated", "queue_name", "variable", "dma_block"),
)
_CALLED = {"instruction": engine_name, "dma_block": queue_label}
_ARROWS = 1 << 40  # beyond the numbers of a prediction's arrows


class _Tracks:
    """Numbers of threads, and which of them have been named."""

    def __init__(self) -> None:
        self._numbers = {name: place for place, name in enumerate(TRACKS)}
        self._lanes: dict[tuple[int, str], Lanes] = {}
        self.named: set[tuple[int, int]] = set()

    def place(self, process: int, track: str, start: int, end: int) -> Place:
        """The thread for a slice; slices of a track come in order of start."""
        number = self._numbers.setdefault(track, len(self._numbers))
        lane = self._lanes.setdefault((process, track), Lanes()).take(start, end)
        return Place(process, 1 + number * LANES_MAX + lane, start, end)


def measured_events(path: Named) -> Iterator[dict[str, Any]]:
    """The events of the profile at `path`; none for a summary. Raises InvalidArgument as `read_profile` does."""
    with refusing(path):
        tables = tables_of(Path(path))
        if tables is None:
            return
        names = Names()
        drawn = [(*row[1:], _slices(tables, names, row)) for row in _DRAWN]
        kinds = np.concatenate([np.full(len(batch["start_ts"]), at) for at, (*_, batch) in enumerate(drawn)])
        rows = np.concatenate([np.arange(len(batch["start_ts"])) for *_, batch in drawn])
        starts, ends = (np.concatenate([batch[each] for *_, batch in drawn]) for each in SPAN)
        if not len(starts):
            return
        base, tracks = int(starts.min()), _Tracks()
        places: dict[tuple[str, int], Place] = {}
        for at in np.lexsort((ends, starts)).tolist():
            track, title, table, batch = drawn[kinds[at]]
            row, start, end = rows[at], int(starts[at]) - base, int(ends[at]) - base
            core = max(int(batch["pcore_idx"][row]), 0)
            written = names.of(int(batch[track][row]))
            process, called = _FIRST_PROCESS + core, _CALLED[table](written)
            if (process, 0) not in tracks.named:
                tracks.named.add((process, 0))
                yield title_event("process_name", process, 0, f"measured core {core}")
            place = tracks.place(process, called, start, end)
            yield from thread_events(tracks.named, process, place.thread, called)
            name, details = _details(table, batch, row, names, title, written)
            yield slice_event(name, table, process, place.thread, start, end, details)
            places[table, int(batch["id"][row])] = place
        yield from _arrows(tables, places)
        yield from _counters(tables, base)


def _slices(tables: Tables, names: Names, row: tuple[str, str, str, str]) -> Batch:
    """The rows of a table that is drawn."""
    table, track, title, _ = row
    _limited(tables, table)
    whole = dict.fromkeys(("id", "pcore_idx", "transfer_bytes"), Kind.whole)
    texts = dict.fromkeys((title, *PLACES), Kind.text)
    found = tables.rows(table, {**SPAN, track: Kind.text}, {**whole, **texts}, names)
    span(found, table)
    return found


def _details(
    table: str, batch: Batch, row: int, names: Names, title: str, queue: str
) -> tuple[str, dict[str, Any]]:
    """Name of a slice, and what a viewer shows when it is selected."""
    name = names.of(int(batch[title][row]))
    if table == "dma_block":
        return name or "DMA", {"bytes": max(int(batch["transfer_bytes"][row]), 0), "queue": queue}
    lines = (names.of(int(batch[each][row])) for each in PLACES)
    return name or "instruction", {"line": next(filter(None, lines), "")}


def _arrows(tables: Tables, places: Mapping[tuple[str, int], Place]) -> Iterator[dict[str, Any]]:
    """Arrows for the rows of Flow both of whose ends are drawn, from the one that others wait for."""
    names = Names()
    _limited(tables, "Flow")
    needed = {"in_id": Kind.whole, "out_id": Kind.whole, "in_table": Kind.text, "out_table": Kind.text}
    number = _ARROWS
    for batch in tables.batches("Flow", needed, {"dependency_type": Kind.text}, names):
        columns = (batch[name].tolist() for name in (*needed, "dependency_type"))
        for producer, consumer, first, second, kind in zip(*columns):
            source = places.get((names.of(first).lower(), producer))
            target = places.get((names.of(second).lower(), consumer))
            if source is not None and target is not None and source.start <= target.start:
                yield from arrow(names.of(kind) or "dependence", number, source, target)
                number += 1


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
