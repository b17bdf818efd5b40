"""Sizes to which steps are rounded up, so that the list of compiled shapes is finite.

A chip runs compiled graphs of fixed shapes. A step is launched in parts: requests that decode together, and chunks of
prompts whose sizes round up to the same ones. What is added to round a part up is padding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from model.engine.scheduler import Batch, Chunk

MOST_ROWS = 128
"""Of one launch of a decode step: one token for each partition."""


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


@dataclass(frozen=True)
class Part:
    """Chunks that are launched together."""

    shape: PartShape
    chunks: tuple[Chunk, ...]

    @property
    def padding(self) -> int:
        """Tokens that are computed for nobody."""
        return self.shape.sequences * self.shape.tokens - sum(chunk.count for chunk in self.chunks)


@dataclass
class BucketUse:
    """What was launched: how often each shape, and how many tokens for requests and for nobody."""

    parts: Counter[PartShape] = field(default_factory=Counter)
    tokens: int = 0
    padding: int = 0

    def add(self, part: Part) -> None:
        """One part."""
        self.parts[part.shape] += 1
        self.padding += part.padding
        self.tokens += part.shape.sequences * part.shape.tokens - part.padding


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
        for (tokens, context, prefix), some in groups.items():
            parts += [
                self._part(chunks, tokens, context, False, prefix)
                for chunks in _in_turn(some, self.sequences[-1])
            ]
        return parts

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
