"""Overlays: files whose numbers stand in the place of those of the hardware records, such as measured ones.

    {"trn2": {"semaphore_ns": {"value": 52.0, "source": "12 kernels on a trn2.3xlarge", "confidence": "derived"}}}

By chip and by field of its record: a `value` in the unit of the field, the `source`, a `confidence` (one of
`Confidence`), and if wanted a `note`. The value of a table by number of ranks is an object of those entries that
change. Only numbers that decide times can be replaced: clocks, rates, and times in ns or cycles. A limit, a capacity, a
count or a capability decides which kernels are accepted and which instructions they issue; another one is another chip.
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
"""A value so many times larger or smaller than the record's is taken for a slip of its unit."""

_TYPES = {each.name: str(each.type) for each in fields(Hardware)}
_KEYS = ("value", "source", "confidence", "note")


def replaceable(name: str) -> bool:
    """Whether a field of the record is a number that decides times only."""
    kind = _TYPES.get(name, "")
    return kind == "float" or kind.startswith("Mapping[int") or (kind == "int" and name.endswith("_cycles"))


@contextmanager
def standing_in(record: Hardware) -> Iterator[None]:
    """A block in which a record stands for the chip of its name, whatever overlay is in use; this process alone."""
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


def stand_in(name: str) -> Hardware | None:
    """The record that stands for a chip, if `standing_in` has one."""
    return _standing_in.get(name)


def overlaid(place: str, records: Mapping[str, Hardware]) -> dict[str, Hardware]:
    """The records of the chips with the numbers of the overlay in a file. Raises InvalidArgument for what is none."""
    overlay = _read(place)
    for chip, numbers in overlay.items():
        for name, entry in numbers.items():
            why = _wrong(records[chip], name, entry)
            if why:
                _refuse(place, f"{chip}, {name:.60}: {why}")
    return {
        chip: record.with_numbers(
            **{name: _number(record, name, each, place) for name, each in overlay.get(chip, {}).items()}
        )
        for chip, record in records.items()
    }


def _number(record: Hardware, name: str, entry: Mapping[str, Any], place: str) -> Number:
    value = entry["value"]
    own = getattr(record, name)
    if isinstance(own, Mapping):
        value = {**own, **{int(ranks): each for ranks, each in value.items()}}
    elif isinstance(own, float):
        value = float(value)
    confidence = Confidence(entry["confidence"])
    return Number(value, entry["source"], confidence, entry.get("note", ""), os.path.basename(place))


def _read(place: str) -> Mapping[str, Mapping[str, Any]]:
    """The entries in a file, by chip and field."""
    try:
        content = json.loads(read_text(place), object_pairs_hook=lambda pairs: _object(pairs, place))
    except (OSError, UnicodeDecodeError) as error:
        _refuse(place, f"it cannot be read: {getattr(error, 'strerror', None) or error}")
    except (ValueError, RecursionError) as error:
        _refuse(place, f"it is no JSON: {error}")
    if not isinstance(content, dict):
        _refuse(place, f"it holds {_kind(content)}, not an object of chips")
    for chip, numbers in content.items():
        if chip not in TARGETS:
            _refuse(place, f"{chip!r:.60} is no chip; known are {', '.join(TARGETS)}")
        if not isinstance(numbers, dict):
            _refuse(place, f"{chip} is {_kind(numbers)}, not an object of numbers")
    return content


def _object(pairs: list[tuple[str, Any]], place: str) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            _refuse(place, f"{name!r:.60} stands twice in one object")
        entries[name] = value
    return entries


def _wrong(record: Hardware, name: str, entry: Any) -> str:
    """What is wrong with an entry, in a sentence; empty where nothing is."""
    if name not in record.provenance:
        return "it is no number of a hardware record"
    if not replaceable(name):
        return (
            "it decides which kernels are accepted and what they issue, not only their times; an overlay replaces "
            "clocks, rates, and times in ns or cycles"
        )
    if not isinstance(entry, Mapping) or not {"value", "source", "confidence"} <= entry.keys() <= {*_KEYS}:
        return f"it needs value, source and confidence, and may have a note; it is {entry!r:.60}"
    for text in ("source", "note"):
        if not isinstance(entry.get(text, ""), str):
            return f"its {text} is {_kind(entry[text])}, not a string"
    if not entry["source"].strip():
        return "its source is empty; say where the value comes from"
    if entry["confidence"] not in [each.value for each in Confidence]:
        return f"its confidence is {entry['confidence']!r:.40}, not {', '.join(each.value for each in Confidence)}"
    own, value = getattr(record, name), entry["value"]
    if not isinstance(own, Mapping):
        return _wrong_value(name, own, value)
    if not isinstance(value, Mapping) or not value:
        return f"its value is {_kind(value)}, not an object by number of ranks: {', '.join(map(str, own))}"
    for ranks, each in value.items():
        if ranks not in map(str, own):
            return f"{ranks!r:.40} is no entry of the record's table: {', '.join(map(str, own))}"
        why = _wrong_value(name, own[int(ranks)], each)
        if why:
            return f"{ranks} ranks: {why}"
    return ""


def _wrong_value(name: str, own: float, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"its value is {_kind(value)}, not a number"
    if isinstance(own, int) and not isinstance(value, int):
        return f"its value is {value!r:.40}; it is a whole number"
    if isinstance(value, float) and not math.isfinite(value):
        return f"its value is {value!r}, which is not finite"
    if value <= 0:
        return f"its value is {value!r:.40}; it is above 0"
    if name.endswith("_fraction") and value > 1:
        return f"its value is {value!r:.40}; it is a share, at most 1"
    if not own / MOST_FACTOR <= value <= own * MOST_FACTOR:
        return f"its value is {value!r:.40}, {MOST_FACTOR:g} times off the record's {own:g}: look at its unit"
    return ""


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _refuse(place: str, why: str) -> NoReturn:
    raise InvalidArgument("NKW-HARDWARE", f"the overlay {place} cannot be used: {why}")
