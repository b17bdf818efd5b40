"""Sampling parameters for each token of a continuation, and the choice of the tokens of a step.

The engine has a `TokenSampler` for each continuation and calls `choose` once a step. Random numbers are those of
NumPy's Philox generator, one for each token. So a seed gives the same numbers on every machine and for every batching.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from model.engine.draw import LEAST_TEMPERATURE, draw
from model.engine.faults import contain
from model.engine.inputs import TokenRule
from model.engine.params import SamplingParams
from model.errors import ModelError
from model.sampling import Drawn, RowSampling, StepOutput

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token, its rank among all tokens (1 is the likeliest), and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class Choice:
    """Sampled token.

    `logprobs` has log-probabilities by token id, of the sampled token and of the likeliest ones; None if not requested.
    """

    token: int
    logprobs: dict[int, Logprob] | None


class TokenSampler:
    """Source of the sampling parameters of one continuation, for one token after another."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        ends: Sequence[int],
        seed: Sequence[int],
        size: int,
        constraint: TokenRule | None = None,
    ) -> None:
        """Create the sampler before the first token.

        Args:
            params: The sampling parameters of the request.
            prompt: The token ids of the prompt, which penalties count.
            ends: The token ids that end the continuation, which `min_tokens` forbids.
            seed: The seed of the random numbers.
            size: The size of the vocabulary.
            constraint: The tokens that structured outputs or a transcription allow.
        """
        self._constraint = constraint
        self._params = params
        self._ends = list(ends)
        self._size = size
        self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
        self._numbers: list[float] = []
        self._chosen = 0
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        self._counts = None if penalties == (0, 0, 1) else np.zeros(size, np.float32)
        self._prompt_counts = None if self._counts is None else _count_tokens(prompt, size)
        self._fixed_bias = self._make_fixed_bias()
        self._limits = _round_limits(params, size)

    @property
    def complete(self) -> bool:
        """Whether a grammar or another rule says that the text is complete and no token may follow."""
        return self._constraint is not None and self._constraint.complete

    def is_ready(self, now: float) -> bool:
        """Return whether the mask of allowed next tokens is known, so that `rows` does not wait.

        Args:
            now: Time of the engine's clock in seconds.
        """
        return self._constraint is None or self._constraint.is_ready(now)

    def rows(self, drafts: Sequence[int] = ()) -> list[RowSampling]:
        """Return the sampling parameters of the next token, and of the token after each draft token.

        The rows end before a draft token that is forbidden, after which the text is complete, or after which no token
        is allowed. Draft tokens do not advance the sampler.

        Raises:
            ModelError: No token is allowed in the first row.
        """
        rows = [self._make_row((), self._constraint)]
        rule = (
            None if self._constraint is None or not drafts or self.complete else self._constraint.for_drafts()
        )
        for num_accepted, draft in enumerate(drafts, 1):
            bias = rows[-1].bias
            if bias is not None and not np.isfinite(bias[draft]):
                break
            if rule is not None and (self.complete or not rule.accept(draft) or rule.complete):
                break
            try:
                rows.append(self._make_row(drafts[:num_accepted], rule))
            except ModelError:  # raised again for the first row, if the draft token is chosen
                break
        return rows

    def take(self, token: int) -> None:
        """Advance the sampler by a token that was sampled with the parameters of the first row."""
        self._numbers.pop(0)
        self._chosen += 1
        if self._counts is not None:
            self._counts[token] += 1
        if self._constraint is not None and not self.complete:
            self._constraint.accept(token)

    def _make_row(self, drafts: Sequence[int], rule: TokenRule | None) -> RowSampling:
        params, position = self._params, len(drafts)
        while len(self._numbers) <= position:
            self._numbers.append(float(self._generator.random(dtype=np.float32)))
        return RowSampling(
            self._numbers[position],
            *self._limits,
            self._make_bias(position, rule),
            self._prompt_counts,
            None if self._counts is None else self._counts + _count_tokens(drafts, self._size),
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.logprobs,
            None if rule is None else rule.by_logits,
        )

    def _make_fixed_bias(self) -> np.ndarray | None:
        params = self._params
        if not params.logit_bias and params.allowed_token_ids is None:
            return None
        bias = np.zeros(self._size, np.float32)
        if params.allowed_token_ids is not None:
            bias[:] = np.nan
            bias[list(params.allowed_token_ids)] = 0
        for token, added in (params.logit_bias or {}).items():
            bias[token] += added
        return bias

    def _make_bias(self, drafts: int, rule: TokenRule | None) -> np.ndarray | None:
        """Return the bias to add to the logits, [vocabulary] float32, or None without a bias; NaN forbids a token.

        Args:
            drafts: Number of draft tokens since the last sampled token.
            rule: The rule for allowed tokens, which has accepted the draft tokens; None without one.

        Raises:
            ModelError: All tokens are forbidden.
        """
        masks_ends = bool(self._ends) and self._chosen + drafts < self._params.min_tokens
        if self._fixed_bias is None and rule is None and not masks_ends:
            return None
        bias = np.zeros(self._size, np.float32) if self._fixed_bias is None else self._fixed_bias.copy()
        if masks_ends:
            bias[self._ends] = np.nan
        if rule is not None and not rule.complete:
            bias[~rule.allowed()] = np.nan
        if not np.isfinite(bias).any():
            raise ModelError(
                "allowed_token_ids, min_tokens and structured_outputs leave no token to choose: relax one of them"
            )
        return bias


