"""Pages of a KV cache: who holds which, which contents are known, and which page is given away next.

A page has room for the keys and values of `block_size` positions in all layers. Sequences hold pages; several may hold
one, as long as none writes to it. A full page is known by a key of its tokens and of all tokens before them, so a
sequence that begins alike shares it (prefix caching). A page that nobody holds keeps its contents until it is given
away: pages of unknown contents first, then the one released longest ago, and of one sequence the last before the first.

Layers that see a window of positions have pages of another kind than layers that see all, and a pool of their own. A
sequence gives back its pages of that kind when its window has passed them, so it holds a window of them however long it
is; its block table names what is left, from the first page on that its next token reads. The pages are not a ring that
a sequence overwrites: what it gave back keeps its contents, under its key, until the pool gives it away, so windows
share prefixes as other pages do. A prefix is shared where the pages of its last window are still known; the pages
before them are not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model.errors import ModelError
from model.state.pool import Key, Pool

BLOCK_SIZES = tuple(2**power for power in range(8))
"""The page sizes, in positions, that the attention kernels take: powers of two up to the 128 partitions of a tile."""


def blocks_before(window: int, block_size: int) -> int:
    """Blocks before its own that the tokens of a block read where they see a window, their own position included."""
    return -(-(window - 1) // block_size)


def window_pages(window: int, block_size: int, sequences: int, tokens: int) -> int:
    """Pages of a window that suffice for so many sequences, whatever a step of so many tokens computes of each."""
    return sequences * (blocks_before(window, block_size) + 2) + tokens // block_size


def check_block_size(block_size: int) -> None:
    """ModelError for pages that the attention kernels do not take."""
    if block_size not in BLOCK_SIZES:
        raise ModelError(f"block_size is {block_size}; pages have 1, 2, 4 … 128 positions")


@dataclass
class BlockTable:
    """The pages of a sequence in one pool: those of its blocks from `first` on, of `block_size` positions each."""

    first: int
    pages: list[int]

    @property
    def end(self) -> int:
        """The block behind the last one."""
        return self.first + len(self.pages)


class PagePool(Pool):
    """`count` pages of one kind, of `block_size` positions each, for layers that see `window` positions, or all."""

    def __init__(self, count: int, block_size: int, window: int | None = None) -> None:
        super().__init__(count)
        assert block_size > 0, f"pages of {block_size} positions"
        assert window is None or window > 0, f"a window of {window} positions"
        self.block_size = block_size
        self.window = window

    def pages_of(self, positions: int) -> int:
        """Pages for so many positions."""
        return -(-positions // self.block_size)

    def first_block(self, block: int) -> int:
        """The first block that a token reads whose own block is `block`."""
        return 0 if self.window is None else max(0, block - blocks_before(self.window, self.block_size))

    def most_pages(self, positions: int, together: int) -> int:
        """Pages that a sequence of so many positions holds at most, of which a step computes `together`."""
        most = self.pages_of(positions)
        if self.window is None:
            return most
        return min(most, blocks_before(self.window, self.block_size) + 1 + self.pages_of(together - 1))

    def known(self, keys: Sequence[Key]) -> int:
        """How many first blocks need no computing: the pool has every page of them that the next token reads."""
        if self.window is None:
            return next((block for block, key in enumerate(keys) if key not in self._place_of), len(keys))
        end = len(keys)
        for block in reversed(range(end)):
            if keys[block] not in self._place_of:
                end = block
            elif block <= self.first_block(end):
                break
        return end
