"""The arrays of a step on pages: where its tokens are written, the pages of their sequences, and copies.

Layers that see a window of positions may have pages of a kind of their own. Then slots, tables and positions come once
more for that kind, and their names end with the window. Slots of recurrent states are copied like pages.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from model.layers.launch import INT32, Launch, LeastWork, StepShape, Value

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


def positions(step: StepShape, window: int | None, tokens: int) -> Value:
    """Where new tokens stand among the positions that a cache holds, or that their sequence's table names."""
    return Value(of_kind("positions", step, window), (tokens, 1), INT32)


def places(step: StepShape, window: int | None, tokens: int) -> tuple[Value | None, Value | None]:
    """Where new tokens are written and the tables of their sequences; None and None where states are not pages."""
    if not step.block_size:
        return None, None
    slots, tables = (of_kind(name, step, window) for name in ("slots", "block_tables"))
    shape = tokens // step.new_tokens, step.of_window(window).cache_length // step.block_size
    return Value(slots, (tokens, 1), INT32), Value(tables, shape, INT32)


def mixed_places(step: StepShape, window: int | None) -> tuple[Value | None, Value | None, Value]:
    """Where the new tokens of a step are written, and the tables of what decodes in it and of its prompts."""
    slots, tables = places(step.decoded, window, step.decoded.tokens)
    _, of_prompts = places(step.prompts, window, step.prompts.tokens)
    assert slots is not None and of_prompts is not None, "sequences decode beside prompts on pages"
    name = of_kind("prompt_tables", step, window)
    return replace(slots, shape=(step.tokens, 1)), tables, replace(of_prompts, name=name)


def copy(step: StepShape, kind: Kind, caches: tuple[Value, Value | None], copies: int) -> Launch:
    """Copies of so many pages of keys and values, or of the one cache of a layer, or slots of two states."""
    held = [each for each in caches if each is not None]
    ends = (
        Value(of_kind(name, step, kind), (copies, 1), INT32) for name in ("copy_sources", "copy_destinations")
    )
    page_bytes = sum(each.nbytes for each in held) / held[0].shape[0]
    work = LeastWork(0.0, 2.0 * copies * page_bytes)
    return Launch("copy_pages", (*caches, *ends), tuple(each.name for each in held), work, copies)
