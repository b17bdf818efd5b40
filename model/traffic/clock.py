"""Predicted clock: how long a step of the engine would take on the chip.

The replicas of `nkw traffic` ask the clock for the time of every step that their scheduler makes. A step is divided
into padded batches: chunks of requests that one pass of the model computes, rounded up to bucket sizes. Each shape of a
padded batch is timed once, by running the kernels of the pass on a simulated core without their arithmetic (a dry run).
"""

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
    """Time of a step and what it consists of.

    `time_ns` is the time of the whole step. Chunks of prompts account for `prompts_ns` of it: in a pass that also
    decodes, for the time that they add to a pass of the decoding sequences alone. `padding` is the number of computed
    tokens that belong to no request. If all requests decode, `equal_steps` steps in a row, this step included, take the
    same time.
    """

    time_ns: int
    padding: int = 0
    equal_steps: int = 1
    prompts_ns: int = 0


class Clock(Protocol):
    """Predictor of the times of steps."""

    def step(self, batch: Batch) -> StepTime:
        """Return the time of the step that computes `batch`; `time_ns` is at least 1."""


class PredictedClock:
    """Clock on which a step takes the sum of the predicted times of its padded batches and of its page copies.

    Times are the simulator's program reading, its prediction between the two bounds. `shapes` has the predicted kernel
    times of every shape so far, so each shape is predicted once.

    Args:
        predictor: Predicts passes of the model and copies of pages.
        buckets: Sizes to which the model's steps are rounded up, with the pages and slots of its cache.
        cache_groups: Cache group of each of the scheduler's page pools, in the order of the pools; the slots of
            recurrent
        states come last.
        groups: Number of data-parallel groups of ranks that compute steps together.
        stack: Serving stack that adds the host's time to a pass and scales the kernels' time; with None, a pass takes
            the
        time of its kernels.
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
        """Whether each prompt comes with a window of speech, so that prompts are computed whole."""
        return self._buckets.whole_prompts

    def step(self, batch: Batch) -> StepTime:
        """Return the time of the step that computes `batch`, in whole nanoseconds.

        The times of its padded batches and of its page copies are added up. New shapes are predicted and kept.
        """
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
        """Return the time of a pass on the serving stack in whole nanoseconds, at least 1.

        Args:
            step: Shape of the pass.
            decoding: Number of requests that decode in the pass, without padding; it decides the host's time.
            prompts: Number of requests of whose prompts the pass computes a chunk.
        """
        key = step, decoding, prompts
        time_ns = self._times_ns.get(key)
        if time_ns is None:
            if step not in self.shapes:
                self.shapes[step] = self._predictor.predict_paged(step)
            time = self.shapes[step].time
            if self._stack is not None:
                time = serve_pass(self._stack, self.shapes[step], decoding, prompts).time
            time_ns = self._times_ns[key] = max(1, round(time.program_ns))
        return time_ns

    def _predict_copies(self, copies: Sequence[PageCopies]) -> int:
        """Return the time in whole ns in which a step copies pages and slots before its passes; 0 without copies.

        All groups of ranks copy at the same time, so for each pool the group with the most copies decides.

        Args:
            copies: Copies of each group; the first element of a copy is the index of its page pool.
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
        """Distinct reasons for which kernels of the predicted steps have a roofline as their time."""
        return tuple(dict.fromkeys(refusal for done in self.shapes.values() for refusal in done.refusals))


def serve_pass(stack: Stack, predicted: PassTime, decoding: int, prompts: int) -> Served:
    """Return the times of a pass on a serving stack: the device's time, and the host's time before and after it.

    A pass that decodes and computes prompts has the host's time of both, minus the smaller of the two constant terms.

    Args:
        stack: The serving stack.
        predicted: The predicted times of the pass's kernels.
        decoding: Number of sequences that decode in the pass.
        prompts: Number of prompts of which the pass computes a chunk.
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
    """Return (number of decoding sequences, number of prompts) of a padded batch, over all groups, without padding."""
    count = len(padded_batch.chunks)
    if padded_batch.step.phase is Phase.decode:
        return count, 0
    decoding = padded_batch.decoding
    return (0 if decoding is None else len(decoding.chunks)), count
