"""Drafts on the predicted clock: how many of them are right, and how long a draft model takes to propose them."""

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
"""Of a text on which acceptance is measured, from its first one on."""


class Outcomes(Protocol):
    """Something that says what becomes of drafts."""

    def draw(self, count: int, draw: np.random.Generator) -> Sequence[tuple[int, int]]:
        """For each of `count` requests how many drafts are proposed, and how many of these are right."""


@dataclass(frozen=True)
class AcceptanceRates:
    """The share of drafts that are right where all drafts before them are: one of each place behind the last token."""

    rates: tuple[float, ...]

    @classmethod
    def parsed(cls, text: str, tokens: int) -> AcceptanceRates:
        """The rates of `tokens` places; the last one in a text such as 0.7,0.5 holds for the places after it."""
        try:
            rates = [float(each) for each in text.split(",")]
        except ValueError:
            rates = []
        if not rates or not all(0 <= each <= 1 for each in rates) or len(rates) > tokens:
            raise ModelError(
                f"acceptance {text!r:.60}; write 0.7, or 0.7,0.5 for the first draft and those after it, from 0 to 1, "
                f"for at most the {tokens} drafts of a step"
            )
        return cls((*rates, *(rates[-1:] * (tokens - len(rates)))))

    def draw(self, count: int, draw: np.random.Generator) -> Sequence[tuple[int, int]]:
        """Every draft is proposed."""
        right = (draw.random(count)[:, None] < np.cumprod(self.rates)).sum(axis=1)
        return [(len(self.rates), each) for each in right.tolist()]


@dataclass(frozen=True)
class MeasuredOutcomes:
    """The steps in which prompt lookup wrote a text: drafts that were proposed, and how many of these were right."""

    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of_text(cls, tokens: Sequence[int], drafts: int) -> MeasuredOutcomes:
        """What prompt lookup proposes for a text, as if each of its tokens were generated; ModelError for one token."""
        tokens = list(tokens[:MEASURED_TOKENS])
        if len(tokens) < 2:
            raise ModelError(f"the text has {len(tokens)} tokens; acceptance is measured on 2 at least")
        lookup, steps, at = PromptLookup(), [], 1
        while at < len(tokens):
            proposed = lookup.after(tokens[:at], min(drafts, len(tokens) - at))
            right = 0
            while right < len(proposed) and proposed[right] == tokens[at + right]:
                right += 1
            steps.append((len(proposed), right))
            at += right + 1
        return cls(tuple(steps))

    def draw(self, count: int, draw: np.random.Generator) -> Sequence[tuple[int, int]]:
        """Any of the steps, each as often as another."""
        return [self.steps[each] for each in draw.integers(len(self.steps), size=count).tolist()]


@dataclass(frozen=True)
class Speculation:
    """What becomes of drafts, and the model that proposes them; None where they are looked up in the prompt."""

    outcomes: Outcomes
    model: ModelSizes | None = None


class _AnyToken(StepOutput):
    """The output of a step that nobody computes."""

    @property
    def likeliest(self) -> int:
        """Any token: what becomes of it is drawn."""
        return 0


_ANY = _AnyToken()


class _TimedSteps:
    """The steps of a draft model on a clock."""

    def __init__(self, clock: Clock) -> None:
        self.use = BucketUse()
        self.taken: list[StepTime] = []
        self._clock = clock

    def step(self, batch: Batch, rows: Rows = NO_ROWS) -> Mapping[Request, Sequence[StepOutput]]:
        """The time of a batch is added to what was `taken`."""
        self.taken.append(self._clock.step(batch))
        return {request: (_ANY,) for request, chunk in batch.chunks.items() if chunk.samples}


class Drafts:
    """What proposes drafts to one replica: a draft model of whose steps `clock` knows the times, or no time at all."""

    def __init__(self, outcomes: Outcomes, clock: Clock | None, seed: int = 0) -> None:
        self._outcomes = outcomes
        self._steps = None if clock is None else _TimedSteps(clock)
        self._model = None if self._steps is None else DraftModel(self._steps)
        self._draw = np.random.default_rng(seed)
        self._right: dict[Request, int] = {}

    def propose(self, batch: Batch, acceptance: Acceptance) -> StepTime:
        """Give chunks their drafts; returns the time that this takes."""
        taken: Sequence[StepTime] = ()
        if self._model is not None and self._steps is not None:
            self._model.propose(batch)
            taken, self._steps.taken = self._steps.taken, []
        slots = [(request, chunk) for request, chunk in batch.chunks.items() if chunk.draft_slots]
        self._right.clear()
        for (request, chunk), (proposed, right) in zip(slots, self._outcomes.draw(len(slots), self._draw)):
            proposed = min(proposed, chunk.draft_slots)
            if proposed:
                batch.chunks[request] = chunk.with_drafts((0,) * proposed)
                self._right[request] = min(right, proposed)
                acceptance.add(proposed, self._right[request])
        return StepTime(sum(each.time_ns for each in taken), 0, 1, sum(each.prompts_ns for each in taken))

    def right(self, request: Request) -> int:
        """How many drafts of the last step are right."""
        return self._right.get(request, 0)
