"""Draft tokens on the predicted clock: how many of them are accepted, and how long a draft model takes.

Tokens are not computed in `nkw traffic`, so whether a draft token is right is drawn from a distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from model.engine import Batch, Request
from model.engine.padded_batch import BucketUse
from model.engine.speculation import NO_ROWS, Acceptance, DraftModel, PromptLookup, Rows
from model.errors import ModelError
from model.plan.sizes import ModelSizes
from model.sampling import StepOutput
from model.traffic.clock import Clock, StepTime

MEASURED_TOKENS = 8192
"""Tokens at the beginning of a text on which acceptance is measured."""


class Outcomes(Protocol):
    """Distribution of the outcome of a decode step with draft tokens."""

    def draw(self, count: int, generator: np.random.Generator) -> Sequence[tuple[int, int]]:
        """Return `count` pairs (proposed drafts, accepted drafts), one for each request, drawn with `generator`."""


@dataclass(frozen=True)
class AcceptanceRates:
    """Probability that a draft token is accepted given that all drafts before it are, by draft position."""

    rates: tuple[float, ...]

    @classmethod
    def parse(cls, text: str, tokens: int) -> AcceptanceRates:
        """Read the rates of `tokens` draft positions, such as 0.7,0.5; the last rate holds for all later positions.

        Raises:
            ModelError: If the text has another form or more rates than `tokens`, or a rate is not from 0 to 1.
        """
        try:
            rates = [float(rate) for rate in text.split(",")]
        except ValueError:
            rates = []
        if not rates or not all(0 <= rate <= 1 for rate in rates) or len(rates) > tokens:
            raise ModelError(
                f"acceptance {text!r:.60}; write 0.7, or 0.7,0.5 for the first draft and those after it, from 0 to 1, "
                f"for at most the {tokens} drafts of a step"
            )
        return cls((*rates, *(rates[-1:] * (tokens - len(rates)))))

    def draw(self, count: int, generator: np.random.Generator) -> Sequence[tuple[int, int]]:
        """Return `count` pairs (proposed drafts, accepted drafts); a draft is proposed at every position."""
        accepted_counts = (generator.random(count)[:, None] < np.cumprod(self.rates)).sum(axis=1)
        return [(len(self.rates), accepted) for accepted in accepted_counts.tolist()]


@dataclass(frozen=True)
class MeasuredOutcomes:
    """Outcomes of the steps in which prompt lookup generates a given text.

    `steps` has for each step its number of proposed and its number of accepted drafts.
    """

    steps: tuple[tuple[int, int], ...]

    @classmethod
    def measure(cls, tokens: Sequence[int], max_drafts: int) -> MeasuredOutcomes:
        """Generate a given text with prompt lookup, and return the outcome of each step.

        A draft counts as accepted if it equals the text and all drafts before it do.

        Args:
            tokens: Token ids of the text; the first `MEASURED_TOKENS` are generated.
            max_drafts: Most drafts of a step.

        Raises:
            ModelError: If the text has fewer than 2 tokens.
        """
        tokens = list(tokens[:MEASURED_TOKENS])
        if len(tokens) < 2:
            raise ModelError(f"the text has {len(tokens)} tokens; acceptance is measured on 2 at least")
        lookup, steps, position = PromptLookup(), [], 1
        while position < len(tokens):
            drafts = lookup.find_continuation(tokens[:position], min(max_drafts, len(tokens) - position))
            matches = [draft == token for draft, token in zip(drafts, tokens[position:])]
            accepted = [*matches, False].index(False)
            steps.append((len(drafts), accepted))
            position += accepted + 1
        return cls(tuple(steps))

    def draw(self, count: int, generator: np.random.Generator) -> Sequence[tuple[int, int]]:
        """Return `count` of the measured steps as (proposed drafts, accepted drafts), all with the same probability."""
        return [self.steps[index] for index in generator.integers(len(self.steps), size=count).tolist()]


@dataclass(frozen=True)
class Speculation:
    """Distribution of accepted drafts, and the draft model; with `model` None, drafts are looked up in the prompt."""

    outcomes: Outcomes
    model: ModelSizes | None = None


class _AnyToken(StepOutput):
    """Output of a step that computes no logits: its likeliest token is 0."""

    @property
    def likeliest(self) -> int:
        """Token id 0, because the outcome of a draft is drawn and does not depend on its token."""
        return 0


_ANY = _AnyToken()


class _TimedSteps:
    """Model runner of a draft model that computes nothing and appends the predicted time of each step to `times`."""

    def __init__(self, clock: Clock, times: list[StepTime]) -> None:
        self.use = BucketUse()
        self._clock = clock
        self._times = times

    def step(self, batch: Batch, rows: Rows = NO_ROWS) -> Mapping[Request, Sequence[StepOutput]]:
        """Append the predicted time of `batch` to `times`; return an output with token 0 for each sampling request."""
        self._times.append(self._clock.step(batch))
        return {request: (_ANY,) for request, chunk in batch.chunks.items() if chunk.samples}


class DraftProposer:
    """Proposer of the drafts of one replica; the outcome of each draft is drawn when it is proposed.

    Args:
        outcomes: Distribution of proposed and accepted drafts.
        clock: Predicts the steps of a draft model; None if drafts are looked up and take no time.
        seed: Seed of the draws.
    """

    def __init__(self, outcomes: Outcomes, clock: Clock | None, seed: int = 0) -> None:
        self._outcomes = outcomes
        self._times: list[StepTime] = []
        self._model = None if clock is None else DraftModel(_TimedSteps(clock, self._times))
        self._generator = np.random.default_rng(seed)
        self._accepted: dict[Request, int] = {}

    def propose(self, batch: Batch, acceptance: Acceptance) -> StepTime:
        """Give draft tokens to the chunks of `batch` that have draft slots, in place, and draw how many are accepted.

        The drafts are counted in `acceptance`.

        Returns:
            The predicted time of the draft model's steps; 0 ns without a draft model.
        """
        self._times.clear()
        if self._model is not None:
            self._model.propose(batch)
        slots = [(request, chunk) for request, chunk in batch.chunks.items() if chunk.draft_slots]
        self._accepted.clear()
        outcomes = self._outcomes.draw(len(slots), self._generator)
        for (request, chunk), (proposed, accepted) in zip(slots, outcomes):
            proposed = min(proposed, chunk.draft_slots)
            if proposed:
                batch.chunks[request] = chunk.with_drafts((0,) * proposed)
                self._accepted[request] = min(accepted, proposed)
                acceptance.add(proposed, self._accepted[request])
        return StepTime(
            sum(time.time_ns for time in self._times), prompts_ns=sum(time.prompts_ns for time in self._times)
        )

    def count_accepted(self, request: Request) -> int:
        """Return how many drafts of a request were accepted in the last `propose`; 0 if it got none."""
        return self._accepted.get(request, 0)
