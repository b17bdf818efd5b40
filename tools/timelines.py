"""Writes tests/timing/stored: the timeline of every shipped kernel at a small shape on every generation, as text.

Predicted times are exact, so a change of a kernel, a cost or the scheduling shows as a difference in these files.
Instructions are in program order. Times are in microseconds; a DMA has a line for its trigger and one for its data
phase.

    python -m tools.timelines [FOLDER]
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import simulate
from nki_kernels.examples import EXAMPLES, RANKS
from nkw.targets import GENERATIONS
from nkw.terminal import progress
from simulate.kernel_by_name import build_call
from simulate.timing import listing, schedule

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "timing" / "stored"
TARGETS = tuple(GENERATIONS.values())
"""One chip of each generation."""


@dataclass(frozen=True)
class Case:
    """A kernel and its positional arguments, the same on each of `ranks` ranks.

    Of arrays only shape and dtype are used.
    """

    kernel: Callable[..., Any]
    arguments: tuple[Any, ...]
    ranks: int = 1

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.__name__


def cases() -> tuple[Case, ...]:
    """Return a case for every kernel of the package and for the first step of the ladder, at small shapes."""
    examples = []
    for name, words in EXAMPLES.items():
        ranks = RANKS.get(name, 1)
        module = importlib.import_module(".".join(["nki_kernels", *name.split(":")[:-1]]))
        kernel = getattr(module, name.rpartition(":")[2])
        arguments, keywords = build_call(words, simulate.Mode.dry, 0, ranks)
        examples.append(Case(kernel, inspect.signature(kernel).bind(*arguments, **keywords).args, ranks))
    return tuple(examples)


def timeline(case: Case, target: str) -> str:
    """Return the timeline of one kernel on one chip as text, from a dry launch, which computes no values."""
    world = simulate.World(target, case.ranks)
    launch = world.launch(case.kernel, [(case.arguments, {})] * case.ranks, mode=simulate.Mode.dry)
    return listing(launch.streams, schedule(launch.streams, launch.hardware))


def timelines() -> dict[str, str]:
    """Compute the timelines of all cases on all chips and return them by file name."""
    every = [(case, target) for case in cases() for target in TARGETS]
    return {
        f"{case.name}-{target}.txt": timeline(case, target) for case, target in progress(every, "timelines")
    }


def write(folder: Path = FOLDER) -> None:
    """Write all timelines to a folder, and remove files of kernels and chips that no longer exist."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = timelines()
    for stale in {path.name for path in folder.glob("*.txt")} - set(fresh):
        (folder / stale).unlink()
    for name, text in fresh.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
