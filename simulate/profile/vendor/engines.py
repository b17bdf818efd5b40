"""Reading of a device profile's tables Instruction and ActiveTime.

They give the active times of engines, and the times for which kernel lines occupy engines and queues.
"""

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
from simulate.profile.vendor.tables import Batch, ColumnType, Names, Tables

SPAN = {"start_ts": ColumnType.time, "end_ts": ColumnType.time}
"""Columns of every table of events."""

CORE = {"pcore_idx": ColumnType.integer}
WAITING = re.compile("EVENT_SEMAPHORE.*")
"""Opcodes of semaphore waits, during which an engine is not active."""

_CALLED = {name.lower(): name for name in ENGINES}
_PLACE = re.compile(r"[\[\s\"']*(?P<file>[^\"'\[\]]+?):(?P<line>[0-9]{1,9})(?![0-9])")
MOST_TRACKS = 10_000
_MOST_CORES = 64
_MOST_FRAMES = 500_000
PLACES = ("nki_source_location", "bir_debug_info_source_location")
"""Columns of an instruction's line, in order of preference. Fused instructions list several lines; the first counts."""


@dataclass
class Instructions:
    """Sums over the table Instruction, by (core, engine) and by (file, line, function).

    `active` has the times of instructions without semaphore waits, `counts` their number, `waits_ns` the time
    that they waited for semaphores. `lines` has [number of instructions, ns that they and their DMA triggers
    take]. `flops` and `transpose_flops` are None if the table has no such figure. `extent` runs from the
    first start to the last end.
    """

    active: dict[tuple[int, str], Covered] = field(default_factory=dict)
    counts: dict[tuple[int, str], int] = field(default_factory=dict)
    waits_ns: dict[tuple[int, str], float] = field(default_factory=dict)
    lines: dict[tuple[str, int, str], list[float]] = field(default_factory=dict)
    flops: int | None = None
    transpose_flops: int | None = None
    extent: Extent = field(default_factory=Extent)


def normalise_engine(text: str) -> str:
    """Return the name of an engine as reports write it: "Tensor" for "tensor"; an unknown name unchanged."""
    return _CALLED.get(text.lower(), text)


def get_span(batch: Batch, table: str) -> tuple[IntColumn, IntColumn]:
    """Return (starts, ends) of the events of a batch in ns.

    Args:
        table: Name of the table, for the message.

    Raises:
        Broken: If an event ends before it starts.
    """
    starts, ends = batch["start_ts"], batch["end_ts"]
    if np.any(ends < starts):
        raise Broken(f"{table} has an event that ends before it starts")
    return starts, ends


def split_by_core(
    batch: Batch, names: IntColumn, known: Sized, table: str
) -> Iterator[tuple[int, int, NDArray[np.intp]]]:
    """Yield (core, number of a name, indices of the rows) for every pair of core and name in a batch.

    A row without a core belongs to core 0.

    Args:
        batch: Columns of the table, with `pcore_idx`.
        names: For each row, the number of a text in `Names`, such as an engine, or another integer.
        known: What was collected from earlier batches; its length is limited too.
        table: Name of the table, for messages.

    Raises:
        Broken: If there are more cores than a chip can have, or more than MOST_TRACKS pairs.
    """
    cores = np.maximum(batch["pcore_idx"], 0)
    if len(cores) and cores.max() >= _MOST_CORES:
        raise Broken(f"{table}.pcore_idx is {cores.max()}, and must be below {_MOST_CORES}")
    pairs = names * _MOST_CORES + cores
    order = np.argsort(pairs, kind="stable")
    pair_numbers, firsts = np.unique(pairs[order], return_index=True)
    if max(len(pair_numbers), len(known)) > MOST_TRACKS:
        raise Broken(f"{table} has more than {MOST_TRACKS:,} engines, queues or partitions")
    for pair, rows in zip(pair_numbers.tolist(), np.split(order, firsts[1:])):
        name_number, core = divmod(pair, _MOST_CORES)
        yield core, name_number, rows


def sum_instructions(tables: Tables) -> Instructions:
    """Return the sums over the table Instruction by engine and by line.

    Empty if the profile lacks the table.
    """
    totals, names = Instructions(), Names()
    frames = _read_frames(tables)
    is_wait_by_opcode: list[bool] = []  # indexed by the number of an opcode
    needed = {**SPAN, "engine": ColumnType.text, "opcode": ColumnType.text}
    optional = {
        **CORE,
        **dict.fromkeys((*PLACES, "kernel_instruction_name"), ColumnType.text),
        **dict.fromkeys(
            "dma_trigger_start_ts dma_trigger_end_ts evt_wait_time_ns raw_flops flops_transpose".split(),
            ColumnType.integer,
        ),
    }
    for batch in tables.read_batches("Instruction", needed, optional, names):
        starts, ends = get_span(batch, "Instruction")
        if not len(starts):
            continue
        totals.extent.add(starts, ends)
        is_wait_by_opcode += [bool(WAITING.fullmatch(text)) for text in names.texts[len(is_wait_by_opcode) :]]
        working = ~np.array([*is_wait_by_opcode, False])[batch["opcode"]]
        totals.flops = _add_column(totals.flops, batch["raw_flops"])
        totals.transpose_flops = _add_column(totals.transpose_flops, batch["flops_transpose"])
        for core, number, rows in split_by_core(batch, batch["engine"], totals.counts, "Instruction"):
            key = core, normalise_engine(names.get_text(number))
            working_rows = rows[working[rows]]
            totals.active.setdefault(key, Covered()).add(starts[working_rows], ends[working_rows])
            totals.counts[key] = totals.counts.get(key, 0) + len(working_rows)
            waited_ns = float(np.maximum(batch["evt_wait_time_ns"][rows], 0).sum(dtype=np.float64))
            totals.waits_ns[key] = totals.waits_ns.get(key, 0.0) + waited_ns
        _add_lines(totals, batch, names, working, frames)
    return totals


