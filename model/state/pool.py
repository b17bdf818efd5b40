"""Numbered places of a cache: who holds which, which contents are known, and which one is given away next.

Several sequences may hold one place, as long as none writes to it. One that nobody holds keeps its contents until it is
given away: those of unknown contents first, then the one released longest ago.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

Key = bytes
"""What a full page holds, or a state behind it: a digest of 16 bytes."""


def page_key(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of a page that holds `tokens`; `parent` is the key of the page before it, or a root key."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


def root_key(salt: str) -> Key:
    """What stands for the parent of first pages that only requests with the same `salt` share."""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=16, person=b"cache_salt").digest()


class Pool:
    """`count` places of one kind."""

    def __init__(self, count: int) -> None:
        assert count > 0, f"{count} places"
        self.count = count
        self._holders = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self._key_of: dict[int, Key] = {}
        self._place_of: dict[Key, int] = {}

    @property
    def free(self) -> int:
        """Places that nobody holds."""
        return len(self._free)

    def holders(self, place: int) -> int:
        """How many sequences hold a place."""
        return self._holders[place]

    def is_free(self, place: int) -> bool:
        """Whether nobody holds a place, so that holding it takes one from the free ones."""
        return not self._holders[place]

    def take(self) -> int:
        """A place without holders, whose contents are forgotten; `free` says whether there is one."""
        place, _ = self._free.popitem(last=False)
        self._forget(place)
        self._holders[place] = 1
        return place

    def hold(self, place: int) -> None:
        """One more sequence holds a place."""
        self._free.pop(place, None)
        self._holders[place] += 1

    def release(self, places: Sequence[int]) -> None:
        """A sequence gives back its places, listed from the first to the last."""
        for place in reversed(places):
            assert self._holders[place] > 0, f"{place} has no holder"
            self._holders[place] -= 1
            if not self._holders[place]:
                self._free[place] = None
                if place not in self._key_of:
                    self._free.move_to_end(place, last=False)

    def publish(self, place: int, key: Key) -> None:
        """A place holds what `key` names; where another one holds the same, that one stays the known one."""
        if key not in self._place_of and place not in self._key_of:
            self._place_of[key] = place
            self._key_of[place] = key

    def place_of(self, key: Key) -> int:
        """The place that holds what a known key names."""
        return self._place_of[key]

    def forget(self) -> None:
        """The contents of no place are known from here on."""
        self._place_of.clear()
        self._key_of.clear()

    def _forget(self, place: int) -> None:
        key = self._key_of.pop(place, None)
        if key is not None:
            del self._place_of[key]
