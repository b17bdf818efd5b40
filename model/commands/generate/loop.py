"""The loop: prompts through a backend, token after token, with the numpy reference checking each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Protocol

from model.config import ModelConfig
from model.engine.stop_strings import StopStrings
from model.errors import ModelError
from model.loading.tokenizer import Tokenizer, TokenStream
from model.sampling import Sampler, SamplingOptions, StepOutput


class Backend(Protocol):
    """Something that computes the model for a batch of sequences."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Sequence[StepOutput]:
        """Start a sequence with each prompt; says what follows each."""

    def decode(self, tokens: Sequence[int | None], positions: Sequence[int]) -> Sequence[StepOutput]:
        """Append a token to each sequence at its position, the number of tokens before it; says what follows each.

        A sequence whose token is None has ended: nothing is appended, and what follows it means nothing.
        """


class StopReason(Enum):
    """Why a generation ended."""

    end_token = "end token"
    stop_string = "stop string"
    length = "length"
    context = "context"


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


@dataclass(frozen=True)
class Generation:
    """The result of one prompt; an end token counts and has no text, a stop string and what follows it neither."""

    prompt_ids: tuple[int, ...]
    generated_ids: tuple[int, ...]
    text: str
    stopped_by: StopReason
    tokens_compared: int
    differences: tuple[Difference, ...]

    @property
    def tokens_equal(self) -> int:
        """The tokens that backend and reference chose alike."""
        return self.tokens_compared - len(self.differences)


def encode_prompt(
    prompt: str, tokenizer: Tokenizer, config: ModelConfig, special_tokens: bool = True
) -> list[int]:
    """The ids of a prompt, with the special tokens that tokenizer.json adds unless `special_tokens` is False.

    Raises ModelError if there are none, or if the context has no room for another.
    """
    ids = tokenizer.encode(prompt, special_tokens)
    if not ids:
        raise ModelError("the prompt has no tokens; this tokenizer adds none at the start of a text")
    room = config.context
    if len(ids) >= room:
        raise ModelError(
            f"the prompt has {len(ids)} tokens; the context of {room} leaves no room for a new one"
        )
    return ids


def positions_needed(prompt_tokens: int, max_new_tokens: int, config: ModelConfig) -> int:
    """How many positions a generation can fill: prompt and new tokens, at most the context."""
    return min(prompt_tokens + max_new_tokens, config.context)


def generate(
    backend: Backend,
    tokenizer: Tokenizer,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingOptions,
    reference: Backend | None = None,
    emit: Callable[[int, str], None] = lambda number, text: None,
    prompts_done: Callable[[], None] = lambda: None,
    stops: Sequence[str] = (),
) -> list[Generation]:
    """Generate up to `max_new_tokens` tokens after each of the prompts, which are computed in one batch.

    `emit` is given the number of a prompt and every piece of text that follows it, as its characters are complete and
    no stop string can begin in it. `prompts_done` is called when the backend has processed the prompts. Each prompt
    gets what it would get alone: its sampler has the seed of `sampling`.

    The reference is fed the tokens that the backend chose (so one difference does not breed others) and chooses with
    samplers of the same seed; choices that differ are kept.
    """
    if max_new_tokens < 1:
        raise ModelError(f"{max_new_tokens} new tokens; at least 1 is needed")
    sequences = [
        _Sequence(
            ids,
            tokenizer.stream(ids),
            StopStrings(stops),
            Sampler(sampling),
            Sampler(sampling),
            partial(emit, number),
        )
        for number, ids in enumerate(prompts)
    ]
    steps = backend.prefill(prompts)
    prompts_done()
    expected: Sequence[StepOutput | None] = [None] * len(prompts)
    if reference is not None:
        expected = reference.prefill(prompts)
    while True:
        for sequence, step, wanted in zip(sequences, steps, expected):
            if sequence.stopped_by is None:
                sequence.advance(step, wanted, max_new_tokens, config, tokenizer)
        if all(each.stopped_by is not None for each in sequences):
            return [each.result() for each in sequences]
        tokens = [None if each.stopped_by is not None else each.generated[-1] for each in sequences]
        positions = [each.position for each in sequences]
        steps = backend.decode(tokens, positions)
        if reference is not None:
            expected = reference.decode(tokens, positions)


@dataclass
class _Sequence:
    """A prompt on its way, with what was chosen after it."""

    prompt_ids: Sequence[int]
    stream: TokenStream
    stops: StopStrings
    chooser: Sampler
    checker: Sampler
    emit: Callable[[str], None]
    generated: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    compared: int = 0
    differences: list[Difference] = field(default_factory=list)
    stopped_by: StopReason | None = None

    @property
    def position(self) -> int:
        """The position of the newest token."""
        return len(self.prompt_ids) + len(self.generated) - 1

    def advance(
        self,
        step: StepOutput,
        expected: StepOutput | None,
        max_new_tokens: int,
        config: ModelConfig,
        tokenizer: Tokenizer,
    ) -> None:
        """Choose the next token, compare it with the reference's choice, and see whether the sequence ends."""
        token = self.chooser.choose(step)
        self.generated.append(token)
        if expected is not None:
            self._compare(token, step, expected, tokenizer)
        if token in config.eos_token_ids:
            self.stopped_by = StopReason.end_token
        else:
            self._give(self.stops.push(self.stream.push(token)))
            limit = positions_needed(len(self.prompt_ids), max_new_tokens, config)
            if self.stops.found:
                self.stopped_by = StopReason.stop_string
            elif self.position + 1 == limit:
                full = len(self.generated) == max_new_tokens
                self.stopped_by = StopReason.length if full else StopReason.context
        if self.stopped_by is not None and not self.stops.found:
            self._give(self.stops.push(self.stream.finish()))
            self._give(self.stops.finish())

    def result(self) -> Generation:
        """What became of the prompt."""
        assert self.stopped_by is not None
        return Generation(
            tuple(self.prompt_ids),
            tuple(self.generated),
            "".join(self.pieces),
            self.stopped_by,
            self.compared,
            tuple(self.differences),
        )

    def _compare(self, token: int, step: StepOutput, expected: StepOutput, tokenizer: Tokenizer) -> None:
        self.compared += 1
        wanted = self.checker.choose(expected)
        if wanted != token:
            texts = tokenizer.decode([token]), tokenizer.decode([wanted])
            apart = step.apart(token, wanted), expected.apart(token, wanted)
            self.differences.append(Difference(self.compared, token, texts[0], wanted, texts[1], *apart))

    def _give(self, text: str) -> None:
        if text:
            self.pieces.append(text)
            self.emit(text)
