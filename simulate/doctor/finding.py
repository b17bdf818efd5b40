"""Findings of `doctor`: a sentence, a command that repairs the problem, and the page that documents it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from simulate.doctor.machine import Machine


class Finding(NamedTuple):
    """A problem with its repair.

    `name` identifies the sort of problem and does not change between versions. `says` is the sentence about it, `mend`
    the shell command that repairs it. `page` is the address of the vendor's page that states the rule, or empty.
    """

    name: str
    says: str
    mend: str
    page: str


Finder = Callable[[Machine], Iterator[Finding]]
"""Function that yields its findings on a machine, none if it sees no problem; looks at nothing but the record."""
