"""Pages of a KV cache: who holds which, which contents are known, and which page is given away next.

A page has room for the keys and values of `block_size` positions in all layers. Sequences hold pages; several may hold
one, as long as none writes to it. A full page is known by a key of its tokens and of all tokens before them, so a
sequence that begins alike shares it (prefix caching). A page that nobody holds keeps its contents until it is given
away: the one released longest ago first, and of one sequence the last page before the first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from model.errors import ModelError

BLOCK_SIZES = tuple(2**power for power in range(8))
"""Positions of a page that the attention kernels take: those that divide the 128 partitions of a tile."""

Key = bytes
"""What a full page holds: a digest of 16 bytes."""


def page_key(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of a page of `tokens` behind the page of key `parent`; behind none, `parent` names what else decides."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


def check_block_size(block_size: int) -> None:
    """ModelError for pages that the attention kernels do not take."""
    if block_size not in BLOCK_SIZES:
        raise ModelError(f"block_size is {block_size}; pages have 1, 2, 4 … 128 positions")


class PagePool:
    """`count` pages of `block_size` positions each."""

    def __init__(self, count: int, block_size: int) -> None:
        assert count > 0 and block_size > 0, f"{count} pages of {block_size} positions"
        self.count = count
        self.block_size = block_size
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

    def publish(self, page: int, key: Key) -> None:
        """A page is full of what `key` names; where another page holds the same, that one stays the known one."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def known(self, keys: Iterable[Key]) -> list[int]:
        """The pages of the first keys, up to the first one that no page holds."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def is_free(self, page: int) -> bool:
        """Whether nobody holds a page, so that holding it takes one from the free ones."""
        return not self._holders[page]
