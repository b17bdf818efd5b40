"""The KV cache as requests hold it: pages of one kind or several, and a block table of each kind for each request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from model.engine.request import Request
from model.state import BlockTable, PagePool

PageCopies = dict[tuple[int, int], int]
"""Pages that get the contents of others: by the number of their pool and their own number, that of the other page."""


class KVCache:
    """One pool of pages for each kind. A request has pages of all kinds for what it computes, or none of any."""

    def __init__(self, pools: Sequence[PagePool], prefix_caching: bool = True) -> None:
        assert pools and len({pool.block_size for pool in pools}) == 1, "pages of all kinds have one size"
        assert len({pool.window for pool in pools}) == len(pools), "one pool for each window"
        self.pools = tuple(pools)
        self.block_size = pools[0].block_size
        self._prefix_caching = prefix_caching

    @property
    def count(self) -> int:
        """Pages of all kinds."""
        return sum(pool.count for pool in self.pools)

    @property
    def pages(self) -> int:
        """Pages of layers that see all positions."""
        return sum(pool.count for pool in self.pools if pool.window is None)

    @property
    def window_pages(self) -> tuple[tuple[int, int], ...]:
        """The windows whose layers have pages of their own, and how many."""
        return tuple((pool.window, pool.count) for pool in self.pools if pool.window is not None)

    @property
    def free(self) -> int:
        """Pages of all kinds that nobody holds."""
        return sum(pool.free for pool in self.pools)

    def refusal(self, request: Request, together: int) -> str | None:
        """Why the pages do not suffice for a request alone, of which a step computes so many tokens; None: they do."""
        positions = request.most_positions
        for pool in self.pools:
            pages = pool.most_pages(positions, min(positions, together))
            if pages > pool.count:
                seen = "" if pool.window is None else f" of layers that see {pool.window} of them"
                return (
                    f"request {request.id} fills up to {positions} positions, {pages} pages of {pool.block_size}"
                    f"{seen}; the cache has {pool.count} pages"
                )
        return None

    def known_blocks(self, request: Request) -> int:
        """The first blocks of a request that need no computing: pages hold what the next one reads of them.

        At least one token is left to compute.
        """
        if not self._prefix_caching:
            return 0
        most = (len(request.tokens) - 1) // self.block_size
        keys = request.page_keys(most, self.block_size)
        found, before = most, most + 1
        while found < before:  # until no kind asks for fewer
            before = found
            for pool in self.pools:
                found = pool.known(keys[:found])
        return found

    def start(self, request: Request, blocks: int, positions: int) -> bool:
        """Hold the first `blocks`, which are known, and take pages up to so many positions.

        False, and nothing is taken, where too few are free.
        """
        keys = request.page_keys(blocks, self.block_size) if blocks else []
        new = -(-positions // self.block_size) - blocks
        shared = [[pool.page_of(key) for key in keys[pool.first_block(blocks) :]] for pool in self.pools]
        for pool, pages in zip(self.pools, shared):
            if new + sum(map(pool.is_free, pages)) > pool.free:
                return False
        for pool, pages in zip(self.pools, shared):
            for page in pages:
                pool.hold(page)
            table = BlockTable(blocks - len(pages), pages)
            table.pages.extend(pool.take() for _ in range(new))
            request.tables.append(table)
        request.computed = request.shared_tokens = blocks * self.block_size
        request.filled = blocks
        return True

    def reserve(self, request: Request, positions: int, copies: PageCopies) -> bool:
        """Pages for so many positions, of which those still to be written are the request's own; False for too few."""
        end = -(-positions // self.block_size)
        block, offset = divmod(request.computed, self.block_size)
        for pool, table in zip(self.pools, request.tables):
            if end > table.end or (offset and pool.holders(table.pages[block - table.first]) > 1):
                break
        else:  # as in most steps that decode
            return True
        for pool, number in zip(self.pools, self._lacking(request, positions)):
            if number > pool.free:
                return False
        self._take(request, positions, copies)
        return True

    def suffices(self, wanted: Iterable[tuple[Request, int]]) -> bool:
        """Whether the free pages suffice for requests up to so many positions each, if none is given back meanwhile."""
        needs = [self._lacking(request, positions) for request, positions in wanted]
        return all(sum(numbers) <= pool.free for pool, numbers in zip(self.pools, zip(*needs)))

    def computed(self, request: Request, positions: int) -> None:
        """Keys and values of so many positions are there.

        Full pages are known by their contents. Where a page has become full, those that the window has passed are
        given back.
        """
        request.computed = positions
        filled = positions // self.block_size
        if filled == request.filled:
            return
        keys = request.page_keys(filled, self.block_size) if self._prefix_caching else ()
        for pool, table in zip(self.pools, request.tables):
            if keys:
                for block in range(request.filled, filled):
                    pool.publish(table.pages[block - table.first], keys[block])
            passed = pool.first_block(filled) - table.first
            if passed > 0:
                pool.release(table.pages[:passed])
                del table.pages[:passed]
                table.first += passed
        request.filled = filled

    def forget(self) -> None:
        """The contents of no page are known from here on."""
        for pool in self.pools:
            pool.forget()

    def fork(self, request: Request, child: Request) -> None:
        """A second request holds the pages of what a first one has computed, none that is reserved for what follows."""
        end = -(-request.computed // self.block_size)
        child.computed, child.filled = request.computed, request.filled
        for pool, table in zip(self.pools, request.tables):
            pages = table.pages[: end - table.first]
            for page in pages:
                pool.hold(page)
            child.tables.append(BlockTable(table.first, pages))

    def give_back(self, request: Request, copies: PageCopies | None = None) -> None:
        """A request holds no pages any more; what only it would have read is not copied."""
        for number, (pool, table) in enumerate(zip(self.pools, request.tables)):
            for page in table.pages if copies else ():
                if copies and pool.holders(page) == 1:
                    copies.pop((number, page), None)
            pool.release(table.pages)
        request.tables, request.computed, request.filled = [], 0, 0

    def _lacking(self, request: Request, positions: int) -> list[int]:
        """Pages of each kind that a request has to take to hold so many positions, copies of shared ones included."""
        end = -(-positions // self.block_size)
        block, offset = divmod(request.computed, self.block_size)
        lacking = []
        for pool, table in zip(self.pools, request.tables):
            held = table.first + len(table.pages)
            copied = offset and pool.holders(table.pages[block - table.first]) > 1
            lacking.append((end - held if end > held else 0) + bool(copied))
        return lacking

    def _take(self, request: Request, positions: int, copies: PageCopies) -> None:
        """Take the pages that a request lacks."""
        end = -(-positions // self.block_size)
        block, offset = divmod(request.computed, self.block_size)
        for number, (pool, table) in enumerate(zip(self.pools, request.tables)):
            place = block - table.first
            if offset and pool.holders(table.pages[place]) > 1:
                old, new = table.pages[place], pool.take()
                pool.release([old])
                table.pages[place] = new
                copies[number, new] = old
            table.pages.extend(pool.take() for _ in range(end - table.end))
