"""What a comparison needs to know of the launches of a command: from their profiles, or from `time --json`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from nkw.errors import InvalidArgument
from nkw.files import SCHEMA, read_text
from simulate.profile.document import path_parts
from simulate.profile.profile import Profile

_ROUNDING = 1e-9
"""Of sums: a path of a million parts, each rounded by at most half of 2**-52, is off by less."""


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a kernel: its file and number, the function around it, its text."""

    file: str
    line: int
    function: str
    text: str


@dataclass(frozen=True, slots=True)
class PathPart:
    """The part of the critical path that one phase of one instruction at one line takes on one engine or DMA queue."""

    place: Place
    op: str
    engine: str
    phase: str
    ns: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Launches that follow one another: lengths, floors and bytes are added up.

    The parts of `path` add up to `length_ns`. `floor_ns` is the time at peak rates, `bound` what it comes from.
    `traffic` gives the bytes read from and written to HBM, by tensor.
    """

    title: str
    reading: str
    length_ns: float
    floor_ns: float
    bound: str
    path: tuple[PathPart, ...]
    traffic: tuple[tuple[str, int, int], ...]


def measured(profiles: Sequence[Profile], numbers: Sequence[int]) -> Measured:
    """Launches by their profiles; `numbers` has the number of the profile of each launch."""
    listed = [_essence(each) for each in profiles]
    return _sum(listed, numbers)


def read_measured(path: str) -> Measured:
    """Launches by the file that `time --json` wrote. Raises InvalidArgument for any other file."""

    try:
        document = json.loads(read_text(path), parse_constant=_no_number)
        if not isinstance(document, dict) or document.get("command") != "time":
            raise ValueError("it does not say that it is one")
        if document.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {document.get('schema')!r:.20}, not {SCHEMA}")
        numbers = [_natural(each["profile"]) for each in document["launches"]]
        found = _sum([_read(each) for each in document["profiles"]], numbers)
        if not math.isclose(math.fsum(part.ns for part in found.path), found.length_ns, rel_tol=_ROUNDING):
            raise ValueError("the parts of its critical path do not add up to its length")
        return found
    except OSError as error:
        why = error.strerror or str(error)
    except KeyError as missing:
        why = f"the key {missing} is missing"
    except (TypeError, IndexError, OverflowError):
        why = "a value has the wrong type or is out of range"
    except json.JSONDecodeError as error:
        why = f"it is no JSON: {error}"
    except UnicodeDecodeError:
        why = "it is not UTF-8"
    except RecursionError:
        why = "it is nested too deeply"
    except ValueError as error:
        why = str(error)
    raise InvalidArgument("NKW-AGAINST-FILE", f"{path} is no profile that `time --json` wrote: {why}")


def _essence(profile: Profile) -> Measured:
    roof = profile.roofline
    return Measured(
        profile.title,
        profile.reading.value,
        profile.length_ns,
        roof.least_ns,
        roof.bound,
        tuple(_part(each) for each in path_parts(profile)),
        tuple((each.name, each.read_bytes, each.written_bytes) for each in profile.traffic),
    )


def _read(document: dict[str, Any]) -> Measured:
    roof = document["roofline"]
    return Measured(
        _words(document["title"]),
        _words(document["reading"]),
        _amount(document["length_ns"]),
        _amount(roof["length_ns"]),
        _words(roof["bound"]),
        tuple(_part(each) for each in document["path"]),
        tuple(
            (_words(each["tensor"]), _natural(each["read_bytes"]), _natural(each["written_bytes"]))
            for each in document["traffic"]
        ),
    )


def _part(row: dict[str, Any]) -> PathPart:
    place = Place(_words(row["file"]), _natural(row["line"]), _words(row["function"]), _words(row["text"]))
    return PathPart(place, _words(row["op"]), _words(row["engine"]), _words(row["phase"]), _amount(row["ns"]))


def _sum(parts: Sequence[Measured], numbers: Sequence[int]) -> Measured:
    """One Measured for launches of which each has the number of its part."""
    if not numbers:
        raise ValueError("it holds no launch")
    counts = {number: numbers.count(number) for number in sorted(set(numbers))}
    chosen = [(parts[number], count) for number, count in counts.items()]
    readings = {part.reading for part, _ in chosen}
    if len(readings) != 1:
        raise ValueError("its launches are of different readings")
    first = chosen[0][0]
    return Measured(
        first.title if len(numbers) == 1 else f"{len(numbers)} launches, the first {first.title}",
        first.reading,
        math.fsum(count * part.length_ns for part, count in chosen),
        math.fsum(count * part.floor_ns for part, count in chosen),
        " and ".join(sorted({part.bound for part, _ in chosen})),
        tuple(
            PathPart(each.place, each.op, each.engine, each.phase, count * each.ns)
            for part, count in chosen
            for each in part.path
        ),
        tuple(
            (name, count * read, count * written)
            for part, count in chosen
            for name, read, written in part.traffic
        ),
    )


def _words(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _natural(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError
    return value


def _amount(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= float(value) < math.inf:
        raise TypeError
    return float(value)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
