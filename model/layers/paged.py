"""Cache groups of a model: layers that share block tables, slot mappings and positions.

Layers with a window may form a group of their own. Then a step has further slot mappings, block tables and positions
for this group, and their names end with the window. Slots of recurrent states are copied like pages.
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
"""Names of the arrays that a step has for each cache group."""


class Slots(Enum):
    """Cache group of recurrent layers and encoders, which have slots; other groups have pages."""

    states = "states"


STATES = Slots.states

CacheGroup = int | Slots | None
"""Window of the group's layers, None for layers without a window, or STATES for slots."""

NEWEST = 1
"""Cache group of the pages that new tokens fill where full pages have four bits.

It is a window of one position: no token reads a page of this group before its own.
"""

FULL_PAGES = "full_page_sources", "full_page_destinations"
"""Names of the inputs of launches that pack full pages: numbers of newest pages, and of the pages of four bits that
are written."""


def name_in_group(name: str, step: StepShape, group: CacheGroup) -> str:
    """Return the name that a step's array `name`, one of GROUP_ARRAYS, has for a cache group.

    It is "<name>.states" for slots, "<name>.<window>" for a window with pages of its own in the step, else `name`.
    """
    if isinstance(group, Slots):
        return f"{name}.{group.value}"
    return f"{name}.{group}" if group in dict(step.window_pages) else name


def find_padding_page(step: StepShape, group: CacheGroup) -> int:
    """Return the index of the group's last page or slot, to which padding tokens write and which nothing reads."""
    return (step.slots if isinstance(group, Slots) else step.for_window(group).pages) - 1
