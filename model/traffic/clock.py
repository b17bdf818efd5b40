"""The predicted clock: how long a step of the engine takes, from dry launches of its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from model.engine import Batch
from model.engine.buckets import Buckets, PartShape
from model.engine.kv_cache import PageCopies
from model.layers.paged import STATES, CacheGroup
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
    """Times of steps as the sum of their parts, in the program reading; a shape is predicted once.

    The cache has so many `pages` of each kind, in the order of the scheduler's pools; slots of states are the last. So
    it is on each of the `groups` of ranks that compute steps together.
    """

    def __init__(
        self,
        predictor: Predictor,
        buckets: Buckets,
        pages: Mapping[CacheGroup, int],
        block_size: int,
        groups: int = 1,
    ) -> None:
        self._groups = groups
        self._predictor = predictor
        self._buckets = buckets
        self._pages = (
            pages.get(None, 0),
            block_size,
            tuple((kind, count) for kind, count in pages.items() if isinstance(kind, int)),
            pages.get(STATES, 0),
        )
        self._kinds = tuple(pages)
        self.shapes: dict[PartShape, PassTime] = {}
        self._times_ns: dict[PartShape, int] = {}

    @property
    def takes_speech(self) -> bool:
        """Whether each prompt comes with a window of speech."""
        return self._buckets.whole_prompts

    def step(self, batch: Batch) -> StepTime:
        """The time of a step in whole nanoseconds."""
        time_ns, padding, alike, prompts_ns = 0, 0, list[int](), 0
        of_groups = batch.groups(self._groups)
        for part in self._buckets.parts(*of_groups):
            shape = part.shape
            taken = self._taken(shape)
            time_ns += taken
            padding += part.padding
            if shape.decodes:
                # A part has another shape once its longest request is at the end of its bucket.
                last = max(chunk.start for chunk in part.chunks) + shape.tokens - 1
                alike.append(shape.context - last)
            else:
                alike.append(1)
                prompts_ns += taken - (0 if shape.beside is None else min(taken, self._taken(shape.beside)))
        return StepTime(
            time_ns + self._copied([each.copies for each in of_groups]), padding, min(alike), prompts_ns
        )

    def _taken(self, shape: PartShape) -> int:
        """The time of a part in whole nanoseconds."""
        taken = self._times_ns.get(shape)
        return self._predicted(shape) if taken is None else taken

    def _copied(self, copies: Sequence[PageCopies]) -> int:
        """The time of copies of pages and slots, in whole nanoseconds: of the group with the most of each kind."""
        counts = Counter[int]()
        for own in copies:
            counts |= Counter(kind for kind, _ in own)
        times = (
            self._predictor.copies(count, self._kinds[kind], *self._pages) for kind, count in counts.items()
        )
        return sum(round(time.program_ns) for time in times)

    @property
    def refusals(self) -> tuple[str, ...]:
        """The different reasons for which parts of steps are rooflines."""
        return tuple(dict.fromkeys(each for done in self.shapes.values() for each in done.refusals))

    def _predicted(self, shape: PartShape) -> int:
        self.shapes[shape] = self._predictor.paged(shape, *self._pages)
        self._times_ns[shape] = max(1, round(self.shapes[shape].time.program_ns))
        return self._times_ns[shape]
