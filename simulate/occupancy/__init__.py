"""On-chip memory of a launch: tiles in SBUF and PSUM with their lifetimes, whether they fit, how large a tile may be.

`occupancies` derives it from a recorded launch, eager or dry; `text` and `svg` display it.
"""

from __future__ import annotations

from simulate.occupancy.svg import svg
from simulate.occupancy.text import text, verdict
from simulate.occupancy.uses import Level, Memory, Occupancy, Source, Use, occupancies

__all__ = [
    "Level",
    "Memory",
    "Occupancy",
    "Source",
    "Use",
    "occupancies",
    "svg",
    "text",
    "verdict",
]
