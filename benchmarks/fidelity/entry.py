"""Entries: published measurements as a file states them, and the sizes that their text fields contain.

A file is a JSON list of objects with `id`, `family`, `kernel`, `shapes`, `dtype`, `target`, `instance`, `cores`,
`latency_us` (or null), `measured`, `source`, `confidence` and, where known, `metrics` and `notes`. A field may be
absent. An invalid field costs only its own entry the prediction; `Entry.flaw` says why.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nkw.errors import InvalidArgument
from nkw.files import read_text

CONFIDENCES = ("high", "medium", "low")
_TEXTS = (
    "id",
    "family",
    "kernel",
    "shapes",
    "dtype",
    "target",
    "instance",
    "measured",
    "source",
    "confidence",
)
_NEEDED = ("family", "target")
SHORTEST_US, LONGEST_US = 1e-4, 1e12
"""Less than a third of a clock cycle, and eleven days: a time beyond them is a slip, often of its unit."""


@dataclass(frozen=True)
class Entry:
    """One published measurement of a kernel on a chip, with the fields of the file.

    kernel: description in words. shapes: sizes in words. measured: how the time was taken. confidence: one of
    `CONFIDENCES`. flaw: why the entry cannot be used, "" if nothing is wrong with it.
    """

    id: str
    family: str
    kernel: str
    shapes: str
    dtype: str
    target: str
    instance: str
    cores: int
    latency_us: float | None
    measured: str
    source: str
    confidence: str
    metrics: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    notes: str = ""
    flaw: str = ""

    @property
    def held_out(self) -> bool:
        """Whether the entry is excluded from fitting and from most tables, as about a fifth of each family is.

        Only the id decides, by the first 32 bits of its SHA-256, so an entry keeps its status when the list grows.
        """
        return int(hashlib.sha256(self.id.encode("utf-8", "surrogatepass")).hexdigest()[:8], 16) * 5 < 2**32

    def says(self, *words: str) -> bool:
        """Return whether the description of the kernel contains all of these strings, ignoring case."""
        text = self.kernel.lower()
        return all(word.lower() in text for word in words)

    def sizes(self) -> dict[str, int]:
        """Return the sizes that `shapes` names, by name.

        It reads `M=4096 K=8192`, `{K: 1024, M: 4096}`, `seqlen 512` and `adamw_M10944_N2048`. The dict is empty if
        `shapes` names no size.
        """
        matches = re.findall(r"([A-Za-z]+)\s*[=: ]\s*(\d+)(?![\d.])", self.shapes)
        matches += re.findall(r"_([A-Z]+)(\d+)(?=_|$)", self.shapes)
        return {name: int(size) for name, size in matches}

    def product(self) -> tuple[int, ...]:
        """Return the first sizes in `shapes` joined by `x`, as in `2048 x 2048` or `128x512`; () if there are none."""
        match = re.search(r"\d+(?:\s*x\s*\d+)+", self.shapes)
        return tuple(map(int, re.findall(r"\d+", match.group()))) if match else ()

    def brackets(self) -> list[tuple[int, ...]]:
        """Return each list of integers in square brackets in `shapes`: `X[1,256,224,224], W[256,256,3,3]`."""
        return [tuple(map(int, group.split(","))) for group in re.findall(r"\[(\d+(?:,\d+)*)\]", self.shapes)]

    def integer(self, pattern: str) -> int | None:
        """Return the integer in the first group of a regular expression, searched in `shapes` and then in `kernel`.

        Returns None if neither matches.
        """
        match = re.search(pattern, self.shapes) or re.search(pattern, self.kernel)
        return int(match.group(1)) if match else None


def read_json(path: str | Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        InvalidArgument: if the file cannot be read or is not valid JSON.
    """
    try:
        return json.loads(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("NKW-FIDELITY-FILE", f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("NKW-FIDELITY-FILE", f"{path} is no JSON: {error}") from None


def read_entries(path: str | Path) -> list[Entry]:
    """Return the entries of a file in its order. An invalid entry is returned too, with its `flaw` set.

    Raises:
        InvalidArgument: if the file cannot be read, or its content is not a JSON list.
    """
    content = read_json(path)
    if isinstance(content, dict) and "entries" in content:
        raise InvalidArgument(
            "NKW-FIDELITY-FILE",
            f"{path} holds times of public sources, not a list of measurements: name their clones with --sources",
        )
    if not isinstance(content, list):
        raise InvalidArgument(
            "NKW-FIDELITY-FILE",
            f"{path} holds a {type(content).__name__}, not a list: give a JSON list of measurements",
        )
    return [_entry(number, item) for number, item in enumerate(content)]


def _entry(number: int, item: Any) -> Entry:
    """Convert element `number` of the list to an entry; what is wrong with its fields becomes its `flaw`."""
    if not isinstance(item, dict):
        item, flaws = {}, [f"it is a {type(item).__name__}, not an object"]
    else:
        flaws = [f"{name} is not given" for name in _NEEDED if item.get(name) in (None, "")]
    texts = {name: _text(item.get(name)) for name in _TEXTS}
    texts["id"] = texts["id"] or f"entry {number}"
    texts["confidence"] = texts["confidence"].lower() or "medium"
    if texts["confidence"] not in CONFIDENCES:
        flaws.append(f"confidence is {item['confidence']!r:.40}, not {', '.join(CONFIDENCES)}")
    cores, latency, metrics = item.get("cores", 1), item.get("latency_us"), item.get("metrics") or {}
    if isinstance(cores, bool) or not isinstance(cores, int) or cores < 1:
        flaws.append(f"cores is {cores!r:.40}, not a count")
        cores = 1
    if latency is not None and not is_number(latency):
        flaws.append(f"latency_us is {latency!r:.40}, not a time or null")
        latency = None
    elif latency is not None and not SHORTEST_US <= latency <= LONGEST_US:
        flaws.append(f"latency_us is {latency!r:.40}, no time of a kernel: {SHORTEST_US} to {LONGEST_US:.0e}")
        latency = None
    if not isinstance(metrics, dict):
        flaws.append(f"metrics is {metrics!r:.40}, not an object")
        metrics = {}
    return Entry(
        **texts,
        cores=cores,
        latency_us=None if latency is None else float(latency),
        metrics=MappingProxyType(metrics),
        notes=_text(item.get("notes")),
        flaw="; ".join(flaws),
    )


def _text(value: Any) -> str:
    """Convert a field to text: "" for None, and JSON without quotes for a list or an object of sizes."""
    if isinstance(value, (dict, list)):
        return json.dumps(value).replace('"', "")
    return "" if value is None else str(value)


def is_number(value: Any) -> bool:
    """Return whether a value is a positive, finite int or float; a bool is not."""
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value < float("inf")
