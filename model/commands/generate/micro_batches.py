"""Backend that divides a batch into micro-batches, which pass the stages of a pipeline one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

from model.runners.static_batch import Backend
from model.sampling import StepOutput

_T = TypeVar("_T")


def size_micro_batches(sequences: int, count: int) -> list[int]:
    """Return the numbers of sequences of `count` micro-batches, which differ by at most 1; larger ones come first."""
    assert 0 < count <= sequences, f"{sequences} sequences in {count} micro-batches"
    size, more = divmod(sequences, count)
    return [size + (number < more) for number in range(count)]


def split_into_micro_batches(sequences: Sequence[_T], sizes: Sequence[int]) -> Iterator[Sequence[_T]]:
    """Yield the entries of each micro-batch in turn, out of a list with an entry for each sequence.

    Args:
        sequences: The entries.
        sizes: Number of sequences of each micro-batch; an assertion fails unless their sum is the number of entries.
    """
    assert len(sequences) == sum(sizes), f"{len(sequences)} sequences in micro-batches of {sizes}"
    for size, end in zip(sizes, accumulate(sizes)):
        yield sequences[end - size : end]


class MicroBatches:
    """Backend made of one backend for each micro-batch; all share the same weights."""

    def __init__(
        self, backends: Sequence[Backend], sizes: Sequence[int], done: Callable[[], None] = lambda: None
    ) -> None:
        """Take the backends of the micro-batches, in order.

        Args:
            backends: The backends.
            sizes: Number of sequences of each.
            done: Called after each step of one of the backends.
        """
        self._backends, self._sizes, self._done = backends, sizes, done

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[StepOutput]:
        """Start a sequence with each prompt, and return the output of the step for each, in the prompts' order."""
        return self._run(lambda backend, batch: backend.prefill(batch), prompts)

    def decode(self, tokens: Sequence[int | None], positions: Sequence[int]) -> list[StepOutput]:
        """Append a token to each sequence at its position, and return the output of the step for each sequence.

        Args:
            tokens: Token of each sequence; None for a finished one.
            positions: Position of each token.
        """
        return self._run(
            lambda backend, batch: backend.decode(
                [token for token, _ in batch], [position for _, position in batch]
            ),
            list(zip(tokens, positions, strict=True)),
        )

    def _run(
        self, step: Callable[[Backend, Sequence[_T]], Sequence[StepOutput]], sequences: Sequence[_T]
    ) -> list[StepOutput]:
        """Call `step` with the backend and the entries of each micro-batch, and return all outputs in order."""
        outputs: list[StepOutput] = []
        for backend, batch in zip(self._backends, split_into_micro_batches(sequences, self._sizes)):
            outputs += step(backend, batch)
            self._done()
        return outputs
