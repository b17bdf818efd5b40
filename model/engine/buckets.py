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
    """Bucket sizes in ascending order, to which the steps of an engine are rounded up.

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
        """Return buckets with powers of two from 1 sequence, 16 tokens and 128 positions on that cover the limits."""
        sequences = min(max_num_seqs, MOST_ROWS)
        tokens = min(max_num_batched_tokens, max_model_len)
        return cls(
            _list_powers(1, sequences),
            _list_powers(16, tokens),
            _list_powers(128, max_model_len + drafts),
            drafts,
        )

    def for_model(self, config: ModelConfig, model_step: StepShape) -> Buckets:
        """Return the buckets with a model's step; steps mix decoding and prompts only if all layers of the model can.

        Args:
            config: The model's config.
            model_step: A step with the dtypes, ranks, pages and slots of the model.
        """
        mixes = self.mixes and compose(config).mixes
        return replace(self, mixes=mixes, whole_prompts=config.cross_positions > 0, model_step=model_step)

    def __str__(self) -> str:
        axes = {"sequences": self.sequences, "tokens": self.tokens, "context": self.context}
        return " ".join(f"{axis}={','.join(map(str, sizes))}" for axis, sizes in axes.items())

    def shapes(self) -> list[StepShape]:
        """Return all shapes that a step can be rounded up to; each is compiled as a graph."""
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
        return decoding + prompts + self._list_mixed_shapes(decoding)

    def _list_mixed_shapes(self, decoding_shapes: list[StepShape]) -> list[StepShape]:
        """Return the shapes of prompts with decoding sequences in the same launch; empty unless `mixes`.

        Block tables of these prompts always have the longest context.

        Args:
            decoding_shapes: The shapes of steps that only decode.
        """
        pairs = (
            (decoding, sequences)
            for sequences in self.sequences
            for decoding in dict.fromkeys(
                self._fit_with_prompts(shape, sequences) for shape in decoding_shapes
            )
        )
        return [
            self._step(Phase.prefill, sequences, tokens, self.context[-1], prefix, decoding)
            for decoding, sequences in (pairs if self.mixes else ())
            if decoding is not None
            for tokens in sorted(
                {*self.tokens, *self._list_token_sizes_with(decoding.tokens)}
                if sequences == 1
                else self.tokens
            )
            for prefix in (0, *self.context)
        ]

    def pad(self, *batches: Batch) -> list[PaddedBatch]:
        """Return the padded batches in which to launch one step: decoding ones first, then chunks of prompts.

        The last decoding batch and the last prompt batch become one if the buckets mix them and the output projection
        (head) takes their rows.

        Args:
            batches: The scheduled batch of each data-parallel group.
        """
        groups = [self._divide(batch) for batch in batches]
        decoding, prompts = groups[0] if len(groups) == 1 else self._combine_groups(groups)
        if self.mixes and decoding and prompts:
            mixed = self._mix(decoding[-1], prompts[-1])
            if mixed is not None:
                return [*decoding[:-1], *prompts[:-1], mixed]
        return decoding + prompts

    def _mix(self, decoding: PaddedBatch, prompts: PaddedBatch) -> PaddedBatch | None:
        """Return one padded batch of prompts with decoding sequences.

        Returns None if the output projection (head), which takes 128 rows, has no room for all decoding sequences.
        """
        prompt_step, decoding_step = (
            prompts.step,
            self._fit_with_prompts(decoding.step, prompts.step.sequences),
        )
        if decoding_step is None or max(map(len, decoding.groups)) > decoding_step.sequences:
            return None
        tokens = prompt_step.new_tokens
        if prompt_step.sequences == 1:
            longest = max(chunk.num_scheduled_tokens for chunk in prompts.chunks)
            sizes = (tokens, *self._list_token_sizes_with(decoding_step.tokens))
            tokens = min(size for size in sizes if size >= longest)
        mixed = self._step(
            *(Phase.prefill, prompt_step.sequences, tokens, self.context[-1], prompt_step.prefix),
            decoding_step,
        )
        return PaddedBatch(mixed, prompts.groups, replace(decoding, step=decoding_step))

    def _list_token_sizes_with(self, rows: int) -> list[int]:
        """Return token sizes for a single prompt that shares its launch with `rows` decoding rows.

        They are the usual sizes less `rows`, so that both together have a usual size.
        """
        return [tokens - rows for tokens in self.tokens if tokens > rows]

    def _fit_with_prompts(self, decoding: StepShape, prompts: int) -> StepShape | None:
        """Return a decoding shape with at most as many sequences as the head takes besides `prompts` prompts.

        Returns None if it takes none.
        """
        sequences = min(decoding.sequences, (MOST_ROWS - prompts) // decoding.new_tokens)
        if not sequences:
            return None
        return self._step(Phase.decode, sequences, decoding.new_tokens, decoding.cache_length)

    def _divide(self, batch: Batch) -> tuple[list[PaddedBatch], list[PaddedBatch]]:
        """Return (decoding, prompts): the padded batches of one group, with prompts in ascending order of size."""
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
            for chunks in _split_chunks(all_chunks, most):
                longest = max(chunk.num_computed_tokens for chunk in chunks) + new_tokens
                decoding.append(self._pad(Phase.decode, chunks, new_tokens, round_up(self.context, longest)))
        for (tokens, context, prefix), all_chunks in sorted(
            prompt_chunks.items(), key=lambda sized_chunks: sized_chunks[0]
        ):
            for chunks in _split_chunks(all_chunks, 1 if self.whole_prompts else self.sequences[-1]):
                padded = self._pad(Phase.prefill, chunks, tokens, context, prefix)
                joined = self._join(prompts[-1], padded) if prompts else None
                prompts[-1:] = [*prompts[-1:], padded] if joined is None else [joined]
        return decoding, prompts

    def _join(self, first: PaddedBatch, second: PaddedBatch) -> PaddedBatch | None:
        """Return two padded batches of prompts as one.

        Returns None if the result has more chunks than the buckets allow, or is predicted to take more time. The latter
        is assumed if it has over `_MAX_JOINED_ROWS` more rows of padding, or over `_MAX_JOINED_PREFIX` more cached
        positions to read.
        """
        steps, chunks = (first.step, second.step), [*first.chunks, *second.chunks]
        if self.whole_prompts or len(chunks) > self.sequences[-1]:
            return None
        joined = self._pad(Phase.prefill, chunks, *_find_largest_sizes(steps))
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
        """Return the decoding and the prompt batches of all groups, combined into batches that every group launches.

        Prompt batches are paired from the largest down.
        """
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
        """Return one padded batch for all groups, in the smallest shape that takes the batch of each.

        Args:
            padded_batches: The padded batch of each group; None if the group has no chunks in it.
        """
        steps = [padded.step for padded in padded_batches if padded is not None]
        sequences = max(step.sequences for step in steps)
        groups = tuple(() if padded is None else padded.groups[0] for padded in padded_batches)
        return PaddedBatch(self._step(steps[0].phase, sequences, *_find_largest_sizes(steps)), groups)

    @cached_property
    def _step(self) -> Callable[..., StepShape]:
        """Function `with_sizes` of the model's step, cached, so that equal arguments give the same object."""
        return cache(self.model_step.with_sizes)


def _find_largest_sizes(steps: Sequence[StepShape]) -> tuple[int, int, int]:
    """Return the largest number of new tokens, the longest cache and the longest prefix of several steps."""
    return (
        max(step.new_tokens for step in steps),
        max(step.cache_length for step in steps),
        max(step.prefix for step in steps),
    )


def round_up(sizes: tuple[int, ...], size: int) -> int:
    """Return the least of the ascending `sizes` that is at least `size`; IndexError if there is none."""
    return sizes[bisect_left(sizes, size)]


def _list_powers(first: int, last: int) -> tuple[int, ...]:
    """Return `first`, 2 * `first`, 4 * `first` and so on, up to the first number that is at least `last`."""
    return tuple(first << power for power in range((-(-last // first) - 1).bit_length() + 1))


def _split_chunks(chunks: list[Chunk], most: int) -> Iterable[list[Chunk]]:
    return (chunks[first : first + most] for first in range(0, len(chunks), most))
