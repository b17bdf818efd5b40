"""Runs to compare, read from profiles or from a file of `time --json`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from nkw.errors import InvalidArgument
from nkw.files import SCHEMA, read_text
from simulate.profile.document import sum_path
from simulate.profile.profile import Profile

_ROUNDING = 1e-9
"""Relative error of sums: rounding a million addends by at most half of 2**-52 each causes less."""


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of a kernel: its file and number, the function around it, its text."""

    file: str
    line: int
    function: str
    text: str


@dataclass(frozen=True, slots=True)
class PathPart:
    """Time on the critical path for a phase of an instruction at a line, on an engine or DMA queue, in ns."""

    source_line: SourceLine
    op: str
    engine: str
    phase: str
    ns: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A run of launches one after another; lengths, floors and bytes are added up.

    The parts of `path` add up to `length_ns`. `floor_ns` is the time at peak rates, `bound` the limit that
    decides it, "compute" or "memory". `traffic` gives (tensor name, bytes read from HBM, bytes written to
    HBM).
    """

    title: str
    reading: str
    length_ns: float
    floor_ns: float
    bound: str
    path: tuple[PathPart, ...]
    traffic: tuple[tuple[str, int, int], ...]


def sum_profiles(profiles: Sequence[Profile], profile_indices: Sequence[int]) -> Measured:
    """Add up the launches of a run.

    Args:
        profiles: Profiles of the distinct launches.
        profile_indices: For each launch, the index of its profile.

    Raises:
        ValueError: If there is no launch, or if the launches have different readings.
    """
    runs = [_extract_run(profile) for profile in profiles]
    return _sum_runs(runs, profile_indices)


def read_measured(path: str) -> Measured:
    """Read a file that `time --json` wrote, and add up its launches.

    Raises:
        InvalidArgument: If the file cannot be read, or if it is no such document.
    """
    try:
        document = json.loads(read_text(path), parse_constant=_refuse_constant)
        if not isinstance(document, dict) or document.get("command") != "time":
            raise ValueError("it has no field command with the content time")
        if document.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {document.get('schema')!r:.20}, not {SCHEMA}")
        profile_indices = [_expect_natural(launch["profile"]) for launch in document["launches"]]
        run = _sum_runs([_parse_run(document) for document in document["profiles"]], profile_indices)
        if not math.isclose(
            math.fsum(path_part.ns for path_part in run.path), run.length_ns, rel_tol=_ROUNDING
        ):
            raise ValueError("the parts of its critical path do not add up to its length")
        return run
    except OSError as error:
        reason = error.strerror or str(error)
    except KeyError as missing:
        reason = f"the key {missing} is missing"
    except (TypeError, IndexError, OverflowError):
        reason = "a value has the wrong type or is out of range"
    except json.JSONDecodeError as error:
        reason = f"it is no JSON: {error}"
    except UnicodeDecodeError:
        reason = "it is not UTF-8"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = str(error)
    raise InvalidArgument(
        "NKW-AGAINST-FILE",
        f"{path} is no profile that `time --json` wrote: {reason}; write it again with time --json",
    )


def _extract_run(profile: Profile) -> Measured:
    """Return a profile as a run of one launch."""
    roof = profile.roofline
    return Measured(
        profile.title,
        profile.reading.value,
        profile.length_ns,
        roof.least_ns,
        roof.bound,
        tuple(_parse_path_part(row) for row in sum_path(profile)),
        tuple((tensor.name, tensor.read_bytes, tensor.written_bytes) for tensor in profile.traffic),
    )


def _parse_run(document: dict[str, Any]) -> Measured:
    """Return a profile's JSON document as a run of one launch.

    Raises:
        KeyError: If a field is missing.
        TypeError: If a field has the wrong type.
    """
    roof = document["roofline"]
    return Measured(
        _expect_string(document["title"]),
        _expect_string(document["reading"]),
        _expect_amount(document["length_ns"]),
        _expect_amount(roof["length_ns"]),
        _expect_string(roof["bound"]),
        tuple(_parse_path_part(row) for row in document["path"]),
        tuple(
            (
                _expect_string(tensor["tensor"]),
                _expect_natural(tensor["read_bytes"]),
                _expect_natural(tensor["written_bytes"]),
            )
            for tensor in document["traffic"]
        ),
    )


def _parse_path_part(row: dict[str, Any]) -> PathPart:
    """Return a part of the critical path from a row of the JSON document; raises as `_parse_run`."""
    source_line = SourceLine(
        _expect_string(row["file"]),
        _expect_natural(row["line"]),
        _expect_string(row["function"]),
        _expect_string(row["text"]),
    )
    return PathPart(
        source_line,
        _expect_string(row["op"]),
        _expect_string(row["engine"]),
        _expect_string(row["phase"]),
        _expect_amount(row["ns"]),
    )


def _sum_runs(runs: Sequence[Measured], run_indices: Sequence[int]) -> Measured:
    """Add up the launches of a run.

    Args:
        runs: Runs of one launch, for the distinct launches.
        run_indices: For each launch, the index of its run.

    Raises:
        ValueError: If there is no launch, or if the launches have different readings.
    """
    if not run_indices:
        raise ValueError("it holds no launch")
    counts = {index: run_indices.count(index) for index in sorted(set(run_indices))}
    weighted_runs = [(runs[index], count) for index, count in counts.items()]
    readings = {run.reading for run, _ in weighted_runs}
    if len(readings) != 1:
        raise ValueError("its launches have different readings")
    first = weighted_runs[0][0]
    return Measured(
        first.title if len(run_indices) == 1 else f"{len(run_indices)} launches, the first {first.title}",
        first.reading,
        math.fsum(count * run.length_ns for run, count in weighted_runs),
        math.fsum(count * run.floor_ns for run, count in weighted_runs),
        " and ".join(sorted({run.bound for run, _ in weighted_runs})),
        tuple(
            PathPart(
                path_part.source_line, path_part.op, path_part.engine, path_part.phase, count * path_part.ns
            )
            for run, count in weighted_runs
            for path_part in run.path
        ),
        tuple(
            (name, count * read, count * written)
            for run, count in weighted_runs
            for name, read, written in run.traffic
        ),
    )


def _expect_string(value: object) -> str:
    """Return a JSON value that must be a string. Raises TypeError otherwise."""
    if not isinstance(value, str):
        raise TypeError
    return value


def _expect_natural(value: object) -> int:
    """Return a JSON value that must be a non-negative integer. Raises TypeError otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError
    return value


def _expect_amount(value: object) -> float:
    """Return a JSON value that must be a finite non-negative number. Raises TypeError otherwise."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= float(value) < math.inf:
        raise TypeError
    return float(value)


def _refuse_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN or Infinity in JSON; the hook `parse_constant` of `json.loads`."""
    raise ValueError(f"{name} is no number")
