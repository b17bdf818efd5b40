"""Comparison of every token that an engine samples with the token that the reference model samples.

Commands with `--compare` give it to the engine as an observer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from model.engine.request import Request
from model.engine.sampler import choose
from model.runners.reference import ReferenceModel, ReferenceSequence
from model.sampling import RowSampling, StepOutput


@dataclass(frozen=True)
class Difference:
    """Sampled token that differs between the engine's backend and the reference.

    `number` counts the new tokens of the continuation from 1. `logits_apart` and `reference_logits_apart` are the
    distances between the logits of the two tokens, as computed by the backend and by the reference. A distance is None
    if the device's candidates lack one of the tokens.
    """

    number: int
    id: int
    text: str
    reference_id: int
    reference_text: str
    logits_apart: float | None
    reference_logits_apart: float | None


@dataclass
class Compared:
    """Number of compared tokens of one continuation, and those that differ."""

    tokens: int = 0
    differences: list[Difference] = field(default_factory=list)


class Comparison:
    """Observer of an engine that samples every token with the reference as well; `compared` is by request id.

    The reference continues the engine's tokens, so one difference causes no further ones. It samples with the same
    parameters and random numbers. A forked continuation begins with a copy of the state of its request.
    """

    def __init__(self, reference: ReferenceModel, decode: Callable[[Sequence[int]], str]) -> None:
        self.compared: dict[str, Compared] = {}
        self._reference, self._decode = reference, decode
        self._sequences: WeakKeyDictionary[Request, ReferenceSequence] = WeakKeyDictionary()

    def observe_choice(
        self, request: Request, tokens: Sequence[int], row: RowSampling, output: StepOutput, token: int
    ) -> None:
        """Sample a token with the reference, and record in `compared` whether it equals the engine's token.

        Args:
            request: The request.
            tokens: The tokens before the sampled one.
            row: The sampling parameters and the random number.
            output: The engine's output of the step.
            token: The token that the engine sampled.

        Raises:
            ModelError: The reference cannot sample a token.
        """
        sequence = self._sequences.get(request)
        if sequence is None:
            sequence = self._sequences[request] = self._start(request, tokens)
        if len(sequence.ids) < len(tokens):
            self._reference.extend(sequence, tokens[len(sequence.ids) :])
        (choice,) = choose([(row, sequence.output)], self._decode)
        if isinstance(choice, BaseException):
            raise choice
        compared = self.compared.setdefault(request.id, Compared())
        compared.tokens += 1
        if choice.token != token:
            compared.differences.append(
                Difference(
                    number=compared.tokens,
                    id=token,
                    text=self._decode([token]),
                    reference_id=choice.token,
                    reference_text=self._decode([choice.token]),
                    logits_apart=output.compute_logit_gap(token, choice.token),
                    reference_logits_apart=sequence.output.compute_logit_gap(token, choice.token),
                )
            )

    def _start(self, request: Request, tokens: Sequence[int]) -> ReferenceSequence:
        """Return the reference's sequence for a new request.

        It is a copy of the parent's sequence if the request was forked, else a sequence without tokens.
        """
        for parent, sequence in self._sequences.items():
            if parent.inputs is request.inputs and sequence.ids == tokens:
                return sequence.copy()
        return self._reference.start(None if request.inputs is None else request.inputs.features)
