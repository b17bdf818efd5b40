"""Pages of a KV cache: reference counts, the prefix cache, and the order in which free pages are evicted.

A page stores the keys and values of `block_size` positions in all layers. Several sequences may refer to one page, as
long as no sequence writes to it. The prefix cache knows a full page by a key of its tokens and of all tokens before it,
so sequences with equal prefixes share the page. A free page keeps its contents until it is allocated. Pages without a
key are allocated first, then the page that was released longest ago; of one sequence, the last page before the first.

Layers with a sliding window have a pool of their own. A sequence releases its pages of this pool when the window has
passed them, so their number is bounded for sequences of any length. The block table starts with the first page that the
next token reads. A released page keeps its contents and its key until it is allocated, so windows share prefixes like
other pages. Sharing a prefix needs the pages of its last window only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model.errors import ModelError
from model.state.pool import Key, Pool

BLOCK_SIZES = tuple(2**power for power in range(8))
"""Page sizes in positions that attention kernels take: powers of two up to the 128 partitions of a tile."""


def count_blocks_before(window: int, block_size: int) -> int:
    """Return the most blocks before a token's own block that the token reads with an attention window.

    A block is `block_size` neighbouring positions. `window` counts positions, the token's own one included.
    """
    return -(-(window - 1) // block_size)


def count_window_pages(window: int, block_size: int, sequences: int, tokens: int) -> int:
    """Return how many pages the layers with a window need for any step of a number of sequences.

    Args:
        window: Positions that a token attends to, its own included.
        block_size: Positions of a page.
        sequences: Most running sequences.
        tokens: Most new tokens of a step, over all sequences.
    """
    return sequences * (count_blocks_before(window, block_size) + 2) + tokens // block_size


def check_block_size(block_size: int) -> None:
    """Check that attention kernels take pages of `block_size` positions; return nothing.

    Raises:
        ModelError: The size is not in BLOCK_SIZES.
    """
    if block_size not in BLOCK_SIZES:
        raise ModelError(f"block_size is {block_size}; pages have 1, 2, 4 … 128 positions")


@dataclass
class BlockTable:
    """Pages of a sequence in one pool, one for each block from block `first` on."""

    first: int
    pages: list[int]

    @property
    def end(self) -> int:
        """Index of the block after the last one, counted from the beginning of the sequence."""
        return self.first + len(self.pages)


class PagePool(Pool):
    """Pool of `count` pages with `block_size` positions each, for the layers with this window (None: without one)."""

    def __init__(self, count: int, block_size: int, window: int | None = None) -> None:
        super().__init__(count)
        assert block_size > 0, f"pages of {block_size} positions"
        assert window is None or window > 0, f"a window of {window} positions"
        self.block_size = block_size
        self.window = window

    def count_pages(self, positions: int) -> int:
        """Return the number of pages that `positions` positions take from the beginning of a page on, rounded up."""
        return -(-positions // self.block_size)

    def find_first_block(self, block: int) -> int:
        """Return the index of the first block that tokens in the block with index `block` read: 0 without a window."""
        return 0 if self.window is None else max(0, block - count_blocks_before(self.window, self.block_size))

    def count_most_pages(self, positions: int, together: int) -> int:
        """Return the most pages of this pool that one sequence holds at any time.

        Args:
            positions: Length of the sequence.
            together: Largest number of its positions that one step computes.
        """
        pages = self.count_pages(positions)
        if self.window is None:
            return pages
        return min(
            pages, count_blocks_before(self.window, self.block_size) + 1 + self.count_pages(together - 1)
        )

    def count_known_pages(self, keys: Sequence[Key]) -> int:
        """Return the length, in pages, of the longest prefix after which a sequence can continue from cached pages.

        Cached must be all pages that the token after the prefix reads: all of the prefix, or with a window the last
        ones. The result is 0 if there is no such prefix. No reference is added.

        Args:
            keys: The keys of a sequence's full pages, from the first page on.
        """
        if self.window is None:
            return next((block for block, key in enumerate(keys) if key not in self._entry_by_key), len(keys))
        end = len(keys)
        if self.find_first_block(end) == end:
            return end  # a token reads no page before its own
        for block in reversed(range(end)):
            if keys[block] not in self._entry_by_key:
                end = block
            elif block <= self.find_first_block(end):
                break
        return end
