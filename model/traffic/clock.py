"""Predicted clock: the time of a step of the engine, from dry launches of its padded batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from model.engine import Batch
from model.engine.buckets import Buckets
from model.engine.kv_cache import PageCopies
from model.engine.padded_batch import PaddedBatch
from model.layers.launch import Phase, StepShape
from model.layers.paged import CacheGroup
from model.plan.predict import PassTime, Predictor
from model.plan.stacks import Served, Stack


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
    A pass has the device and engine times of `stack`, as in a plan; with None, the times of the kernels alone.
    `shapes` holds the predictions of the kernels so far.
    """

    def __init__(
        self,
        predictor: Predictor,
        buckets: Buckets,
        cache_groups: Sequence[CacheGroup],
        groups: int = 1,
        stack: Stack | None = None,
    ) -> None:
        self._groups = groups
        self._stack = stack
        self._predictor = predictor
        self._buckets = buckets
        self._cache_groups = cache_groups
        self.shapes: dict[StepShape, PassTime] = {}
        self._times_ns: dict[tuple[StepShape, int, int], int] = {}

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
            decoding, prompts = _count_sequences(padded_batch)
            step_ns = self._predict_pass(step, decoding, prompts)
            time_ns += step_ns
            padding += padded_batch.padding
            if step.phase is Phase.decode:
                # The shape changes once the longest request is at the end of its bucket.
                last = max(chunk.num_computed_tokens for chunk in padded_batch.chunks) + step.new_tokens - 1
                equal_steps.append(step.cache_length - last)
            else:
                decoding_ns = 0 if step.decoding is None else self._predict_pass(step.decoding, decoding, 0)
                equal_steps.append(1)
                prompts_ns += max(0, step_ns - decoding_ns)
        time_ns += self._predict_copies([group_batch.copies for group_batch in group_batches])
        return StepTime(time_ns, padding, min(equal_steps), prompts_ns)

    def _predict_pass(self, step: StepShape, decoding: int, prompts: int) -> int:
        """Return the time in whole nanoseconds, at least 1, of a pass with so many decoding sequences and prompts."""
        key = step, decoding, prompts
        time_ns = self._times_ns.get(key)
        if time_ns is None:
            if step not in self.shapes:
                self.shapes[step] = self._predictor.paged(step)
            time = self.shapes[step].time
            if self._stack is not None:
                time = serve_pass(self._stack, self.shapes[step], decoding, prompts).time
            time_ns = self._times_ns[key] = max(1, round(time.program_ns))
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


def serve_pass(stack: Stack, predicted: PassTime, decoding: int, prompts: int) -> Served:
    """Return the times of a pass on a serving stack; a pass of both kinds has the longer base of their engine times.

    Args:
        stack: The serving stack.
        predicted: The predicted times of the kernels.
        decoding: Number of sequences that decode in the pass.
        prompts: Number of prompts.
    """
    if not prompts:
        return stack.serve_step(predicted.time, decoding)
    served = stack.serve_prompts(predicted, prompts)
    if not decoding:
        return served
    both_ns = served.engine_ns + stack.step_engine.compute_ns(decoding)
    shorter_ns = min(stack.step_engine.compute_ns(0), stack.prompt_engine.compute_ns(0))
    return replace(served, engine_ns=both_ns - shorter_ns)


def _count_sequences(padded_batch: PaddedBatch) -> tuple[int, int]:
    """Return the numbers of decoding sequences and of prompts of a padded batch, of all groups, without padding."""
    count = len(padded_batch.chunks)
    if padded_batch.step.phase is Phase.decode:
        return count, 0
    decoding = padded_batch.decoding
    return (0 if decoding is None else len(decoding.chunks)), count
