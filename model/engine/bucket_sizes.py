"""Bucket sizes that are read from a text such as an option, or fitted to the sizes of expected requests.

A step is rounded up to bucket sizes on three axes: sequences, tokens of a chunk, and context positions; see `buckets`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from typing import Any

from model.engine.buckets import MOST_ROWS, Buckets, round_up
from model.errors import ModelError

AXES = ("sequences", "tokens", "context")
AUTO = "auto"
SHAPES = 256
"""The largest number of shapes of fitted sizes. Powers of two up to 16 sequences, 512 tokens and 2048 positions have
590 shapes, and 5,340 with steps that mix decoding and prompts."""

_CONTEXT_STEP = 128  # multiple of positions that attention_decode takes
_TOKEN_STEP = 16
_COMPILED_TOKENS = 128  # the smallest chunk that is compiled ahead
_MAX_SIZES = 8  # of an axis that is fitted


@dataclass(frozen=True)
class BucketLimits:
    """Largest sizes that steps have on each axis, and the number of draft tokens that a decode step verifies."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    drafts: int = 0

    @property
    def powers(self) -> Buckets:
        """Buckets with powers of two up to the limits."""
        return Buckets.powers(self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len, self.drafts)

    @property
    def compiled(self) -> Buckets:
        """Default buckets if every shape is compiled ahead, as in vLLM's plugin for Neuron.

        They are powers of two of sequences, and of tokens from 128 on, and the longest context only; decoding and
        prompts have separate launches. 16 sequences, 512 tokens and 2048 positions have 35 shapes.
        https://awsdocs-neuron.readthedocs-hosted.com/en/v2.33.0/vllm-neuron/docs/guides/reference-configuration.html
        """
        powers = self.powers
        tokens = tuple(size for size in powers.tokens if size >= _COMPILED_TOKENS) or (_COMPILED_TOKENS,)
        return replace(powers, tokens=tokens, context=powers.context[-1:], mixes=False)

    def list_required_sizes(self) -> dict[str, int]:
        """Return, by axis, the size that the largest bucket must have at least.

        Sequences need only 1, because a decode step of more sequences is divided into several launches.
        """
        tokens = min(self.max_num_batched_tokens, self.max_model_len)
        return {"sequences": 1, "tokens": tokens, "context": self.max_model_len + self.drafts}


@dataclass
class SizeCounts:
    """How often steps had each size before rounding, by axis.

    `sequences` counts numbers of sequences, `tokens` the tokens of a chunk, and `context` the positions of a sequence.
    """

    sequences: Counter[int] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    context: Counter[int] = field(default_factory=Counter)

    @classmethod
    def from_lengths(cls, lengths: Iterable[tuple[int, int]], max_chunk: int) -> SizeCounts:
        """Return counts of chunk and context sizes that requests of given lengths will cause.

        The number of sequences that decode together does not follow from lengths, so `sequences` stays empty.

        Args:
            lengths: The numbers of prompt tokens and of new tokens of each request.
            max_chunk: The largest number of tokens of a chunk.
        """
        counts = cls()
        for prompt, new in lengths:
            for start in range(0, prompt, max_chunk):
                counts.tokens[min(max_chunk, prompt - start)] += 1
                counts.context[min(prompt, start + max_chunk)] += 1
            for end in range(
                _round_up_to(prompt + 1, _CONTEXT_STEP),
                _round_up_to(prompt + new, _CONTEXT_STEP) + 1,
                _CONTEXT_STEP,
            ):
                counts.context[end] += min(end, prompt + new) - max(end - _CONTEXT_STEP, prompt)
        return counts


