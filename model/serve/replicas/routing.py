"""Which replica computes a request: the one that has served most of its prompt, unless that one has far more to do.

A prompt is cut into blocks of 64 bytes. A block is known by a hash of itself and of all blocks before it, as a page is
(`model/state/pages.py`). Each replica has the blocks of the prompts that were sent to it, as many as its pages have
room for; the least recently used go first, as the pages themselves do. So the index needs no word of the replicas.

1. A prefix decides if it is at least a quarter of the prompt. A shorter one saves little, and what all prompts begin
   with, such as a system message, would gather them on one replica instead of becoming known to each.
2. It does not decide where its replica has more continuations on their way than the least loaded one by over half of
   the sequences of a step. So no request waits for a place in a step of one replica while another has over half of its
   places free. A replica whose queue is full is passed over while another's is not.
3. Otherwise the least loaded replica computes it, among equals the one that knows the fewest blocks, then the one that
   was sent the fewest requests.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile
from typing import Any

Key = bytes
"""A block behind the blocks before it: a digest of 16 bytes."""

BLOCK_BYTES = 64
_TOKEN_BYTES = 4  # of English, about
_LEAST_SHARE = 4  # a prefix has to be one part in so many of the prompt

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
AUDIO = "/v1/audio/transcriptions", "/v1/audio/translations"
TOKENIZING = "/tokenize", "/detokenize"
"""Paths whose requests take a place in the queue, beside the engine's steps."""
GENERATING = (COMPLETIONS, CHATS, *AUDIO)
"""Paths whose requests the engine computes."""


@dataclass(frozen=True)
class Asked:
    """What the choice of a replica rests on: the blocks of the first prompt, and how many continuations are wanted."""

    keys: Sequence[Key] = ()
    wanted: int = 0

    @classmethod
    def of(cls, path: str, body: bytes, most_blocks: int, key_salt: str = "") -> Asked:
        """Read a request as it came, together with the salt of its key; the replica refuses what is wrong with it."""
        if path not in (COMPLETIONS, CHATS):
            return cls(wanted=int(path in (*AUDIO, *TOKENIZING)))
        try:
            given = json.loads(body)
            if not isinstance(given, dict):
                return cls()
            prompts = _prompts(given.get("prompt")) if path == COMPLETIONS else [_conversation(given)]
        except (ValueError, RecursionError):
            return cls()
        n = given.get("n")
        return cls(
            _keys(_root(path, key_salt, given), prompts[0], most_blocks) if prompts else (),
            len(prompts) * (n if isinstance(n, int) and n > 0 else 1),
        )


@dataclass
class _Lane:
    """One replica: continuations on their way, requests so far, and blocks, the least recently used first."""

    load: int = 0
    requests: int = 0
    blocks: OrderedDict[Key, None] = field(default_factory=OrderedDict)


@dataclass(frozen=True)
class Choice:
    """A replica, and whether the prompt's prefix decided."""

    replica: Hashable
    by_prefix: bool


class Routing:
    """The rule above for some replicas, which are known by keys of any type.

    Each computes up to `sequences` continuations in a step, has `places` for continuations, and keeps `positions`
    tokens for prompts that begin alike (0: none).
    """

    def __init__(self, sequences: int, places: int, positions: int) -> None:
        self.most_blocks = positions * _TOKEN_BYTES // BLOCK_BYTES
        self._lanes: defaultdict[Hashable, _Lane] = defaultdict(_Lane)
        self._slack = sequences // 2
        self._places = places

    def load(self, replica: Hashable) -> int:
        """Continuations on their way at a replica."""
        return self._lanes[replica].load

    def choose(self, asked: Asked, up: Sequence[Hashable]) -> Choice:
        """Choose a replica among `up` for the request, which adds to that replica's load until `ended` is called.

        A replica that is not among `up` is forgotten once nothing is on its way there.
        """
        lanes = self._lanes
        for key in [key for key, lane in lanes.items() if key not in up and not lane.load]:
            del lanes[key]
        free = [each for each in up if lanes[each].load + asked.wanted <= self._places] or list(up)
        least = min(free, key=lambda each: (lanes[each].load, len(lanes[each].blocks), lanes[each].requests))
        known = {each: self._known(each, asked.keys) for each in free}
        best = max(free, key=lambda each: (known[each], -lanes[each].load, each == least))
        by_prefix = (
            0 < len(asked.keys) <= known[best] * _LEAST_SHARE
            and lanes[best].load - lanes[least].load <= self._slack
        )
        chosen = best if by_prefix else least
        self._take(lanes[chosen], asked)
        return Choice(chosen, by_prefix)

    def ended(self, choice: Choice, asked: Asked) -> None:
        """A request is no longer on its way."""
        self._lanes[choice.replica].load -= asked.wanted

    def forget(self, replica: Hashable) -> None:
        """A replica starts anew, without pages; its requests end as others do."""
        self._lanes[replica].blocks.clear()

    def _known(self, replica: Hashable, keys: Sequence[Key]) -> int:
        """How many of the first blocks a replica has served."""
        blocks = self._lanes[replica].blocks
        return sum(1 for _ in takewhile(blocks.__contains__, keys))

    def _take(self, lane: _Lane, asked: Asked) -> None:
        lane.load += asked.wanted
        lane.requests += 1
        for key in reversed(asked.keys):  # so that the end of a prompt is forgotten before its beginning
            lane.blocks[key] = None
            lane.blocks.move_to_end(key)
        while len(lane.blocks) > self.most_blocks:
            lane.blocks.popitem(last=False)


def _root(path: str, key_salt: str, given: Mapping[str, Any]) -> Key:
    """Return the parent of first blocks; prompts of different paths and of different salts share no block."""
    return blake2b(json.dumps([path, key_salt, given.get("cache_salt")]).encode(), digest_size=16).digest()


def _keys(root: Key, prompt: bytes, most: int) -> list[Key]:
    """Return the keys of a prompt's first whole blocks, at most `most` of them."""
    keys, key = [], root
    for begin in range(0, min(len(prompt) // BLOCK_BYTES, most) * BLOCK_BYTES, BLOCK_BYTES):
        key = blake2b(key + prompt[begin : begin + BLOCK_BYTES], digest_size=16).digest()
        keys.append(key)
    return keys


def _prompts(given: Any) -> list[bytes]:
    """The prompts of a completion, of which a text or a list of ids may stand alone."""
    if not isinstance(given, list) or (given and isinstance(given[0], int)):
        given = [given]
    return [_bytes(each) for each in given]


def _bytes(prompt: Any) -> bytes:
    """A prompt such that one that goes on has more bytes behind the same ones."""
    if isinstance(prompt, str):
        return prompt.encode(errors="replace")
    return "".join(f"{each}," for each in prompt).encode() if isinstance(prompt, list) else b""


def _conversation(given: Mapping[str, Any]) -> bytes:
    """What a chat template reads, in the order in which templates write it."""
    messages = given.get("messages")
    parts = [given.get("tools"), *(messages if isinstance(messages, list) else ())]
    return "".join(map(json.dumps, parts)).encode()
