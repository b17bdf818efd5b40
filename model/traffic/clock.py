"""Predicted clock: the time of a step of the engine, from dry launches of its padded batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from model.engine import Batch
from model.engine.buckets import Buckets
from model.engine.kv_cache import PageCopies
from model.layers.launch import Phase, StepShape
from model.layers.paged import CacheGroup
from model.plan.predict import PassTime, Predictor


@dataclass(frozen=True)
class StepTime:
    """Time of a step, of which chunks of prompts take `prompts_ns`.

    Chunks that are launched together with decoding sequences take the time that they add to a launch of these alone.
    `padding` counts the tokens that only round the step up. If all requests decode, `equal_steps` steps in a row, this
    one included, take the same time.
    """

    time_ns: int
    padding: int = 0
    equal_steps: int = 1
    prompts_ns: int = 0


class Clock(Protocol):
    """Predictor of the times of steps."""

    def step(self, batch: Batch) -> StepTime:
        """Return the time of a step, at least 1 ns."""


class PredictedClock:
    """Clock on which a batch takes the sum of its padded batches, in the program reading. Each shape is predicted once.

    `buckets` are those of the model, with the pages and slots of its cache. `cache_groups` are in the order of the
    scheduler's pools; slots of states come last. `groups` is the number of groups of ranks that compute steps together.
    `shapes` holds the predictions so far.
    """

    def __init__(
        self,
        predictor: Predictor,
        buckets: Buckets,
        cache_groups: Sequence[CacheGroup],
        groups: int = 1,
    ) -> None:
        self._groups = groups
        self._predictor = predictor
        self._buckets = buckets
        self._cache_groups = cache_groups
        self.shapes: dict[StepShape, PassTime] = {}
        self._times_ns: dict[StepShape, int] = {}

    @property
    def takes_speech(self) -> bool:
        """Whether each prompt comes with a window of speech."""
        return self._buckets.whole_prompts

    def step(self, batch: Batch) -> StepTime:
        """Return the time of a step in whole nanoseconds."""
        time_ns, padding, equal_steps, prompts_ns = 0, 0, list[int](), 0
        group_batches = batch.split_groups(self._groups)
        for padded_batch in self._buckets.pad(*group_batches):
            step = padded_batch.step
            step_ns = self._predict_step(step)
            time_ns += step_ns
            padding += padded_batch.padding
            if step.phase is Phase.decode:
                # The shape changes once the longest request is at the end of its bucket.
                last = max(chunk.num_computed_tokens for chunk in padded_batch.chunks) + step.new_tokens - 1
                equal_steps.append(step.cache_length - last)
            else:
                decoding_ns = 0 if step.decoding is None else self._predict_step(step.decoding)
                equal_steps.append(1)
                prompts_ns += max(0, step_ns - decoding_ns)
        time_ns += self._predict_copies([group_batch.copies for group_batch in group_batches])
        return StepTime(time_ns, padding, min(equal_steps), prompts_ns)

    def _predict_step(self, step: StepShape) -> int:
        """Return the time of a padded batch in whole nanoseconds, at least 1."""
        time_ns = self._times_ns.get(step)
        if time_ns is None:
            self.shapes[step] = self._predictor.paged(step)
            time_ns = self._times_ns[step] = max(1, round(self.shapes[step].time.program_ns))
        return time_ns

    def _predict_copies(self, copies: Sequence[PageCopies]) -> int:
        """Return the time of copies of pages and slots in whole nanoseconds.

        All groups of ranks copy at the same time, so the group with the most copies of a pool decides.
        """
        counts = Counter[int]()
        for group_copies in copies:
            counts |= Counter(pool for pool, _ in group_copies)
        times = (
            self._predictor.time_copies(count, self._cache_groups[pool], self._buckets.model_step)
            for pool, count in counts.items()
        )
        return sum(round(time.program_ns) for time in times)

    @property
    def refusals(self) -> tuple[str, ...]:
        """Different reasons for which parts of steps are rooflines."""
        return tuple(dict.fromkeys(refusal for done in self.shapes.values() for refusal in done.refusals))
