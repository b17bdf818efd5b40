"""One candidate measured: a dry launch of the kernel, and its time in one reading or in two."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from nkw.errors import NkwError
from simulate.bind import install
from simulate.kernel_by_name import callable_named, folder_of, importing_from, launch_named
from simulate.run.launch import Launch, unwrap_kernel
from simulate.timing import Reading, dependences, schedule
from simulate.tune.parameters import ARGUMENT, Candidate

WORSE = "worse"
"""The objective that is the longer time of the program and the scheduled reading."""
READINGS = (Reading.program.value, Reading.scheduled.value, WORSE)
_ENVIRONMENT = ("NKI_", "NKW_", "NEURON_")
_LONGEST_REASON = 200  # characters


@dataclass(frozen=True)
class Subject:
    """A kernel by name with its arguments, and all that another process has to know to launch it."""

    words: str
    arguments: tuple[str, ...]
    reading: str
    environment: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, words: str, arguments: Sequence[str], reading: str) -> Subject:
        """With the environment variables of this process that launches read: chip, ranks, level, rules."""
        chosen = tuple((name, each) for name, each in os.environ.items() if name.startswith(_ENVIRONMENT))
        return cls(words, tuple(arguments), reading, chosen)


@dataclass(frozen=True)
class Outcome:
    """The times of a candidate; without times, `code` and `why` say what refused it."""

    program_ns: float | None = None
    scheduled_ns: float | None = None
    code: str = ""
    why: str = ""

    @property
    def length_ns(self) -> float | None:
        """The objective: the longest time measured; None for a candidate that was refused."""
        return max((each for each in (self.program_ns, self.scheduled_ns) if each is not None), default=None)


class Bench:
    """Measures the candidates of one subject, one after another; the kernel's file is read once."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        with importing_from(folder_of(subject.words)):
            self.kernel: Callable[..., Any] = unwrap_kernel(callable_named(subject.words))

    def launch(self, candidate: Candidate) -> Launch:
        """The dry launch with a candidate; raises what the launch raises."""
        subject = self._subject
        with importing_from(folder_of(subject.words)):
            return launch_named(
                self.kernel, subject.words, subject.arguments, keywords={ARGUMENT: dict(candidate)}
            )

    def times(self, launch: Launch) -> Outcome:
        """Its times in the readings that the objective needs."""
        waits = dependences(launch.streams)
        wanted = self._subject.reading
        program, scheduled = (
            schedule(launch.streams, launch.hardware, each, waits).length_ns
            if wanted in (each.value, WORSE)
            else None
            for each in (Reading.program, Reading.scheduled)
        )
        return Outcome(program, scheduled)

    def outcome(self, candidate: Candidate) -> Outcome:
        """The times of a candidate, or why it was refused. What the kernel prints is dropped."""
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            try:
                return self.times(self.launch(candidate))
            except NkwError as refused:
                return Outcome(code=refused.code, why=_line(refused))
            except Exception as failed:  # whatever the kernel's Python raises with these values
                return Outcome(code=type(failed).__name__, why=_line(failed))


def bench_elsewhere(subject: Subject) -> Bench:
    """The bench in a process of its own: chip, ranks, level and rules are those of the process that asks."""
    os.environ.update(subject.environment)
    install("simulate")
    return Bench(subject)


def _line(error: Exception) -> str:
    """The values that a rule saw, else the first line of an error."""
    words = " ".join(str(getattr(error, "seen", "") or getattr(error, "message", "") or error).split())
    return words if len(words) <= _LONGEST_REASON else f"{words[: _LONGEST_REASON - 1]}…"
