"""On-chip memory of a launch: what lies in SBUF and PSUM from when to when, what fits, and how large a tile may be.

`occupancies` works it out from a recorded launch, eager or dry; `text` and `svg` show it.
"""

from __future__ import annotations

from simulate.occupancy.svg import svg
from simulate.occupancy.text import text, verdict
from simulate.occupancy.uses import Level, Memory, Occupancy, Room, Source, Use, occupancies

__all__ = [
    "Level",
    "Memory",
    "Occupancy",
    "Room",
    "Source",
    "Use",
    "occupancies",
    "svg",
    "text",
    "verdict",
]
