"""Provenance of the tiles on chip, while a program is lowered: of which value each element is a copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from simulate.isa.plan import Plan
from simulate.memory import NkiTensor, Storage, views
from simulate.replay.arena import list_operands
from simulate.replay.fusion.graph import Value, View, rebase
from simulate.replay.fusion.provenance import ElementIds, Provenance, compute_element_ids, find_view

_Layout = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, shape and strides of a tile in its storage, in elements."""


class ProvenanceMap:
    """Provenance of each storage on chip: a view if the last write covered the storage by one view, else element ids.

    A storage is forgotten after its last use: the ids of all tiles of a large program take several times the bytes of
    its arguments.
    """

    def __init__(self, plans: Iterable[Plan], values: list[Value]) -> None:
        self._values = values
        self._sources: dict[int, View | ElementIds] = {}
        # Views of the ids of a storage since its last write, as a kernel reads a stationary tile many times.
        self._views: dict[int, dict[_Layout, View | None]] = {}
        last: dict[int, int] = {}
        for position, plan in enumerate(plans):
            for tile in list_operands(plan):
                last[id(tile.storage)] = position
        self._last_uses: dict[int, list[int]] = {}
        for key, position in last.items():
            self._last_uses.setdefault(position, []).append(key)

    def read(self, tile: NkiTensor) -> Provenance:
        """Return the provenance of a tile at this point; elements that no instruction wrote have the id -1."""
        source = self._sources.get(id(tile.storage))
        if isinstance(source, View):
            # The view has the elements of the whole storage in order, as a contiguous buffer of its shape has.
            view = rebase(View(source.value, tile.offset, tile.shape, tile.strides), source)
            if view is not None:
                return Provenance(view)
        ids = view_elements(self._get_element_ids(tile.storage), tile)
        layout = tile.offset, tile.shape, tile.strides
        known_views = self._views.setdefault(id(tile.storage), {})
        if layout not in known_views:
            known_views[layout] = find_view(ids, self._values)
        return Provenance(known_views[layout] or ids)

    def write(self, tile: NkiTensor, provenance: Provenance) -> None:
        """Set the provenance of a tile's elements; `provenance` has the tile's shape."""
        self._views.pop(id(tile.storage), None)
        covers_storage = tile.size == tile.storage.size and views.is_row_major(tile.shape, tile.strides)
        if covers_storage and provenance.view is not None:
            self._sources[id(tile.storage)] = provenance.view
        else:
            view_elements(self._get_element_ids(tile.storage), tile)[...] = provenance.get_element_ids()

    def drop_dead(self, position: int) -> None:
        """Forget the storages whose last use is by the plan at a position."""
        for key in self._last_uses.get(position, ()):
            self._sources.pop(key, None)
            self._views.pop(key, None)

    def _get_element_ids(self, storage: Storage) -> ElementIds:
        """Return the ids of a storage's elements, flat, from now on stored as an array that may be written to."""
        source = self._sources.get(id(storage))
        if source is None:
            source = np.full(storage.size, -1, np.int64)
        elif isinstance(source, View):
            source = compute_element_ids(source).reshape(-1)
        self._sources[id(storage)] = source
        return source


def view_elements(flat: np.ndarray, tile: NkiTensor) -> np.ndarray:
    """Return a NumPy view of a tile's entries in `flat`, which has one entry per element of the tile's storage."""
    width = flat.itemsize
    strides: Sequence[int] = tuple(stride * width for stride in tile.strides)
    return np.ndarray(tile.shape, flat.dtype, flat, tile.offset * width, strides)
