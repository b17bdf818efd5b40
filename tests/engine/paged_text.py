"""A model without arithmetic: it keeps the tokens themselves in pages, and the next token follows from what it reads.

So a page that is shared too early, written by two, copied too late or given away too soon changes the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from model.engine import Batch, Chunk, Request, Scheduler
from model.state import PagePool

VOCABULARY = 50
_UNWRITTEN = -1


def next_token(history: Sequence[int]) -> int:
    """The token that follows a text."""
    return crc32(bytes(history)) % VOCABULARY


def alone(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that follow a prompt when nobody else is there."""
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(text))
    return text[len(prompt) :]


class PagedText:
    """Pages of tokens."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages = [[_UNWRITTEN] * pool.block_size for _ in range(pool.count)]

    def step(self, batch: Batch) -> dict[Request, list[int]]:
        """Compute a batch: copies, then writes of all chunks, then reads; drafts are verified."""
        for new, old in batch.copies.items():
            self._pages[new] = self._pages[old][:]
        for request, chunk in batch.chunks.items():
            assert chunk.count > 0
            assert chunk.start == request.computed
            for position, token in enumerate(chunk.tokens, chunk.start):
                page, offset = self._at(request, position)
                assert self._pool.holders(page) == 1, "a page with two writers"
                self._pages[page][offset] = token
        return {request: self._chosen(chunk) for request, chunk in batch.chunks.items() if chunk.chooses}

    def _chosen(self, chunk: Chunk) -> list[int]:
        chosen: list[int] = []
        for draft in (*chunk.drafts, None):
            count = chunk.start + chunk.count - len(chunk.drafts) + len(chosen)
            chosen.append(next_token(self._read(chunk.request, [*chunk.request.tokens, *chosen][:count])))
            if chosen[-1] != draft:
                break
        return chosen

    def _at(self, request: Request, position: int) -> tuple[int, int]:
        place, offset = divmod(position, self._pool.block_size)
        return request.table[place], offset

    def _read(self, request: Request, expected: list[int]) -> list[int]:
        places = (self._at(request, position) for position in range(len(expected)))
        assert [self._pages[page][offset] for page, offset in places] == expected
        return expected


def check_pages(scheduler: Scheduler) -> None:
    """Reference counts are exact, and free and held pages are all."""
    pool = scheduler.pool
    held = [0] * pool.count
    for request in scheduler.running:
        for page in request.table:
            held[page] += 1
    assert [pool.holders(page) for page in range(pool.count)] == held
    assert pool.free == held.count(0)
    assert all(not request.table and not request.computed for request in scheduler.waiting)
    for request in scheduler.running:
        assert pool.pages_of(request.computed) <= len(request.table)
