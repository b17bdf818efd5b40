"""Slots of recurrent states: one for each running sequence, and snapshots at the ends of pages.

A recurrent layer keeps one state per sequence and updates it in place, so a prefix can be shared only where a snapshot
of its state exists. Snapshots are taken every `interval` positions, and after the last full page before the last token
of a prompt. A snapshot is a slot with a key: the sequence releases it and continues in a copy, and the pool evicts it
like a page. Without a free slot for the copy the sequence continues in its slot, and there is no snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence

from model.state.pool import Key, Pool

INTERVAL = 512
"""Default distance of snapshots in positions."""


class SlotPool(Pool):
    """Pool of `count` slots; pages have `block_size` positions, and snapshots are `interval` positions apart."""

    def __init__(self, count: int, block_size: int, interval: int = INTERVAL) -> None:
        super().__init__(count)
        assert block_size > 0 and interval % block_size == 0, f"{interval} positions, pages of {block_size}"
        self.block_size = block_size
        self.interval = interval

    def find_next_snapshot(self, position: int, prompt: int) -> int:
        """Return the number of tokens after which the next snapshot of the state is taken, more than `position`.

        `position` counts the tokens computed so far, and `prompt` the tokens of the prompt.
        """
        regular = (position // self.interval + 1) * self.interval
        last = (prompt - 1) // self.block_size * self.block_size
        return last if position < last < regular else regular

    def count_known_pages(self, keys: Sequence[Key]) -> int:
        """Return the length, in pages, of the longest prefix whose state has a snapshot; 0 if there is none.

        `keys` are the keys of a sequence's full pages, from the first on. No reference is added.
        """
        return next((end for end in range(len(keys), 0, -1) if keys[end - 1] in self._entry_by_key), 0)

    def is_writable(self, slot: int) -> bool:
        """Return whether a slot may be written: one sequence refers to it, and it is no snapshot."""
        return self._ref_counts[slot] == 1 and slot not in self._key_by_entry

    def make_writable(self, slot: int) -> int | None:
        """Return the slot in which a sequence that holds `slot`, with a snapshot, continues.

        It is a newly allocated slot, into which the caller copies the state; the reference to `slot` is released.
        Without a free slot it is `slot` itself, which loses its key, so the snapshot is gone. The result is None if
        there is no free slot and another sequence refers to `slot`.
        """
        if self.free:
            copy = self.take()
            self.release([slot])
            return copy
        if self._ref_counts[slot] > 1:
            return None
        self._forget(slot)
        return slot


class WindowPool(SlotPool):
    """Pool of `count` slots for the states of an encoder, one for each window of a running sequence.

    The prompt of a sequence fills its slot, and no later step changes it. So sequences that continue one prompt share a
    slot until they end, and there are no snapshots.
    """

    def is_writable(self, slot: int) -> bool:
        """Return True: a slot is filled together with its prompt and never written again, so no copy is needed."""
        return True
