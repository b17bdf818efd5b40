"""Sizes of buckets that somebody chose: read from a text, or fitted to what was asked before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import product

from model.engine.buckets import MOST_ROWS, Buckets, rounded
from model.errors import ModelError

AXES = ("sequences", "tokens", "context")
AUTO = "auto"
SHAPES = 256
"""How many shapes fitted sizes may give rise to; powers of two up to 16 sequences, 512 tokens and 2048 positions have
590, and 5,340 for pairs of what decodes and prompts."""

_CONTEXT_STEP = 128  # positions of a decode step's tables, as attention_decode takes them
_TOKEN_STEP = 16
_COMPILED_TOKENS = 128  # the fewest of a chunk that is compiled ahead
_MOST_SIZES = 8  # of an axis that is fitted


@dataclass(frozen=True)
class BucketLimits:
    """The largest of each axis that may be asked for, and how many drafts a decode step verifies."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    drafts: int = 0

    @property
    def powers(self) -> Buckets:
        """Powers of two up to the limits."""
        return Buckets.powers(self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len, self.drafts)

    @property
    def compiled(self) -> Buckets:
        """The sizes by default where every shape is compiled ahead, those of vLLM's plugin for Neuron.

        Powers of two of sequences, and of tokens from 128 on; one context, the longest; prompts and what decodes in
        launches of their own. 16 sequences, 512 tokens and 2048 positions have 35 shapes.
        https://awsdocs-neuron.readthedocs-hosted.com/en/v2.33.0/vllm-neuron/docs/guides/reference-configuration.html
        """
        every = self.powers
        tokens = tuple(size for size in every.tokens if size >= _COMPILED_TOKENS) or (_COMPILED_TOKENS,)
        return replace(every, tokens=tokens, context=every.context[-1:], mixes=False)

    def needed(self) -> dict[str, int]:
        """What the largest size of each axis has to cover; a decode step of more sequences becomes several parts."""
        tokens = min(self.max_num_batched_tokens, self.max_model_len)
        return {"sequences": 1, "tokens": tokens, "context": self.max_model_len + self.drafts}


@dataclass
class AskedSizes:
    """How often each size was asked for: sequences of a part, tokens of a chunk, positions of a part's longest."""

    sequences: Counter[int] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    context: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of_lengths(cls, requests: Iterable[tuple[int, int]], most: int) -> AskedSizes:
        """Of requests with so many prompt and new tokens each, whose chunks have at most `most` tokens.

        How many decode at a time does not follow from lengths, so `sequences` stays empty.
        """
        asked = cls()
        for prompt, new in requests:
            for start in range(0, prompt, most):
                asked.tokens[min(most, prompt - start)] += 1
                asked.context[min(prompt, start + most)] += 1
            for end in range(
                _up(prompt + 1, _CONTEXT_STEP), _up(prompt + new, _CONTEXT_STEP) + 1, _CONTEXT_STEP
            ):
                asked.context[end] += min(end, prompt + new) - max(end - _CONTEXT_STEP, prompt)
        return asked


