"""Observation of stores to HBM: elements of a store that a second store changes before anything has read them.

The detector `lost` reports them. A store is pending for an element until an instruction reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from simulate.check.tile_values import resolve_elements
from simulate.memory import MemoryRegion, NkiTensor
from simulate.run.execute import view_flat
from simulate.run.machine import Issue, NeuronCore

_NONE = -1
"""Event id of an element without a pending store."""


@dataclass(frozen=True, slots=True)
class LostStore:
    """Store that changes elements of an earlier store that nothing has read.

    `first` and `second` are the events of the two stores to `tensor`. `count` of the `size` elements that the
    second store writes change.
    """

    first: int
    second: int
    tensor: int
    count: int
    size: int


@dataclass
class Stores:
    """Pending stores of one core, and in `lost` the stores that were overwritten unread.

    `_unread` has, for each element of a tensor in HBM, the event whose store nothing has read so far, or -1.
    """

    lost: list[LostStore] = field(default_factory=list)
    _unread: dict[int, np.ndarray] = field(default_factory=dict)
    _loaded: set[int] = field(default_factory=set)
    """Tiles that a DMA loaded from HBM, whose source is unchanged."""
    _old: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """Events that stored the elements which the running store overwrites, and their bits, by tensor."""
    _partly_read: set[int] = field(default_factory=set)
    """Stores to private HBM that an instruction has read in part: the kernel stores rows and uses columns of them."""

    def before(self, core: NeuronCore, issue: Issue) -> None:
        """Copy the bits that a store is about to overwrite, and end the pending stores of elements that are read."""
        self._old.clear()
        plan, reads, writes = issue
        for tile in reads:
            events = self._unread.get(tile.storage.serial)
            if events is not None:
                if tile.buffer is MemoryRegion.private_hbm:
                    self._partly_read.update(np.unique(self._get(events, tile)).tolist())
                self._set(events, tile, _NONE)
        if plan.rendezvous is not None or not reads:
            return
        for tile in writes:
            events = self._unread.get(tile.storage.serial)
            if events is not None:
                earlier = self._get(events, tile)
                if (earlier != _NONE).any():
                    self._old[tile.storage.serial] = earlier.copy(), _view_bits(tile).copy()

    def after(self, core: NeuronCore, event: int, issue: Issue) -> None:
        """Append to `lost` if a store changed pending elements, and record the store as pending.

        A copy from HBM is not recorded, because its source still has the values. Shared HBM of two cores is
        left to `race`.
        """
        plan, reads, writes = issue
        if plan.rendezvous is not None or not reads:
            return
        from_hbm = plan.effects.copies and reads[0].buffer in _HBM
        is_copy = from_hbm or (plan.effects.copies and reads[0].storage.serial in self._loaded)
        for tile in writes:
            serial = tile.storage.serial
            if tile.buffer not in _HBM:
                (self._loaded.add if from_hbm else self._loaded.discard)(serial)
                continue
            if core.rank.logical_core_size > 1 and tile.buffer is MemoryRegion.shared_hbm:
                continue  # the other core may have read or written the elements; `race` judges those
            if serial in self._old:
                self._compare(event, tile, *self._old[serial])
            if serial not in self._unread:
                count = tile.storage.nbytes // tile.storage.dtype.storage.itemsize
                self._unread[serial] = np.full(count, _NONE, np.int32)
            # A copy that is updated in part afterwards loses nothing, because its source is unchanged.
            self._set(self._unread[serial], tile, _NONE if is_copy else event)

    def _compare(self, event: int, tile: NkiTensor, earlier: np.ndarray, old: np.ndarray) -> None:
        changed = (earlier != _NONE) & (old != _view_bits(tile))
        if not changed.any() or (old[changed] == old[changed].flat[0]).all():
            return  # equal bits, or a constant that initialises the tensor
        count = int(changed.sum())
        first = int(earlier[changed].flat[0])
        if first in self._partly_read:
            return
        self.lost.append(LostStore(first, event, tile.storage.serial, count, tile.size))

    @staticmethod
    def _get(events: np.ndarray, tile: NkiTensor) -> np.ndarray:
        if tile.dtype.storage.itemsize != tile.storage.dtype.storage.itemsize:
            return np.full(tile.shape, _NONE, np.int32)
        if tile.dynamic is not None:
            elements, inside = resolve_elements(tile)
            return np.where(inside, events[np.where(inside, elements, 0)], _NONE)
        return _view(events, tile)

    @staticmethod
    def _set(events: np.ndarray, tile: NkiTensor, event: int) -> None:
        if tile.dtype.storage.itemsize != tile.storage.dtype.storage.itemsize:
            events[...] = _NONE  # a view of another width: the elements do not correspond
        elif tile.dynamic is not None:
            elements, inside = resolve_elements(tile)
            events[elements[inside]] = event
        else:
            _view(events, tile)[...] = event


_HBM = (MemoryRegion.private_hbm, MemoryRegion.shared_hbm)


def _view(events: np.ndarray, tile: NkiTensor) -> np.ndarray:
    strides = [stride * events.itemsize for stride in tile.strides]
    return np.ndarray(tile.shape, events.dtype, events, tile.offset * events.itemsize, strides)


def _view_bits(tile: NkiTensor) -> np.ndarray:
    unsigned = np.dtype(f"u{tile.dtype.storage.itemsize}")
    if tile.dynamic is None:
        return tile.array.view(unsigned)
    elements, inside = resolve_elements(tile)
    return view_flat(tile).array.view(unsigned)[np.where(inside, elements, 0)]
