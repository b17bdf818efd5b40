"""Tokens and logits of two runs of one model: how far they are equal, and how far apart logits are until then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GreedyRun:
    """The likeliest tokens after a prompt, the logits [vocabulary] that each was chosen from, and measured seconds."""

    tokens: tuple[int, ...]
    logits: tuple[np.ndarray, ...]
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """`equal` of `tokens` tokens before the first that differs, which is `ours` and `theirs`, where one does.

    `largest_difference` is that of logits of equal prefixes, `gap` how far apart ours put the two tokens.
    """

    tokens: int
    equal: int
    largest_difference: float
    ours: int | None = None
    theirs: int | None = None
    gap: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether all tokens are equal."""
        return self.equal == self.tokens


def compared(ours: GreedyRun, theirs: GreedyRun) -> Comparison:
    """Two runs with the same prompt. One may have ended before the other, at an end token."""
    tokens = min(len(ours.tokens), len(theirs.tokens))
    equal = next((at for at in range(tokens) if ours.tokens[at] != theirs.tokens[at]), tokens)
    seen = min(equal + 1, tokens)
    largest = _largest_difference(ours.logits[:seen], theirs.logits[:seen])
    if equal == tokens:
        return Comparison(tokens, equal, largest)
    own, other = ours.tokens[equal], theirs.tokens[equal]
    gap = float(ours.logits[equal][own] - ours.logits[equal][other])
    return Comparison(tokens, equal, largest, own, other, gap)


def _largest_difference(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """Over the entries that both have: padded vocabularies have more."""
    differences = []
    for own, other in zip(ours, theirs):
        size = min(len(own), len(other))
        differences.append(float(np.abs(own[:size] - other[:size]).max()))
    return max(differences, default=0.0)
