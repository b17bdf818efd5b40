"""Report of a search, as text and as a JSON document."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from nkw.report import Hanging, Part, table
from simulate.profile.numbers import format_share, format_us
from simulate.tune.parameters import Tunable
from simulate.tune.search import SearchState, Trial

_LISTED = 10


@dataclass(frozen=True)
class Report:
    """A search and its kernel.

    `reading` is the objective, one of `simulate.tune.measuring.READINGS`. `floor_ns` is the time at peak rates of the
    launch with the default. `entry` is the name of the launch's entry in the table of tuned values, or None.
    """

    title: str
    kernel: Tunable
    reading: str
    floor_ns: float
    search_state: SearchState
    entry: str | None

    @property
    def gain(self) -> float:
        """Share of the default's time that the best candidate saves, from 0 to 1."""
        return 1 - _get_length_ns(self.search_state.best) / _get_length_ns(self.search_state.default)

    def make_parts(self) -> list[Part]:
        """Return the report as parts for a terminal: times, gain, number of candidates, parameters, the best ten."""
        state = self.search_state
        floor, default, best = self.floor_ns, _get_length_ns(state.default), _get_length_ns(state.best)
        objective = (
            "worse of the program and the scheduled reading" if self.reading == "worse" else self.reading
        )
        rows = [
            (name, format_us(time_ns), format_share(floor, time_ns))
            for name, time_ns in (("floor", floor), ("default", default), ("best", best))
        ]
        summary = f"{len(state.trials):,} of {self.kernel.candidates:,} candidates tried"
        if state.pruned:
            summary += f", {len(state.pruned):,} of them refused: {self._count_refusals()}"
        out: list[Part] = [
            Hanging(self.title, style="bold"),
            Hanging(f"objective: {objective}{'' if self.reading == 'worse' else ' reading'}"),
            Hanging(summary),
            *(["interrupted: this is the best so far"] if state.stopped else []),
            "",
            table("|us|floor", rows),
            f"gain {format_share(default - best, default)}",
            "",
            self._make_parameter_table(),
            "",
            self._make_candidate_table(),
        ]
        return out

    def _count_refusals(self) -> str:
        """Return the codes of refused candidates with their counts as text, the most frequent first."""
        codes = Counter(trial.outcome.code for trial in self.search_state.pruned)
        return ", ".join(f"{code} {count:,}" for code, count in codes.most_common())

    def _make_parameter_table(self) -> Part:
        """Return the table of parameters, in descending order of importance, with default, best value and domain."""
        importance, best = self.search_state.importance, self.search_state.best.candidate
        ordered = sorted(self.kernel.parameters, key=lambda parameter: -importance.get(parameter.name, 0.0))
        rows = [
            (
                parameter.name,
                f"{importance[parameter.name]:.0%}".replace("%", " %")
                if parameter.name in importance
                else "-",
                str(parameter.default),
                str(best[parameter.name]),
                ", ".join(map(str, parameter.domain)),
            )
            for parameter in ordered
        ]
        return table("parameter|matters|default|best|domain", rows, left=(0, 4))

    def _make_candidate_table(self) -> Part:
        """Return the table of the ten fastest candidates, with their values that are not the default's."""
        from rich.text import Text

        rows: list[list[Part]] = []
        for trial in self.search_state.ranked[:_LISTED]:
            changes = " ".join(
                f"{name}={choice}" for name, choice in self.search_state.changes(trial).items()
            )
            times = format_us(_get_length_ns(trial)), format_share(self.floor_ns, _get_length_ns(trial))
            rows.append([f"{trial.number:,}", *times, Text(changes or "the default")])
        return table("number|us|floor|values that are not the default's", rows, left=(3,))

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON types, with the keys of docs/json.md."""
        state = self.search_state
        return {
            "kernel": self.kernel.name,
            "title": self.title,
            "reading": self.reading,
            "complete": state.stopped is None,
            "floor_ns": float(self.floor_ns),
            "default_ns": _get_length_ns(state.default),
            "best_ns": _get_length_ns(state.best),
            "best": dict(state.best.candidate),
            "gain": self.gain,
            "entry": self.entry,
            "candidates": self.kernel.candidates,
            "parameters": [
                {
                    "name": parameter.name,
                    "default": parameter.default,
                    "domain": list(parameter.domain),
                    "importance": state.importance.get(parameter.name),
                }
                for parameter in self.kernel.parameters
            ],
            "tried": [
                {
                    "number": trial.number,
                    "values": dict(trial.candidate),
                    "program_ns": _to_float(trial.outcome.program_ns),
                    "scheduled_ns": _to_float(trial.outcome.scheduled_ns),
                    "code": trial.outcome.code,
                    "why": trial.outcome.why,
                }
                for trial in state.trials
            ],
        }


def _get_length_ns(trial: Trial) -> float:
    """Return the objective of a candidate in ns; the candidate must not be refused."""
    assert trial.outcome.length_ns is not None
    return float(trial.outcome.length_ns)


def _to_float(number: float | None) -> float | None:
    """Convert a number to a Python float; None stays None."""
    return None if number is None else float(number)
