"""Sampling parameters of requests, with vLLM's names, defaults and meanings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from model.engine.checks import (
    check_flag,
    check_integer,
    check_number,
    check_optional_integer,
    check_range,
    check_texts,
    check_token_ids,
    check_vocabulary,
    display_value,
)
from model.engine.structured import StructuredOutputsParams
from model.errors import ModelError

MOST_LOGPROBS = 20
"""Largest number of log-probabilities, as in OpenAI's API."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request: the number of continuations of a prompt, and how their tokens are sampled.

    Attributes:
        n: Number of continuations.
        presence_penalty: Subtracted from the logits of tokens in the output.
        frequency_penalty: Subtracted from the logits of tokens in the output, once for each occurrence.
        repetition_penalty: Divides logits above 0, and multiplies logits below 0, of tokens in prompt or output.
        temperature: Divides logits; 0 selects the largest logit. Temperatures above 0 are at least 1e-6.
        top_p: Samples from the likeliest tokens with this joint probability. Each limit keeps the likeliest token.
        top_k: Samples from so many likeliest tokens; 0 and -1 stand for all.
        min_p: Samples from tokens with at least this share of the likeliest token's probability.
        seed: Determines random numbers together with the index of the continuation.
        stop: Strings that end the text.
        stop_token_ids: Tokens that end the text.
        ignore_eos: Whether the model's end tokens do not end the text.
        max_tokens: Largest number of new tokens; None for as many as the context allows.
        min_tokens: Number of first tokens that only `max_tokens` can end, and that are not searched for `stop`.
        logprobs: Number of likeliest tokens whose log-probabilities are returned with each sampled token. They are
            computed from the model's logits, before penalties, biases and limits.
        prompt_logprobs: As `logprobs`, for each token of the prompt except the first. The prompt then shares no page.
        skip_special_tokens: Only True is supported.
        include_stop_str_in_output: Whether the text contains the stop string that ended it.
        logit_bias: Added to the logits of token ids.
        allowed_token_ids: The only tokens that can be sampled.
        structured_outputs: The form of the text.
        stops: The strings of `stop` as a tuple.

    Raises:
        ModelError: A value has another type or is out of range. Iterables are read once, at construction.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    stops: tuple[str, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        for name, check in _TYPES.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.seed == -1:  # in vLLM, as None
            object.__setattr__(self, "seed", None)
        stops = () if self.stop is None else check_texts("stop", self.stop)
        object.__setattr__(self, "stop", self.stop if isinstance(self.stop, str) else stops or None)
        object.__setattr__(self, "stops", stops)
        ranges: tuple[tuple[str, float | None, float, float], ...] = (
            ("n", self.n, 1, 128),
            ("presence_penalty", self.presence_penalty, -2, 2),
            ("frequency_penalty", self.frequency_penalty, -2, 2),
            ("repetition_penalty", self.repetition_penalty, 1 / 16, 16),
            ("temperature", self.temperature, 0, 1e6),
            ("top_k", self.top_k, -1, float("inf")),
            ("min_p", self.min_p, 0, 1),
            ("max_tokens", self.max_tokens, 1, float("inf")),
            ("min_tokens", self.min_tokens, 0, float("inf") if self.max_tokens is None else self.max_tokens),
            ("logprobs", self.logprobs, 0, MOST_LOGPROBS),
            ("prompt_logprobs", self.prompt_logprobs, 0, MOST_LOGPROBS),
            ("seed", self.seed, 0, 2**63 - 1),
        )
        for name, value, least, most in ranges:
            check_range(name, value, least, most)
        if not self.skip_special_tokens:
            raise ModelError(
                "skip_special_tokens is False; texts are decoded without special tokens only: leave it out"
            )
        if not 0 < self.top_p <= 1:
            raise ModelError(f"top_p is {display_value(self.top_p)}; it must be above 0 and at most 1")
        if not all(stops):
            raise ModelError("a stop string is empty; every text begins with it: leave it out")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ModelError(
                "allowed_token_ids is empty; no token could be chosen: leave it out to allow all tokens"
            )

    def check_vocabulary(self, size: int) -> None:
        """Check that all token ids of the parameters are in a vocabulary of `size` tokens.

        Raises:
            ModelError: A token id is outside the vocabulary.
        """
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            check_vocabulary(name, getattr(self, name) or (), size)


def _check_token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    """Return the distinct token ids of an iterable in their order, or None for None.

    Raises:
        ModelError: The value is no list of token ids.
    """
    return None if value is None else tuple(dict.fromkeys(check_token_ids(name, value)))


def _check_biases(name: str, value: Any) -> dict[int, float] | None:
    """Return the bias of each token id as a dict, or None for None.

    Raises:
        ModelError: The value is no mapping from whole numbers to numbers from -100 to 100.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ModelError(f"{name} is {display_value(value)}; it must map token ids to numbers")
    biases = {}
    for key, bias in value.items():
        token_id = check_integer(f"a token id of {name}", key)
        biases[token_id] = check_number(f"{name} of token {display_value(token_id)}", bias)
        check_range(f"{name} of token {display_value(token_id)}", bias, -100, 100)
    return biases


def _check_form(name: str, value: Any) -> StructuredOutputsParams | None:
    """Return a StructuredOutputsParams or None as it is.

    Raises:
        ModelError: The value has another type.
    """
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    raise ModelError(f"{name} is {display_value(value)}; it must be StructuredOutputsParams")


_TYPES: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("n", "top_k", "min_tokens"), check_integer),
    **dict.fromkeys(("seed", "max_tokens", "logprobs", "prompt_logprobs"), check_optional_integer),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), check_number),
    **dict.fromkeys(("temperature", "top_p", "min_p"), check_number),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"), check_flag),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), _check_token_ids),
    "logit_bias": _check_biases,
    "structured_outputs": _check_form,
}
"""The check of each field except `stop`, which returns the value of the field."""
