"""What profilers add up themselves: the tables Summary, Metadata and Warning, and the document of `summary-json`.

`--output-format summary-json` has the fields of the table Summary (aws-neuron/neuron-agentic-development,
skills/neuron-explorer-profile-schema). neuron-profile's own `json` holds the same fields as the first element of
`summary` (Neuron SDK documentation, "Neuron Profile User Guide", Alternative output formats); neuron-explorer puts them
into an object under the name of the profile. Times are in seconds, rates in bytes a second, clocks in GHz.
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
from simulate.profile.vendor.tables import Kind, Names, Tables

ENGINES = ("Tensor", "Vector", "Scalar", "GpSimd", "Sync")
"""The engines as Summary has fields for them."""

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


def summary_fields(tables: Tables) -> dict[str, float]:
    """The fields of Summary that a profile has, by name."""
    found = tables.rows("Summary", {}, dict.fromkeys(_NUMBERS, Kind.number)) if "Summary" in tables else {}
    count = max(map(len, found.values()), default=0)
    if count > 1:
        tables.notes.append(f"Summary has {count} rows; the first is used")
    return _known({name: float(column[0]) for name, column in found.items() if len(column)})


def metadata(tables: Tables) -> Origin:
    """The fields of Metadata."""
    names = Names()
    words = {name: Kind.text for each in _WORDS.values() for name in each}
    kinds = {**words, **dict.fromkeys(_RATES, Kind.number), "is_simulation": Kind.truth}
    found = tables.rows("Metadata", {}, kinds, names) if "Metadata" in tables else {}
    first = {name: column[0] for name, column in found.items() if len(column)}
    numbers = _known({name: float(first[name]) for name in _RATES if name in first})
    texts = {name: names.of(int(first[name])) for name in words if name in first}
    return _origin(numbers, texts, bool(first.get("is_simulation", False)))


def warnings(tables: Tables) -> tuple[str, ...]:
    """The profiler's own warnings, each once."""
    names = Names()
    for _ in tables.batches("Warning", {"message": Kind.text}, names=names):
        pass
    return tuple(names.texts[:_MOST_WARNINGS])


def summary_document(path: Named) -> tuple[dict[str, float], Origin, list[str]]:
    """The fields and the origin of a summary in JSON, and notes on it. Raises Broken for any other JSON."""
    try:
        document = json.loads(read_text(path), parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise Broken(f"it is no JSON: {error}") from None
    records = _records(document)
    if len(records) != 1:
        many = (
            f"{len(records)} summaries; give a file with one" if records else "no summary with a total_time"
        )
        raise Broken(f"it holds {many}")
    record = records[0]
    numbers = {name: _number(name, record[name]) for name in _NUMBERS if record.get(name) is not None}
    rates = {name: _number(name, record[name]) for name in _RATES if record.get(name) is not None}
    texts = {
        name: value for each in _WORDS.values() for name in each if isinstance(value := record.get(name), str)
    }
    more = ["instruction"] if isinstance(document, dict) and "instruction" in document else []
    notes = [f"of {Path(path).name} the summary is used; the list {name} is left out" for name in more]
    return _known(numbers), _origin(_known(rates), texts, record.get("is_simulation") is True), notes


def is_summary(text: str) -> bool:
    """Whether text is JSON with the summary of a profile."""
    try:
        return bool(_records(json.loads(text)))
    except (ValueError, RecursionError):
        return False


def _records(document: object) -> list[Mapping[str, object]]:
    """The objects with `total_time`: the document, or those in it, or in the list `summary`."""
    if isinstance(document, dict):
        lists = [document[name] for name in ("summary", "Summary") if isinstance(document.get(name), list)]
        candidates = [document] if "total_time" in document else [*document.values(), *chain(*lists)]
    else:
        candidates = document if isinstance(document, list) else []
    return [each for each in candidates if isinstance(each, dict) and "total_time" in each]


def _origin(numbers: Fields, texts: Mapping[str, str], simulated: bool) -> Origin:
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


def _known(fields: Fields) -> dict[str, float]:
    """Fields that are not null. Raises Broken for a negative one, and for what no time and no size is."""
    for name, value in fields.items():
        if not (math.isnan(value) or 0 <= value < _LARGEST):
            raise Broken(f"{name} is {value:g}")
    return {name: value for name, value in fields.items() if not math.isnan(value)}


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Broken(f"{name} is no number")
    if not abs(value) < _LARGEST:
        raise Broken(f"{name} is out of range")
    return float(value)


def _no_number(name: str) -> NoReturn:
    raise Broken(f"{name} is no number")
