"""A model without arithmetic: pages and slots hold the tokens themselves, and the next one follows from what it reads.

So a page or a slot that is shared too early, written by two, copied too late or given away too soon changes the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from model.engine import Batch, Chunk, Request, Scheduler
from model.engine.kv_cache import KVCache

VOCABULARY = 50
_UNWRITTEN = -1


def next_token(history: Sequence[int]) -> int:
    """Return the token that follows a text."""
    return crc32(bytes(history)) % VOCABULARY


def alone(prompt: Sequence[int], count: int) -> list[int]:
    """Return the tokens that follow a prompt without other requests."""
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(text))
    return text[len(prompt) :]


class PagedText:
    """Pages of tokens, of every kind: all of them are read, of windows what a token sees. A state is all tokens."""

    def __init__(self, cache: KVCache) -> None:
        self._pools, self._slots = cache.pools, cache.slots
        self._pages = [[[_UNWRITTEN] * pool.block_size for _ in range(pool.count)] for pool in cache.pools]
        self._pages += [] if cache.slots is None else [[[_UNWRITTEN] for _ in range(cache.slots.count)]]

    def step(self, batch: Batch) -> dict[Request, list[int]]:
        """Compute a batch: copies, then writes of all chunks, then reads; drafts are verified."""
        for (pool_index, new), old in batch.copies.items():
            self._pages[pool_index][new] = self._pages[pool_index][old][:]
        for request, chunk in batch.chunks.items():
            assert chunk.num_scheduled_tokens > 0
            assert chunk.num_computed_tokens == request.computed
            for position, token in enumerate(chunk.tokens, chunk.num_computed_tokens):
                for pool_index, pool in enumerate(self._pools):
                    page, offset = self._locate(request, pool_index, position)
                    assert pool.count_references(page) == 1, "a page with two writers"
                    self._pages[pool_index][page][offset] = token
            self._advance(chunk)
        for chunk in batch.chunks.values():
            known = [*chunk.request.tokens, *chunk.drafts]
            for end in (chunk.num_computed_tokens + 1, chunk.seq_len):
                self._read(chunk.request, known[:end])
        return {request: self._chosen(chunk) for request, chunk in batch.chunks.items() if chunk.samples}

    def _advance(self, chunk: Chunk) -> None:
        """Advance the state of a request; a first token resets it."""
        slots, slot, text = self._slots, chunk.request.slot, [*chunk.request.tokens, *chunk.drafts]
        if slots is not None:
            assert slot is not None
            assert slots.is_writable(slot), "a slot with two writers, or one that is known"
            before = self._pages[-1][slot] if chunk.num_computed_tokens else []
            assert before == text[: chunk.num_computed_tokens], "the state is not that before the first token"
            self._pages[-1][slot] = [*before, *chunk.tokens]

    def _chosen(self, chunk: Chunk) -> list[int]:
        chosen: list[int] = []
        for draft in (*chunk.drafts, None):
            count = chunk.seq_len - len(chunk.drafts) + len(chosen)
            chosen.append(next_token(self._read(chunk.request, [*chunk.request.tokens, *chosen][:count])))
            if chosen[-1] != draft:
                break
        return chosen

    def _locate(self, request: Request, pool_index: int, position: int) -> tuple[int, int]:
        table, (block, offset) = (
            request.tables[pool_index],
            divmod(position, self._pools[pool_index].block_size),
        )
        assert table.first <= block, "a page that was given back"
        return table.pages[block - table.first], offset

    def _read(self, request: Request, expected: list[int]) -> list[int]:
        """Return what the last token of a text sees, after a check of every pool of pages."""
        for pool_index, pool in enumerate(self._pools):
            first = 0 if pool.window is None else max(0, len(expected) - pool.window)
            slots = (self._locate(request, pool_index, position) for position in range(first, len(expected)))
            assert [self._pages[pool_index][page][offset] for page, offset in slots] == expected[first:]
        if self._slots is not None:
            assert request.slot is not None
            assert self._pages[-1][request.slot][: len(expected)] == expected
        return expected


def check_pages(scheduler: Scheduler) -> None:
    """Check that reference counts are exact, that all pages are counted, and the limit of each sequence."""
    for pool_index, pool in enumerate(scheduler.cache.pools):
        ref_counts = [0] * pool.count
        for request in scheduler.running:
            table = request.tables[pool_index]
            for page in table.pages:
                ref_counts[page] += 1
            assert pool.count_pages(request.computed) <= table.end
            assert table.first == pool.find_first_block(request.computed // pool.block_size)
        assert [pool.count_references(page) for page in range(pool.count)] == ref_counts
        assert pool.free == ref_counts.count(0)
    slots = scheduler.cache.slots
    if slots is not None:
        assert all(request.kept_slot is None for request in scheduler.running)
        used = [request.slot for request in scheduler.running]
        assert [slots.count_references(slot) for slot in range(slots.count)] == list(
            map(used.count, range(slots.count))
        )
        assert slots.free == slots.count - len({*used})
    assert all(not request.is_running and not request.computed for request in scheduler.waiting)
