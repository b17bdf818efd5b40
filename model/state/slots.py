"""Slots of recurrent states: one for each running sequence, and snapshots at the ends of pages.

A recurrent layer keeps one state of a sequence, and its next tokens change it in place. So a prefix can be shared only
where its state was kept. A snapshot is taken every `interval` positions, and behind the last full page before the last
token of a prompt. There the contents of the slot become known, and the sequence goes on in a copy. A snapshot is a slot
that nobody holds, until the pool gives it away like a page. Where no other slot is free, the sequence goes on in its
own, and there is no snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence

from model.state.pool import Key, Pool

INTERVAL = 512
"""Positions from one snapshot of a sequence to the next, unless somebody says otherwise."""


class SlotPool(Pool):
    """`count` slots; pages have `block_size` positions, and snapshots are `interval` positions apart."""

    def __init__(self, count: int, block_size: int, interval: int = INTERVAL) -> None:
        super().__init__(count)
        assert block_size > 0 and interval % block_size == 0, f"{interval} positions, pages of {block_size}"
        self.block_size = block_size
        self.interval = interval

    def snapshot_after(self, position: int, prompt: int) -> int:
        """Where the next snapshot behind a position is taken of a sequence; its prompt has so many tokens."""
        regular = (position // self.interval + 1) * self.interval
        last = (prompt - 1) // self.block_size * self.block_size
        return last if position < last < regular else regular

    def known(self, keys: Sequence[Key]) -> int:
        """The most first blocks, by their keys, behind which a state is known."""
        return next((end for end in range(len(keys), 0, -1) if keys[end - 1] in self._place_of), 0)

    def is_own(self, slot: int) -> bool:
        """Whether the one sequence that holds a slot may change its state."""
        return self._holders[slot] == 1 and slot not in self._key_of

    def own(self, slot: int) -> int | None:
        """The slot in which a holder of this one goes on: another, which is to get a copy, or the same if none is free.

        None where none is free and somebody else holds this one.
        """
        if self.free:
            copy = self.take()
            self.release([slot])
            return copy
        if self._holders[slot] > 1:
            return None
        self._forget(slot)
        return slot


class WindowPool(SlotPool):
    """`count` slots of what an encoder left behind, one for each window of a running sequence.

    The prompt of a sequence fills its slot, and nobody changes it later. So sequences that continue one prompt share
    a slot to their ends, and there are no snapshots.
    """

    def is_own(self, slot: int) -> bool:
        """Nobody writes to it."""
        return True