def list_engines(tables: Tables, totals: Instructions) -> tuple[ActiveEngine, ...]:
    """Return the active times by core and engine, in order of core.

    They are from the table ActiveTime where it has the engine, else the time that the engine's instructions
    cover.

    Args:
        totals: Sums over the table Instruction.
    """
    active = {key: covered.ns for key, covered in totals.active.items()}
    active_times: dict[tuple[int, str], Covered] = {}
    names = Names()
    for batch in tables.read_batches("ActiveTime", {**SPAN, "engine": ColumnType.text}, CORE, names):
        starts, ends = get_span(batch, "ActiveTime")
        for core, number, rows in split_by_core(batch, batch["engine"], active_times, "ActiveTime"):
            active_times.setdefault((core, normalise_engine(names.get_text(number))), Covered()).add(
                starts[rows], ends[rows]
            )
    active.update({key: covered.ns for key, covered in active_times.items()})
    order = {name: index for index, name in enumerate(ENGINES)}
    return tuple(
        ActiveEngine(*key, active[key], totals.counts.get(key), totals.waits_ns.get(key))
        for key in sorted(active, key=lambda key: (key[0], order.get(key[1], len(order)), key[1]))
    )


def list_lines(totals: Instructions) -> tuple[MeasuredLine, ...]:
    """Return the time by kernel line, in descending order of ns.

    Args:
        totals: Sums over the table Instruction.
    """
    lines = [
        MeasuredLine(*line_key, int(count), held_ns) for line_key, (count, held_ns) in totals.lines.items()
    ]
    return tuple(sorted(lines, key=lambda line: (-line.held_ns, line.file, line.line)))


def parse_location(location: str) -> tuple[str, int] | None:
    """Return (file, line) of a location such as `/home/ubuntu/kernel.py:76`, or of the first in a list.

    Returns None if the text has no file and line.
    """
    match = _PLACE.match(location)
    return (match["file"].strip(), int(match["line"])) if match else None


def _add_column(total: int | None, column: IntColumn) -> int | None:
    """Return a total plus the entries of a column that are not negative; negative entries stand for null.

    The total is returned unchanged if all are null, also if it is None.
    """
    present = column[column >= 0]
    return (total or 0) + int(present.sum(dtype=np.float64)) if len(present) else total


def _add_lines(
    totals: Instructions,
    batch: Batch,
    names: Names,
    working: NDArray[np.bool_],
    frames: dict[str, tuple[str, int, str]],
) -> None:
    """Add instruction counts and occupied times of a batch to `totals.lines`.

    Instructions without a location in the batch and without a frame are left out.

    Args:
        working: For each row, whether the instruction is no semaphore wait.
        frames: (file, line, innermost function) by the name of a kernel instruction.
    """
    held_ns = (batch["end_ts"] - batch["start_ts"]).astype(np.float64)
    begins, stops = batch["dma_trigger_start_ts"], batch["dma_trigger_end_ts"]
    held_ns += np.where((begins >= 0) & (stops > begins), stops - begins, 0)
    nki, bir = (batch[name] for name in PLACES)
    location_number = np.where(nki >= 0, nki, bir)
    pairs = (location_number + 1) * (len(names.texts) + 1) + batch["kernel_instruction_name"] + 1
    is_attributed = working & (pairs > 0)
    keys, rows = np.unique(pairs[is_attributed], return_inverse=True)
    counts = np.bincount(rows, minlength=len(keys)).tolist()
    ns_by_line = np.bincount(rows, weights=held_ns[is_attributed], minlength=len(keys)).tolist()
    for pair, count, line_ns in zip(keys.tolist(), counts, ns_by_line):
        location_code, name_code = divmod(pair, len(names.texts) + 1)
        frame = frames.get(names.get_text(name_code - 1))
        line_key = (
            parse_location(names.get_text(location_code - 1))
            if location_code
            else frame[:2]
            if frame
            else None
        )
        if line_key is None:
            continue
        sums = totals.lines.setdefault((*line_key, frame[2] if frame else ""), [0, 0.0])
        sums[0] += count
        sums[1] += line_ns


def _read_frames(tables: Tables) -> dict[str, tuple[str, int, str]]:
    """Return (file, line, innermost function) by the name of a kernel instruction.

    Empty without the tables; if they have too many rows, a note says so.
    """
    if tables.count_rows("KernelInstructions") > _MOST_FRAMES:
        tables.notes.append(f"KernelInstructions is left out: it has more than {_MOST_FRAMES:,} rows")
        return {}
    names = Names()
    functions: dict[int, int] = {}
    for batch in tables.read_batches(
        "KernelStackFrames",
        {"stack_frame_id": ColumnType.integer},
        {"fully_qualified_function_name": ColumnType.text},
        names,
    ):
        function_numbers = batch["fully_qualified_function_name"].tolist()
        functions.update(zip(batch["stack_frame_id"].tolist(), function_numbers))
    frames = {}
    optional = {
        "file_path": ColumnType.text,
        "line_number": ColumnType.integer,
        "stack_frame_id": ColumnType.integer,
    }
    for batch in tables.read_batches(
        "KernelInstructions", {"kernel_instruction_name": ColumnType.text}, optional, names
    ):
        columns = ("kernel_instruction_name", *optional)
        for name, file, line, frame in zip(*(batch[column].tolist() for column in columns)):
            if file >= 0 and line >= 0:
                frames[names.get_text(name)] = (
                    names.get_text(file),
                    line,
                    names.get_text(functions.get(frame, -1)),
                )
    return frames
