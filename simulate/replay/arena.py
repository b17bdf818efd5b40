"""One block of host memory for the tiles of all programs of a replay cache.

The live range of a tile is from its first to its last use, and programs run one after another. Tiles with disjoint
live ranges share bytes, as on the chip. So the working set in the host's caches stays about as large as an SBUF.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulate.isa.plan import Plan
from simulate.memory import NkiTensor, Storage
from simulate.memory.placement import Tile, place_tiles
from simulate.run.rebuild import NO_BYTES

_LINE = 64  # bytes of a cache line


class Arena:
    """Block of host memory that grows to the size of the largest program."""

    def __init__(self) -> None:
        self.block = np.empty(0, np.uint8)

    def reserve(self, size: int) -> np.ndarray:
        """Return a block of at least `size` bytes, aligned to a cache line; a smaller block is replaced."""
        if self.block.size < size:
            memory = np.empty(size + _LINE, np.uint8)
            start = -memory.ctypes.data % _LINE  # a vector access across two cache lines costs two accesses
            self.block = memory[start : start + size]
        return self.block


class Tiles:
    """On-chip tiles of one program; each has an offset in the arena and the views that the plans take of it."""

    def __init__(self, ranks: Sequence[Sequence[Plan]]) -> None:
        self._placements: list[tuple[Storage, int, list[NkiTensor]]] = []
        self._block: np.ndarray | None = None
        self._unbound = False
        self.size = 0
        for plans in ranks:
            self._add_rank(plans)

    def _add_rank(self, plans: Sequence[Plan]) -> None:
        views: dict[int, list[NkiTensor]] = {}
        storages: dict[int, Storage] = {}
        uses: dict[int, list[int]] = {}
        for position, plan in enumerate(plans):
            for tile in list_operands(plan):
                if tile.buffer.on_chip:
                    key = id(tile.storage)
                    storages[key] = tile.storage
                    views.setdefault(key, []).append(tile)
                    uses.setdefault(key, []).append(position)
        numbered = list(storages)
        tiles = [
            Tile(serial, -(-storages[key].nbytes // _LINE) * _LINE, uses[key][0], uses[key][-1], None)
            for serial, key in enumerate(numbered)
        ]
        placement = place_tiles(tiles)
        for serial, key in enumerate(numbered):
            self._placements.append((storages[key], self.size + placement.offsets[serial], views[key]))
        self.size += placement.high_water_bytes

    def bind(self, arena: Arena) -> None:
        """Bind the tiles to the arena's bytes; do nothing if the tiles are bound to the arena's current block."""
        block = arena.reserve(self.size)
        if block is self._block:
            return
        self._block = block
        self._unbound = False
        for storage, offset, views in self._placements:
            storage.uncounted_array = block[offset : offset + storage.nbytes]
            for view in views:
                view.forget_array()

    def unbind(self) -> None:
        """Drop the tiles' bytes until the next `bind`, because a rewritten program does not use most tiles."""
        if self._unbound:
            return
        self._unbound = True
        self._block = None
        for storage, _, views in self._placements:
            storage.uncounted_array = NO_BYTES
            storage.float_views.clear()
            for view in views:
                view.forget_array()

    def drop_conversions(self) -> None:
        """Drop the float32 conversions of narrow tiles, whose bytes another program may write next."""
        for storage, _, _ in self._placements:
            storage.float_views.clear()


def list_operands(plan: Plan) -> list[NkiTensor]:
    """Return the tensors that an instruction reads and writes, including the tensors of its run-time indices."""
    tiles = [*plan.reads, *plan.writes]
    return tiles + [tile.dynamic.index for tile in tiles if tile.dynamic is not None]
