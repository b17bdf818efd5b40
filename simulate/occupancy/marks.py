"""Letters of allocations and short names of kernel lines, for text and picture."""

from __future__ import annotations

import string
from pathlib import PurePath

from nkw.errors import Location
from simulate.occupancy.uses import Memory, Source

LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
OTHERS = "#"
"""Mark of every allocation after the last letter."""


def assign_letters(memory: Memory) -> dict[int, str]:
    """Return the letter that marks each allocation in maps, by its index in `Memory.sources`.

    Letters are given in the order of `Memory.ranks`: A to Z, a to z, 0 to 9, and "#" for all others.
    """
    return {source: LETTERS[rank] if rank < len(LETTERS) else OTHERS for source, rank in memory.ranks.items()}


def shorten_location(location: Location) -> str:
    """Format a line of source as FILE:LINE, with the file's name without folder and suffix."""
    return f"{PurePath(location.file).stem}:{location.line}"


def format_call_chain(source: Source) -> str:
    """Format the line of an allocation and its callers, innermost first, such as "mlp:40 < model:12"."""
    lines = [source.where, *reversed(source.callers)]
    return " < ".join(shorten_location(line) for line in lines if line is not None)
