"""Comparison of the tokens and logits of two runs of a model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GreedyRun:
    """Greedy tokens after a prompt, the logits [vocabulary] of each token, and the measured seconds."""

    tokens: tuple[int, ...]
    logits: tuple[np.ndarray, ...]
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """Comparison of two greedy runs.

    tokens              compared tokens
    equal               equal tokens before the first difference
    largest_difference  largest difference of logits after equal tokens
    ours, theirs        the first different tokens; None without a difference
    gap                 difference of our logits of these two tokens
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
