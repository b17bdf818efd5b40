"""One block of host memory for the tiles of all programs of a replay cache.

A program needs a tile from its first to its last use, and programs run one after another. So tiles are placed over
each other as on the chip, and the working set in the host's caches stays about as large as an SBUF.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulate.isa.plan import Plan
from simulate.memory import NkiTensor, Storage
from simulate.memory.placement import Tile, place
from simulate.run.rebuild import NO_BYTES

_LINE = 64  # bytes of a cache line


class Arena:
    """The block; it grows to what the largest program needs."""

    def __init__(self) -> None:
        self.block = np.empty(0, np.uint8)

    def at_least(self, size: int) -> np.ndarray:
        """The block, made new if it is smaller than `size` bytes."""
        if self.block.size < size:
            whole = np.empty(size + _LINE, np.uint8)
            start = -whole.ctypes.data % _LINE  # a vector register across two lines is read and written twice
            self.block = whole[start : start + size]
        return self.block


class Tiles:
    """The on-chip tiles of one program, each with its place in the arena and every view the plans take of it."""

    def __init__(self, ranks: Sequence[Sequence[Plan]]) -> None:
        self._places: list[tuple[Storage, int, list[NkiTensor]]] = []
        self._block: np.ndarray | None = None
        self._unbound = False
        self.size = 0
        for plans in ranks:
            self._add_rank(plans)

    def _add_rank(self, plans: Sequence[Plan]) -> None:
        views: dict[int, list[NkiTensor]] = {}
        storages: dict[int, Storage] = {}
        uses: dict[int, list[int]] = {}
        for number, plan in enumerate(plans):
            for tile in _operands(plan):
                if tile.buffer.on_chip:
                    key = id(tile.storage)
                    storages[key] = tile.storage
                    views.setdefault(key, []).append(tile)
                    uses.setdefault(key, []).append(number)
        numbered = list(storages)
        tiles = [
            Tile(serial, -(-storages[key].nbytes // _LINE) * _LINE, uses[key][0], uses[key][-1], None)
            for serial, key in enumerate(numbered)
        ]
        placement = place(tiles)
        for serial, key in enumerate(numbered):
            self._places.append((storages[key], self.size + placement.offsets[serial], views[key]))
        self.size += placement.high_water_bytes

    def bind(self, arena: Arena) -> None:
        """Put the tiles into the arena; nothing happens if they are in it."""
        block = arena.at_least(self.size)
        if block is self._block:
            return
        self._block = block
        self._unbound = False
        for storage, offset, views in self._places:
            storage.array = block[offset : offset + storage.nbytes]
            for view in views:
                view.forget_array()

    def unbind(self) -> None:
        """Leave the tiles without bytes until the next `bind`; a rewritten program has no use for most of them."""
        if self._unbound:
            return
        self._unbound = True
        self._block = None
        for storage, _, views in self._places:
            storage.array = NO_BYTES
            storage.float_views.clear()
            for view in views:
                view.forget_array()

    def drop_conversions(self) -> None:
        """Drop conversions of narrow tiles: their bytes are another program's now."""
        for storage, _, _ in self._places:
            storage.float_views.clear()


def _operands(plan: Plan) -> list[NkiTensor]:
    tiles = [*plan.reads, *plan.writes]
    return tiles + [tile.dynamic.index for tile in tiles if tile.dynamic is not None]
