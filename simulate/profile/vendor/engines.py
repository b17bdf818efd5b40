"""The tables Instruction and ActiveTime: how long engines are active, and which lines hold them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from simulate.profile.vendor.errors import Broken
from simulate.profile.vendor.intervals import Covered, Extent, IntColumn
from simulate.profile.vendor.records import ActiveEngine, MeasuredLine
from simulate.profile.vendor.summary import ENGINES
from simulate.profile.vendor.tables import Batch, Kind, Names, Tables

SPAN = {"start_ts": Kind.time, "end_ts": Kind.time}
"""The columns of every timeline of events."""

CORE = {"pcore_idx": Kind.whole}
WAITING = re.compile("EVENT_SEMAPHORE.*")
"""Opcodes of semaphore waits, in which an engine is not active."""

_CALLED = {name.lower(): name for name in ENGINES}
_PLACE = re.compile(r"[\[\s\"']*(?P<file>[^\"'\[\]]+?):(?P<line>[0-9]{1,9})(?![0-9])")
MOST_TRACKS = 10_000
_MOST_CORES = 64
_MOST_FRAMES = 500_000
PLACES = ("nki_source_location", "bir_debug_info_source_location")
"""Where an instruction says its line, the first that does; of several lines, which fusion makes, the first counts."""


@dataclass
class Instructions:
    """What the table Instruction adds up to."""

    active: dict[tuple[int, str], Covered] = field(default_factory=dict)
    counts: dict[tuple[int, str], int] = field(default_factory=dict)
    waits_ns: dict[tuple[int, str], float] = field(default_factory=dict)
    lines: dict[tuple[str, int, str], list[float]] = field(default_factory=dict)
    flops: int | None = None
    transpose_flops: int | None = None
    extent: Extent = field(default_factory=Extent)


def engine_name(written: str) -> str:
    """An engine as reports name it: `tensor` and `Tensor` are written."""
    return _CALLED.get(written.lower(), written)


def span(batch: Batch, table: str) -> tuple[IntColumn, IntColumn]:
    """Starts and ends. Raises Broken for an event that ends before it starts."""
    starts, ends = batch["start_ts"], batch["end_ts"]
    if np.any(ends < starts):
        raise Broken(f"{table} has an event that ends before it starts")
    return starts, ends


def by_core(
    batch: Batch, names: IntColumn, known: Sized, table: str
) -> Iterator[tuple[int, int, NDArray[np.intp]]]:
    """(core, number of a name, its rows) for all pairs that occur; a missing core is core 0.

    Raises Broken where there are more cores than a chip could have, or more names, counting the `known` ones.
    """
    cores = np.maximum(batch["pcore_idx"], 0)
    if len(cores) and cores.max() >= _MOST_CORES:
        raise Broken(f"{table}.pcore_idx is {cores.max()}")
    pairs = names * _MOST_CORES + cores
    order = np.argsort(pairs, kind="stable")
    found, firsts = np.unique(pairs[order], return_index=True)
    if max(len(found), len(known)) > MOST_TRACKS:
        raise Broken(f"{table} has more than {MOST_TRACKS:,} engines, queues or partitions")
    for pair, rows in zip(found.tolist(), np.split(order, firsts[1:])):
        number, core = divmod(pair, _MOST_CORES)
        yield core, number, rows


def instructions(tables: Tables) -> Instructions:
    """The table Instruction, added up by engine and by line."""
    found, names = Instructions(), Names()
    frames = _frames(tables)
    waits: list[bool] = []  # by the number of an opcode
    needed = {**SPAN, "engine": Kind.text, "opcode": Kind.text}
    optional = {
        **CORE,
        **dict.fromkeys((*PLACES, "kernel_instruction_name"), Kind.text),
        **dict.fromkeys(
            "dma_trigger_start_ts dma_trigger_end_ts evt_wait_time_ns raw_flops flops_transpose".split(),
            Kind.whole,
        ),
    }
    for batch in tables.batches("Instruction", needed, optional, names):
        starts, ends = span(batch, "Instruction")
        if not len(starts):
            continue
        found.extent.add(starts, ends)
        waits += [bool(WAITING.fullmatch(text)) for text in names.texts[len(waits) :]]
        working = ~np.array([*waits, False])[batch["opcode"]]
        found.flops = _added(found.flops, batch["raw_flops"])
        found.transpose_flops = _added(found.transpose_flops, batch["flops_transpose"])
        for core, number, rows in by_core(batch, batch["engine"], found.counts, "Instruction"):
            key = core, engine_name(names.of(number))
            here = rows[working[rows]]
            found.active.setdefault(key, Covered()).add(starts[here], ends[here])
            found.counts[key] = found.counts.get(key, 0) + len(here)
            waited = float(np.maximum(batch["evt_wait_time_ns"][rows], 0).sum(dtype=np.float64))
            found.waits_ns[key] = found.waits_ns.get(key, 0.0) + waited
        _add_lines(found, batch, names, working, frames)
    return found


def engines(tables: Tables, found: Instructions) -> tuple[ActiveEngine, ...]:
    """Active times by core and engine: those of ActiveTime, else what the instructions cover."""
    active = {key: covered.ns for key, covered in found.active.items()}
    merged: dict[tuple[int, str], Covered] = {}
    names = Names()
    for batch in tables.batches("ActiveTime", {**SPAN, "engine": Kind.text}, CORE, names):
        starts, ends = span(batch, "ActiveTime")
        for core, number, rows in by_core(batch, batch["engine"], merged, "ActiveTime"):
            merged.setdefault((core, engine_name(names.of(number))), Covered()).add(starts[rows], ends[rows])
    active.update({key: covered.ns for key, covered in merged.items()})
    order = {name: place for place, name in enumerate(ENGINES)}
    return tuple(
        ActiveEngine(*key, active[key], found.counts.get(key), found.waits_ns.get(key))
        for key in sorted(active, key=lambda key: (key[0], order.get(key[1], len(order)), key[1]))
    )


def lines(found: Instructions) -> tuple[MeasuredLine, ...]:
    """Time by line, the longest first."""
    listed = [MeasuredLine(*place, int(count), held) for place, (count, held) in found.lines.items()]
    return tuple(sorted(listed, key=lambda each: (-each.held_ns, each.file, each.line)))


def place_of(written: str) -> tuple[str, int] | None:
    """File and line of a location such as `/home/ubuntu/kernel.py:76`, or of the first in a list of them."""
    match = _PLACE.match(written)
    return (match["file"].strip(), int(match["line"])) if match else None


def _added(total: int | None, column: IntColumn) -> int | None:
    """A total with the values of a column; None as long as all of them are null."""
    known = column[column >= 0]
    return (total or 0) + int(known.sum(dtype=np.float64)) if len(known) else total


def _add_lines(
    found: Instructions,
    batch: Batch,
    names: Names,
    working: NDArray[np.bool_],
    frames: dict[str, tuple[str, int, str]],
) -> None:
    held = (batch["end_ts"] - batch["start_ts"]).astype(np.float64)
    begins, stops = batch["dma_trigger_start_ts"], batch["dma_trigger_end_ts"]
    held += np.where((begins >= 0) & (stops > begins), stops - begins, 0)
    nki, bir = (batch[name] for name in PLACES)
    place = np.where(nki >= 0, nki, bir)
    pairs = (place + 1) * (len(names.texts) + 1) + batch["kernel_instruction_name"] + 1
    chosen = working & (pairs > 0)
    keys, rows = np.unique(pairs[chosen], return_inverse=True)
    counts = np.bincount(rows, minlength=len(keys)).tolist()
    times = np.bincount(rows, weights=held[chosen], minlength=len(keys)).tolist()
    for pair, count, time in zip(keys.tolist(), counts, times):
        at, called = divmod(pair, len(names.texts) + 1)
        frame = frames.get(names.of(called - 1))
        known = place_of(names.of(at - 1)) if at else frame[:2] if frame else None
        if known is None:
            continue
        entry = found.lines.setdefault((*known, frame[2] if frame else ""), [0, 0.0])
        entry[0] += count
        entry[1] += time


def _frames(tables: Tables) -> dict[str, tuple[str, int, str]]:
    """File, line and innermost function by the name of a kernel instruction."""
    if tables.count("KernelInstructions") > _MOST_FRAMES:
        tables.notes.append(f"KernelInstructions is left out: it has more than {_MOST_FRAMES:,} rows")
        return {}
    names = Names()
    functions: dict[int, int] = {}
    for batch in tables.batches(
        "KernelStackFrames",
        {"stack_frame_id": Kind.whole},
        {"fully_qualified_function_name": Kind.text},
        names,
    ):
        called = batch["fully_qualified_function_name"].tolist()
        functions.update(zip(batch["stack_frame_id"].tolist(), called))
    found = {}
    kinds = {"file_path": Kind.text, "line_number": Kind.whole, "stack_frame_id": Kind.whole}
    for batch in tables.batches("KernelInstructions", {"kernel_instruction_name": Kind.text}, kinds, names):
        columns = ("kernel_instruction_name", *kinds)
        for name, file, line, frame in zip(*(batch[column].tolist() for column in columns)):
            if file >= 0 and line >= 0:
                found[names.of(name)] = (names.of(file), line, names.of(functions.get(frame, -1)))
    return found
