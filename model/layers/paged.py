"""The cache groups of a model: layers whose pages or slots the same arrays of a step name.

Layers that see a window of positions may be a group of their own. Then slots, tables and positions come once more for
that group, and their names end with the window. Slots of recurrent states are copied like pages.
"""

from __future__ import annotations

from enum import Enum

from model.layers.launch import StepShape

GROUP_ARRAYS = (
    "positions",
    "slot_mapping",
    "block_tables",
    "prompt_tables",
    "copy_sources",
    "copy_destinations",
)
"""The arrays of a step that come once for every cache group."""


class Slots(Enum):
    """The cache group of recurrent layers and encoders, which keep slots; other groups keep pages."""

    states = "states"


STATES = Slots.states

CacheGroup = int | Slots | None
"""The window of the group's layers, or None for layers that see all positions; or slots."""


def name_in_group(name: str, step: StepShape, group: CacheGroup) -> str:
    """Return the name of one of GROUP_ARRAYS for a cache group; it ends with the window or the slots, if any."""
    if isinstance(group, Slots):
        return f"{name}.{group.value}"
    return f"{name}.{group}" if group in dict(step.window_pages) else name


def spare(step: StepShape, group: CacheGroup) -> int:
    """Return the number of the page or slot that is only written, the last one."""
    return (step.slots if isinstance(group, Slots) else step.for_window(group).pages) - 1
