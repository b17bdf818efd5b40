"""Slices and counters of a device profile in a trace, next to those of a prediction.

A physical core is a process named `measured core N`; an engine or DMA queue is a thread of it. The first
event starts at time 0 of the trace. A row of the table Flow is an arrow if both of its ends are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nkw.files import Named
from simulate.profile.vendor.dma import normalise_queue
from simulate.profile.vendor.engines import CORE, PLACES, SPAN, get_span, normalise_engine
from simulate.profile.vendor.errors import Broken, refuse_broken_profile
from simulate.profile.vendor.read import open_tables
from simulate.profile.vendor.tables import Batch, ColumnType, Names, Tables
from simulate.timing.flows import SlicePosition, make_arrow
from simulate.timing.timeline import TRACKS
from simulate.timing.trace import LANES_MAX, Lanes, make_slice_event, make_thread_events, make_title_event

MOST_SLICES = 1_000_000
"""Most rows of a table in a trace; a viewer needs some hundred bytes for each."""
_FIRST_PROCESS = 1_000_000  # greater than the ranks of a prediction
_COUNTERS = {
    "PendingDma": ("value", "pending DMAs"),
    "SbufUsage": ("avg_util_percent", "SBUF average fullness"),
    "PsumUsage": ("avg_util_percent", "PSUM average fullness"),
}


# Table, column of the track, column of the slice's name, and the name of the table in Flow.
_DRAWN = (
    ("Instruction", "engine", "opcode", "instruction"),
    ("DmaPacketAggregated", "queue_name", "variable", "dma_block"),
)
_CALLED = {"instruction": normalise_engine, "dma_block": normalise_queue}
_ARROWS = 1 << 40  # greater than the numbers of a prediction's arrows


class _Tracks:
    """Allocation of a viewer's thread numbers to tracks, engines or DMA queues of a core.

    `named` has the (process, thread) whose name has been yielded; thread 0 stands for the process.
    """

    def __init__(self) -> None:
        self._numbers = {name: index for index, name in enumerate(TRACKS)}
        self._lanes: dict[tuple[int, str], Lanes] = {}
        self.named: set[tuple[int, int]] = set()

    def allocate(self, process: int, track: str, start: int, end: int) -> SlicePosition:
        """Return the position of a slice in the trace: its process, a thread of the track that is free, and its times.

        Overlapping slices of a track get different threads. Slices of a track must be passed in order of
        start.

        Args:
            process: Number of the process, which stands for a physical core.
            track: Name of the engine or DMA queue.
            start: Start of the slice in ns.
            end: End of the slice in ns.
        """
        number = self._numbers.setdefault(track, len(self._numbers))
        lane = self._lanes.setdefault((process, track), Lanes()).take(start, end)
        return SlicePosition(process, 1 + number * LANES_MAX + lane, start, end)


def read_trace_events(path: Named) -> Iterator[dict[str, Any]]:
    """Yield the trace events of the profile at `path`: names, slices, arrows, then counters.

    Yields nothing for a profile that is a summary in JSON.

    Raises:
        InvalidArgument: As for `read_profile`, and if a table has more than MOST_SLICES rows.
    """
    with refuse_broken_profile(path):
        tables = open_tables(Path(path))
        if tables is None:
            return
        names = Names()
        drawn_tables = [(*row[1:], _read_slices(tables, names, row)) for row in _DRAWN]
        table_indices = np.concatenate(
            [
                np.full(len(batch["start_ts"]), table_index)
                for table_index, (*_, batch) in enumerate(drawn_tables)
            ]
        )
        rows = np.concatenate([np.arange(len(batch["start_ts"])) for *_, batch in drawn_tables])
        starts, ends = (np.concatenate([batch[column] for *_, batch in drawn_tables]) for column in SPAN)
        if not len(starts):
            return
        base, tracks = int(starts.min()), _Tracks()
        threads: dict[tuple[str, int], SlicePosition] = {}
        for event_index in np.lexsort((ends, starts)).tolist():
            track, title, table, batch = drawn_tables[table_indices[event_index]]
            row, start, end = (
                rows[event_index],
                int(starts[event_index]) - base,
                int(ends[event_index]) - base,
            )
            core = max(int(batch["pcore_idx"][row]), 0)
            track_text = names.get_text(int(batch[track][row]))
            process, track_name = _FIRST_PROCESS + core, _CALLED[table](track_text)
            if (process, 0) not in tracks.named:
                tracks.named.add((process, 0))
                yield make_title_event("process_name", process, 0, f"measured core {core}")
            thread = tracks.allocate(process, track_name, start, end)
            yield from make_thread_events(tracks.named, process, thread.thread, track_name)
            name, details = _describe_slice(table, batch, row, names, title, track_text)
            yield make_slice_event(name, table, process, thread.thread, start, end, details)
            threads[table, int(batch["id"][row])] = thread
        yield from _make_arrows(tables, threads)
        yield from _make_counters(tables, base)


def _read_slices(tables: Tables, names: Names, row: tuple[str, str, str, str]) -> Batch:
    """Return the columns of a table whose rows are slices.

    Args:
        names: Numbers the texts of the columns.
        row: Entry of `_DRAWN`: table, column of the track, column of the slice's name.

    Raises:
        Broken: If there are too many rows, or an event ends before it starts.
    """
    table, track, title, _ = row
    _expect_drawable(tables, table)
    integer_columns = dict.fromkeys(("id", "pcore_idx", "transfer_bytes"), ColumnType.integer)
    text_columns = dict.fromkeys((title, *PLACES), ColumnType.text)
    slices = tables.read_rows(
        table, {**SPAN, track: ColumnType.text}, {**integer_columns, **text_columns}, names
    )
    get_span(slices, table)
    return slices


def _describe_slice(
    table: str, batch: Batch, row: int, names: Names, title: str, queue: str
) -> tuple[str, dict[str, Any]]:
    """Return (name of a slice, details that a viewer shows when the slice is selected).

    Args:
        table: "instruction" or "dma_block", as Flow names the table.
        row: Index of the slice in the batch.
        title: Column of the slice's name.
        queue: Name of its track in the profile.
    """
    name = names.get_text(int(batch[title][row]))
    if table == "dma_block":
        return name or "DMA", {"bytes": max(int(batch["transfer_bytes"][row]), 0), "queue": queue}
    lines = (names.get_text(int(batch[column][row])) for column in PLACES)
    return name or "instruction", {"line": next(filter(None, lines), "")}


def _make_arrows(
    tables: Tables, threads: Mapping[tuple[str, int], SlicePosition]
) -> Iterator[dict[str, Any]]:
    """Yield trace events of arrows for the rows of Flow whose ends are both drawn, from producer to consumer.

    Rows whose consumer starts before the producer are left out.

    Args:
        threads: Positions of slices by (name of the table in Flow, id of the row).
    """
    names = Names()
    _expect_drawable(tables, "Flow")
    needed = {
        "in_id": ColumnType.integer,
        "out_id": ColumnType.integer,
        "in_table": ColumnType.text,
        "out_table": ColumnType.text,
    }
    number = _ARROWS
    for batch in tables.read_batches("Flow", needed, {"dependency_type": ColumnType.text}, names):
        columns = (batch[name].tolist() for name in (*needed, "dependency_type"))
        for producer, consumer, first, second, dependence_type in zip(*columns):
            source = threads.get((names.get_text(first).lower(), producer))
            target = threads.get((names.get_text(second).lower(), consumer))
            if source is not None and target is not None and source.start <= target.start:
                yield from make_arrow(names.get_text(dependence_type) or "dependence", number, source, target)
                number += 1


def _make_counters(tables: Tables, base: int) -> Iterator[dict[str, Any]]:
    """Yield the counter events of pending DMAs, and of the fullness of SBUF and PSUM.

    Args:
        base: Time of the profile in ns at which the trace starts.
    """
    for table, (column, name) in _COUNTERS.items():
        _expect_drawable(tables, table)
        for batch in tables.read_batches(
            table, {"timestamp": ColumnType.time, column: ColumnType.number}, CORE
        ):
            for time_ns, amount, core in zip(
                *(batch[column_name].tolist() for column_name in ("timestamp", column, "pcore_idx"))
            ):
                if amount >= 0:
                    process, time_us = _FIRST_PROCESS + max(core, 0), max(time_ns - base, 0) / 1000
                    yield {
                        "name": name,
                        "ph": "C",
                        "pid": process,
                        "tid": 0,
                        "ts": time_us,
                        "args": {"value": amount},
                    }


def _expect_drawable(tables: Tables, table: str) -> None:
    """Raise Broken if a table has more than MOST_SLICES rows."""
    if tables.count_rows(table) > MOST_SLICES:
        raise Broken(f"{table} has more than {MOST_SLICES:,} rows, too many for a trace; leave --trace out")