def read_buckets(text: str, limits: BucketLimits, default: Buckets | None = None) -> Buckets:
    """Return buckets from a text such as `sequences=1,16 tokens=64,512 context=2048`.

    Args:
        text: The sizes of one or more axes.
        limits: The largest requested sizes.
        default: The buckets whose sizes the axes missing in the text get; by default powers of two.

    Raises:
        ModelError: The text has another form, or the kernels do not take the sizes, or they do not cover the limits.
    """
    sizes: dict[str, Any] = {}
    for word in text.split():
        axis, equals, numbers = word.partition("=")
        if axis not in AXES or not equals or axis in sizes:
            raise ModelError(
                f"buckets have {word!r:.60}; they are such as 'sequences=1,16 tokens=64,512 context=2048'"
            )
        texts = numbers.split(",")
        if not all(number.isdecimal() and len(number) < 10 and int(number) > 0 for number in texts):
            raise ModelError(
                f"{axis} of the buckets are {numbers!r:.60}, not positive whole numbers; they are as in 'tokens=64,512'"
            )
        sizes[axis] = tuple(sorted(set(map(int, texts))))
    if not sizes:
        raise ModelError(
            "buckets have no sizes; they are such as 'sequences=1,16 tokens=64,512 context=2048'"
        )
    buckets = replace(default or limits.powers, **sizes)
    for axis, required in limits.list_required_sizes().items():
        largest = getattr(buckets, axis)[-1]
        if largest < required:
            raise ModelError(
                f"{axis} of the buckets end at {largest}; up to {required} are needed: add a size from {required} on"
            )
    if buckets.sequences[-1] > MOST_ROWS:
        raise ModelError(
            f"sequences of the buckets go up to {buckets.sequences[-1]}; a launch takes {MOST_ROWS}"
        )
    if buckets.sequences[0] * (1 + limits.drafts) > MOST_ROWS:
        raise ModelError(
            f"buckets of {buckets.sequences[0]} sequences with {limits.drafts} drafts each have more than the "
            f"{MOST_ROWS} rows of a launch"
        )
    if any(size % _CONTEXT_STEP for size in buckets.context):
        raise ModelError(f"context of the buckets is in multiples of {_CONTEXT_STEP} positions")
    if buckets.tokens[-1] > buckets.context[-1]:
        raise ModelError(
            f"tokens of the buckets go up to {buckets.tokens[-1]}, beyond their context, {buckets.context[-1]}"
        )
    return buckets


def fit_buckets(counts: SizeCounts, limits: BucketLimits, max_shapes: int = SHAPES) -> Buckets:
    """Return the buckets with the least padding that have at most `max_shapes` shapes.

    The padding of an axis is the sum of its rounded sizes over the sum of the sizes; the product over the axes is
    minimal. An axis without counts has powers of two. Decoding and prompts have separate launches, because pairs of
    their shapes would leave few sizes of each.

    Args:
        counts: How often steps have each size.
        limits: The largest requested sizes, which the buckets cover.
        max_shapes: The largest number of shapes.

    Raises:
        ModelError: No sizes have so few shapes.
    """
    powers, required = limits.powers, limits.list_required_sizes()
    steps = {"sequences": 1, "tokens": _TOKEN_STEP, "context": _CONTEXT_STEP}
    choices: list[list[tuple[int, ...]]] = []
    for axis in AXES:
        axis_counts: Counter[int] = getattr(counts, axis)
        axis_powers: tuple[int, ...] = getattr(powers, axis)
        last = min(axis_powers[-1], _round_up_to(max([required[axis], *axis_counts]), steps[axis]))
        fits = [_fit_sizes(axis_counts, count, steps[axis], last) for count in range(1, _MAX_SIZES + 1)]
        choices.append(list(dict.fromkeys(fits)) if axis_counts else [axis_powers])
    fitting = [
        buckets
        for sequences, tokens, context in product(*choices)
        if len((buckets := Buckets(sequences, tokens, context, limits.drafts, mixes=False)).shapes())
        <= max_shapes
    ]
    if not fitting:
        raise ModelError(f"no sizes of buckets give at most {max_shapes} shapes: allow more shapes")
    return min(fitting, key=lambda buckets: (_compute_padding(counts, buckets), len(buckets.shapes())))


def _compute_padding(counts: SizeCounts, buckets: Buckets) -> float:
    """Return the sum of rounded sizes over the sum of sizes, multiplied over all axes with counts; 1 is no padding."""
    padding = 1.0
    for axis in AXES:
        axis_counts, sizes = getattr(counts, axis), getattr(buckets, axis)
        if axis_counts:
            total = sum(round_up(sizes, size) * count for size, count in axis_counts.items())
            padding *= total / sum(size * count for size, count in axis_counts.items())
    return padding


def _fit_sizes(counts: Counter[int], num_sizes: int, step: int, last: int) -> tuple[int, ...]:
    """Return at most `num_sizes` bucket sizes, multiples of `step` and `last` itself, with the least padding.

    Padding is the sum of the rounded sizes. `best[i]` is that sum for the sizes up to the i-th candidate, with the
    bucket sizes that give it.
    """
    rounded: Counter[int] = Counter()
    for size, count in counts.items():
        rounded[min(last, _round_up_to(size, step))] += count
    candidates = sorted({*rounded, last})
    below = [0, *accumulate(rounded[size] for size in candidates)]
    best: list[tuple[float, tuple[int, ...]]] = [
        (size * below[end + 1], (size,)) for end, size in enumerate(candidates)
    ]
    for _ in range(1, num_sizes):
        best = [
            min([best[end], *((total + size * (below[end + 1] - below[before + 1]), (*sizes, size))
                 for before, (total, sizes) in enumerate(best[:end]))])
            for end, size in enumerate(candidates)
        ]  # fmt: skip
    return best[-1][1]


def _round_up_to(size: int, step: int) -> int:
    return -(-size // step) * step
