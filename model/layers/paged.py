"""The cache groups of a model: layers whose pages or slots the same arrays of a step name.

Layers that see a window of positions may have pages of a kind of their own. Then slots, tables and positions come once
more for that kind, and their names end with the window. Slots of recurrent states are copied like pages.
"""

from __future__ import annotations

from enum import Enum

from model.layers.launch import StepShape

OF_KIND = ("positions", "slots", "block_tables", "prompt_tables", "copy_sources", "copy_destinations")
"""The arrays that come once for every kind of pages."""

MOST_COPIES = 128
"""Pages that one launch copies: one on each partition."""


class Slots(Enum):
    """The kind of what recurrent layers keep, where the kinds of pages are windows, or None for all positions."""

    states = "states"


STATES = Slots.states

Kind = int | Slots | None
"""Pages of layers that see a window of positions, or all, or slots."""


def of_kind(name: str, step: StepShape, kind: Kind) -> str:
    """The name of one of the arrays for layers that see a window of positions, or all, or for recurrent ones."""
    if isinstance(kind, Slots):
        return f"{name}.{kind.value}"
    return f"{name}.{kind}" if kind in dict(step.window_pages) else name


def spare(step: StepShape, kind: Kind) -> int:
    """The number of the page or slot that nobody reads, the last one."""
    return (step.slots if isinstance(kind, Slots) else step.of_window(kind).pages) - 1
