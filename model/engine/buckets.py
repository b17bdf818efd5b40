"""Bucket sizes that steps are rounded up to, so that the number of compiled shapes is finite.

A chip runs compiled graphs of fixed shapes. A batch is launched as one or several steps: requests that decode together,
and chunks of prompts. Rounding a step up adds rows of padding. Chunks of different sizes share a step if the added
rows take less time than reading the weights again. Predicted for Llama-3.1-8B on 8 cores of trn2, in ms:

    chunks of                          apart    together
    16 and 128 tokens                  15.4     10.2
    128 and 256                        18.3     16.8
    128 after 1024 others, and 128     17.6     12.8
    256 after 1024 others, and 256     21.7     19.8
    four of 16, and 64                 15.6     17.2     (not joined: 384 rows more)
    64 after 1024 others, and 256      19.0     19.8     (not joined: 192 rows more)
    256 and 512                        27.0     29.3     (not joined: 256 rows more)

Sequences that decode also share a step with prompts, so that weights are read once for both. Predicted as above:

    decoding sequences          chunks of                       apart    together
    1 at 128 positions          16 tokens                       13.6      7.7
    1 at 128                    128 after 1024 others           15.7     10.2
    16 at 2048                  496 tokens                      24.4     19.2
    16 at 2048                  512 tokens                      24.7     20.9

Products of 528 rows take 1.7 ms more than products of 512 rows. So a single prompt is rounded up together with the
rows that decode: with 16 such rows, 496 tokens are a size, too. The head takes 128 rows. If decoding tokens and last
tokens of prompts are more, or if a layer does not mix them, two steps are launched.

Data-parallel groups that divide experts launch the same shapes at the same time. So the batches of all groups are
combined, and each is rounded up to the largest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import zip_longest

from model.config import ModelConfig
from model.engine.padded_batch import PaddedBatch
from model.engine.scheduler import Batch, Chunk
from model.families import compose
from model.layers.launch import FLOAT32, PARTITIONS, Phase, StepShape, WeightDtypes

MOST_ROWS = PARTITIONS
"""Largest number of rows of a decode step: one token for each partition."""

_MAX_JOINED_ROWS = 128
"""Largest number of rows that joining chunks may add; a tile of them takes 2 ms above."""

_MAX_JOINED_PREFIX = 1024
"""Largest number of cached positions of all sequences that attention may read in addition after joining."""

SIZES_ONLY = StepShape(Phase.decode, 1, 1, 0, 0, 1, FLOAT32, WeightDtypes(FLOAT32))
"""The step of buckets without a model, which has sizes only."""


@dataclass(frozen=True)
class Buckets:
    """Bucket sizes in ascending order.

    Attributes:
        sequences: Sizes of the number of sequences of a step.
        tokens: Sizes of the number of tokens of a chunk.
        context: Sizes of the number of positions of a sequence.
        drafts: Number of draft tokens that a decoding sequence may verify in addition to its token.
        mixes: Whether sequences decode in the launches of prompts. Then every pair of a decoding shape and a prompt
            shape is a shape.
        whole_prompts: Whether each prompt is a step, even a prompt of one token, because its inputs are encoded with
            it.
        model_step: A step with the dtypes, ranks, pages and slots of the model.
    """

    sequences: tuple[int, ...]
    tokens: tuple[int, ...]
    context: tuple[int, ...]
    drafts: int = 0
    mixes: bool = True
    whole_prompts: bool = False
    model_step: StepShape = SIZES_ONLY

    @classmethod
    def powers(
        cls, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, drafts: int = 0
    ) -> Buckets:
        """Return powers of two from 1 sequence, 16 tokens and 128 positions on that cover the limits."""
        sequences = min(max_num_seqs, MOST_ROWS)
        tokens = min(max_num_batched_tokens, max_model_len)
        return cls(_powers(1, sequences), _powers(16, tokens), _powers(128, max_model_len + drafts), drafts)

    def for_model(self, config: ModelConfig, model_step: StepShape) -> Buckets:
        """Return the buckets of a model; steps mix only if all of its layers take mixed steps."""
        mixes = self.mixes and compose(config).mixes
        return replace(self, mixes=mixes, whole_prompts=config.cross_positions > 0, model_step=model_step)

    def __str__(self) -> str:
        axes = {"sequences": self.sequences, "tokens": self.tokens, "context": self.context}
        return " ".join(f"{axis}={','.join(map(str, sizes))}" for axis, sizes in axes.items())

    def shapes(self) -> list[StepShape]:
        """Return all shapes of steps, each of which is compiled as a graph."""
        decoding = [
            self._step(Phase.decode, sequences, new_tokens, context)
            for new_tokens in dict.fromkeys((1, 1 + self.drafts))
            for sequences in self.sequences
            if sequences * new_tokens <= MOST_ROWS
            for context in self.context
        ]
        prompts = [
            self._step(Phase.prefill, sequences, tokens, context, prefix)
            for sequences in ((1,) if self.whole_prompts else self.sequences)
            for tokens in self.tokens
            for context in self.context
            if context >= tokens
            for prefix in (0, *(size for size in self.context if size <= context and not self.whole_prompts))
        ]
        return decoding + prompts + self._mixed_shapes(decoding)

    def _mixed_shapes(self, decoding_shapes: list[StepShape]) -> list[StepShape]:
        """Return the shapes of prompts with decoding sequences; block tables of prompts have the longest length."""
        pairs = (
            (decoding, sequences)
            for sequences in self.sequences
            for decoding in dict.fromkeys(self._with_prompts(shape, sequences) for shape in decoding_shapes)
        )
        return [
            self._step(Phase.prefill, sequences, tokens, self.context[-1], prefix, decoding)
            for decoding, sequences in (pairs if self.mixes else ())
            if decoding is not None
            for tokens in sorted(
                {*self.tokens, *self._tokens_with(decoding.tokens)} if sequences == 1 else self.tokens
            )
            for prefix in (0, *self.context)
        ]

    def pad(self, *batches: Batch) -> list[PaddedBatch]:
        """Divide the batches of all groups into padded batches, decoding batches first, then chunks of prompts."""
        groups = [self._divide(batch) for batch in batches]
        decoding, prompts = groups[0] if len(groups) == 1 else self._combine_groups(groups)
        if self.mixes and decoding and prompts:
            mixed = self._mix(decoding[-1], prompts[-1])
            if mixed is not None:
                return [*decoding[:-1], *prompts[:-1], mixed]
        return decoding + prompts

    def _mix(self, decoding: PaddedBatch, prompts: PaddedBatch) -> PaddedBatch | None:
        """Return prompts with decoding sequences in one padded batch; None if the head does not take as many rows."""
        prompt_step, decoding_step = prompts.step, self._with_prompts(decoding.step, prompts.step.sequences)
        if decoding_step is None or max(map(len, decoding.groups)) > decoding_step.sequences:
            return None
        tokens = prompt_step.new_tokens
        if prompt_step.sequences == 1:
            longest = max(chunk.num_scheduled_tokens for chunk in prompts.chunks)
            sizes = (tokens, *self._tokens_with(decoding_step.tokens))
            tokens = min(size for size in sizes if size >= longest)
        mixed = self._step(
            *(Phase.prefill, prompt_step.sequences, tokens, self.context[-1], prompt_step.prefix),
            decoding_step,
        )
        return PaddedBatch(mixed, prompts.groups, replace(decoding, step=decoding_step))

    def _tokens_with(self, rows: int) -> list[int]:
        """Return the sizes of a single prompt that is rounded up together with decoding rows."""
        return [tokens - rows for tokens in self.tokens if tokens > rows]

    def _with_prompts(self, decoding: StepShape, prompts: int) -> StepShape | None:
        """Return a decoding shape with the sequences that the head takes with the prompts, or None if it takes none."""
        sequences = min(decoding.sequences, (MOST_ROWS - prompts) // decoding.new_tokens)
        if not sequences:
            return None
        return self._step(Phase.decode, sequences, decoding.new_tokens, decoding.cache_length)

    def _divide(self, batch: Batch) -> tuple[list[PaddedBatch], list[PaddedBatch]]:
        """Divide the batch of one group into padded batches that decode and padded batches of prompts."""
        decoding_chunks: dict[int, list[Chunk]] = {1: [], 1 + self.drafts: []}
        prompts: list[PaddedBatch] = []
        prompt_chunks = dict[tuple[int, int, int], list[Chunk]]()
        for chunk in batch.chunks.values():
            start, count = chunk.num_computed_tokens, chunk.num_scheduled_tokens
            if count == 1 + chunk.num_draft_tokens and not (self.whole_prompts and start == 0):
                decoding_chunks[1 + self.drafts if chunk.num_draft_tokens else 1].append(chunk)
            else:
                tokens = round_up(self.tokens, count)
                prefix = round_up(self.context, start) if start else 0
                context = round_up(self.context, max(prefix, start + count, tokens))
                prompt_chunks.setdefault((tokens, context, prefix), []).append(chunk)
        decoding = []
        for new_tokens, all_chunks in decoding_chunks.items():
            most = max(size for size in self.sequences if size * new_tokens <= MOST_ROWS)
            for chunks in _in_turn(all_chunks, most):
                longest = max(chunk.num_computed_tokens for chunk in chunks) + new_tokens
                decoding.append(self._pad(Phase.decode, chunks, new_tokens, round_up(self.context, longest)))
        for (tokens, context, prefix), all_chunks in sorted(
            prompt_chunks.items(), key=lambda sized_chunks: sized_chunks[0]
        ):
            for chunks in _in_turn(all_chunks, 1 if self.whole_prompts else self.sequences[-1]):
                padded = self._pad(Phase.prefill, chunks, tokens, context, prefix)
                joined = self._join(prompts[-1], padded) if prompts else None
                prompts[-1:] = [*prompts[-1:], padded] if joined is None else [joined]
        return decoding, prompts

    def _join(self, first: PaddedBatch, second: PaddedBatch) -> PaddedBatch | None:
        """Return two padded batches of prompts as one; None if that is predicted to take more time."""
        steps, chunks = (first.step, second.step), [*first.chunks, *second.chunks]
        if self.whole_prompts or len(chunks) > self.sequences[-1]:
            return None
        joined = self._pad(Phase.prefill, chunks, *_largest_sizes(steps))
        more_rows = joined.step.tokens - sum(step.tokens for step in steps)
        more_prefix = joined.step.sequences * joined.step.prefix - sum(
            step.sequences * step.prefix for step in steps
        )
        return joined if more_rows <= _MAX_JOINED_ROWS and more_prefix <= _MAX_JOINED_PREFIX else None

    def _pad(
        self, phase: Phase, chunks: list[Chunk], tokens: int, context: int, prefix: int = 0
    ) -> PaddedBatch:
        sequences = round_up(self.sequences, len(chunks))
        return PaddedBatch(self._step(phase, sequences, tokens, context, prefix), (tuple(chunks),))

    def _combine_groups(
        self, groups: Sequence[tuple[list[PaddedBatch], list[PaddedBatch]]]
    ) -> tuple[list[PaddedBatch], list[PaddedBatch]]:
        """Combine the decoding and the prompt batches of all groups, the largest prompts with the largest."""
        sizes = {padded.step.new_tokens for decoding, _ in groups for padded in decoding}
        decoding = [
            self._combine(padded_batches)
            for size in sorted(sizes)
            for padded_batches in zip_longest(
                *([padded for padded in decoding if padded.step.new_tokens == size] for decoding, _ in groups)
            )
        ]
        prompts = [
            self._combine(padded_batches)
            for padded_batches in zip_longest(*(reversed(prompts) for _, prompts in groups))
        ]
        return decoding, prompts[::-1]

    def _combine(self, padded_batches: Sequence[PaddedBatch | None]) -> PaddedBatch:
        """Combine one padded batch of each group, None for an empty one, in the smallest common shape."""
        steps = [padded.step for padded in padded_batches if padded is not None]
        sequences = max(step.sequences for step in steps)
        groups = tuple(() if padded is None else padded.groups[0] for padded in padded_batches)
        return PaddedBatch(self._step(steps[0].phase, sequences, *_largest_sizes(steps)), groups)

    @cached_property
    def _step(self) -> Callable[..., StepShape]:
        """`with_sizes` of the model's step; equal arguments give the same object."""
        return cache(self.model_step.with_sizes)


def _largest_sizes(steps: Sequence[StepShape]) -> tuple[int, int, int]:
    """Return the largest number of new tokens, cache length and prefix among several steps."""
    return (
        max(step.new_tokens for step in steps),
        max(step.cache_length for step in steps),
        max(step.prefix for step in steps),
    )


def round_up(sizes: tuple[int, ...], size: int) -> int:
    """Return the least of the ascending `sizes` that is not below `size`."""
    return sizes[bisect_left(sizes, size)]


def _powers(first: int, last: int) -> tuple[int, ...]:
    """Return `first` times powers of two, up to the first that is not below `last`."""
    return tuple(first << power for power in range((-(-last // first) - 1).bit_length() + 1))


def _in_turn(chunks: list[Chunk], most: int) -> Iterable[list[Chunk]]:
    return (chunks[first : first + most] for first in range(0, len(chunks), most))
