"""One profile from a file or a folder: `read_profile`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from nkw.files import Named, opened
from simulate.profile.vendor.dma import Packets, dma, packets
from simulate.profile.vendor.engines import Instructions, engines, instructions, lines
from simulate.profile.vendor.errors import Broken, refusing
from simulate.profile.vendor.memory import necessary_bytes, on_chip, tensors
from simulate.profile.vendor.records import ActiveEngine, DeviceProfile, Origin
from simulate.profile.vendor.summary import (
    ENGINES,
    is_summary,
    metadata,
    summary_document,
    summary_fields,
    warnings,
)
from simulate.profile.vendor.synchronization import synchronization
from simulate.profile.vendor.tables import Tables

_MAGIC = b"PAR1"
_PROBED_BYTES = 1 << 20
_HEAD_BYTES = 200  # in which a document of this project's own names its command
_KNOWN_MAJORS = range(7, 13)
"""Schema 7 came with SDK 2.31, schema 12 with SDK 2.33 (titles of the vendor's schema reference)."""


def read_profile(path: Named) -> DeviceProfile:
    """What the vendor's profiler measured.

    path: a folder with the Parquet tables of neuron-explorer, or one of its files; or the file that
    `--output-format summary-json` of neuron-explorer or neuron-profile wrote, or the `json` of neuron-profile.

    Raises InvalidArgument for everything else, and where Parquet is to be read without pyarrow.
    """
    with refusing(path):
        tables = tables_of(Path(path))
        return _of_summary(path) if tables is None else _of_tables(path, tables)


def tables_of(path: Path) -> Tables | None:
    """The tables of the folder that a path names, or that holds the table which it names; None for any other file."""
    if not path.is_dir() and not _is_parquet(path):
        return None
    tables = Tables(_folder(path) if path.is_dir() else path.parent)
    if not len(tables):
        raise Broken("it has no file named after a table, such as Instruction.parquet")
    return tables


def is_device_profile(path: Named) -> bool:
    """Whether the name or the first bytes of a path say that `read_profile` is to read it."""
    place = Path(path)
    try:
        if place.is_dir() or _is_parquet(place):
            return True
        with opened(place) as file:
            content = file.read(_PROBED_BYTES + 1)
        if len(content) > _PROBED_BYTES:
            return b'"total_time"' in content and b'"command"' not in content[:_HEAD_BYTES]
        return is_summary(content.decode())
    except (OSError, ValueError):
        return False


def _is_parquet(path: Path) -> bool:
    with opened(path) as file:
        return file.read(len(_MAGIC)) == _MAGIC or path.suffix == ".parquet"


def _folder(path: Path) -> Path:
    """The folder with the tables: the one given, or the only profile below it as `--data-path` lays them out."""
    below = path / "profiles" / "global"
    if below.is_dir() and not any(path.glob("*.parquet")):
        found = sorted(each for each in below.iterdir() if each.is_dir())
        if len(found) != 1:
            raise Broken(f"{below} has {len(found)} profiles; give the folder of one")
        return found[0]
    return path


def _of_tables(path: Named, tables: Tables) -> DeviceProfile:
    fields, origin, found = summary_fields(tables), metadata(tables), instructions(tables)
    moved = packets(tables)
    listed = tensors(tables, moved.by_variable)
    return DeviceProfile(
        path=os.fspath(path),
        total_ns=_total_ns(fields, found, moved, tables),
        work_ns=_work_ns(fields, found, moved),
        engines=_completed(engines(tables, found), fields),
        dma=dma(moved, fields),
        lines=lines(found),
        tensors=listed,
        necessary_bytes=_whole(fields, "inputs_outputs_weights_size_bytes", necessary_bytes(listed)),
        hw_flops=_whole(fields, "hardware_flops", found.flops),
        transpose_flops=_whole(fields, "transpose_flops", found.transpose_flops),
        on_chip=on_chip(tables),
        synchronization=synchronization(tables),
        origin=origin,
        warnings=warnings(tables),
        notes=(*_schema_notes(origin), *dict.fromkeys(tables.notes)),
    )


def _of_summary(path: Named) -> DeviceProfile:
    fields, origin, notes = summary_document(path)
    if "total_time" not in fields:
        raise Broken("it has no total_time")
    return DeviceProfile(
        path=os.fspath(path),
        total_ns=fields["total_time"] * 1e9,
        work_ns=_seconds(fields, "total_exec_time"),
        engines=_completed((), fields),
        dma=dma(Packets(), fields),
        necessary_bytes=_whole(fields, "inputs_outputs_weights_size_bytes"),
        hw_flops=_whole(fields, "hardware_flops"),
        transpose_flops=_whole(fields, "transpose_flops"),
        origin=origin,
        notes=(*_schema_notes(origin), *notes),
    )


def _completed(found: tuple[ActiveEngine, ...], fields: Mapping[str, float]) -> tuple[ActiveEngine, ...]:
    """Engines of the tables, else those of Summary, which adds up all cores of a logical one."""
    if found:
        return found
    active = {name: f"{name.lower()}_engine_active_time" for name in ENGINES}
    return tuple(
        ActiveEngine(0, name, fields[field] * 1e9, _whole(fields, f"{name.lower()}_engine_instruction_count"))
        for name, field in active.items()
        if field in fields
    )


def _total_ns(fields: Mapping[str, float], found: Instructions, moved: Packets, tables: Tables) -> float:
    total, work = _seconds(fields, "total_time"), _work_ns({}, found, moved)
    if total is None and work is None:
        raise Broken("it has no Summary.total_time and no row of Instruction or of a DMA table")
    if total is None:
        tables.notes.append("Summary has no total_time; the time from the first to the last event is used")
    return total if total is not None else float(work or 0.0)


def _work_ns(fields: Mapping[str, float], found: Instructions, moved: Packets) -> float | None:
    if "total_exec_time" in fields:
        return _seconds(fields, "total_exec_time")
    extents = (found.extent, moved.extent)
    firsts = [each.first_ns for each in extents if each.first_ns is not None]
    lasts = [each.last_ns for each in extents if each.last_ns is not None]
    return float(max(lasts) - min(firsts)) if firsts else None


def _schema_notes(origin: Origin) -> list[str]:
    major = origin.schema.split(".")[0]
    notes = ["the compiler simulated this profile; no device measured it"] if origin.simulated else []
    if origin.schema and not (major.isdecimal() and int(major[:9]) in _KNOWN_MAJORS):
        known = f"{_KNOWN_MAJORS[0]} to {_KNOWN_MAJORS[-1]}"
        notes.append(f"its schema is {origin.schema:.20}; this reader knows {known}")
    return notes


def _seconds(fields: Mapping[str, float], name: str) -> float | None:
    return fields[name] * 1e9 if name in fields else None


def _whole(fields: Mapping[str, float], name: str, other: int | None = None) -> int | None:
    return int(fields[name]) if name in fields else other
