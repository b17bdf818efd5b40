"""Cases by their numbers: a number decides everything about its case, so that each can be run again alone."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from tests.hostile.cases import KINDS, Maker
from tests.hostile.judge import Case, faults


def cases(first: int, only: str | None = None) -> Iterator[tuple[int, Maker]]:
    """Yield numbers from `first` on, and the makers of their cases in turn."""
    for number in count(first):
        maker = KINDS[number % len(KINDS)]
        if only in (None, maker.__name__):
            yield number, maker


def tried(number: int, maker: Maker) -> tuple[Case, list[str]]:
    """Run one case; return it and the faults of its outcome."""
    with tempfile.TemporaryDirectory(prefix="nkw-hostile-") as name:
        folder = Path(name)
        case = maker(random.Random(number), folder)
        return case, faults(case, folder)
