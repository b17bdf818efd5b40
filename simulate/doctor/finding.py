"""Findings of `doctor`: a sentence, a command that repairs the problem, and the page that documents it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from simulate.doctor.machine import Machine


class Finding(NamedTuple):
    """A problem with its repair.

    `name` is stable; `page` is empty for the project's own rules.
    """

    name: str
    says: str
    mend: str
    page: str


Finder = Callable[[Machine], Iterator[Finding]]
"""Function that yields the findings on a machine and depends on the record alone."""
