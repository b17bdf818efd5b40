"""Numbers of a hardware record as a calibration changes them: one value each, an entry of a table by itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simulate.hardware import Confidence, Hardware, Number
from simulate.hardware.overlay import replaceable
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
"""What decides times between instructions, of a kernel as a whole, or of a core that works alone: no instruction's cost
names these."""

LIKELY = {Confidence.documented: 0.25, Confidence.derived: 0.5, Confidence.guessed: 1.0}
"""By confidence of a number the change, as a natural logarithm, that counts as one standard deviation: a documented one
is seldom off by more than a quarter, a guessed one often by a factor of two. These are guesses of this project."""


@dataclass(frozen=True, order=True)
class Parameter:
    """A field of the record; for a table by number of ranks, `ranks` is the entry."""

    field: str
    ranks: int | None = None

    def __str__(self) -> str:
        return self.field if self.ranks is None else f"{self.field}[{self.ranks}]"

    def value(self, record: Hardware) -> float:
        """Its value in a record."""
        value = getattr(record, self.field)
        return float(value if self.ranks is None else value[self.ranks])

    def likely(self, record: Hardware) -> float:
        """The standard deviation of its change, see `LIKELY`."""
        return LIKELY[record.provenance[self.field].confidence]

    def most(self, record: Hardware) -> float:
        """The largest change, as a logarithm: a share is at most 1."""
        return -math.log(self.value(record)) if self.field.endswith("_fraction") else math.log(100.0)

    @property
    def slower(self) -> float:
        """The sign of a change that makes a kernel slower: 1 for a time, -1 for a rate."""
        return -1.0 if self.field.endswith(_RATES) or "gb_per_s" in self.field else 1.0


def changed(record: Hardware, changes: Mapping[Parameter, float]) -> Hardware:
    """The record with each number multiplied by the exponential of its change; a change of 0 does nothing."""
    numbers: dict[str, Number] = {}
    for parameter, change in changes.items():
        if change:
            before = numbers.get(parameter.field, record.provenance[parameter.field])
            numbers[parameter.field] = replace(
                before, value=_scaled(before.value, parameter, math.exp(change))
            )
    return record.with_numbers(**numbers) if numbers else record


def _scaled(value: Any, parameter: Parameter, factor: float) -> Any:
    if parameter.ranks is None:
        return value * factor
    return {**value, parameter.ranks: value[parameter.ranks] * factor}


def deciding(record: Hardware, launches: Sequence[Launch]) -> list[Parameter]:
    """The numbers that may decide the time of launches: all numbers in the terms of their costs, and all waits."""
    named = {
        number
        for done in launches
        for stream in done.streams
        for cost in set(stream.costs)
        for term in cost.terms
        for number in term.numbers
    }
    return parameters(record, [*named, *_WAITS])


def parameters(record: Hardware, names: Iterable[str] | None = None) -> list[Parameter]:
    """The parameters of some fields, or of all, by name. Fields that do not decide times alone are left out."""
    found: list[Parameter] = []
    for name in sorted(set(record.provenance if names is None else names)):
        if not replaceable(name):
            continue
        value = getattr(record, name)
        if isinstance(value, Mapping):
            found += [Parameter(name, ranks) for ranks in value]
        else:
            found.append(Parameter(name))
    return found


def entries(
    record: Hardware, changes: Mapping[Parameter, float], sources: Mapping[Parameter, str]
) -> dict[str, dict[str, Any]]:
    """The numbers of an overlay: what changes, with its sources, and what `record` has from an overlay already."""
    out: dict[str, dict[str, Any]] = {}
    for name in record.replaced:
        number = record.provenance[name]
        out[name] = {
            "value": _plain(number.value),
            **_told(number.source, number.confidence.value, number.note),
        }
    for parameter, change in sorted(changes.items()):
        value = rounded(parameter, record, change)
        note = f"{math.expm1(change):+.1%} off {parameter.value(record):g}"
        entry = {"value": value, **_told(sources[parameter], Confidence.derived.value, note)}
        if parameter.ranks is not None:
            before = out.get(parameter.field, {}).get("value", {})
            entry["value"] = {**before, str(parameter.ranks): value}
        out[parameter.field] = entry
    return out


def rounded(parameter: Parameter, record: Hardware, change: float) -> float:
    """The changed value, to four digits; a whole number where the record has one."""
    value = parameter.value(record) * math.exp(change)
    own = getattr(record, parameter.field)
    whole = isinstance(own if parameter.ranks is None else own[parameter.ranks], int)
    return max(1, round(value)) if whole else float(f"{value:.4g}")


def _plain(value: Any) -> Any:
    return {str(ranks): each for ranks, each in value.items()} if isinstance(value, Mapping) else value


def _told(source: str, confidence: str, note: str) -> dict[str, str]:
    return {"source": source, "confidence": confidence, **({"note": note} if note else {})}
