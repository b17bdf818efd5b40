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

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from model.errors import ModelError

BLOCK_SIZES = tuple(2**power for power in range(8))
"""Positions of a page that the attention kernels take: those that divide the 128 partitions of a tile."""

Key = bytes
"""What a full page holds: a digest of 16 bytes."""


def page_key(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of a page of `tokens` behind the page of key `parent`; behind none, `parent` names what else decides."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


def root_key(salt: str) -> Key:
    """What stands for the parent of first pages that only requests with the same `salt` share."""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=16, person=b"cache_salt").digest()


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


class PagePool:
    """`count` pages of one kind, of `block_size` positions each, for layers that see `window` positions, or all."""

    def __init__(self, count: int, block_size: int, window: int | None = None) -> None:
        assert count > 0 and block_size > 0, f"{count} pages of {block_size} positions"
        assert window is None or window > 0, f"a window of {window} positions"
        self.count = count
        self.block_size = block_size
        self.window = window
        self._holders = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self._key_of: dict[int, Key] = {}
        self._page_of: dict[Key, int] = {}

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """How many sequences hold a page."""
        return self._holders[page]

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

    def take(self) -> int:
        """A page without holders, whose contents are forgotten; `free` says whether there is one."""
        page, _ = self._free.popitem(last=False)
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more sequence holds a page."""
        self._free.pop(page, None)
        self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """A sequence gives back its pages, listed from the first to the last."""
        for page in reversed(pages):
            assert self._holders[page] > 0, f"page {page} has no holder"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free[page] = None
                if page not in self._key_of:
                    self._free.move_to_end(page, last=False)

    def publish(self, page: int, key: Key) -> None:
        """A page is full of what `key` names; where another page holds the same, that one stays the known one."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def forget(self) -> None:
        """The contents of no page are known from here on."""
        self._page_of.clear()
        self._key_of.clear()

    def known(self, keys: Sequence[Key]) -> int:
        """The most first blocks, by their keys, of which all is known that the token behind them reads."""
        if self.window is None:
            return next((block for block, key in enumerate(keys) if key not in self._page_of), len(keys))
        end = len(keys)
        for block in reversed(range(end)):
            if keys[block] not in self._page_of:
                end = block
            elif block <= self.first_block(end):
                break
        return end

    def page_of(self, key: Key) -> int:
        """The page that holds what a known key names."""
        return self._page_of[key]

    def is_free(self, page: int) -> bool:
        """Whether nobody holds a page, so that holding it takes one from the free ones."""
        return not self._holders[page]
