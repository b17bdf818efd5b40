"""Numbers of a hardware record as parameters of a calibration.

Every entry of a table by number of ranks is a separate parameter. The change of a number is the natural logarithm of
its new value over its recorded value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simulate.hardware import Confidence, Hardware, Number
from simulate.hardware.overlay import is_replaceable
from simulate.run import Launch

_RATES = ("_ghz", "_bytes_per_ns", "_fraction", "_elements_per_cycle", "_16bit", "_16bit_strided", "_fp32")
_WAITS = (
    "semaphore_ns",
    "same_engine_wait_ns",
    "activation_table_load_ns",
    "psum_same_bank_slowdown_factor",
    "activity_throttle_window_ns",
    "activity_throttle_busy_fraction",
    "tensor_throttled_clock_ghz",
    "matmul_throttled_latency_ns",
    "hbm_gb_per_s_per_stack",
    "kernel_start_ns",
    "kernel_end_ns",
    "benchmark_overhead_ns",
    "host_overhead_ns",
)
"""Numbers that decide waits between instructions, kernel overheads, or cores that work alone.

No instruction's cost contains them.
"""

LIKELY = {Confidence.documented: 0.25, Confidence.derived: 0.5, Confidence.guessed: 1.0}
"""Standard deviation of a number's change by its confidence, as a natural logarithm.

Documented numbers are rarely wrong by more than a quarter, guessed ones often by a factor of two. These are
guesses of this project.
"""


@dataclass(frozen=True, order=True)
class Parameter:
    """Number of a hardware record: a field by name; `ranks` selects the entry if the field is a table, else None."""

    field: str
    ranks: int | None = None

    def __str__(self) -> str:
        return self.field if self.ranks is None else f"{self.field}[{self.ranks}]"

    def value(self, record: Hardware) -> float:
        """Return the value of the number in a record, in the unit of the field."""
        field_content = getattr(record, self.field)
        return float(field_content if self.ranks is None else field_content[self.ranks])

    def likely(self, record: Hardware) -> float:
        """Return the standard deviation of the number's change, by its confidence in a record (`LIKELY`)."""
        return LIKELY[record.provenance[self.field].confidence]

    def most(self, record: Hardware) -> float:
        """Return the largest change of the number in a record: log(100), or for a share the change to a value of 1."""
        return -math.log(self.value(record)) if self.field.endswith("_fraction") else math.log(100.0)

    @property
    def slower(self) -> float:
        """Sign of a change that makes kernels slower: 1.0 for a time, -1.0 for a rate or a clock."""
        return -1.0 if self.field.endswith(_RATES) or "gb_per_s" in self.field else 1.0


def change_record(record: Hardware, changes: Mapping[Parameter, float]) -> Hardware:
    """Return a copy of the record with each number multiplied by the exponential of its change.

    Returns the record itself if all changes are 0.
    """
    numbers: dict[str, Number] = {}
    for parameter, change in changes.items():
        if change:
            number = numbers.get(parameter.field, record.provenance[parameter.field])
            numbers[parameter.field] = replace(
                number, value=_scale_number(number.value, parameter, math.exp(change))
            )
    return record.with_numbers(**numbers) if numbers else record


def _scale_number(number: Any, parameter: Parameter, factor: float) -> Any:
    """Return the content of a parameter's field, with its number, or only its entry of a table, times a factor."""
    if parameter.ranks is None:
        return number * factor
    return {**number, parameter.ranks: number[parameter.ranks] * factor}


def list_deciding(record: Hardware, launches: Sequence[Launch]) -> list[Parameter]:
    """Return the numbers of a record that may decide the time of launches, sorted by name.

    These are the numbers from which the costs of their instructions are computed; and all numbers that decide waits,
    kernel overheads or the bandwidth of a core that works alone. Fields that an overlay cannot replace are left out.
    """
    names = {
        number
        for launch in launches
        for stream in launch.streams
        for cost in set(stream.costs)
        for term in cost.terms
        for number in term.numbers
    }
    return list_parameters(record, [*names, *_WAITS])


def list_parameters(record: Hardware, names: Iterable[str] | None = None) -> list[Parameter]:
    """Return the parameters of fields, sorted by name, without fields that an overlay cannot replace.

    Args:
        record: The record.
        names: The fields; None for all.
    """
    parameters: list[Parameter] = []
    for name in sorted(set(record.provenance if names is None else names)):
        if not is_replaceable(name):
            continue
        content = getattr(record, name)
        if isinstance(content, Mapping):
            parameters += [Parameter(name, ranks) for ranks in content]
        else:
            parameters.append(Parameter(name))
    return parameters


def make_overlay(
    record: Hardware, changes: Mapping[Parameter, float], sources: Mapping[Parameter, str]
) -> dict[str, dict[str, Any]]:
    """Return the entries of an overlay for a chip, by field, as JSON types.

    They are the changed numbers, rounded, and the numbers that `record` has from an overlay already.

    Args:
        record: The record.
        changes: The changes.
        sources: The source of each changed number.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name in record.replaced:
        number = record.provenance[name]
        rows[name] = {
            "value": _to_json(number.value),
            **_describe_number(number.source, number.confidence.value, number.note),
        }
    for parameter, change in sorted(changes.items()):
        new_number = round_number(parameter, record, change)
        note = f"{math.expm1(change):+.1%} off {parameter.value(record):g}"
        row = {"value": new_number, **_describe_number(sources[parameter], Confidence.derived.value, note)}
        if parameter.ranks is not None:
            table = rows.get(parameter.field, {}).get("value", {})
            row["value"] = {**table, str(parameter.ranks): new_number}
        rows[parameter.field] = row
    return rows


def round_number(parameter: Parameter, record: Hardware, change: float) -> float:
    """Return a number of the record after a change, rounded to four digits; to an integer, at least 1, if it is one."""
    number = parameter.value(record) * math.exp(change)
    content = getattr(record, parameter.field)
    is_integer = isinstance(content if parameter.ranks is None else content[parameter.ranks], int)
    return max(1, round(number)) if is_integer else float(f"{number:.4g}")


def _to_json(number: Any) -> Any:
    """Return a number as it is, or a table by ranks as a dict whose keys are strings."""
    return {str(ranks): entry for ranks, entry in number.items()} if isinstance(number, Mapping) else number


def _describe_number(source: str, confidence: str, note: str) -> dict[str, str]:
    """Return the fields of an overlay's entry other than its value; an empty note is left out."""
    return {"source": source, "confidence": confidence, **({"note": note} if note else {})}
