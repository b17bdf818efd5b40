"""What a search found, as text and as a document."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from nkw.parts import Hanging, Part, table
from simulate.profile.numbers import share, us
from simulate.tune.parameters import Tunable
from simulate.tune.search import Found, Tried

_LISTED = 10


@dataclass(frozen=True)
class Report:
    """A search with what it was about; `floor_ns` is the time at peak rates, `entry` the name in the table, if any."""

    title: str
    kernel: Tunable
    reading: str
    floor_ns: float
    found: Found
    entry: str | None

    @property
    def gain(self) -> float:
        """The part of the default's time that the best candidate saves."""
        return 1 - _ns(self.found.best) / _ns(self.found.default)

    def parts(self) -> list[Part]:
        """The report: default, best and gain, how many were tried, the parameters, the best ten."""
        found = self.found
        floor, default, best = self.floor_ns, _ns(found.default), _ns(found.best)
        objective = (
            "worse of the program and the scheduled reading" if self.reading == "worse" else self.reading
        )
        rows = [
            (name, us(each), share(floor, each))
            for name, each in (("floor", floor), ("default", default), ("best", best))
        ]
        tried = f"{len(found.tried):,} of {self.kernel.candidates:,} candidates tried"
        if found.pruned:
            tried += f", {len(found.pruned):,} of them refused: {self._refusals()}"
        out: list[Part] = [
            Hanging(self.title, style="bold"),
            Hanging(f"objective: {objective}{'' if self.reading == 'worse' else ' reading'}"),
            Hanging(tried),
            *(["interrupted: this is the best so far"] if found.stopped else []),
            "",
            table("|us|floor", rows),
            f"gain {share(default - best, default)}",
            "",
            self._parameters(),
            "",
            self._listed(),
        ]
        return out

    def _refusals(self) -> str:
        codes = Counter(each.outcome.code for each in self.found.pruned)
        return ", ".join(f"{code} {count:,}" for code, count in codes.most_common())

    def _parameters(self) -> Part:
        """Every parameter, the one that matters most first."""
        importance, best = self.found.importance, self.found.best.candidate
        ordered = sorted(self.kernel.parameters, key=lambda each: -importance.get(each.name, 0.0))
        rows = [
            (
                each.name,
                f"{importance[each.name]:.0%}".replace("%", " %") if each.name in importance else "-",
                str(each.default),
                str(best[each.name]),
                ", ".join(map(str, each.domain)),
            )
            for each in ordered
        ]
        return table("parameter|matters|default|best|domain", rows, left=(0, 4))

    def _listed(self) -> Part:
        """The fastest candidates."""
        from rich.text import Text

        rows: list[list[Part]] = []
        for each in self.found.ranked[:_LISTED]:
            changes = " ".join(f"{name}={value}" for name, value in self.found.changes(each).items())
            times = us(_ns(each)), share(self.floor_ns, _ns(each))
            rows.append([f"{each.number:,}", *times, Text(changes or "the default")])
        return table("number|us|floor|values that are not the default's", rows, left=(3,))

    def as_json(self) -> dict[str, Any]:
        """The keys of docs/json.md."""
        found = self.found
        return {
            "kernel": self.kernel.name,
            "title": self.title,
            "reading": self.reading,
            "complete": found.stopped is None,
            "floor_ns": float(self.floor_ns),
            "default_ns": _ns(found.default),
            "best_ns": _ns(found.best),
            "best": dict(found.best.candidate),
            "gain": self.gain,
            "entry": self.entry,
            "candidates": self.kernel.candidates,
            "parameters": [
                {
                    "name": each.name,
                    "default": each.default,
                    "domain": list(each.domain),
                    "importance": found.importance.get(each.name),
                }
                for each in self.kernel.parameters
            ],
            "tried": [
                {
                    "number": each.number,
                    "values": dict(each.candidate),
                    "program_ns": _float(each.outcome.program_ns),
                    "scheduled_ns": _float(each.outcome.scheduled_ns),
                    "code": each.outcome.code,
                    "why": each.outcome.why,
                }
                for each in found.tried
            ],
        }


def _ns(tried: Tried) -> float:
    """The objective of a candidate that was measured."""
    assert tried.outcome.length_ns is not None
    return float(tried.outcome.length_ns)


def _float(number: float | None) -> float | None:
    return None if number is None else float(number)
