"""The loop: one prompt through a backend, token after token, with the numpy reference checking each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from model.config import ModelConfig
from model.errors import ModelError
from model.sampling import Sampler, SamplingOptions, StepOutput
from model.tokenizer import Tokenizer


class Backend(Protocol):
    """Something that computes the model for one sequence at a time."""

    def prefill(self, ids: Sequence[int]) -> StepOutput:
        """Start a sequence with a prompt; says what follows it."""

    def decode(self, token: int, position: int) -> StepOutput:
        """Append one token at `position`, which is the number of tokens before it; says what follows it."""


class StopReason(Enum):
    """Why a generation ended."""

    end_token = "end token"
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
    """The result of a generation; an end token counts and has no text. Times are of this machine, not of a chip."""

    prompt_ids: tuple[int, ...]
    generated_ids: tuple[int, ...]
    text: str
    stopped_by: StopReason
    tokens_compared: int
    differences: tuple[Difference, ...]
    prefill_seconds: float
    decode_seconds: float

    @property
    def tokens_equal(self) -> int:
        """The tokens that backend and reference chose alike."""
        return self.tokens_compared - len(self.differences)


def encode_prompt(prompt: str, tokenizer: Tokenizer, config: ModelConfig) -> list[int]:
    """The ids of a prompt; ModelError if there are none, or if the context has no room for another."""
    ids = tokenizer.encode(prompt)
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
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    sampling: SamplingOptions,
    reference: Backend | None = None,
    emit: Callable[[str], None] = lambda text: None,
    prompt_done: Callable[[], None] = lambda: None,
) -> Generation:
    """Generate up to `max_new_tokens` tokens, giving `emit` every piece of text as its characters are complete.

    `prompt_done` is called when the backend has processed the prompt.

    The reference is fed the tokens that the backend chose (so one difference does not breed others) and chooses with
    a sampler of the same seed; choices that differ are kept.
    """
    if max_new_tokens < 1:
        raise ModelError(f"{max_new_tokens} new tokens; at least 1 is needed")
    stream = tokenizer.stream(prompt_ids)
    chooser, checker = Sampler(sampling), Sampler(sampling)
    limit = positions_needed(len(prompt_ids), max_new_tokens, config)
    generated: list[int] = []
    pieces: list[str] = []
    compared = 0
    differences: list[Difference] = []

    def give(text: str) -> None:
        if text:
            pieces.append(text)
            emit(text)

    start = time.perf_counter()
    step = backend.prefill(prompt_ids)
    prefill_seconds = time.perf_counter() - start
    prompt_done()
    decode_seconds = 0.0
    expected = reference.prefill(prompt_ids) if reference else None
    while True:
        token = chooser.choose(step)
        generated.append(token)
        if expected is not None:
            compared += 1
            wanted = checker.choose(expected)
            if wanted != token:
                texts = tokenizer.decode([token]), tokenizer.decode([wanted])
                apart = step.apart(token, wanted), expected.apart(token, wanted)
                differences.append(Difference(compared, token, texts[0], wanted, texts[1], *apart))
        if token in config.eos_token_ids:
            stopped_by = StopReason.end_token
            break
        give(stream.push(token))
        position = len(prompt_ids) + len(generated) - 1
        if position + 1 == limit:
            stopped_by = StopReason.length if len(generated) == max_new_tokens else StopReason.context
            break
        start = time.perf_counter()
        step = backend.decode(token, position)
        decode_seconds += time.perf_counter() - start
        if reference is not None:
            expected = reference.decode(token, position)
    give(stream.finish())
    return Generation(
        tuple(prompt_ids),
        tuple(generated),
        "".join(pieces),
        stopped_by,
        compared,
        tuple(differences),
        prefill_seconds,
        decode_seconds,
    )
