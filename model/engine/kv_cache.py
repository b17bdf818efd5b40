"""The cache as requests hold it: pages of one kind or several with a block table of each, and slots of states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from model.engine.request import Request
from model.state import BlockTable, Key, PagePool, SlotPool

PageCopies = dict[tuple[int, int], int]
"""Pages that get the contents of others: by the number of their pool and their own number, that of the other page.

The pool of slots, where there is one, comes behind those of pages.
"""


class KVCache:
    """One pool of pages for each kind, and one of slots where layers are recurrent.

    A request has pages of all kinds for what it computes and a slot, or none of any.
    """

    def __init__(
        self, pools: Sequence[PagePool], prefix_caching: bool = True, slots: SlotPool | None = None
    ) -> None:
        every = [*pools, *(() if slots is None else (slots,))]
        assert every and len({pool.block_size for pool in every}) == 1, "pages of all kinds have one size"
        assert len({pool.window for pool in pools}) == len(pools), "one pool for each window"
        self.pools = tuple(pools)
        self.slots = slots
        self.block_size = every[0].block_size
        self._every = every
        self._prefix_caching = prefix_caching

    @property
    def count(self) -> int:
        """Pages of all kinds and slots."""
        return sum(pool.count for pool in self._every)

    @property
    def pages(self) -> int:
        """Pages of layers that see all positions."""
        return sum(pool.count for pool in self.pools if pool.window is None)

    @property
    def window_pages(self) -> tuple[tuple[int, int], ...]:
        """The windows whose layers have pages of their own, and how many."""
        return tuple((pool.window, pool.count) for pool in self.pools if pool.window is not None)

    @property
    def positions(self) -> int:
        """Positions that the cache remembers at most: in its pages, or up to its snapshots where it has no pages."""
        if self.pages or self.slots is None:
            return self.pages * self.block_size
        return self.slots.count * self.slots.interval

    @property
    def free(self) -> int:
        """Pages of all kinds and slots that nobody holds."""
        return sum(pool.free for pool in self._every)

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

    def known_blocks(self, request: Request, comes: bool = False) -> int:
        """The first blocks of a request that need no computing: pages hold what the next one reads of them.

        There is a state behind them as well, unless that `comes` from elsewhere. At least one token is left to compute.
        """
        kinds = self.pools if comes else self._every
        if not self._prefix_caching or not kinds:
            return 0
        most = (len(request.tokens) - 1) // self.block_size
        keys = request.page_keys(most, self.block_size)
        found, before = most, most + 1
        while found < before:  # until no kind asks for fewer
            before = found
            for pool in kinds:
                found = pool.known(keys[:found])
        return found

    def chunk_end(self, request: Request, first: int, end: int) -> int:
        """Where a chunk of the tokens first … end is to end: at the first snapshot in it, if there is one."""
        if self.slots is None or not self._prefix_caching:
            return end
        return min(end, self.slots.snapshot_after(first, request.prompt_tokens))

    def start(self, request: Request, blocks: int, positions: int, copies: PageCopies | None) -> bool:
        """Hold the first `blocks`, which are known, and take pages up to so many positions, and a slot.

        The slot gets the state behind the first blocks; without `copies` that comes from elsewhere. False, and nothing
        is taken, where too few are free.
        """
        keys = request.page_keys(blocks, self.block_size) if blocks else []
        new = -(-positions // self.block_size) - blocks
        shared = [[pool.find(key) for key in keys[pool.first_block(blocks) :]] for pool in self.pools]
        for pool, pages in zip(self.pools, shared):
            if new + sum(pool.ref_count(page) == 0 for page in pages) > pool.free:
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
        """Pages for so many positions, and a slot. What the request writes is its own. False where too few are free."""
        end = -(-positions // self.block_size)
        block, offset = divmod(request.computed, self.block_size)
        for pool, table in zip(self.pools, request.tables):
            if end > table.end or (offset and pool.ref_count(table.pages[block - table.first]) > 1):
                break
        else:  # as in most steps that decode
            return self._own_state(request, copies)
        for pool, number in zip(self.pools, self._lacking(request, positions)):
            if number > pool.free:
                return False
        if not self._own_state(request, copies):
            return False
        self._take(request, positions, copies)
        return True

    def keep_state(self, request: Request, copies: PageCopies) -> bool:
        """Keep a request's state while drafts change a copy of it; False where that takes a slot too many.

        One that is a copy of this step gets no other.
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
        """A request has its kept state `back`, or goes on with the copy that drafts changed; False if none was kept."""
        if self.slots is None or request.kept_slot is None:
            return False
        assert request.slot is not None, f"request {request.id} has no slot"
        kept, changed = request.kept_slot, request.slot
        request.slot, request.kept_slot = (kept if back else changed), None
        self.slots.release([changed if back else kept])
        return True

    def no_drafts(self, request: Request, copies: PageCopies) -> None:
        """No draft came for which a state was to be kept."""
        changed = request.slot
        if self.settle_state(request, back=True):
            assert changed is not None, f"request {request.id} has no slot"
            del copies[len(self.pools), changed]

    def suffices(self, wanted: Iterable[tuple[Request, int]]) -> bool:
        """Whether the free pages suffice for requests up to so many positions each, if none is given back meanwhile."""
        needs = [self._lacking(request, positions) for request, positions in wanted]
        return all(sum(numbers) <= pool.free for pool, numbers in zip(self.pools, zip(*needs)))

    def computed(self, request: Request, positions: int) -> None:
        """Keys and values of so many positions are there, and the state behind them.

        Full pages are known by their contents, and states where snapshots are taken. When a page becomes full, the
        request gives back the pages that its window has passed.
        """
        request.computed = positions
        filled = positions // self.block_size
        if self.slots is not None and self._prefix_caching:
            self._publish_state(self.slots, request, filled)
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
        for pool in self._every:
            pool.forget()

    def steps_to_snapshot(self, request: Request) -> int | None:
        """How many single tokens lead to the next snapshot of a request; None where none is taken."""
        if self.slots is None or not self._prefix_caching:
            return None
        return self.slots.snapshot_after(request.computed, request.prompt_tokens) - request.computed

    def fork(self, request: Request, child: Request) -> None:
        """A second request holds the slot and the pages of what a first one has computed, none reserved for more."""
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

    def give_back(self, request: Request, copies: PageCopies | None = None) -> None:
        """A request holds no pages and no slot any more; what only it would have read is not copied."""
        for number, (pool, table) in enumerate(zip(self.pools, request.tables)):
            if copies:
                for page in table.pages:
                    if pool.ref_count(page) == 1:
                        copies.pop((number, page), None)
            pool.release(table.pages)
        for slot in (request.slot, request.kept_slot):
            if self.slots is not None and slot is not None:
                if copies and self.slots.ref_count(slot) == 1:
                    copies.pop((len(self.pools), slot), None)
                self.slots.release([slot])
        request.slot = request.kept_slot = None
        request.tables, request.computed, request.filled = [], 0, 0

    def _start_state(self, request: Request, key: Key | None, copies: PageCopies | None) -> bool:
        """Take a slot for a request, with the state that a key names, or none; False where too few are free."""
        slots = self.slots
        if slots is None:
            return True
        if key is None or copies is None:
            request.slot = slots.take() if slots.free else None
            return request.slot is not None
        request.slot = slots.find(key)
        slots.hold(request.slot)
        if self._own_state(request, copies):
            return True
        slots.release([request.slot])
        request.slot = None
        return False

    def _own_state(self, request: Request, copies: PageCopies) -> bool:
        """Let a request have a slot whose state it may change; False where too few are free."""
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

    def _publish_state(self, slots: SlotPool, request: Request, filled: int) -> None:
        """A request's state is known by its contents where a snapshot is taken."""
        end = filled * self.block_size
        if end == request.computed and slots.snapshot_after(end - 1, request.prompt_tokens) == end:
            assert request.slot is not None, f"request {request.id} has no slot"
            slots.publish(request.slot, request.page_keys(filled, self.block_size)[-1])

    def _lacking(self, request: Request, positions: int) -> list[int]:
        """Pages of each kind that a request has to take to hold so many positions, copies of shared ones included."""
        end = -(-positions // self.block_size)
        block, offset = divmod(request.computed, self.block_size)
        lacking = []
        for pool, table in zip(self.pools, request.tables):
            held = table.first + len(table.pages)
            copied = offset and pool.ref_count(table.pages[block - table.first]) > 1
            lacking.append((end - held if end > held else 0) + bool(copied))
        return lacking

    def _take(self, request: Request, positions: int, copies: PageCopies) -> None:
        """Take the pages that a request lacks."""
        end = -(-positions // self.block_size)
        block, offset = divmod(request.computed, self.block_size)
        for number, (pool, table) in enumerate(zip(self.pools, request.tables)):
            place = block - table.first
            if offset and pool.ref_count(table.pages[place]) > 1:
                old, new = table.pages[place], pool.take()
                pool.release([old])
                table.pages[place] = new
                copies[number, new] = old
            table.pages.extend(pool.take() for _ in range(end - table.end))
