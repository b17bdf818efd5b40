"""Overlays: files whose numbers replace numbers of the hardware records, for example with measured ones.

    {"trn2": {"semaphore_ns": {"value": 52.0, "source": "12 kernels on a trn2.3xlarge", "confidence": "derived"}}}

Each entry of a chip names a field of its record. It has a `value` in the unit of the field, a `source`, a `confidence`
(one of `Confidence`), and optionally a `note`. If the field is a table by number of ranks, the value is an object of
the changed entries. An overlay can replace clocks, rates, and times in ns or cycles, and the facts of `VALUE_FACTS`,
which are true or false and decide values. It cannot replace limits, capacities, counts or capabilities, because they
decide which kernels are accepted and what they issue.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NoReturn

from nkw.errors import InvalidArgument
from nkw.files import read_text
from nkw.targets import TARGETS
from simulate.hardware.record import Confidence, Hardware, Number

MOST_FACTOR = 1000.0
"""Largest ratio of an overlay's value to the record's value, or of the record's to it; a larger one is refused.

It is most likely an error of the unit.
"""

VALUE_FACTS = ("matmul_keeps_fp8_subnormals",)
"""Fields that are true or false and change what an instruction computes, not whether it is accepted."""

_TYPES = {field.name: str(field.type) for field in fields(Hardware)}
_KEYS = ("value", "source", "confidence", "note")


def is_replaceable(name: str) -> bool:
    """Return whether a field of `Hardware` is a clock, a rate or a time, which an overlay may replace.

    False for `VALUE_FACTS`, which an overlay may replace too, and for unknown names.
    """
    annotation = _TYPES.get(name, "")
    is_cycles = annotation == "int" and name.endswith("_cycles")
    return annotation == "float" or annotation.startswith("Mapping[int") or is_cycles


@contextmanager
def use_stand_in(record: Hardware) -> Iterator[None]:
    """Let `hardware` return this record for its chip inside a `with` block, whatever overlay is in use.

    Applies to this process alone. Blocks nest: at the end the record of the outer block is used again.
    """
    before = _standing_in.get(record.name)
    _standing_in[record.name] = record
    try:
        yield
    finally:
        if before is None:
            del _standing_in[record.name]
        else:
            _standing_in[record.name] = before


_standing_in: dict[str, Hardware] = {}


def find_stand_in(name: str) -> Hardware | None:
    """Return the record that `use_stand_in` set for a chip, given by its name, or None outside such a block."""
    return _standing_in.get(name)


def apply_overlay(path: str, records: Mapping[str, Hardware]) -> dict[str, Hardware]:
    """Return copies of the records with the numbers of the overlay in a file.

    Args:
        path: The file.
        records: The records of all chips by name.

    Raises:
        InvalidArgument: The file is not an overlay, or an entry cannot replace its field.
    """
    overlay = _read(path)
    for chip, numbers in overlay.items():
        for name, entry in numbers.items():
            why = _find_error(records[chip], name, entry)
            if why:
                _refuse(path, f"{chip}, {name:.60}: {why}")
    return {
        chip: record.with_numbers(
            **{
                name: _build_number(record, name, entry, path)
                for name, entry in overlay.get(chip, {}).items()
            }
        )
        for chip, record in records.items()
    }


def _build_number(record: Hardware, name: str, entry: Mapping[str, Any], path: str) -> Number:
    """Return the number that a checked entry of the overlay gives a field; a table keeps its other entries."""
    value = entry["value"]
    current = getattr(record, name)
    if isinstance(current, Mapping):
        value = {**current, **{int(ranks): figure for ranks, figure in value.items()}}
    elif isinstance(current, float):
        value = float(value)
    confidence = Confidence(entry["confidence"])
    return Number(value, entry["source"], confidence, entry.get("note", ""), os.path.basename(path))


def _read(path: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the entries of an overlay file by chip and field; the entries themselves are not checked.

    Raises:
        InvalidArgument: The file cannot be read, is no JSON, or is not an object of known chips and of their entries.
    """
    try:
        content = json.loads(read_text(path), object_pairs_hook=lambda pairs: _build_object(pairs, path))
    except (OSError, UnicodeDecodeError) as error:
        _refuse(path, f"it cannot be read: {getattr(error, 'strerror', None) or error}")
    except (ValueError, RecursionError) as error:
        _refuse(path, f"it is no JSON: {error}")
    if not isinstance(content, dict):
        _refuse(path, f"it holds {_describe_type(content)}, not an object of chips")
    for chip, numbers in content.items():
        if chip not in TARGETS:
            _refuse(path, f"{chip!r:.60} is no known chip; known are {', '.join(TARGETS)}")
        if not isinstance(numbers, dict):
            _refuse(path, f"{chip} is {_describe_type(numbers)}, not an object of numbers")
    return content


