"""Choice of the replica that computes a request: by the prefix that replicas have served, and by their load.

A prompt is cut into blocks of 64 bytes. A block is known by a hash of itself and of all blocks before it, as a page is
(`model/state/pages.py`). The index has the blocks of the prompts that were sent to each replica, as many as its pages
can hold. The least recently used blocks are forgotten first, like the pages, so replicas need not report their pages.

1. The replica that has served the longest prefix of the prompt is chosen if the prefix is at least a quarter of the
   prompt. A shorter prefix saves little, and prefixes that all prompts share, such as a system message, would gather
   all prompts on one replica.
2. The prefix does not decide if its replica has many more continuations in progress than the least loaded replica:
   more than half of the sequences of a step. So no request waits for a step of one replica while another replica has
   over half of its sequences free. A replica whose queue is full is skipped while another replica's queue is not.
3. Otherwise the least loaded replica is chosen. Ties go to the replica that knows the fewest blocks, and then to the
   replica that was sent the fewest requests.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile
from typing import Any

BlockHash = bytes
"""Digest of 16 bytes of a block and of all blocks before it."""

BLOCK_BYTES = 64
_TOKEN_BYTES = 4  # of English, about
_MIN_PREFIX_DIVISOR = 4  # a prefix decides if it is at least the prompt divided by this number

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
AUDIO = "/v1/audio/transcriptions", "/v1/audio/translations"
TOKENIZING = "/tokenize", "/detokenize", "/tokenizer_info"
"""Paths of requests that take a place in the queue but no step of the engine."""
GENERATING = (COMPLETIONS, CHATS, RESPONSES, *AUDIO)
"""Paths of requests that the engine computes."""


@dataclass(frozen=True)
class RoutedRequest:
    """What the choice of a replica depends on.

    `block_hashes` are the hashes of the first prompt's blocks of 64 bytes, in order. `continuations` is the load of the
    request, the number of texts to generate; it is 0 for requests that never wait in an engine's queue.
    """

    block_hashes: Sequence[BlockHash] = ()
    continuations: int = 0

    @classmethod
    def from_body(cls, path: str, body: bytes, max_blocks: int, key_salt: str = "") -> RoutedRequest:
        """Read the inputs of the choice from the body of a request that nothing has checked yet.

        A body that the replica will refuse gives no hashes and no continuations.

        Args:
            path: Path of the request.
            body: Its body.
            max_blocks: The number of blocks after which the prompt is cut off.
            key_salt: The salt of the client's API key; prompts under different salts share no hash.
        """
        if path not in (COMPLETIONS, CHATS, RESPONSES):
            return cls(continuations=int(path in (*AUDIO, *TOKENIZING)))
        try:
            arguments = json.loads(body)
            if not isinstance(arguments, dict):
                return cls()
            prompts = _encode_prompts(arguments) if path == COMPLETIONS else [_encode_conversation(arguments)]
        except (ValueError, RecursionError):
            return cls()
        n = arguments.get("n")
        salts = [path, key_salt, arguments.get("cache_salt")]
        return cls(
            _hash_blocks(salts, prompts[0], max_blocks) if prompts else (),
            len(prompts) * (n if isinstance(n, int) and n > 0 else 1),
        )


@dataclass
class _ReplicaState:
    """What the routing knows about a replica.

    `load` is the number of continuations in progress, `requests` counts all requests sent so far, and `blocks` has the
    hashes of served prompts, the least recently used first.
    """

    load: int = 0
    requests: int = 0
    blocks: OrderedDict[BlockHash, None] = field(default_factory=OrderedDict)

    def count_prefix(self, block_hashes: Sequence[BlockHash]) -> int:
        """Return how many blocks, from the first one of a prompt on, the replica has served."""
        return sum(1 for _ in takewhile(self.blocks.__contains__, block_hashes))

    def add(self, request: RoutedRequest, max_blocks: int) -> None:
        """Add a request's continuations to the load, count it, and add its block hashes to `blocks`.

        `blocks` keeps the `max_blocks` hashes that were used last.
        """
        self.load += request.continuations
        self.requests += 1
        # In reverse, so that the end of a prompt is forgotten before its beginning.
        for block_hash in reversed(request.block_hashes):
            self.blocks[block_hash] = None
            self.blocks.move_to_end(block_hash)
        while len(self.blocks) > max_blocks:
            self.blocks.popitem(last=False)


@dataclass(frozen=True)
class Choice:
    """Key of the chosen replica, and whether the prompt's prefix decided and not the load."""

    replica: Hashable
    by_prefix: bool


