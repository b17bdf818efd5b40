"""The provenance of every tile on chip, while a program is lowered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from simulate.isa.plan import Plan
from simulate.memory import NkiTensor, Storage, views
from simulate.replay.arena import operands
from simulate.replay.fusion.graph import Value, View, rebased
from simulate.replay.fusion.provenance import ElementIds, Provenance, element_ids_of, view_of

_Layout = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, shape and strides of a tile in its storage, in elements."""


class ProvenanceMap:
    """The provenance of each storage on chip: a view if its last write was one whole view, else element ids.

    An entry is dropped after the last use of its storage: the ids of all tiles of a large program take several times
    the bytes of its arguments.
    """

    def __init__(self, plans: Iterable[Plan], values: list[Value]) -> None:
        self._values = values
        self._sources: dict[int, View | ElementIds] = {}
        # The views found in the ids of a storage since its last write: a kernel reads a stationary tile many times.
        self._views: dict[int, dict[_Layout, View | None]] = {}
        last: dict[int, int] = {}
        for position, plan in enumerate(plans):
            for tile in operands(plan):
                last[id(tile.storage)] = position
        self._last_uses: dict[int, list[int]] = {}
        for key, position in last.items():
            self._last_uses.setdefault(position, []).append(key)

    def read(self, tile: NkiTensor) -> Provenance:
        """The provenance of a tile; -1 for elements that no instruction wrote."""
        source = self._sources.get(id(tile.storage))
        if isinstance(source, View):
            # The view has the elements of the whole storage in order, as a contiguous buffer of its shape has.
            found = rebased(View(source.value, tile.offset, tile.shape, tile.strides), source)
            if found is not None:
                return Provenance(found)
        part = elements_of(self._element_ids(tile.storage), tile)
        place = tile.offset, tile.shape, tile.strides
        known = self._views.setdefault(id(tile.storage), {})
        if place not in known:
            known[place] = view_of(part, self._values)
        return Provenance(known[place] or part)

    def write(self, tile: NkiTensor, provenance: Provenance) -> None:
        """Set the provenance of a tile; `provenance` has the tile's shape."""
        self._views.pop(id(tile.storage), None)
        whole = tile.size == tile.storage.size and views.is_row_major(tile.shape, tile.strides)
        if whole and provenance.view is not None:
            self._sources[id(tile.storage)] = provenance.view
        else:
            elements_of(self._element_ids(tile.storage), tile)[...] = provenance.element_ids()

    def drop_dead(self, position: int) -> None:
        """Drop the entries whose last use is at a position."""
        for key in self._last_uses.get(position, ()):
            self._sources.pop(key, None)
            self._views.pop(key, None)

    def _element_ids(self, storage: Storage) -> ElementIds:
        source = self._sources.get(id(storage))
        if source is None:
            source = np.full(storage.size, -1, np.int64)
        elif isinstance(source, View):
            source = element_ids_of(source).reshape(-1)
        self._sources[id(storage)] = source
        return source


def elements_of(flat: np.ndarray, tile: NkiTensor) -> np.ndarray:
    """The view that a tile takes of `flat`, an array with one entry for each element of the tile's storage."""
    width = flat.itemsize
    strides: Sequence[int] = tuple(stride * width for stride in tile.strides)
    return np.ndarray(tile.shape, flat.dtype, flat, tile.offset * width, strides)
