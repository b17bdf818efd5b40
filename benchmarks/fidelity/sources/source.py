"""Sources: published times of kernels whose source is public, as a file states them.

A file is a JSON object with `entries`, a `target`, and `default_repo` or `repo`: the repository, owner/name, of
entries that name none. An entry has `kernel`, `lnc`, `measured_us`, and fields that describe its launch. Its field
`source` names the document that states the time and is not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.fidelity.entry import LONGEST_US, SHORTEST_US, is_number, read_json
from nkw.errors import InvalidArgument, shown

_COMMON = ("kernel", "repo", "lnc", "measured_us", "source")


@dataclass(frozen=True)
class Source:
    """One launch of a public kernel and its measured device time in us, which includes start and end of the kernel.

    number: index of the entry in the file. lnc: physical cores per logical core. arguments: the fields that describe
    the launch. flaw: why the entry cannot be launched, "" if nothing is wrong with it.
    """

    number: int
    kernel: str
    repo: str
    target: str
    lnc: int
    measured_us: float
    arguments: Mapping[str, Any]
    flaw: str = ""

    def fields(self) -> dict[str, Any]:
        """Return `lnc` and the fields that describe the launch, by name; launches of one kernel differ in them."""
        return {"lnc": self.lnc, **self.arguments}


def read_sources(path: str | Path) -> list[Source]:
    """Return the sources in a file, in its order. An invalid entry is returned too, with its `flaw` set.

    Raises:
        InvalidArgument: if the file cannot be read or is not a JSON object with a list `entries`.
    """
    content = read_json(path)
    entries = content.get("entries") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise InvalidArgument(
            "NKW-FIDELITY-FILE",
            f"{path} is not an object with a list `entries`, which --sources needs: give a file of public sources",
        )
    repo = str(content.get("default_repo") or content.get("repo", "")).split(" ")[0]
    target = str(content.get("target", ""))
    return [_source(number, item, repo, target) for number, item in enumerate(entries)]


def _source(number: int, item: Any, repo: str, target: str) -> Source:
    """Convert entry `number` of a file to a source; `repo` is its repository if it names none."""
    fields = item if isinstance(item, dict) else {}
    flaws = [] if isinstance(item, dict) else [f"it is a {type(item).__name__}, not an object"]
    lnc, measured = fields.get("lnc"), fields.get("measured_us")
    if isinstance(lnc, bool) or lnc not in (1, 2):
        flaws.append(f"lnc is {lnc!r:.40}, not 1 or 2")
        lnc = 1
    if not is_number(measured) or not SHORTEST_US <= measured <= LONGEST_US:
        flaws.append(f"measured_us is {measured!r:.40}, no time of a kernel")
        measured = 0.0
    arguments = {name: value for name, value in fields.items() if name not in _COMMON}
    return Source(
        number,
        one_line(fields.get("kernel", ""), 80),
        one_line(fields.get("repo", repo), 80),
        target,
        int(lnc),
        float(measured),
        MappingProxyType(arguments),
        "; ".join(flaws),
    )


def compare_fields(sources: Sequence[Source]) -> tuple[list[str], list[str]]:
    """Return which fields of several sources differ, and which are equal.

    Returns:
        The names of the fields that differ; and "name value" for each field that is equal in all sources.
    """
    names = list(dict.fromkeys(name for source in sources for name in source.fields()))
    values = {name: [one_line(source.fields().get(name, "")) for source in sources] for name in names}
    varied = [name for name in names if len(set(values[name])) > 1]
    same = [f"{one_line(name)} {values[name][0]}" for name in names if name not in varied]
    return varied, same


def one_line(value: Any, most: int = 40) -> str:
    """Format a value of a file as a table cell: one line of at most `most` characters, shortened if it is longer."""
    return shown(" ".join(str(value).split()), most)