class Routing:
    """Choice of a replica for each request, by the rules of the module's description.

    Keys of replicas may be of any hashable type.

    Args:
        max_num_seqs: The number of continuations in a step of a replica.
        max_continuations: The number of continuations that a replica accepts at once.
        positions: The number of tokens that a replica caches for prompts with equal prefixes; 0 without such a cache.
    """

    def __init__(self, max_num_seqs: int, max_continuations: int, positions: int) -> None:
        self.max_blocks = positions * _TOKEN_BYTES // BLOCK_BYTES
        self._states: defaultdict[Hashable, _ReplicaState] = defaultdict(_ReplicaState)
        self._max_load_difference = max_num_seqs // 2
        self._max_continuations = max_continuations

    def choose(self, request: RoutedRequest, up: Sequence[Hashable]) -> Choice:
        """Choose a replica for a request, add the request to its load, and add the prompt's blocks to its index.

        The load stays until `end` is called.

        Args:
            request: The inputs of the choice.
            up: The keys of the replicas that answer, at least one. Other replicas are forgotten once their last request
                has
            ended.
        """
        states = self._states
        for key in [key for key, state in states.items() if key not in up and not state.load]:
            del states[key]
        candidates = [
            key for key in up if states[key].load + request.continuations <= self._max_continuations
        ] or list(up)
        least = min(
            candidates, key=lambda key: (states[key].load, len(states[key].blocks), states[key].requests)
        )
        prefixes = {key: states[key].count_prefix(request.block_hashes) for key in candidates}
        best = max(candidates, key=lambda key: (prefixes[key], -states[key].load, key == least))
        by_prefix = (
            0 < len(request.block_hashes) <= prefixes[best] * _MIN_PREFIX_DIVISOR
            and states[best].load - states[least].load <= self._max_load_difference
        )
        choice = Choice(best if by_prefix else least, by_prefix)
        states[choice.replica].add(request, self.max_blocks)
        return choice

    def end(self, choice: Choice, request: RoutedRequest) -> None:
        """Subtract the continuations of a request that has ended from the load of its replica."""
        self._states[choice.replica].load -= request.continuations

    def forget(self, replica: Hashable) -> None:
        """Forget the blocks of a replica that starts again with an empty cache.

        Its load stays until its requests end.
        """
        self._states[replica].blocks.clear()


def _hash_blocks(salts: Sequence[Any], prompt: bytes, max_blocks: int) -> list[BlockHash]:
    """Return the hashes of a prompt's first whole blocks, at most `max_blocks`.

    Each hash covers its block, all blocks before it and the salts, so prompts with different salts share no hash.
    """
    hashes, block_hash = [], blake2b(json.dumps(salts).encode(), digest_size=16).digest()
    for begin in range(0, min(len(prompt) // BLOCK_BYTES, max_blocks) * BLOCK_BYTES, BLOCK_BYTES):
        block_hash = blake2b(block_hash + prompt[begin : begin + BLOCK_BYTES], digest_size=16).digest()
        hashes.append(block_hash)
    return hashes


def _encode_prompts(arguments: Mapping[str, Any]) -> list[bytes]:
    """Return the bytes of each prompt of a completion; a single text or a single list of token ids is one prompt."""
    prompts = arguments.get("prompt")
    if not isinstance(prompts, list) or (prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    return [_encode_prompt(prompt) for prompt in prompts]


def _encode_prompt(prompt: Any) -> bytes:
    """Return the bytes of a text or of token ids, and no bytes for anything else.

    If one prompt continues another, its bytes begin with the bytes of the other.
    """
    if isinstance(prompt, str):
        return prompt.encode(errors="replace")
    return "".join(f"{id}," for id in prompt).encode() if isinstance(prompt, list) else b""


def _encode_conversation(arguments: Mapping[str, Any]) -> bytes:
    """Return the tools, the instructions and then the messages or items of a request as JSON bytes.

    This is the order in which chat templates write them, so equal beginnings of prompts have equal bytes.
    """
    messages = arguments.get("messages", arguments.get("input"))
    messages = messages if isinstance(messages, list) else [messages]
    contents = [arguments.get("tools"), arguments.get("instructions"), *messages]
    return "".join(map(json.dumps, contents)).encode()
