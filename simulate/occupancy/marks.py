"""The letter of a source of tiles and the name of its line in the kernel, for text and picture."""

from __future__ import annotations

import string
from pathlib import PurePath

from nkw.errors import Location
from simulate.occupancy.uses import Memory, Source

LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
OTHERS = "#"
"""The mark of every source beyond the last letter."""


def letters(memory: Memory) -> dict[int, str]:
    """The letter of every source, by its rank."""
    return {number: LETTERS[rank] if rank < len(LETTERS) else OTHERS for number, rank in memory.ranks.items()}


def short(where: Location) -> str:
    """A line by the name of its file alone."""
    return f"{PurePath(where.file).stem}:{where.line}"


def place_of(source: Source) -> str:
    """Where a source stands in the kernel: its line, then its callers, innermost first."""
    lines = [source.where, *reversed(source.callers)]
    return " < ".join(short(line) for line in lines if line is not None)
