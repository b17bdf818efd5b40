"""Device profiles from a file or a folder: `read_profile`.

A profile is a folder of Parquet tables, or a JSON file with the fields of the table Summary alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from nkw.files import Named, opened
from simulate.profile.vendor.dma import Packets, make_dma, sum_packets
from simulate.profile.vendor.engines import Instructions, list_engines, list_lines, sum_instructions
from simulate.profile.vendor.errors import Broken, refuse_broken_profile
from simulate.profile.vendor.memory import count_necessary_bytes, list_tensors, read_occupancy
from simulate.profile.vendor.records import ActiveEngine, DeviceProfile, Origin
from simulate.profile.vendor.summary import (
    ENGINES,
    is_summary,
    read_metadata,
    read_summary,
    read_summary_document,
    read_warnings,
)
from simulate.profile.vendor.synchronization import sum_synchronization
from simulate.profile.vendor.tables import Tables

_MAGIC = b"PAR1"
_PROBED_BYTES = 1 << 20
_HEAD_BYTES = 200  # first bytes, in which documents of `nkw` name their command
_KNOWN_MAJORS = range(7, 13)
"""Schema 7 came with SDK 2.31, schema 12 with SDK 2.33 (titles of the vendor's schema reference)."""


def read_profile(path: Named) -> DeviceProfile:
    """Read a profile of the vendor's profilers.

    Args:
        path: A folder with the Parquet tables of neuron-explorer, or a file in it. Or the file that
            `--output-format summary-json` of neuron-explorer or neuron-profile wrote, or the `json` of
            neuron-profile.

    Raises:
        InvalidArgument: If the path holds no such profile, or if it is Parquet and pyarrow is missing.
    """
    with refuse_broken_profile(path):
        tables = open_tables(Path(path))
        return _read_summary_file(path) if tables is None else _read_tables(path, tables)


def open_tables(path: Path) -> Tables | None:
    """Return the tables of the folder that a path names, or of the folder around a Parquet file; else None.

    Raises:
        Broken: If the folder has no table.
        OSError: If the path cannot be read.
    """
    if not path.is_dir() and not _is_parquet(path):
        return None
    tables = Tables(_find_folder(path) if path.is_dir() else path.parent)
    if not len(tables):
        raise Broken("it has no file named after a table, such as Instruction.parquet")
    return tables


def is_device_profile(path: Named) -> bool:
    """Return whether a path seems to be a profile for `read_profile`: a folder, Parquet, or JSON with a summary.

    False if the path cannot be read.
    """
    file_path = Path(path)
    try:
        if file_path.is_dir() or _is_parquet(file_path):
            return True
        with opened(file_path) as file:
            content = file.read(_PROBED_BYTES + 1)
        if len(content) > _PROBED_BYTES:
            return b'"total_time"' in content and b'"command"' not in content[:_HEAD_BYTES]
        return is_summary(content.decode())
    except (OSError, ValueError):
        return False


def _is_parquet(path: Path) -> bool:
    """Return whether a file's name or first bytes identify it as Parquet. Raises OSError if it cannot be read."""
    with opened(path) as file:
        return file.read(len(_MAGIC)) == _MAGIC or path.suffix == ".parquet"


def _find_folder(path: Path) -> Path:
    """Return the folder with the tables: the path, or the only profile below it in the layout of `--data-path`.

    Raises:
        Broken: If there are no or several profiles below it.
    """
    below = path / "profiles" / "global"
    if below.is_dir() and not any(path.glob("*.parquet")):
        folders = sorted(folder for folder in below.iterdir() if folder.is_dir())
        if len(folders) != 1:
            raise Broken(f"{below} has {len(folders)} profiles; give the folder of one")
        return folders[0]
    return path


def _read_tables(path: Named, tables: Tables) -> DeviceProfile:
    """Return the profile that the tables hold.

    Args:
        path: The path that the user gave.
    """
    fields, origin, instructions = read_summary(tables), read_metadata(tables), sum_instructions(tables)
    packets = sum_packets(tables)
    tensors = list_tensors(tables, packets.by_variable)
    return DeviceProfile(
        path=os.fspath(path),
        total_ns=_get_total_ns(fields, instructions, packets, tables),
        work_ns=_get_work_ns(fields, instructions, packets),
        engines=_complete_engines(list_engines(tables, instructions), fields),
        dma=make_dma(packets, fields),
        lines=list_lines(instructions),
        tensors=tensors,
        necessary_bytes=_get_count(
            fields, "inputs_outputs_weights_size_bytes", count_necessary_bytes(tensors)
        ),
        hw_flops=_get_count(fields, "hardware_flops", instructions.flops),
        transpose_flops=_get_count(fields, "transpose_flops", instructions.transpose_flops),
        on_chip=read_occupancy(tables),
        synchronization=sum_synchronization(tables),
        origin=origin,
        warnings=read_warnings(tables),
        notes=(*_list_schema_notes(origin), *dict.fromkeys(tables.notes)),
    )


def _read_summary_file(path: Named) -> DeviceProfile:
    """Return the profile of a summary in JSON: it has neither lines nor tensors."""
    fields, origin, notes = read_summary_document(path)
    if "total_time" not in fields:
        raise Broken("it has no total_time; write it with --output-format summary-json")
    return DeviceProfile(
        path=os.fspath(path),
        total_ns=fields["total_time"] * 1e9,
        work_ns=_get_ns(fields, "total_exec_time"),
        engines=_complete_engines((), fields),
        dma=make_dma(Packets(), fields),
        necessary_bytes=_get_count(fields, "inputs_outputs_weights_size_bytes"),
        hw_flops=_get_count(fields, "hardware_flops"),
        transpose_flops=_get_count(fields, "transpose_flops"),
        origin=origin,
        notes=(*_list_schema_notes(origin), *notes),
    )


def _complete_engines(
    engines: tuple[ActiveEngine, ...], fields: Mapping[str, float]
) -> tuple[ActiveEngine, ...]:
    """Return the engines of the tables, or those of Summary at core 0 if there is none.

    Summary adds up all physical cores of a logical core.

    Args:
        fields: Fields of Summary by name.
    """
    if engines:
        return engines
    field_by_engine = {name: f"{name.lower()}_engine_active_time" for name in ENGINES}
    return tuple(
        ActiveEngine(
            0, name, fields[field] * 1e9, _get_count(fields, f"{name.lower()}_engine_instruction_count")
        )
        for name, field in field_by_engine.items()
        if field in fields
    )


def _get_total_ns(
    fields: Mapping[str, float], instructions: Instructions, packets: Packets, tables: Tables
) -> float:
    """Return Summary.total_time in ns; if it is absent, the time from the first to the last event.

    A note in `tables` says so then.

    Raises:
        Broken: If the profile has neither.
    """
    total_ns, work_ns = _get_ns(fields, "total_time"), _get_work_ns({}, instructions, packets)
    if total_ns is None and work_ns is None:
        raise Broken("it has no Summary.total_time and no row of Instruction or of a DMA table")
    if total_ns is None:
        tables.notes.append("Summary has no total_time; the time from the first to the last event is used")
    return total_ns if total_ns is not None else float(work_ns or 0.0)


def _get_work_ns(fields: Mapping[str, float], instructions: Instructions, packets: Packets) -> float | None:
    """Return Summary.total_exec_time in ns; if it is absent, the time from the first to the last event.

    Returns None if there are no events either.
    """
    if "total_exec_time" in fields:
        return _get_ns(fields, "total_exec_time")
    extents = (instructions.extent, packets.extent)
    firsts = [extent.first_ns for extent in extents if extent.first_ns is not None]
    lasts = [extent.last_ns for extent in extents if extent.last_ns is not None]
    return float(max(lasts) - min(firsts)) if firsts else None


def _list_schema_notes(origin: Origin) -> list[str]:
    """Return sentences about a profile that was simulated, and about a schema that this reader does not know."""
    major = origin.schema.split(".")[0]
    notes = ["the compiler simulated this profile; no device measured it"] if origin.simulated else []
    if origin.schema and not (major.isdecimal() and int(major[:9]) in _KNOWN_MAJORS):
        known = f"{_KNOWN_MAJORS[0]} to {_KNOWN_MAJORS[-1]}"
        notes.append(f"its schema is {origin.schema:.20}; this reader knows {known}")
    return notes


def _get_ns(fields: Mapping[str, float], name: str) -> float | None:
    """Return the field `name` of Summary, which is in seconds, in ns; None if it is absent."""
    return fields[name] * 1e9 if name in fields else None


def _get_count(fields: Mapping[str, float], name: str, default: int | None = None) -> int | None:
    """Return the field `name` of Summary as an integer, or the default if it is absent."""
    return int(fields[name]) if name in fields else default
