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

Requests that decode and prompts are one part as well, so that weights are read once for both. Predicted as above:

    what decodes                chunks of                       apart    together
    1 at 128 positions          16 tokens                       13.6      7.7
    1 at 128                    128 after 1024 others           15.7     10.2
    16 at 2048                  496 tokens                      24.4     19.2
    16 at 2048                  512 tokens                      24.7     20.9

Products of 528 rows take 1.7 ms more than those of 512. So a single prompt is rounded up together with the rows that
decode: beside 16 of these 496 tokens are a size, too. The head takes 128 rows; where tokens that decode and the ends of
prompts are more, the two are parts of their own. So they are in a model with a layer that does not mix them.

Groups of ranks that divide experts launch the same shapes at the same time: the parts of all groups are taken together,
each rounded up to the largest of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest

from model.engine.scheduler import Batch, Chunk
from model.execution.expert_load import ExpertLoad
from model.layers.launch import PARTITIONS

MOST_ROWS = PARTITIONS
"""Of one launch of a decode step: one token for each partition."""

_JOINED_ROWS = 128
"""The most rows that chunks of different sizes add when they become one part: a tile of them takes 2 ms above."""

_JOINED_PREFIX = 1024
"""The most cached positions, of all sequences, that attention reads more of then."""


@dataclass(frozen=True)
class PartShape:
    """The rounded sizes of a part: sequences, tokens of each, positions that their tables name.

    A part of prompts reads `prefix` cached positions; one that `decodes` reads all that its tables name. What decodes
    `beside` prompts is in the same launches.
    """

    sequences: int
    tokens: int
    context: int
    decodes: bool
    prefix: int = 0
    beside: PartShape | None = None

    def __str__(self) -> str:
        reads = "" if self.decodes else f", {self.prefix} of them cached"
        beside = "" if self.beside is None else f", beside {self.beside}"
        return f"{self.sequences} x {self.tokens} tokens, {self.context} positions{reads}{beside}"

    @property
    def rows(self) -> int:
        """Tokens of all sequences, padding included."""
        return self.sequences * self.tokens + (0 if self.beside is None else self.beside.rows)

    @property
    def alone(self) -> PartShape:
        """Without what decodes beside it."""
        return replace(self, beside=None)


@dataclass(frozen=True)
class Part:
    """Chunks that are launched together, those of each group of ranks; a group may have none.

    `beside` holds the chunks that decode in the same launches as prompts.
    """

    shape: PartShape
    groups: tuple[tuple[Chunk, ...], ...]
    beside: Part | None = None

    @property
    def chunks(self) -> Sequence[Chunk]:
        """Those of all groups."""
        return self.groups[0] if len(self.groups) == 1 else tuple(chain.from_iterable(self.groups))

    @property
    def rows(self) -> int:
        """Tokens of all groups, padding included."""
        return len(self.groups) * self.shape.rows

    @property
    def padding(self) -> int:
        """Tokens that are computed for nobody."""
        computed = len(self.groups) * self.shape.alone.rows - sum(chunk.count for chunk in self.chunks)
        return computed + (0 if self.beside is None else self.beside.padding)


@dataclass
class BucketUse:
    """What was launched: how often each shape of `buckets`, and how many tokens for requests and for nobody.

    `experts` is the load of groups of ranks that divide experts.
    """

    buckets: Buckets | None = None
    experts: ExpertLoad | None = None
    parts: Counter[PartShape] = field(default_factory=Counter)
    tokens: int = 0
    padding: int = 0

    def add(self, part: Part) -> None:
        """One part."""
        self.parts[part.shape] += 1
        self.padding += part.padding
        self.tokens += part.rows - part.padding


