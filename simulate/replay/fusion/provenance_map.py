"""Where the elements of every tile on chip come from, while a program is lowered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from simulate.isa.plan import Plan
from simulate.memory import NkiTensor, Storage, views
from simulate.replay.fusion.graph import Value, View, rebased
from simulate.replay.fusion.provenance import Cells, Table, table_of, view_of

_Place = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, shape and strides of a tile in its storage, in elements."""


class Tables:
    """A view for each tile that was last written whole by one, a table for the others.

    What no later plan uses is dropped: the tables of all tiles of a large program take several times the bytes of its
    arguments.
    """

    def __init__(self, plans: Iterable[Plan], values: list[Value]) -> None:
        self._values = values
        self._held: dict[int, View | Table] = {}
        # What was found in each table since it was last written: a kernel reads a stationary tile over and over.
        self._found: dict[int, dict[_Place, View | None]] = {}
        last: dict[int, int] = {}
        for position, plan in enumerate(plans):
            for tile in (*plan.reads, *plan.writes):
                last[id(tile.storage)] = position
                if tile.dynamic is not None:
                    last[id(tile.dynamic.index.storage)] = position
        self._ends: dict[int, list[int]] = {}
        for key, position in last.items():
            self._ends.setdefault(position, []).append(key)

    def read(self, tile: NkiTensor) -> Cells:
        """Where the elements of a tile come from; -1 for those that nothing wrote."""
        held = self._held.get(id(tile.storage))
        if isinstance(held, View):
            # The view shows the whole storage in order, as a contiguous buffer of its shape would.
            found = rebased(View(held.value, tile.offset, tile.shape, tile.strides), held)
            if found is not None:
                return Cells(found)
        part = seen(self._table(tile.storage), tile)
        place = tile.offset, tile.shape, tile.strides
        known = self._found.setdefault(id(tile.storage), {})
        if place not in known:
            known[place] = view_of(part, self._values)
        return Cells(known[place] or part)

    def write(self, tile: NkiTensor, cells: Cells) -> None:
        """Let other elements stand in a tile from now on; `cells` has its shape."""
        self._found.pop(id(tile.storage), None)
        whole = tile.size == tile.storage.size and views.is_row_major(tile.shape, tile.strides)
        if whole and cells.view is not None:
            self._held[id(tile.storage)] = cells.view
        else:
            seen(self._table(tile.storage), tile)[...] = cells.table()

    def passed(self, position: int) -> None:
        """Drop the tables that are of no use after a position."""
        for key in self._ends.get(position, ()):
            self._held.pop(key, None)
            self._found.pop(key, None)

    def _table(self, storage: Storage) -> Table:
        held = self._held.get(id(storage))
        if held is None:
            held = np.full(storage.size, -1, np.int64)
        elif isinstance(held, View):
            held = table_of(held).reshape(-1)
        self._held[id(storage)] = held
        return held


def seen(flat: np.ndarray, tile: NkiTensor) -> np.ndarray:
    """What a tile shows of an array that has a number for each element of its storage."""
    width = flat.itemsize
    strides: Sequence[int] = tuple(stride * width for stride in tile.strides)
    return np.ndarray(tile.shape, flat.dtype, flat, tile.offset * width, strides)
