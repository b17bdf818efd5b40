"""Numbered entries of a cache: reference counts, keys of known contents, and the order of eviction.

An entry is a page of keys and values (`PagePool`) or a slot of a recurrent state (`SlotPool`).

Several sequences may refer to one entry, as long as no sequence writes to it. A free entry keeps its contents until it
is allocated: entries without a key first, then the entry that was released longest ago.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

Key = bytes
"""Digest of 16 bytes that identifies the contents of a full page, or the recurrent state after it."""


def compute_page_key(parent: Key, tokens: Sequence[int]) -> Key:
    """Return the key of a full page with the ids `tokens`, a digest of these and of `parent`.

    `parent` is the key of the sequence's page before this one; for the first page it is a root key.
    """
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


def compute_root_key(salt: str) -> Key:
    """Return the parent key of a sequence's first page; requests with different salts share no pages."""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=16, person=b"cache_salt").digest()


class Pool:
    """Pool of `count` entries, numbered from 0."""

    def __init__(self, count: int) -> None:
        assert count > 0, f"{count} entries"
        self.count = count
        self._ref_counts = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self._key_by_entry: dict[int, Key] = {}
        self._entry_by_key: dict[Key, int] = {}

    @property
    def free(self) -> int:
        """Number of entries without references."""
        return len(self._free)

    def count_references(self, entry: int) -> int:
        """Return the number of sequences that refer to an entry."""
        return self._ref_counts[entry]

    def take(self) -> int:
        """Allocate the free entry that is evicted first, and return its index.

        The entry gets one reference, and its contents are no longer known by a key. Raises KeyError if none is free.
        """
        entry, _ = self._free.popitem(last=False)
        self._forget(entry)
        self._ref_counts[entry] = 1
        return entry

    def hold(self, entry: int) -> None:
        """Add a reference to an entry; a free one keeps its contents and is no longer free."""
        self._free.pop(entry, None)
        self._ref_counts[entry] += 1

    def release(self, entries: Sequence[int]) -> None:
        """Remove one reference from each of a sequence's entries, given from its first to its last.

        Entries without further references become free. Those without a key are allocated next; of the others the
        sequence's last one is evicted before its first.
        """
        for entry in reversed(entries):
            assert self._ref_counts[entry] > 0, f"{entry} has no reference"
            self._ref_counts[entry] -= 1
            if not self._ref_counts[entry]:
                self._free[entry] = None
                if entry not in self._key_by_entry:
                    self._free.move_to_end(entry, last=False)

    def publish(self, entry: int, key: Key) -> None:
        """Make `find` return the entry for `key`; do nothing if the entry has a key already, or the key an entry."""
        if key not in self._entry_by_key and entry not in self._key_by_entry:
            self._entry_by_key[key] = entry
            self._key_by_entry[entry] = key

    def find(self, key: Key) -> int:
        """Return the index of the entry, free or not, whose contents have a key. Raises KeyError for an unknown key."""
        return self._entry_by_key[key]

    def forget(self) -> None:
        """Forget the keys of all entries, so that `find` finds none; references stay."""
        self._entry_by_key.clear()
        self._key_by_entry.clear()

    def _forget(self, entry: int) -> None:
        key = self._key_by_entry.pop(entry, None)
        if key is not None:
            del self._entry_by_key[key]
