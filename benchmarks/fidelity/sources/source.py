"""Published times of kernels whose source is public, as a file of them states them.

A file is a JSON object with `entries`, a `target`, and `default_repo` or `repo`: the repository, owner/name, of entries
that name none. An entry has `kernel`, `lnc`, `measured_us`, and fields that describe its launch. Its field `source`
names the file that states the time and is not read.
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
    """One launch of a public kernel and its measured time, which includes start and end of the kernel.

    `number` is its place in the file. `arguments` has the fields that say what is launched; `flaw` is why none can be.
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
        """Everything that tells the launch from others of its kernel."""
        return {"lnc": self.lnc, **self.arguments}


def read_sources(path: str | Path) -> list[Source]:
    """Read the entries of a file. Raises InvalidArgument for what holds no times of public sources."""
    content = read_json(path)
    entries = content.get("entries") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise InvalidArgument(
            "NKW-FIDELITY-FILE", f"{path} holds no object with a list of entries, which --sources needs"
        )
    repo = str(content.get("default_repo") or content.get("repo", "")).split(" ")[0]
    target = str(content.get("target", ""))
    return [_source(number, item, repo, target) for number, item in enumerate(entries)]


def _source(number: int, item: Any, repo: str, target: str) -> Source:
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


def told_apart(sources: Sequence[Source]) -> tuple[list[str], list[str]]:
    """Which fields of several sources differ, and which are equal.

    Returns two lists: the names of the fields that differ; for each field that is equal in all sources, the words
    `name value`.
    """
    names = list(dict.fromkeys(name for source in sources for name in source.fields()))
    values = {name: [one_line(source.fields().get(name, "")) for source in sources] for name in names}
    varied = [name for name in names if len(set(values[name])) > 1]
    same = [f"{one_line(name)} {values[name][0]}" for name in names if name not in varied]
    return varied, same


def one_line(value: Any, most: int = 40) -> str:
    """Format a value of a file as a cell of a table: one line of at most `most` characters."""
    return shown(" ".join(str(value).split()), most)
