"""Measurement of a candidate: a dry launch of the kernel, and its time in one or two readings."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from nkw.errors import NkwError
from simulate.bind import install
from simulate.kernel_by_name import find_import_folder, importing_from, launch_named, load_callable
from simulate.run.launch import Launch, unwrap_kernel
from simulate.timing import Reading, dependences, schedule
from simulate.tune.parameters import ARGUMENT, Candidate

WORSE = "worse"
"""Objective that is the longer of the times in the program and the scheduled reading."""
READINGS = (Reading.program.value, Reading.scheduled.value, WORSE)
_ENVIRONMENT = ("NKI_", "NKW_", "NEURON_")
_LONGEST_REASON = 200  # most characters of a reason


@dataclass(frozen=True)
class Subject:
    """A kernel by name with its arguments, and the environment that another process needs to launch it.

    `words` is FILE.py:NAME or MODULE:NAME. `arguments` are texts of the command line. `reading` is one of `READINGS`,
    the objective. `environment` has (name, value) of variables.
    """

    words: str
    arguments: tuple[str, ...]
    reading: str
    environment: tuple[tuple[str, str], ...]

    @classmethod
    def from_arguments(cls, kernel_name: str, arguments: Sequence[str], reading: str) -> Subject:
        """Return a subject with this process's environment variables that launches read: chip, ranks, level, rules."""
        variables = tuple(
            (name, setting) for name, setting in os.environ.items() if name.startswith(_ENVIRONMENT)
        )
        return cls(kernel_name, tuple(arguments), reading, variables)


@dataclass(frozen=True)
class Outcome:
    """Predicted times of a candidate, or the code and the reason of its refusal.

    A time is None in a reading that the objective does not need. A refused candidate has neither.
    """

    program_ns: float | None = None
    scheduled_ns: float | None = None
    code: str = ""
    why: str = ""

    @property
    def length_ns(self) -> float | None:
        """Objective in ns: the longer of the predicted times; None for a refused candidate."""
        return max(
            (time_ns for time_ns in (self.program_ns, self.scheduled_ns) if time_ns is not None), default=None
        )


class Bench:
    """Imported kernel of a subject, which launches and times candidates one after another in this process."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        with importing_from(find_import_folder(subject.words)):
            self.kernel: Callable[..., Any] = unwrap_kernel(load_callable(subject.words))

    def launch(self, candidate: Candidate) -> Launch:
        """Launch the kernel dry with a candidate as its argument `tuning`. Errors of the launch pass through."""
        subject = self._subject
        with importing_from(find_import_folder(subject.words)):
            return launch_named(
                self.kernel, subject.words, subject.arguments, keywords={ARGUMENT: dict(candidate)}
            )

    def time_launch(self, launch: Launch) -> Outcome:
        """Return the predicted times of a launch, in the readings that the objective needs."""
        waits = dependences(launch.streams)
        objective = self._subject.reading
        program, scheduled = (
            schedule(launch.streams, launch.hardware, reading, waits).length_ns
            if objective in (reading.value, WORSE)
            else None
            for reading in (Reading.program, Reading.scheduled)
        )
        return Outcome(program, scheduled)

    def time_candidate(self, candidate: Candidate) -> Outcome:
        """Return the predicted times of a candidate; any error of its launch becomes a refusal.

        Output of the kernel is discarded.
        """
        with open(os.devnull, "w") as null_file, redirect_stdout(null_file), redirect_stderr(null_file):
            try:
                return self.time_launch(self.launch(candidate))
            except NkwError as refused:
                return Outcome(code=refused.code, why=_shorten_error(refused))
            except Exception as failed:  # any error of the kernel's Python code
                return Outcome(code=type(failed).__name__, why=_shorten_error(failed))


def make_bench_in_process(subject: Subject) -> Bench:
    """Prepare a new process for measuring: set the subject's environment variables, make `import nki` the simulator.

    Returns:
        The bench of the subject.
    """
    os.environ.update(subject.environment)
    install("simulate")
    return Bench(subject)


def _shorten_error(error: Exception) -> str:
    """Return the arguments that a rule refused, else an error's message, as one line of at most 200 characters."""
    text = " ".join(str(getattr(error, "seen", "") or getattr(error, "message", "") or error).split())
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 1]}…"
