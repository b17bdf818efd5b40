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


def page_arguments(step: StepShape, window: int | None, tokens: int) -> dict[str, Value]:
    """The arguments `slots` and `block_tables` of an attention kernel; none where states are not pages.

    `slots` [tokens, 1] are where the new tokens are written, `block_tables` [sequences, blocks] the pages they read.
    """
    if not step.block_size:
        return {}
    blocks = step.of_window(window).cache_length // step.block_size
    shapes = {"slots": (tokens, 1), "block_tables": (tokens // step.new_tokens, blocks)}
    return {
        parameter: Value(of_kind(parameter, step, window), shape, INT32)
        for parameter, shape in shapes.items()
    }


def mixed_page_arguments(step: StepShape, decoding: StepShape, window: int | None) -> dict[str, Value]:
    """The same for sequences that decode beside prompts, with the `prompt_tables` of the prompts."""
    assert step.block_size, "sequences decode beside prompts on pages"
    decoded = page_arguments(decoding, window, decoding.tokens)
    prompts = page_arguments(step.prompts, window, step.prompts.tokens)
    return {
        "slots": replace(decoded["slots"], shape=(step.tokens, 1)),
        "block_tables": decoded["block_tables"],
        "prompt_tables": replace(prompts["block_tables"], name=of_kind("prompt_tables", step, window)),
    }


def copy(step: StepShape, kind: Kind, caches: tuple[Value, Value | None], copies: int) -> Launch:
    """Copies of so many pages of keys and values, or of the one cache of a layer, or slots of two states."""
    cache, other = caches
    held = [each for each in caches if each is not None]
    sources, destinations = (
        Value(of_kind(name, step, kind), (copies, 1), INT32) for name in ("copy_sources", "copy_destinations")
    )
    arguments = {"cache": cache, "other": other, "sources": sources, "destinations": destinations}
    page_bytes = sum(each.nbytes for each in held) / held[0].shape[0]
    work = LeastWork(0.0, 2.0 * copies * page_bytes)
    return Launch("copy_pages", arguments, tuple(each.name for each in held), work, copies)