def _build_object(pairs: list[tuple[str, Any]], path: str) -> dict[str, Any]:
    """Return a JSON object as a dict; raise InvalidArgument if it has the same key twice."""
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            _refuse(path, f"the key {name!r:.60} occurs twice in one object; remove one of them")
        entries[name] = value
    return entries


def _find_error(record: Hardware, name: str, entry: Any) -> str:
    """Return the reason why an entry of an overlay cannot replace a field, or an empty string if it can.

    Args:
        record: The record of the chip, without the overlay.
        name: The name of the field.
        entry: The entry as it was read from JSON.
    """
    if name not in record.provenance:
        return "a hardware record has no number of this name; its numbers are the fields of simulate.hardware.Hardware"
    if not is_replaceable(name) and name not in VALUE_FACTS:
        return (
            "it decides which kernels are accepted and what they issue, not only their times; an overlay replaces "
            f"clocks, rates, times in ns or cycles, and {', '.join(VALUE_FACTS)}"
        )
    if not isinstance(entry, Mapping) or not {"value", "source", "confidence"} <= entry.keys() <= {*_KEYS}:
        return f"an entry has value, source and confidence, and may have a note; this one is {entry!r:.60}"
    for text in ("source", "note"):
        if not isinstance(entry.get(text, ""), str):
            return f"its {text} is {_describe_type(entry[text])}, not a string"
    if not entry["source"].strip():
        return "its source is empty; say where the value comes from"
    if entry["confidence"] not in [member.value for member in Confidence]:
        return (
            f"its confidence is {entry['confidence']!r:.40}; it must be one of "
            f"{', '.join(member.value for member in Confidence)}"
        )
    current, value = getattr(record, name), entry["value"]
    if not isinstance(current, Mapping):
        return _find_value_error(name, current, value)
    if not isinstance(value, Mapping) or not value:
        return f"its value is {_describe_type(value)}, not an object by number of ranks: {', '.join(map(str, current))}"
    for ranks, item in value.items():
        if ranks not in map(str, current):
            return f"{ranks!r:.40} is no entry of the record's table: {', '.join(map(str, current))}"
        why = _find_value_error(name, current[int(ranks)], item)
        if why:
            return f"{ranks} ranks: {why}"
    return ""


def _find_value_error(name: str, current: float, value: Any) -> str:
    """Return the reason why a value cannot replace the number `current` of a field, or an empty string if it can."""
    if name in VALUE_FACTS:
        return "" if isinstance(value, bool) else f"its value is {value!r:.40}; it must be true or false"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"its value is {_describe_type(value)}, not a number"
    if isinstance(current, int) and not isinstance(value, int):
        return f"its value is {value!r:.40}; it must be a whole number"
    if isinstance(value, float) and not math.isfinite(value):
        return f"its value is {value!r}, which is not finite"
    if value <= 0:
        return f"its value is {value!r:.40}; it must be above 0"
    if name.endswith("_fraction") and value > 1:
        return f"its value is {value!r:.40}; it must be at most 1, since it is a share"
    if not current / MOST_FACTOR <= value <= current * MOST_FACTOR:
        return (
            f"its value is {value!r:.40}, {MOST_FACTOR:g} times off the record's {current:g}; check its unit"
        )
    return ""


def _describe_type(value: Any) -> str:
    """Return the JSON type of a value with its article, such as "an object"."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _refuse(path: str, why: str) -> NoReturn:
    """Raise InvalidArgument for an overlay file."""
    raise InvalidArgument("NKW-HARDWARE", f"the overlay {path} cannot be used: {why}")