def read_buckets(text: str, limits: BucketLimits, default: Buckets | None = None) -> Buckets:
    """Sizes such as `sequences=1,16 tokens=64,512 context=2048`; the rest is as in `default`, else in powers of two.

    ModelError for another form, and for sizes that the kernels do not take or that do not cover the limits.
    """
    sizes: dict[str, tuple[int, ...]] = {}
    for part in text.split():
        axis, equals, numbers = part.partition("=")
        if axis not in AXES or not equals or axis in sizes:
            raise ModelError(
                f"buckets have {part!r:.60}; they are such as 'sequences=1,16 tokens=64,512 context=2048'"
            )
        if not all(each.isdecimal() and len(each) < 10 and int(each) > 0 for each in numbers.split(",")):
            raise ModelError(f"{axis} of the buckets are {numbers!r:.60}, not positive whole numbers")
        sizes[axis] = tuple(sorted({int(each) for each in numbers.split(",")}))
    if not sizes:
        raise ModelError(
            "buckets have no sizes; they are such as 'sequences=1,16 tokens=64,512 context=2048'"
        )
    default = default or limits.powers
    found = {axis: sizes.get(axis, getattr(default, axis)) for axis in AXES}
    for axis, needed in limits.needed().items():
        if found[axis][-1] < needed:
            raise ModelError(f"{axis} of the buckets end at {found[axis][-1]}; up to {needed} are needed")
    if found["sequences"][-1] > MOST_ROWS:
        raise ModelError(
            f"sequences of the buckets go up to {found['sequences'][-1]}; a launch takes {MOST_ROWS}"
        )
    if found["sequences"][0] * (1 + limits.drafts) > MOST_ROWS:
        raise ModelError(
            f"buckets of {found['sequences'][0]} sequences with {limits.drafts} drafts each have more than the "
            f"{MOST_ROWS} rows of a launch"
        )
    if any(each % _CONTEXT_STEP for each in found["context"]):
        raise ModelError(f"context of the buckets is in multiples of {_CONTEXT_STEP} positions")
    if found["tokens"][-1] > found["context"][-1]:
        raise ModelError(
            f"tokens of the buckets go up to {found['tokens'][-1]}, beyond their context, {found['context'][-1]}"
        )
    return replace(default, **found)


def fitted(asked: AskedSizes, limits: BucketLimits, shapes: int = SHAPES) -> Buckets:
    """The sizes with the least padding that have at most `shapes` shapes.

    The padding of an axis is the sum of its rounded sizes over the sum of what was asked. The product of the three
    axes is least. An axis of which nothing was asked keeps powers of two. What decodes and prompts stay parts of their
    own, because their pairs would leave few sizes of each.
    """
    powers, needed = limits.powers, limits.needed()
    steps = {"sequences": 1, "tokens": _TOKEN_STEP, "context": _CONTEXT_STEP}
    choices: list[list[tuple[int, ...]]] = []
    for axis in AXES:
        seen: Counter[int] = getattr(asked, axis)
        known: tuple[int, ...] = getattr(powers, axis)
        last = min(known[-1], _up(max([needed[axis], *seen]), steps[axis]))
        every = [_least_padding(seen, count, steps[axis], last) for count in range(1, _MOST_SIZES + 1)]
        choices.append(list(dict.fromkeys(every)) if seen else [known])
    fitting = [
        buckets
        for sequences, tokens, context in product(*choices)
        if len((buckets := Buckets(sequences, tokens, context, limits.drafts, mixes=False)).shapes())
        <= shapes
    ]
    if not fitting:
        raise ModelError(f"no sizes of buckets give at most {shapes} shapes")
    return min(fitting, key=lambda buckets: (_padded(asked, buckets), len(buckets.shapes())))


def _padded(asked: AskedSizes, buckets: Buckets) -> float:
    """The product over the axes of rounded sizes relative to what was asked."""
    share = 1.0
    for axis in AXES:
        seen, sizes = getattr(asked, axis), getattr(buckets, axis)
        if seen:
            total = sum(rounded(sizes, size) * count for size, count in seen.items())
            share *= total / sum(size * count for size, count in seen.items())
    return share


def _least_padding(seen: Counter[int], count: int, step: int, last: int) -> tuple[int, ...]:
    """At most `count` sizes, multiples of a step up to `last`, to which the sum of rounded sizes is least.

    `best[i]` is that sum for what is at most the i-th candidate, and the sizes that give it.
    """
    often: Counter[int] = Counter()
    for size, times in seen.items():
        often[min(last, _up(size, step))] += times
    candidates = sorted({*often, last})
    best: list[tuple[float, tuple[int, ...]]] = []
    below, times = [0], 0
    for size in candidates:
        times += often[size]
        below.append(times)
    for end, size in enumerate(candidates):
        best.append((size * below[end + 1], (size,)))
    for _ in range(1, count):
        best = [
            min([best[end], *((total + size * (below[end + 1] - below[before + 1]), (*sizes, size))
                 for before, (total, sizes) in enumerate(best[:end]))])
            for end, size in enumerate(candidates)
        ]  # fmt: skip
    return best[-1][1]


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
