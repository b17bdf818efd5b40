"""Drafts: tokens that may follow a request's, proposed cheaply and verified several at a time in one step.

A draft counts where the request chooses the same token from the logits before it, with the same random number that it
would have drawn alone. So drafts change no token, whether greedy or sampled; a wrong one costs its place in the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from model.engine.padded_batch import BucketUse
from model.engine.request import Request
from model.engine.scheduler import Batch, Chunk
from model.errors import ModelError
from model.sampling import RowSampling, StepOutput

Rows = Mapping[Request, Sequence[RowSampling]]
"""The draws of requests: of what follows the last token, and each draft; none where candidates are enough."""

NO_ROWS: Rows = {}

NO_RECURRENT_DRAFTS = (
    "the draft model has recurrent layers, whose state does not go back where a draft is wrong; take one with "
    "attention only, or method ngram"
)
"""Why a model is none to draft with."""


class Proposer(Protocol):
    """Something that proposes the next tokens of requests."""

    def propose(self, batch: Batch) -> Mapping[Request, Sequence[int]]:
        """At most as many drafts for each request of a batch as its chunk has slots."""


class Steps(Protocol):
    """Something that computes batches on pages; `use` counts what it launched."""

    use: BucketUse

    def step(self, batch: Batch, rows: Rows = NO_ROWS) -> Mapping[Request, Sequence[StepOutput]]:
        """Compute a batch; says what follows the last token of each request that chooses, and each of its drafts.

        That is a token that the device drew, as the `rows` of the request ask, or else logits; logits as well for a
        request without `rows`, and the likeliest candidates for each. Of a chunk that `scores`, it says what follows
        each token.
        """


@dataclass
class Acceptance:
    """How many drafts were verified, and how many were right, by their place behind the last token, from 0."""

    verified: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)

    def add(self, verified: int, accepted: int) -> None:
        """The drafts of one chunk."""
        self.verified.update(range(verified))
        self.accepted.update(range(accepted))

    @property
    def rates(self) -> list[float]:
        """The share of verified drafts that were right, place by place."""
        return [self.accepted[place] / count for place, count in sorted(self.verified.items())]


class PromptLookup:
    """Drafts are what followed the last tokens of a request where these stood before (n-grams).

    The longest run of `most` to `least` last tokens that stands earlier decides, the latest of several.
    """

    def __init__(self, most: int = 4, least: int = 2) -> None:
        if not 1 <= least <= most:
            raise ModelError(f"prompt lookup takes runs of {least} to {most} tokens; at least 1 is needed")
        self._most, self._least = most, least

    def propose(self, batch: Batch) -> dict[Request, list[int]]:
        """Drafts for requests whose last tokens stand earlier."""
        found = {
            request: self.after(request.tokens, chunk.draft_slots)
            for request, chunk in batch.chunks.items()
            if chunk.draft_slots
        }
        return {request: drafts for request, drafts in found.items() if drafts}

    def after(self, text: Sequence[int], slots: int) -> list[int]:
        """At most `slots` drafts behind a text."""
        tokens = np.asarray(text)
        for size in range(min(self._most, len(tokens) - 1), self._least - 1, -1):
            runs = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
            places = np.flatnonzero((runs == tokens[-size:]).all(axis=1))
            if len(places):
                after = int(places[-1]) + size
                return [int(token) for token in tokens[after : after + slots]]
        return []


class DraftModel:
    """Drafts are the likeliest tokens of a smaller model, which keeps its keys and values in pages of equal numbers.

    Whatever the large model computes in a page, the small one computes in its own page of that number. So tables,
    shared prefixes and copies of pages hold for both.
    """

    def __init__(self, model: Steps) -> None:
        self._model = model
        self._computed: dict[Request, int] = {}

    def propose(self, batch: Batch) -> dict[Request, list[int]]:
        """Compute the batch's prompts, then as many drafts, one after the other, as each request has slots."""
        known = self._computed
        self._computed = {request: count for request, count in known.items() if request.is_running}
        first: dict[Request, Chunk] = {}
        for request, chunk in batch.chunks.items():
            start = min(chunk.num_computed_tokens, known.get(request, chunk.num_computed_tokens))
            first[request] = replace(
                chunk, num_computed_tokens=start, num_scheduled_tokens=chunk.seq_len - start
            )
            self._computed[request] = chunk.seq_len
        drafts: dict[Request, list[int]] = {request: [] for request in first}
        chunks, step = first, replace(batch, chunks=first)
        while chunks:
            outputs = self._model.step(step, dict.fromkeys(chunks, ()))
            for request in chunks:
                if request in outputs and len(drafts[request]) < batch.chunks[request].draft_slots:
                    drafts[request].append(outputs[request][-1].likeliest)
            chunks = self._next(batch, drafts, chunks)
            step = Batch(chunks)
        return {request: own for request, own in drafts.items() if own}

    def _next(
        self, batch: Batch, drafts: Mapping[Request, Sequence[int]], done: Mapping[Request, Chunk]
    ) -> dict[Request, Chunk]:
        """The chunks that compute the newest draft of each request with slots for another."""
        chunks = {}
        for request in done:
            own, slots = drafts[request], batch.chunks[request].draft_slots
            if own and len(own) < slots:
                at = len(request.tokens) + len(own) - 1
                chunks[request] = Chunk(request, at, 1, samples=True, drafts=tuple(own))
                self._computed[request] = at + 1
        return chunks
