"""How a request chooses its tokens and when it ends, with vLLM's names, defaults and meanings."""

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
"""As in OpenAI's API."""


@dataclass(frozen=True)
class SamplingParams:
    """`n` continuations of a prompt, and how each token of them is chosen.

    - Logits first: `logit_bias` is added; `repetition_penalty` divides those above 0, and multiplies those below, of
      tokens in the prompt or the output; `presence_penalty` is subtracted for tokens in the output,
      `frequency_penalty` as often as they are there. `allowed_token_ids`, where given, are the only ones; so are those
      that `structured_outputs` allows.
    - The draw: logits are divided by `temperature`, 0 takes the largest; from the `top_k` largest (0 or -1: all), of
      these the likeliest of joint probability `top_p`, of these those with at least `min_p` of the best's probability.
      Each limit keeps the likeliest allowed token, whatever its value. Draws are computed in float32, where a
      temperature above 0 counts as 1e-6 at least.
      A continuation of a request with a `seed` draws with that and its number.
    - The end: `max_tokens`, None for what the context allows; the model's end token, unless `ignore_eos`; a
      `stop_token_ids`; a `stop` string, which is not part of the text unless `include_stop_str_in_output`. Nothing but
      `max_tokens` ends the first `min_tokens`, whose text counts for no stop string.
    - `logprobs` most likely tokens are returned for each place, with the chosen one: logarithms of the probabilities
      of the model's logits, before any of the above. `prompt_logprobs` are as many for each token of the prompt but the
      first; then no page of the prompt is shared.

    Iterables are read once, at construction. Raises ModelError for a value of another type or out of range.
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
            raise ModelError("skip_special_tokens is False; texts are decoded without special tokens only")
        if not 0 < self.top_p <= 1:
            raise ModelError(f"top_p is {display_value(self.top_p)}; it must be above 0 and at most 1")
        if not all(stops):
            raise ModelError("a stop string is empty; every text begins with it")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ModelError("allowed_token_ids is empty; no token could be chosen")

    def check_vocabulary(self, size: int) -> None:
        """Raise ModelError for a token id that a vocabulary of `size` does not have."""
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            check_vocabulary(name, getattr(self, name) or (), size)


def _check_token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    """Return distinct token ids in their order, or None as it is."""
    return None if value is None else tuple(dict.fromkeys(check_token_ids(name, value)))


def _check_biases(name: str, value: Any) -> dict[int, float] | None:
    """Return a number from -100 to 100 for each token id, or None as it is."""
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
    """Return the form of a text, or None as it is."""
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
"""The check of the type of each field but `stop`; it returns the value that the field gets."""
