"""Sizes to which steps are rounded up, so that the list of compiled shapes is finite.

A chip runs compiled graphs of fixed shapes. A step is launched in parts: requests that decode together, and chunks of
prompts whose sizes round up to the same ones. What is added to round a part up is padding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from model.engine.scheduler import Batch, Chunk

MOST_SEQUENCES = 128
"""Of one launch of a decode step: one for each partition."""


@dataclass(frozen=True)
class PartShape:
    """The rounded sizes of a part: sequences, tokens of each, positions that their tables name, cached ones read.

    A part of one token a sequence decodes, whatever `prefix` is.
    """

    sequences: int
    tokens: int
    context: int
    prefix: int

    @property
    def decodes(self) -> bool:
        """Whether each sequence computes one token."""
        return self.tokens == 1


@dataclass(frozen=True)
class Part:
    """Chunks that are launched together."""

    shape: PartShape
    chunks: tuple[Chunk, ...]

    @property
    def padding(self) -> int:
        """Tokens that are computed for nobody."""
        return self.shape.sequences * self.shape.tokens - sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True)
class Buckets:
    """The sizes, each in ascending order: sequences of a part, tokens of a chunk, positions of a sequence."""

    sequences: tuple[int, ...]
    tokens: tuple[int, ...]
    context: tuple[int, ...]

    @classmethod
    def powers(cls, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> Buckets:
        """Powers of two: from 1 sequence, 16 tokens and 128 positions on, up to the limits, rounded up."""
        sequences = min(max_num_seqs, MOST_SEQUENCES)
        tokens = min(max_num_batched_tokens, max_model_len)
        return cls(_powers(1, sequences), _powers(16, tokens), _powers(128, max_model_len))

    def parts(self, batch: Batch) -> list[Part]:
        """The parts of a step: first what decodes, then the chunks of prompts."""
        decoding, groups = [], dict[tuple[int, int, int], list[Chunk]]()
        for chunk in batch.chunks.values():
            if chunk.count == 1:
                decoding.append(chunk)
            else:
                tokens = rounded(self.tokens, chunk.count)
                prefix = rounded(self.context, chunk.start) if chunk.start else 0
                context = rounded(self.context, max(prefix, chunk.start + chunk.count, tokens))
                groups.setdefault((tokens, context, prefix), []).append(chunk)
        parts = [
            self._part(some, 1, rounded(self.context, max(chunk.start for chunk in some) + 1), 0)
            for some in _in_turn(decoding, self.sequences[-1])
        ]
        for (tokens, context, prefix), chunks in groups.items():
            parts += [
                self._part(some, tokens, context, prefix) for some in _in_turn(chunks, self.sequences[-1])
            ]
        return parts

    def _part(self, chunks: list[Chunk], tokens: int, context: int, prefix: int) -> Part:
        shape = PartShape(rounded(self.sequences, len(chunks)), tokens, context, prefix)
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
