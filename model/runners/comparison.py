"""Every token that an engine chooses, held against the choice of the model in plain numpy."""

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
    """A new token, counted from 1, for which backend and reference made different choices.

    `logits_apart` and `reference_logits_apart` say how far the logits of the two lie apart in the step of either; None
    where a device gave candidates that do not hold both.
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
    """The tokens of one continuation that were compared, and those that differ."""

    tokens: int = 0
    differences: list[Difference] = field(default_factory=list)


class Comparison:
    """An observer of an engine that has the reference choose every token as well; `compared` is by request id.

    The reference gets the tokens that the engine chose, so that one difference does not breed others, and draws with
    the same parameters and random numbers. A continuation that a request forks into begins with a copy of its state.
    """

    def __init__(self, reference: ReferenceModel, decode: Callable[[Sequence[int]], str]) -> None:
        self.compared: dict[str, Compared] = {}
        self._reference, self._decode = reference, decode
        self._sequences: WeakKeyDictionary[Request, ReferenceSequence] = WeakKeyDictionary()

    def chosen(
        self, request: Request, tokens: Sequence[int], row: RowSampling, output: StepOutput, token: int
    ) -> None:
        """Compare one choice. Raises ModelError where the reference can make none."""
        sequence = self._sequences.get(request)
        if sequence is None:
            sequence = self._sequences[request] = self._start(request, tokens)
        if len(sequence.ids) < len(tokens):
            self._reference.extend(sequence, tokens[len(sequence.ids) :])
        expected = sequence.output
        (choice,) = choose([(row, expected)], self._decode)
        if isinstance(choice, BaseException):
            raise choice
        compared = self.compared.setdefault(request.id, Compared())
        compared.tokens += 1
        if choice.token != token:
            texts = self._decode([token]), self._decode([choice.token])
            apart = output.logit_gap(token, choice.token), expected.logit_gap(token, choice.token)
            compared.differences.append(
                Difference(compared.tokens, token, texts[0], choice.token, texts[1], *apart)
            )

    def _start(self, request: Request, tokens: Sequence[int]) -> ReferenceSequence:
        """The sequence of a new request: a copy of that of the request which it was forked from, or an empty one."""
        for other, sequence in self._sequences.items():
            if other.inputs is request.inputs and sequence.ids == tokens:
                return sequence.copy()
        return self._reference.start(None if request.inputs is None else request.inputs.features)
