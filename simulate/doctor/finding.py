"""What `doctor` reports: one sentence, the command that mends it, and the page that documents it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from simulate.doctor.machine import Machine


class Finding(NamedTuple):
    """Something to mend. `name` is stable; `page` is empty where the rule is the project's own."""

    name: str
    says: str
    mend: str
    page: str


Finder = Callable[[Machine], Iterator[Finding]]
"""A pure function of a machine."""
