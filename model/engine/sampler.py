"""Chooses the tokens of one continuation from the logits of its steps.

The draw is that of the kernel `sample`, of all candidates: its numpy reference is called here. Random numbers are
numpy's Philox, one for each token, so a seed gives the same numbers on every machine and however requests are batched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from model.engine.params import SamplingParams
from model.engine.structured import Constraint
from model.errors import ModelError

Draw = Callable[..., tuple[np.ndarray, ...]]
"""`sample_reference` of nki_kernels."""


@dataclass(frozen=True)
class Logprob:
    """The logarithm of a token's probability, its place among all tokens, from 1, and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class Choice:
    """A token, and where asked for the logarithms of probabilities by token id: its own and those of the likeliest."""

    token: int
    logprobs: dict[int, Logprob] | None


class TokenSampler:
    """The choices of one continuation; `ends` are tokens that end it, and `seed` decides its random numbers."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        ends: Sequence[int],
        seed: Sequence[int],
        draw: Draw,
        decode: Callable[[Sequence[int]], str],
        constraint: Constraint | None = None,
    ) -> None:
        self._constraint = constraint
        self._decode = decode
        self._params = params
        self._prompt = prompt
        self._ends = list(ends)
        self._draw = draw
        self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
        self._chosen: Counter[int] = Counter()

    @cached_property
    def _prompt_counts(self) -> Counter[int]:
        return Counter(self._prompt)

    @property
    def complete(self) -> bool:
        """Whether the text has the form it was asked for, and nothing may follow."""
        return self._constraint is not None and self._constraint.complete

    def choose(self, logits: np.ndarray) -> Choice:
        """The next token, from logits [vocabulary] float32. ModelError where the largest is not finite."""
        if not np.isfinite(logits.max()):
            raise ModelError(
                f"the model's largest logit is {logits.max()}; its weights are too large or not finite"
            )
        uniform = self._generator.random(dtype=np.float32)
        bias, counts = self._bias(len(logits)), self._counts(len(logits))
        if self._params.temperature == 0 and bias is None and not counts:
            token = int(np.argmax(logits))
        else:
            token = self._drawn(logits, uniform, bias, counts)
        self._chosen[token] += 1
        if self._constraint is not None and not self.complete:
            self._constraint.accept(token)
        return self._choice(logits, token)

    def _drawn(
        self, logits: np.ndarray, uniform: float, bias: np.ndarray | None, counts: dict[str, np.ndarray]
    ) -> int:
        params, size = self._params, len(logits)

        def column(value: float) -> np.ndarray:
            return np.full((1, 1), value, np.float32)

        chosen, *_ = self._draw(
            logits[None],
            column(uniform),
            column(params.temperature),
            column(params.top_k if params.top_k > 0 else size),
            column(params.top_p),
            column(params.min_p),
            size,
            bias=bias,
            repetition=column(params.repetition_penalty),
            presence=column(params.presence_penalty),
            frequency=column(params.frequency_penalty),
            **counts,
        )
        return int(chosen[0, 0])

    def _bias(self, size: int) -> np.ndarray | None:
        params = self._params
        masks_ends = bool(self._ends) and self._chosen.total() < params.min_tokens
        given = params.logit_bias or params.allowed_token_ids is not None or self._constraint is not None
        if not given and not masks_ends:
            return None
        bias = np.zeros((1, size), np.float32)
        if params.allowed_token_ids is not None:
            bias[:] = -np.inf
            bias[0, list(params.allowed_token_ids)] = 0
        for token, added in (params.logit_bias or {}).items():
            bias[0, token] += added
        if masks_ends:
            bias[0, self._ends] = -np.inf
        if self._constraint is not None and not self.complete:
            bias[0, ~self._constraint.allowed()] = -np.inf
        if not np.isfinite(bias).any():
            raise ModelError("allowed_token_ids, min_tokens and structured_outputs leave no token to choose")
        return bias

    def _counts(self, size: int) -> dict[str, Any]:
        params = self._params
        if (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0, 0, 1):
            return {}
        return {
            "prompt_counts": _counted(self._prompt_counts, size),
            "output_counts": _counted(self._chosen, size),
        }

    def _choice(self, logits: np.ndarray, token: int) -> Choice:
        count = self._params.logprobs
        if count is None:
            return Choice(token, None)
        wide = logits.astype(np.float64)
        shares = wide - wide.max()
        shares -= np.log(np.exp(shares).sum())
        best = np.argsort(-shares, kind="stable")[:count]
        wanted = dict.fromkeys([token, *map(int, best)])
        ranks = {each: int((shares > shares[each]).sum()) + 1 for each in wanted}
        found = {each: Logprob(float(shares[each]), ranks[each], self._decode([each])) for each in wanted}
        return Choice(token, found)


def _counted(counts: Counter[int], size: int) -> np.ndarray:
    row = np.zeros((1, size), np.float32)
    row[0, list(counts)] = list(counts.values())
    return row
