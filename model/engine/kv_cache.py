"""The KV cache of requests: pages of one or several cache groups, each with block tables, and slots for states.

A cache group is the set of layers that see equally many positions: all, or a window. Its layers share pages. A slot has
the state of a request's recurrent layers. A prefix cache keeps full pages, and snapshots of states, by a key of all
tokens up to their end. `Scheduler` calls this module; it changes block tables and page numbers, while the contents of
pages are on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from model.engine.request import Request
from model.errors import ModelError
from model.state import BlockTable, Key, PagePool, SlotPool

PageCopies = dict[tuple[int, int], int]
"""Copies of pages: the number of the source by the numbers of the pool and of the destination.

Page pools are numbered from 0, and the pool of slots has the next number.
"""


class KVCache:
    """Page pool of each cache group, and the pool of slots if layers are recurrent.

    A running request has pages in every pool, and a slot; a waiting request has none.

    Attributes:
        pools: The page pools, one for each window and one for layers without a window.
        slots: The slots of states, or None.
        block_size: Positions of a page.
        count: Number of pages of all pools and slots.
        pages: Number of pages of layers without a window.
        window_pages: Windows with pages of their own, each with its number of pages.
        positions: The largest number of positions that the cache remembers: in its pages, or up to its snapshots if no
            layer has pages.
    """

    def __init__(
        self, pools: Sequence[PagePool], prefix_caching: bool = True, slots: SlotPool | None = None
    ) -> None:
        all_pools = [*pools, *(() if slots is None else (slots,))]
        assert all_pools and len({pool.block_size for pool in all_pools}) == 1, (
            "pages of all groups have one size"
        )
        assert len({pool.window for pool in pools}) == len(pools), "one pool for each window"
        self.pools = tuple(pools)
        self.slots = slots
        self.block_size = all_pools[0].block_size
        self.count = sum(pool.count for pool in all_pools)
        self.pages = sum(pool.count for pool in pools if pool.window is None)
        self.window_pages = tuple((pool.window, pool.count) for pool in pools if pool.window is not None)
        if self.pages or slots is None:
            self.positions = self.pages * self.block_size
        else:
            self.positions = slots.count * slots.interval
        self._all_pools = all_pools
        self._prefix_caching = prefix_caching

    @property
    def free(self) -> int:
        """Number of free pages of all pools plus free slots."""
        return sum(pool.free for pool in self._all_pools)

    def check_room(self, request: Request, max_chunk: int) -> None:
        """Check that the cache can hold a request if no other one runs.

        Args:
            request: The request, with its largest number of positions.
            max_chunk: Most tokens of the request that a step computes.

        Raises:
            ModelError: A pool has too few pages.
        """
        positions = request.max_positions
        for pool in self.pools:
            pages = pool.count_most_pages(positions, min(positions, max_chunk))
            if pages > pool.count:
                seen = "" if pool.window is None else f" of layers that see {pool.window} of them"
                raise ModelError(
                    f"request {request.id} fills up to {positions} positions, {pages} pages of {pool.block_size}"
                    f"{seen}; the cache has {pool.count} pages: shorten the prompt or its max_tokens, or give the "
                    "cache more pages"
                )

    def count_cached_blocks(self, request: Request, has_state: bool = False) -> int:
        """Return how many leading blocks (pages' worth of tokens) of a waiting request the prefix cache has.

        They are counted only if all pools have the pages that later tokens read and, if layers are recurrent, a
        snapshot has the state after the blocks. At least one token is never counted, so that a step has something to
        compute.

        Args:
            request: A request that waits.
            has_state: Whether the state is transferred to the request, so that no snapshot is needed.
        """
        pools = self.pools if has_state else self._all_pools
        if not self._prefix_caching or not pools:
            return 0
        cached = (len(request.tokens) - 1) // self.block_size
        keys = request.compute_page_keys(cached, self.block_size)
        previous = cached + 1
        while cached < previous:  # until no pool has fewer
            previous = cached
            for pool in pools:
                cached = pool.count_known_pages(keys[:cached])
        return cached

    def count_tokens_to_snapshot(self, request: Request, position: int) -> int | None:
        """Return the number of tokens from `position` to the next position at which a request's state is kept.

        Returns None if there are no recurrent layers or no prefix caching.
        """
        if self.slots is None or not self._prefix_caching:
            return None
        return self.slots.find_next_snapshot(position, request.prompt_tokens) - position

    def start(self, request: Request, blocks: int, positions: int, copies: PageCopies | None) -> bool:
        """Give a waiting request its cached blocks, new pages up to `positions`, and a slot, so that it runs.

        Sets the request's block tables, slot and number of computed tokens.

        Args:
            request: A request that waits.
            blocks: Number of first blocks that are in the prefix cache.
            positions: Number of positions that the pages have room for.
            copies: Receives the copy of the state after the first blocks; None if the state is transferred instead.

        Returns:
            Whether enough pages and slots are free; otherwise nothing changes.
        """
        keys = request.compute_page_keys(blocks, self.block_size) if blocks else []
        new = -(-positions // self.block_size) - blocks
        shared = [[pool.find(key) for key in keys[pool.find_first_block(blocks) :]] for pool in self.pools]
        for pool, pages in zip(self.pools, shared):
            if new + sum(pool.count_references(page) == 0 for page in pages) > pool.free:
                return False
        if not self._start_state(request, keys[-1] if blocks and copies is not None else None, copies):
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
        """Give a running request pages up to `positions`, and make the page and the slot that it writes next its own.

        A shared page or slot is replaced by a copy.

        Args:
            request: A running request.
            positions: Number of positions that the pages have room for.
            copies: Receives the copies of shared pages and slots.

        Returns:
            Whether enough pages and slots are free; otherwise nothing changes.
        """
        end = -(-positions // self.block_size)
        block, offset = divmod(request.computed, self.block_size)
        for pool, table in zip(self.pools, request.tables):
            if end > table.end or (offset and pool.count_references(table.pages[block - table.first]) > 1):
                break
        else:  # as in most steps that decode
            return self._make_state_writable(request, copies)
        if not self.has_room([(request, positions)]) or not self._make_state_writable(request, copies):
            return False
        for number, (pool, table) in enumerate(zip(self.pools, request.tables)):
            index = block - table.first
            if offset and pool.count_references(table.pages[index]) > 1:
                shared = table.pages[index]
                table.pages[index] = pool.take()
                pool.release([shared])
                copies[number, table.pages[index]] = shared
            table.pages.extend(pool.take() for _ in range(end - table.end))
        return True

    def keep_state(self, request: Request, copies: PageCopies) -> bool:
        """Keep a request's state in `kept_slot`, and give the request a copy of it in a new slot.

        Draft tokens then change the copy.

        Args:
            request: A running request.
            copies: Receives the copy of the state.

        Returns:
            Whether that was possible: a slot is free, and the request's slot is not itself a copy of this step. Also
            True if there are no recurrent layers.
        """
        if self.slots is None:
            return True
        if not self.slots.free or (len(self.pools), request.slot) in copies:
            return False
        assert request.slot is not None, f"request {request.id} has no slot"
        request.kept_slot, request.slot = request.slot, self.slots.take()
        copies[len(self.pools), request.slot] = request.kept_slot
        return True

    def settle_state(self, request: Request, back: bool) -> bool:
        """End the use of a kept state: return the request to it if `back`, else continue with the changed copy.

        The unused slot is released.

        Returns:
            Whether a state was kept; otherwise nothing changes.
        """
        if self.slots is None or request.kept_slot is None:
            return False
        assert request.slot is not None, f"request {request.id} has no slot"
        kept, changed = request.kept_slot, request.slot
        request.slot, request.kept_slot = (kept if back else changed), None
        self.slots.release([changed if back else kept])
        return True

    def discard_kept_state(self, request: Request, copies: PageCopies) -> None:
        """Return a request without draft tokens to its kept state, and remove the copy of the state from `copies`.

        Does nothing if no state was kept.
        """
        copy = request.slot
        if self.settle_state(request, back=True):
            assert copy is not None, f"request {request.id} has no slot"
            del copies[len(self.pools), copy]

    def has_room(self, requests: Iterable[tuple[Request, int]]) -> bool:
        """Return whether the free pages suffice for all of the given requests together.

        Args:
            requests: Pairs of a running request and the number of positions that it needs.
        """
        missing = [self._count_missing_pages(request, positions) for request, positions in requests]
        return all(sum(counts) <= pool.free for pool, counts in zip(self.pools, zip(*missing)))

    def mark_computed(self, request: Request, positions: int) -> None:
        """Record that the first `positions` tokens of a request are computed.

        Full pages and snapshots of states enter the prefix cache. When a page becomes full, the request releases the
        pages that its window has passed.
        """
        request.computed = positions
        filled = positions // self.block_size
        if self.slots is not None and self.count_tokens_to_snapshot(request, positions - 1) == 1:
            assert request.slot is not None, f"request {request.id} has no slot"
            self.slots.publish(request.slot, request.compute_page_keys(filled, self.block_size)[-1])
        if filled == request.filled:
            return
        keys = request.compute_page_keys(filled, self.block_size) if self._prefix_caching else ()
        for pool, table in zip(self.pools, request.tables):
            if keys:
                for block in range(request.filled, filled):
                    pool.publish(table.pages[block - table.first], keys[block])
            passed = pool.find_first_block(filled) - table.first
            if passed > 0:
                pool.release(table.pages[:passed])
                del table.pages[:passed]
                table.first += passed
        request.filled = filled

    def forget(self) -> None:
        """Remove all contents from the prefix cache; the pages of running requests stay."""
        for pool in self._all_pools:
            pool.forget()

    def fork(self, request: Request, child: Request) -> None:
        """Let a new request share the slot and the computed pages of a running request.

        Sets the block tables, slot and number of computed tokens of `child`.
        """
        end = -(-request.computed // self.block_size)
        child.computed, child.filled = request.computed, request.filled
        for pool, table in zip(self.pools, request.tables):
            pages = table.pages[: end - table.first]
            for page in pages:
                pool.hold(page)
            child.tables.append(BlockTable(table.first, pages))
        if self.slots is not None and request.slot is not None:
            child.slot = request.slot
            self.slots.hold(child.slot)

    def release(self, request: Request, copies: PageCopies | None = None) -> None:
        """Release the pages and slots of a request, which then waits with no computed tokens.

        Args:
            request: The request.
            copies: Pending copies of this step; those into pages and slots that only this request has are removed.
        """
        for number, (pool, table) in enumerate(zip(self.pools, request.tables)):
            if copies:
                for page in table.pages:
                    if pool.count_references(page) == 1:
                        copies.pop((number, page), None)
            pool.release(table.pages)
        for slot in (request.slot, request.kept_slot):
            if self.slots is not None and slot is not None:
                if copies and self.slots.count_references(slot) == 1:
                    copies.pop((len(self.pools), slot), None)
                self.slots.release([slot])
        request.slot = request.kept_slot = None
        request.tables, request.computed, request.filled = [], 0, 0

    def _start_state(self, request: Request, key: Key | None, copies: PageCopies | None) -> bool:
        """Give a request a slot, and return whether one is free.

        Args:
            request: A request that starts.
            key: Key of the snapshot with which the slot begins; None for an empty state.
            copies: Receives the copy of the snapshot; None if the state is transferred instead.
        """
        slots = self.slots
        if slots is None:
            return True
        if key is None or copies is None:
            request.slot = slots.take() if slots.free else None
            return request.slot is not None
        request.slot = slots.find(key)
        slots.hold(request.slot)
        if self._make_state_writable(request, copies):
            return True
        slots.release([request.slot])
        request.slot = None
        return False

    def _make_state_writable(self, request: Request, copies: PageCopies) -> bool:
        """Replace the slot of a request by a copy in a new slot if it is shared, and return whether this succeeded.

        It fails if no slot is free; then nothing changes. The copy is added to `copies`.
        """
        slots, slot = self.slots, request.slot
        if slots is None or slot is None or slots.is_writable(slot):
            return True
        request.slot = slots.make_writable(slot)
        if request.slot is None:
            request.slot = slot
            return False
        if request.slot != slot:
            copies[len(self.pools), request.slot] = slot
        return True

    def _count_missing_pages(self, request: Request, positions: int) -> list[int]:
        """Return, by pool, how many new pages a request needs to have `positions` positions.

        A shared page that the request writes next needs a new page for its copy.
        """
        end = -(-positions // self.block_size)
        block, offset = divmod(request.computed, self.block_size)
        return [
            max(0, end - table.end)
            + bool(offset and pool.count_references(table.pages[block - table.first]) > 1)
            for pool, table in zip(self.pools, request.tables)
        ]
