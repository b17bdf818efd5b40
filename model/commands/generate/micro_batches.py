"""A backend that computes a batch as micro-batches, which follow each other through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

from model.runners.static_batch import Backend
from model.sampling import StepOutput

_T = TypeVar("_T")


def micro_batch_sizes(sequences: int, count: int) -> list[int]:
    """The sequences of each of `count` micro-batches: as many, or one more in the first ones."""
    assert 0 < count <= sequences, f"{sequences} sequences in {count} micro-batches"
    each, more = divmod(sequences, count)
    return [each + (number < more) for number in range(count)]


def of_micro_batches(given: Sequence[_T], sizes: Sequence[int]) -> Iterator[Sequence[_T]]:
    """What is given for every sequence, micro-batch by micro-batch."""
    assert len(given) == sum(sizes), f"{len(given)} sequences in micro-batches of {sizes}"
    for size, end in zip(sizes, accumulate(sizes)):
        yield given[end - size : end]


class MicroBatches:
    """A backend for each micro-batch, of `sizes` sequences, all of which hold the same weights.

    `done` is called after a step of each micro-batch.
    """

    def __init__(
        self, backends: Sequence[Backend], sizes: Sequence[int], done: Callable[[], None] = lambda: None
    ) -> None:
        self._backends, self._sizes, self._done = backends, sizes, done

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[StepOutput]:
        """Start a sequence with each prompt; says what follows each."""
        return self._all(lambda backend, own: backend.prefill(own), prompts)

    def decode(self, tokens: Sequence[int | None], positions: Sequence[int]) -> list[StepOutput]:
        """Append a token to each sequence that has not ended, at its position; says what follows each."""
        steps = list(zip(tokens, positions, strict=True))
        return self._all(
            lambda backend, own: backend.decode([token for token, _ in own], [at for _, at in own]), steps
        )

    def _all(
        self, step: Callable[[Backend, Sequence[_T]], Sequence[StepOutput]], given: Sequence[_T]
    ) -> list[StepOutput]:
        outputs: list[StepOutput] = []
        for backend, own in zip(self._backends, of_micro_batches(given, self._sizes)):
            outputs += step(backend, own)
            self._done()
        return outputs