@dataclass(frozen=True)
class Buckets:
    """The sizes, each in ascending order: sequences of a part, tokens of a chunk, positions of a sequence.

    A sequence that decodes computes one token, or `drafts` more that it verifies. Where a step `mixes`, sequences
    decode beside prompts, and every pair of a decoding shape and a prompt shape is a shape of its own. Where a model
    takes `whole_prompts`, each prompt is a part of its own, whole, also of one token: inputs are encoded with it.
    """

    sequences: tuple[int, ...]
    tokens: tuple[int, ...]
    context: tuple[int, ...]
    drafts: int = 0
    mixes: bool = True
    whole_prompts: bool = False

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
            for sequences in ((1,) if self.whole_prompts else self.sequences)
            for tokens in self.tokens
            for context in self.context
            if context >= tokens
            for prefix in (0, *(each for each in self.context if each <= context and not self.whole_prompts))
        ]
        return decoding + prompts + self._mixed_shapes(decoding)

    def _mixed_shapes(self, decoding: list[PartShape]) -> list[PartShape]:
        """The shapes of prompts beside decoding sequences; all tables of prompts have the longest length."""
        context = self.context[-1]
        pairs = (
            (own, sequences)
            for sequences in self.sequences
            for own in dict.fromkeys(_beside_prompts(each, sequences) for each in decoding)
        )
        return [
            PartShape(sequences, tokens, context, False, prefix, beside)
            for beside, sequences in (pairs if self.mixes else ())
            if beside.sequences
            for tokens in sorted(
                {*self.tokens, *self._beside(beside.rows)} if sequences == 1 else self.tokens
            )
            for prefix in (0, *self.context)
        ]

    def parts(self, *batches: Batch) -> list[Part]:
        """The parts of a step, a batch of each group: first what decodes, then the chunks of prompts."""
        found = [self._decoding_and_prompts(batch) for batch in batches]
        parts, prompts = found[0] if len(found) == 1 else _of_all_groups(found)
        if self.mixes and parts and prompts:
            mixed = self._mixed(parts[-1], prompts[-1])
            if mixed is not None:
                return [*parts[:-1], *prompts[:-1], mixed]
        return parts + prompts

    def _mixed(self, decoding: Part, prompts: Part) -> Part | None:
        """Prompts with what decodes beside them; None where the head does not take as many rows."""
        shape, beside = prompts.shape, _beside_prompts(decoding.shape, prompts.shape.sequences)
        if max(map(len, decoding.groups)) > beside.sequences:
            return None
        tokens = shape.tokens
        if shape.sequences == 1:
            most = max(chunk.count for chunk in prompts.chunks)
            tokens = min(size for size in (tokens, *self._beside(beside.rows)) if size >= most)
        mixed = replace(shape, tokens=tokens, context=self.context[-1], beside=beside)
        return Part(mixed, prompts.groups, replace(decoding, shape=beside))

    def _beside(self, rows: int) -> list[int]:
        """Tokens of one prompt that are rounded up together with rows that decode."""
        return [tokens - rows for tokens in self.tokens if tokens > rows]

    def _decoding_and_prompts(self, batch: Batch) -> tuple[list[Part], list[Part]]:
        """Parts of one kind each."""
        decoding: dict[int, list[Chunk]] = {1: [], 1 + self.drafts: []}
        prompts: list[Part] = []
        groups = dict[tuple[int, int, int], list[Chunk]]()
        for chunk in batch.chunks.values():
            if chunk.count == 1 + chunk.verified and not (self.whole_prompts and chunk.start == 0):
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
            for chunks in _in_turn(some, 1 if self.whole_prompts else self.sequences[-1]):
                part = self._part(chunks, tokens, context, False, prefix)
                joined = self._joined(prompts[-1], part) if prompts else None
                prompts[-1:] = [*prompts[-1:], part] if joined is None else [joined]
        return parts, prompts

    def _joined(self, first: Part, second: Part) -> Part | None:
        """Two parts of prompts as one, where that is predicted to take less time."""
        shapes, chunks = (first.shape, second.shape), [*first.chunks, *second.chunks]
        if self.whole_prompts or len(chunks) > self.sequences[-1]:
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
        return Part(shape, (tuple(chunks),))


def _of_all_groups(found: Sequence[tuple[list[Part], list[Part]]]) -> tuple[list[Part], list[Part]]:
    """Parts of single groups as parts of all: those of one kind together, the largest prompts with the largest."""
    sizes = dict.fromkeys(part.shape.tokens for decoding, _ in found for part in decoding)
    parts = [
        _together(own)
        for size in sorted(sizes)
        for own in zip_longest(
            *([each for each in decoding if each.shape.tokens == size] for decoding, _ in found)
        )
    ]
    prompts = [_together(own) for own in zip_longest(*(reversed(prompts) for _, prompts in found))]
    return parts, prompts[::-1]


def _together(parts: Sequence[Part | None]) -> Part:
    """A part of each group, or none, in the smallest shape that takes them all."""
    shapes = [each.shape for each in parts if each is not None]
    sequences, tokens, context, prefix = (
        max(sizes) for sizes in zip(*((own.sequences, own.tokens, own.context, own.prefix) for own in shapes))
    )
    groups = tuple(() if each is None else each.groups[0] for each in parts)
    return Part(PartShape(sequences, tokens, context, shapes[0].decodes, prefix), groups)


def _beside_prompts(decoding: PartShape, prompts: int) -> PartShape:
    """What decodes, with no more sequences than the head takes rows of beside those of so many prompts."""
    return replace(decoding, sequences=min(decoding.sequences, (MOST_ROWS - prompts) // decoding.tokens))


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
