"""Host memory for the on-chip tiles of all programs of a replay cache.

To bind a tile is to set the byte array of its storage to a part of the block. The live range of a tile is from its
first to its last use, and programs run one after another. Tiles with disjoint live ranges share bytes, as on the
chip. So the working set in the host's caches stays about as large as an SBUF.
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
    """Block of host memory, which is replaced by a larger one when a program needs more."""

    def __init__(self) -> None:
        self.block = np.empty(0, np.uint8)

    def reserve(self, size: int) -> np.ndarray:
        """Return the block, aligned to a cache line, after replacing it if it has fewer than `size` bytes."""
        if self.block.size < size:
            memory = np.empty(size + _LINE, np.uint8)
            start = -memory.ctypes.data % _LINE  # a vector access across two cache lines costs two accesses
            self.block = memory[start : start + size]
        return self.block


class Tiles:
    """On-chip tiles of one program, each with its offset in an arena's block; `size` is the bytes that all need."""

    def __init__(self, ranks: Sequence[Sequence[Plan]]) -> None:
        """Place the tiles that plans use, rank after rank; `ranks` has the plans of each rank in program order."""
        self._placements: list[tuple[Storage, int, list[NkiTensor]]] = []
        self._block: np.ndarray | None = None
        self._unbound = False
        self.size = 0
        for plans in ranks:
            self._add_rank(plans)

    def _add_rank(self, plans: Sequence[Plan]) -> None:
        """Place the tiles of one rank's plans after those of earlier ranks; disjoint live ranges share bytes."""
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
        """Bind the tiles to an arena's block; does nothing if they are bound to its current block."""
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
        """Release the tiles' bytes until the next `bind`; a rewritten program does not use most tiles."""
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
        """Drop cached float32 copies of the tiles' contents, whose bytes another program may write next."""
        for storage, _, _ in self._placements:
            storage.float_views.clear()


def list_operands(plan: Plan) -> list[NkiTensor]:
    """Return the tensors that an instruction reads and writes, including the tensors of its run-time indices."""
    tiles = [*plan.reads, *plan.writes]
    return tiles + [tile.dynamic.index for tile in tiles if tile.dynamic is not None]
