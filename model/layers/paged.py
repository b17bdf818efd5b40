"""The arrays of a step on pages: where its tokens are written, the pages of their sequences, and copies of pages.

Layers that see a window of positions may have pages of a kind of their own. Then slots, tables and positions come once
more for that kind, and their names end with the window.
"""

from __future__ import annotations

from model.layers.launch import INT32, Launch, LeastWork, StepShape, Value

OF_KIND = ("positions", "slots", "block_tables", "copy_sources", "copy_destinations")
"""The arrays that come once for every kind of pages."""

MOST_COPIES = 128
"""Pages that one launch copies: one on each partition."""


def of_kind(name: str, step: StepShape, window: int | None) -> str:
    """The name of one of the arrays for layers that see `window` positions, or all."""
    return f"{name}.{window}" if window in dict(step.window_pages) else name


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


def copy(step: StepShape, window: int | None, caches: tuple[Value, Value], copies: int) -> Launch:
    """Copies of so many pages of keys and values."""
    keys, values = caches
    ends = (
        Value(of_kind(name, step, window), (copies, 1), INT32)
        for name in ("copy_sources", "copy_destinations")
    )
    page_bytes = (keys.nbytes + values.nbytes) / keys.shape[0]
    work = LeastWork(0.0, 2.0 * copies * page_bytes)
    return Launch("copy_pages", (keys, values, *ends), (keys.name, values.name), work, copies)
