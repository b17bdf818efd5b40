"""Speculative decoding: proposers of draft tokens, several of which one step of the model verifies.

A draft token is accepted if the request samples the same token from the logits before it, with the random number that
it uses without drafts. So drafts change no token, greedy or sampled. A rejected draft token costs a row of the step.
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
"""Sampling parameters of each request's rows, for the last token and each draft token; empty if candidates suffice."""

NO_ROWS: Rows = {}

NO_RECURRENT_DRAFTS = (
    "the draft model has recurrent layers, whose state does not go back where a draft is wrong; take one with "
    "attention only, or method ngram"
)
"""The message for a draft model that cannot roll back its state."""


class Proposer(Protocol):
    """Proposer of draft tokens."""

    def propose(self, batch: Batch) -> Mapping[Request, Sequence[int]]:
        """Return draft tokens by request, for each at most `draft_slots` of the request's chunk."""


class Steps(Protocol):
    """Model runner, which computes the batches of an engine; `use` counts what it launched."""

    use: BucketUse

    def step(self, batch: Batch, rows: Rows = NO_ROWS) -> Mapping[Request, Sequence[StepOutput]]:
        """Compute a batch on the device, after its page copies, and count it in `use`.

        Args:
            batch: The scheduled chunks and page copies.
            rows: The sampling parameters of the rows of each request.

        Returns:
            For a request that samples, the outputs after its last token and after each draft token; for a request that
            scores, the outputs after each token of its chunk. An output has the token that the device sampled by
            `rows`, or logits; requests without rows get logits, and an empty row sequence asks for candidates only.
        """


@dataclass
class Acceptance:
    """Counts of verified and of accepted draft tokens, by draft position; position 0 is the first draft token."""

    verified: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)

    def add(self, verified: int, accepted: int) -> None:
        """Count the draft tokens of one chunk: `verified` of them, of which the first `accepted` were accepted."""
        self.verified.update(range(verified))
        self.accepted.update(range(accepted))

    @property
    def rates(self) -> list[float]:
        """Share of verified draft tokens that were accepted, by draft position."""
        return [self.accepted[position] / count for position, count in sorted(self.verified.items())]


class PromptLookup:
    """Proposer that repeats what followed an earlier occurrence of a request's last tokens (n-grams).

    The longest n-gram of `most` to `least` tokens with an earlier occurrence is used, and its latest occurrence.

    Raises:
        ModelError: `least` is below 1 or above `most`.
    """

    def __init__(self, most: int = 4, least: int = 2) -> None:
        if not 1 <= least <= most:
            raise ModelError(
                f"prompt lookup takes n-grams of {least} to {most} tokens; the first number must be at least 1 and the "
                "second no smaller"
            )
        self._most, self._least = most, least

    def propose(self, batch: Batch) -> dict[Request, list[int]]:
        """Return draft tokens by request; requests whose last tokens do not occur earlier are left out."""
        proposed = {
            request: self.find_continuation(request.tokens, chunk.draft_slots)
            for request, chunk in batch.chunks.items()
            if chunk.draft_slots
        }
        return {request: drafts for request, drafts in proposed.items() if drafts}

    def find_continuation(self, tokens: Sequence[int], slots: int) -> list[int]:
        """Return at most `slots` tokens that followed the latest earlier occurrence of the last tokens.

        Returns an empty list if the last tokens do not occur earlier.
        """
        array = np.asarray(tokens)
        for size in range(min(self._most, len(array) - 1), self._least - 1, -1):
            ngrams = np.lib.stride_tricks.sliding_window_view(array[:-1], size)
            matches = np.flatnonzero((ngrams == array[-size:]).all(axis=1))
            if len(matches):
                return list(map(int, array[matches[-1] + size :][:slots]))
        return []


class DraftModel:
    """Proposer of the likeliest tokens of a smaller draft model.

    Both models number their pages alike: page i of the draft model has the same positions as page i of the target
    model. So block tables, shared prefixes and copies of pages are valid for both.
    """

    def __init__(self, model: Steps) -> None:
        self._model = model
        self._computed: dict[Request, int] = {}

    def propose(self, batch: Batch) -> dict[Request, list[int]]:
        """Return draft tokens by request, sampled greedily.

        The draft model first computes the tokens of the batch, and those it has not computed before. Then it computes
        one draft token after another while requests have draft slots.
        """
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
            chunks = self._list_next_chunks(batch, drafts, chunks)
            step = Batch(chunks)
        return {request: proposed for request, proposed in drafts.items() if proposed}

    def _list_next_chunks(
        self, batch: Batch, drafts: Mapping[Request, Sequence[int]], done: Mapping[Request, Chunk]
    ) -> dict[Request, Chunk]:
        """Return the chunks that compute the newest draft token of each request with a slot for another.

        Args:
            batch: The batch of the target model, with the draft slots.
            drafts: Draft tokens so far.
            done: The requests of the draft model's last step.
        """
        chunks = {}
        for request in done:
            proposed = drafts[request]
            if 0 < len(proposed) < batch.chunks[request].draft_slots:
                position = len(request.tokens) + len(proposed) - 1
                chunks[request] = Chunk(request, position, 1, samples=True, drafts=tuple(proposed))
                self._computed[request] = position + 1
        return chunks
