"""Comparison of the tokens and logits of two greedy runs of a model with the same prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GreedyRun:
    """Greedy tokens after a prompt, the logits [vocabulary] from which each token follows, and the measured seconds."""

    tokens: tuple[int, ...]
    logits: tuple[np.ndarray, ...]
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """Comparison of two greedy runs.

    Attributes:
        tokens: Number of compared tokens.
        equal: Number of equal tokens before the first difference.
        largest_difference: Largest difference of logits in steps whose previous tokens are all equal.
        ours: Our first different token; None without a difference.
        theirs: Their token in its place; None without a difference.
        gap: Difference between our logits of these two tokens; 0 without a difference.
    """

    tokens: int
    equal: int
    largest_difference: float
    ours: int | None = None
    theirs: int | None = None
    gap: float = 0.0


def compare_runs(ours: GreedyRun, theirs: GreedyRun) -> Comparison:
    """Compare two runs with the same prompt up to the end of the shorter run.

    Logits are compared in the entries of the smaller vocabulary, because a library may pad its vocabulary.
    """
    tokens = min(len(ours.tokens), len(theirs.tokens))
    equal = next((index for index in range(tokens) if ours.tokens[index] != theirs.tokens[index]), tokens)
    largest = 0.0
    for our_logits, their_logits in zip(ours.logits[: min(equal + 1, tokens)], theirs.logits):
        size = min(len(our_logits), len(their_logits))
        largest = max(largest, float(np.abs(our_logits[:size] - their_logits[:size]).max()))
    if equal == tokens:
        return Comparison(tokens, equal, largest)
    our_token, their_token = ours.tokens[equal], theirs.tokens[equal]
    gap = float(ours.logits[equal][our_token] - ours.logits[equal][their_token])
    return Comparison(tokens, equal, largest, our_token, their_token, gap)