def choose(
    draws: Sequence[tuple[RowSampling, StepOutput]], decode: Decode
) -> Sequence[Choice | BaseException]:
    """Return, for each row, the token that the device sampled, or a token that the host samples now.

    A row has an exception in place of a token if sampling raises, or a ModelError if its largest logit is not finite.

    Args:
        draws: For each row, its sampling parameters and the model's output.
        decode: Returns the text of token ids, for log-probabilities.
    """
    on_host = [index for index, (_, answer) in enumerate(draws) if answer.drawn is None]
    tokens: dict[int, int | BaseException] = {}
    try:
        tokens = dict(zip(on_host, _draw_tokens([draws[index] for index in on_host])))
    except BaseException as error:
        contain(error)
        for index in on_host:  # a row draws the same token alone and in a batch
            try:
                (tokens[index],) = _draw_tokens([draws[index]])
            except BaseException as row_error:
                tokens[index] = contain(row_error)
    choices: list[Choice | BaseException] = []
    for index, (row, answer) in enumerate(draws):
        try:
            choices.append(_make_choice(row, answer, tokens.get(index), decode))
        except BaseException as error:
            choices.append(contain(error))
    return choices


def _draw_tokens(draws: Sequence[tuple[RowSampling, StepOutput]]) -> list[int]:
    """Return the token ids that the host samples for rows, whose outputs all have logits."""
    if not draws:
        return []
    scores = np.stack([_mask_logits(row, require_logits(answer.logits)) for row, answer in draws])
    tokens: list[int] = draw(scores, [row for row, _ in draws]).tolist()
    return tokens


def _make_choice(
    row: RowSampling, answer: StepOutput, token: int | BaseException | None, decode: Decode
) -> Choice:
    """Return the choice of a row with its log-probabilities.

    Args:
        row: The sampling parameters.
        answer: The model's output.
        token: The token that the host sampled, or an exception; not read if the device sampled one.
        decode: Returns the text of token ids.

    Raises:
        BaseException: `token` is an exception.
        ModelError: The largest logit is not finite.
    """
    largest = answer.largest
    if not np.isfinite(largest):
        raise ModelError(f"the model's largest logit is {largest}; its weights are too large or not finite")
    if answer.drawn is not None:
        likeliest = (
            None if row.logprobs is None else _read_device_logprobs(answer.drawn, row.logprobs, decode)
        )
        return Choice(answer.drawn.token, likeliest)
    if not isinstance(token, int):
        assert token is not None, "the host has drawn no token"
        raise token
    return Choice(
        token,
        None
        if row.logprobs is None
        else compute_logprobs(require_logits(answer.logits), token, row.logprobs, decode),
    )


def _read_device_logprobs(drawn: Drawn, count: int, decode: Decode) -> dict[int, Logprob]:
    """Return what `compute_logprobs` returns, from the candidates that the device chose instead of all logits."""
    candidates = dict(zip(drawn.ids.tolist(), drawn.logprobs.tolist()))
    tokens = dict.fromkeys([drawn.token, *drawn.ids[:count].tolist()])
    ranks = {token: int((drawn.logprobs > np.float32(candidates[token])).sum()) + 1 for token in tokens}
    return {token: Logprob(candidates[token], ranks[token], decode([token])) for token in tokens}


def compute_logprobs(logits: np.ndarray, token: int, count: int, decode: Decode) -> dict[int, Logprob]:
    """Return the log-probabilities of `token` and of the `count` likeliest tokens, by token id.

    Args:
        logits: The model's logits, [vocabulary].
        token: The sampled token.
        count: Number of likeliest tokens.
        decode: Returns the text of token ids.
    """
    wide = logits.astype(np.float64)
    log_softmax = wide - wide.max()
    log_softmax -= np.log(np.exp(log_softmax).sum())
    likeliest = np.argsort(-log_softmax, kind="stable")[:count]
    tokens = dict.fromkeys([token, *map(int, likeliest)])
    ranks = {index: int((log_softmax > log_softmax[index]).sum()) + 1 for index in tokens}
    return {index: Logprob(float(log_softmax[index]), ranks[index], decode([index])) for index in tokens}


def _mask_logits(row: RowSampling, logits: np.ndarray) -> np.ndarray:
    """Return logits with -inf for tokens that the row's `by_logits` function forbids; the same array without one.

    The function decides by the logits with bias, but the bias is not added to the result.
    """
    if row.by_logits is None:
        return logits
    biased = logits.astype(np.float32)
    if row.bias is not None:
        biased = np.where(np.isnan(row.bias), np.float32(-np.inf), biased + row.bias)
    row.by_logits(biased)
    return np.where(np.isneginf(biased), biased, logits)


def require_logits(logits: np.ndarray | None) -> np.ndarray:
    """Return the logits; AssertionError if they are None, because the device sampled the token."""
    assert logits is not None, "a step without logits"
    return logits


def _round_limits(params: SamplingParams, size: int) -> tuple[float, int, float, float]:
    """Return temperature, top_k, top_p and min_p as floats that are exact in float32; a top_k of 0 is no limit.

    So host and device sample alike: a small temperature stays above 0, and a top_p that rounds to 1 keeps all tokens.
    """
    temperature = np.float32(params.temperature)
    if params.temperature > 0:
        temperature = max(temperature, LEAST_TEMPERATURE)
    top_k = params.top_k if 0 < params.top_k < size else 0
    return float(temperature), top_k, float(np.float32(params.top_p)), float(np.float32(params.min_p))


def _count_tokens(tokens: Sequence[int], size: int) -> np.ndarray:
    """Return the number of occurrences of every token id in `tokens`, [size] float32."""
    return np.bincount(np.asarray(tokens, np.int64), minlength=size).astype(np.float32)
