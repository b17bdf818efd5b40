"""The predicted clock: how long a step of the engine takes, from dry launches of its parts."""

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
    """A step of `time_ns`, of which chunks of prompts take `prompts_ns`, with padding of so many tokens.

    Chunks beside which sequences decode take what they add to the time in which these would decode alone.

    Where its requests decode, `alike` steps in a row, this one included, take as long.
    """

    time_ns: int
    padding: int = 0
    alike: int = 1
    prompts_ns: int = 0


class Clock(Protocol):
    """Something that says how long a step takes."""

    def step(self, batch: Batch) -> StepTime:
        """The time of a step, at least 1 ns."""


class PredictedClock:
    """Times of batches as the sums of their steps, in the program reading; a shape is predicted once.

    `buckets` are those of the model, with the pages and slots of its cache. `cache_groups` are in the order of the
    scheduler's pools; slots of states come last. `groups` is the number of groups of ranks that compute steps together.
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
        """The time of a step in whole nanoseconds."""
        time_ns, padding, alike, prompts_ns = 0, 0, list[int](), 0
        group_batches = batch.groups(self._groups)
        for padded_batch in self._buckets.pad(*group_batches):
            step = padded_batch.step
            taken = self._taken(step)
            time_ns += taken
            padding += padded_batch.padding
            if step.phase is Phase.decode:
                # The shape changes once the longest request is at the end of its bucket.
                last = max(chunk.num_computed_tokens for chunk in padded_batch.chunks) + step.new_tokens - 1
                alike.append(step.cache_length - last)
            else:
                alike.append(1)
                prompts_ns += taken - (0 if step.decoding is None else min(taken, self._taken(step.decoding)))
        copied = self._copied([group_batch.copies for group_batch in group_batches])
        return StepTime(time_ns + copied, padding, min(alike), prompts_ns)

    def _taken(self, shape: StepShape) -> int:
        """Return the time of a step in whole nanoseconds."""
        taken = self._times_ns.get(shape)
        return self._predicted(shape) if taken is None else taken

    def _copied(self, copies: Sequence[PageCopies]) -> int:
        """The time of copies of pages and slots, in whole nanoseconds: of the group with the most of each kind."""
        counts = Counter[int]()
        for own in copies:
            counts |= Counter(pool for pool, _ in own)
        times = (
            self._predictor.time_copies(count, self._cache_groups[pool], self._buckets.model_step)
            for pool, count in counts.items()
        )
        return sum(round(time.program_ns) for time in times)

    @property
    def refusals(self) -> tuple[str, ...]:
        """The different reasons for which parts of steps are rooflines."""
        return tuple(dict.fromkeys(each for done in self.shapes.values() for each in done.refusals))

    def _predicted(self, shape: StepShape) -> int:
        self.shapes[shape] = self._predictor.paged(shape)
        self._times_ns[shape] = max(1, round(self.shapes[shape].time.program_ns))
        return self._times_ns[shape]
