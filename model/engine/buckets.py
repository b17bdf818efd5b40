"""Sizes to which steps are rounded up, so that the list of compiled shapes is finite.

A chip runs compiled graphs of fixed shapes. A step is launched in parts: requests that decode together, and chunks of
prompts. What is added to round a part up is padding. Chunks of different sizes are one part where the rows that this
adds take less time than reading the weights again. Predicted for Llama-3.1-8B on 8 cores of trn2, in ms:

    chunks of                          apart    together
    16 and 128 tokens                  15.4     10.2
    128 and 256                        18.3     16.8
    128 after 1024 others, and 128     17.6     12.8
    256 after 1024 others, and 256     21.7     19.8
    four of 16, and 64                 15.6     17.2     (not joined: 384 rows more)
    64 after 1024 others, and 256      19.0     19.8     (not joined: 192 rows more)
    256 and 512                        27.0     29.3     (not joined: 256 rows more)

What decodes and prompts are always two parts, since no kernel takes rows of both kinds of attention. 16 requests that
decode at 2048 positions and a prompt of 512 tokens take 7.7 + 16.9 ms; were all but attention launched once, the
kernels would add up to some 20 ms.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from model.engine.scheduler import Batch, Chunk

MOST_ROWS = 128
"""Of one launch of a decode step: one token for each partition."""

_JOINED_ROWS = 128
"""The most rows that chunks of different sizes add when they become one part: a tile of them takes 2 ms above."""

_JOINED_PREFIX = 1024
"""The most cached positions, of all sequences, that attention reads more of then."""


@dataclass(frozen=True)
class PartShape:
    """The rounded sizes of a part: sequences, tokens of each, positions that their tables name.

    A part of prompts reads `prefix` cached positions; one that `decodes` reads all that its tables name.
    """

    sequences: int
    tokens: int
    context: int
    decodes: bool
    prefix: int = 0

    def __str__(self) -> str:
        reads = "" if self.decodes else f", {self.prefix} of them cached"
        return f"{self.sequences} x {self.tokens} tokens, {self.context} positions{reads}"

    @property
    def rows(self) -> int:
        """Tokens of all sequences, padding included."""
        return self.sequences * self.tokens


@dataclass(frozen=True)
class Part:
    """Chunks that are launched together."""

    shape: PartShape
    chunks: tuple[Chunk, ...]

    @property
    def padding(self) -> int:
        """Tokens that are computed for nobody."""
        return self.shape.rows - sum(chunk.count for chunk in self.chunks)


@dataclass
class BucketUse:
    """What was launched: how often each shape of `buckets`, and how many tokens for requests and for nobody."""

    buckets: Buckets | None = None
    parts: Counter[PartShape] = field(default_factory=Counter)
    tokens: int = 0
    padding: int = 0

    def add(self, part: Part) -> None:
        """One part."""
        self.parts[part.shape] += 1
        self.padding += part.padding
        self.tokens += part.shape.rows - part.padding


@dataclass(frozen=True)
class Buckets:
    """The sizes, each in ascending order: sequences of a part, tokens of a chunk, positions of a sequence.

    What decodes computes one token, or `drafts` more that it verifies.
    """

    sequences: tuple[int, ...]
    tokens: tuple[int, ...]
    context: tuple[int, ...]
    drafts: int = 0

    @classmethod
    def powers(
        cls, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, drafts: int = 0
    ) -> Buckets:
        """Powers of two: from 1 sequence, 16 tokens and 128 positions on, up to the limits, rounded up."""
        sequences = min(max_num_seqs, MOST_ROWS)
        tokens = min(max_num_batched_tokens, max_model_len)
        return cls(_powers(1, sequences), _powers(16, tokens), _powers(128, max_model_len + drafts), drafts)

    def __str__(self) -> str:
        sizes = {"sequences": self.sequences, "tokens": self.tokens, "context": self.context}
        return " ".join(f"{axis}={','.join(map(str, own))}" for axis, own in sizes.items())

    def shapes(self) -> list[PartShape]:
        """Every shape that a part may have: the graphs that a chip needs compiled."""
        decoding = [
            PartShape(sequences, new, context, True)
            for new in dict.fromkeys((1, 1 + self.drafts))
            for sequences in self.sequences
            if sequences * new <= MOST_ROWS
            for context in self.context
        ]
        prompts = [
            PartShape(sequences, tokens, context, False, prefix)
            for sequences in self.sequences
            for tokens in self.tokens
            for context in self.context
            if context >= tokens
            for prefix in (0, *(each for each in self.context if each <= context))
        ]
        return decoding + prompts

    def parts(self, batch: Batch) -> list[Part]:
        """The parts of a step: first what decodes, then the chunks of prompts."""
        decoding: dict[int, list[Chunk]] = {1: [], 1 + self.drafts: []}
        prompts: list[Part] = []
        groups = dict[tuple[int, int, int], list[Chunk]]()
        for chunk in batch.chunks.values():
            if chunk.count == 1 + chunk.verified:
                decoding[1 + self.drafts if chunk.verified else 1].append(chunk)
            else:
                tokens = rounded(self.tokens, chunk.count)
                prefix = rounded(self.context, chunk.start) if chunk.start else 0
                context = rounded(self.context, max(prefix, chunk.start + chunk.count, tokens))
                groups.setdefault((tokens, context, prefix), []).append(chunk)
        parts = []
        for new, some in decoding.items():
            for chunks in _in_turn(some, max(each for each in self.sequences if each * new <= MOST_ROWS)):
                context = rounded(self.context, max(chunk.start for chunk in chunks) + new)
                parts.append(self._part(chunks, new, context, True))
        for (tokens, context, prefix), some in sorted(groups.items(), key=lambda group: group[0]):
            for chunks in _in_turn(some, self.sequences[-1]):
                part = self._part(chunks, tokens, context, False, prefix)
                joined = self._joined(prompts[-1], part) if prompts else None
                prompts[-1:] = [*prompts[-1:], part] if joined is None else [joined]
        return parts + prompts

    def _joined(self, first: Part, second: Part) -> Part | None:
        """Two parts of prompts as one, where that is predicted to take less time."""
        shapes, chunks = (first.shape, second.shape), [*first.chunks, *second.chunks]
        if len(chunks) > self.sequences[-1]:
            return None
        tokens, context, prefix = (
            max(sizes) for sizes in zip(*((own.tokens, own.context, own.prefix) for own in shapes))
        )
        part = self._part(chunks, tokens, context, False, prefix)
        more_rows = part.shape.rows - sum(own.rows for own in shapes)
        more_prefix = part.shape.sequences * prefix - sum(own.sequences * own.prefix for own in shapes)
        return part if more_rows <= _JOINED_ROWS and more_prefix <= _JOINED_PREFIX else None

    def _part(self, chunks: list[Chunk], tokens: int, context: int, decodes: bool, prefix: int = 0) -> Part:
        shape = PartShape(rounded(self.sequences, len(chunks)), tokens, context, decodes, prefix)
        return Part(shape, tuple(chunks))


def rounded(sizes: tuple[int, ...], size: int) -> int:
    """The first of some sizes that is not below another."""
    return sizes[bisect_left(sizes, size)]


def _powers(first: int, last: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


def _in_turn(chunks: list[Chunk], most: int) -> Iterable[list[Chunk]]:
    return (chunks[first : first + most] for first in range(0, len(chunks), most))
