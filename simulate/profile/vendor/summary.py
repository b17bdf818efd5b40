"""Sums that profilers write: the tables Summary, Metadata and Warning, and the document of `summary-json`.

`--output-format summary-json` has the fields of the table Summary (aws-neuron/neuron-agentic-development,
skills/neuron-explorer-profile-schema). The `json` of neuron-profile has the same fields as the first element
of `summary` (Neuron SDK documentation, "Neuron Profile User Guide", Alternative output formats).
neuron-explorer puts them into an object under the name of the profile. Times are in seconds, rates in bytes
per second, clocks in GHz.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import NoReturn

from nkw.files import Named, read_text
from simulate.profile.vendor.errors import Broken
from simulate.profile.vendor.records import Origin
from simulate.profile.vendor.tables import ColumnType, Names, Tables

ENGINES = ("Tensor", "Vector", "Scalar", "GpSimd", "Sync")
"""Engines for which Summary has fields."""

_NUMBERS = (
    "total_time total_exec_time dma_active_time dma_transfer_total_bytes dma_transfer_count hbm_read_bytes "
    "hbm_write_bytes inputs_outputs_weights_size_bytes hardware_flops transpose_flops"
).split() + [
    f"{engine.lower()}_engine_{field}"
    for engine in ENGINES
    for field in ("active_time", "instruction_count", "instruction_time")
]
_WORDS = {
    "schema": ("profile_schema_version",),
    "instance": ("instance_type",),
    "explorer": ("explorer_version", "profiler_version"),
    "runtime": ("runtime_version",),
    "compiler": ("compiler_version",),
}
_RATES = (
    "dma_ddr_bandwidth tensor_engine_num_rows tensor_engine_num_cols tensor_engine_clock_freq num_physical_cores"
).split()
_LARGEST = 1e18  # ns: 31 years; bytes: an exabyte
_MOST_WARNINGS = 100

Fields = Mapping[str, float]


def read_summary(tables: Tables) -> dict[str, float]:
    """Return the fields of the first row of Summary by name, without nulls; empty without the table.

    A note says if there are several rows.

    Raises:
        Broken: If a field is negative or too large.
    """
    columns = (
        tables.read_rows("Summary", {}, dict.fromkeys(_NUMBERS, ColumnType.number))
        if "Summary" in tables
        else {}
    )
    num_rows = max(map(len, columns.values()), default=0)
    if num_rows > 1:
        tables.notes.append(f"Summary has {num_rows} rows; the first is used")
    return _drop_nulls({name: float(column[0]) for name, column in columns.items() if len(column)})


def read_metadata(tables: Tables) -> Origin:
    """Return the circumstances of the measurement from the first row of Metadata.

    Empty fields without the table.
    """
    names = Names()
    words = {name: ColumnType.text for field_names in _WORDS.values() for name in field_names}
    optional = {**words, **dict.fromkeys(_RATES, ColumnType.number), "is_simulation": ColumnType.truth}
    columns = tables.read_rows("Metadata", {}, optional, names) if "Metadata" in tables else {}
    first_row = {name: column[0] for name, column in columns.items() if len(column)}
    numbers = _drop_nulls({name: float(first_row[name]) for name in _RATES if name in first_row})
    texts = {name: names.get_text(int(first_row[name])) for name in words if name in first_row}
    return _make_origin(numbers, texts, bool(first_row.get("is_simulation", False)))


def read_warnings(tables: Tables) -> tuple[str, ...]:
    """Return the first 100 distinct warnings of the profiler."""
    names = Names()
    for _ in tables.read_batches("Warning", {"message": ColumnType.text}, names=names):
        pass
    return tuple(names.texts[:_MOST_WARNINGS])


def read_summary_document(path: Named) -> tuple[dict[str, float], Origin, list[str]]:
    """Read a summary in a JSON file.

    Returns:
        The fields of Summary by name, the circumstances of the measurement, and notes on what was omitted.

    Raises:
        Broken: If the file is no JSON, contains no summary or several, or if a field is no number or out of
            range.
    """
    try:
        document = json.loads(read_text(path), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise Broken(f"it is no JSON: {error}") from None
    records = _find_summaries(document)
    if len(records) != 1:
        problem = (
            f"{len(records)} summaries; give a file with one" if records else "no summary with a total_time"
        )
        raise Broken(f"it holds {problem}")
    record = records[0]
    numbers = {name: _expect_number(name, record[name]) for name in _NUMBERS if record.get(name) is not None}
    rates = {name: _expect_number(name, record[name]) for name in _RATES if record.get(name) is not None}
    texts = {
        name: field_text
        for field_names in _WORDS.values()
        for name in field_names
        if isinstance(field_text := record.get(name), str)
    }
    omitted_lists = ["instruction"] if isinstance(document, dict) and "instruction" in document else []
    notes = [
        f"of {Path(path).name} the summary is used; the list {name} is left out" for name in omitted_lists
    ]
    return (
        _drop_nulls(numbers),
        _make_origin(_drop_nulls(rates), texts, record.get("is_simulation") is True),
        notes,
    )


def is_summary(text: str) -> bool:
    """Return whether a text is JSON that contains the summary of a profile; False for any other text."""
    try:
        return bool(_find_summaries(json.loads(text)))
    except (ValueError, RecursionError):
        return False


def _find_summaries(document: object) -> list[Mapping[str, object]]:
    """Return the objects with `total_time`: the document, its members, or members of its list `summary`.

    Of a document that is a list, these are its elements with `total_time`.
    """
    if isinstance(document, dict):
        lists = [document[name] for name in ("summary", "Summary") if isinstance(document.get(name), list)]
        candidates = [document] if "total_time" in document else [*document.values(), *chain(*lists)]
    else:
        candidates = document if isinstance(document, list) else []
    return [
        candidate for candidate in candidates if isinstance(candidate, dict) and "total_time" in candidate
    ]


def _make_origin(numbers: Fields, texts: Mapping[str, str], simulated: bool) -> Origin:
    """Return the circumstances of the measurement, with peaks in bytes and FLOP per ns.

    Args:
        numbers: Fields of Metadata that are numbers, by name.
        texts: Fields of Metadata that are texts, by name.
    """
    rows, columns, clock = (
        numbers.get(f"tensor_engine_{name}", 0.0) for name in ("num_rows", "num_cols", "clock_freq")
    )
    cores = numbers.get("num_physical_cores")
    return Origin(
        **{
            field: next((texts[name] for name in names if name in texts), "")
            for field, names in _WORDS.items()
        },
        simulated=simulated,
        cores=round(cores) if cores else None,
        dma_peak_bytes_per_ns=numbers.get("dma_ddr_bandwidth", 0.0) / 1e9 or None,
        tensor_peak_flops_per_ns=rows * columns * 2.0 * clock or None,
    )


def _drop_nulls(fields: Fields) -> dict[str, float]:
    """Return the fields that are not NaN, which stands for null.

    Raises:
        Broken: If a field is negative or too large for a time or size.
    """
    for name, number in fields.items():
        if not (math.isnan(number) or 0 <= number < _LARGEST):
            raise Broken(f"{name} is {number:g}, and must be at least 0 and below {_LARGEST:g}")
    return {name: number for name, number in fields.items() if not math.isnan(number)}


def _expect_number(name: str, number: object) -> float:
    """Return a JSON number as a float. Raises Broken for other types and for numbers out of range."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise Broken(f"{name} is no number")
    if not abs(number) < _LARGEST:
        raise Broken(f"{name} is out of range")
    return float(number)


def _refuse_constant(name: str) -> NoReturn:
    """Raise Broken for NaN or Infinity in JSON; the hook `parse_constant` of `json.loads`."""
    raise Broken(f"{name} is no number")
