"""What one continuation asks of each draw, and the choices that follow from the draws of a step.

Random numbers are numpy's Philox, one for each token, so a seed gives the same numbers on every machine and however
requests are batched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from model.engine.draw import LEAST_TEMPERATURE, draw
from model.engine.faults import contain
from model.engine.params import SamplingParams
from model.engine.speech import TokenRule
from model.errors import ModelError
from model.sampling import Drawn, SampleRow, StepOutput

Decode = Callable[[Sequence[int]], str]


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
    """The draws of one continuation; `ends` are tokens that end it, and `seed` decides its random numbers."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        ends: Sequence[int],
        seed: Sequence[int],
        size: int,
        constraint: TokenRule | None = None,
    ) -> None:
        self._constraint = constraint
        self._params = params
        self._ends = list(ends)
        self._size = size
        self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
        self._numbers: list[float] = []
        self._chosen = 0
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        self._counts = None if penalties == (0, 0, 1) else np.zeros(size, np.float32)
        self._prompt_counts = None if self._counts is None else _counted(prompt, size)
        self._fixed_bias = self._given_bias()
        self._limits = _limits(params, size)

    @property
    def complete(self) -> bool:
        """Whether the text has the form it was asked for, and nothing may follow."""
        return self._constraint is not None and self._constraint.complete

    def is_ready(self, now: float) -> bool:
        """Return whether the tokens that may be drawn next are known, at the engine's time `now` in seconds."""
        return self._constraint is None or self._constraint.is_ready(now)

    def rows(self, drafts: Sequence[int] = ()) -> list[SampleRow]:
        """The draw of the next token, and of the one behind each of some drafts, up to one that ends or breaks a form.

        Raises ModelError where no token is left for the first of them.
        """
        rows = [self._row((), self._constraint)]
        rule = (
            None if self._constraint is None or not drafts or self.complete else self._constraint.for_drafts()
        )
        for place, draft in enumerate(drafts, 1):
            bias = rows[-1].bias
            if bias is not None and not np.isfinite(bias[draft]):
                break
            if rule is not None and (self.complete or not rule.accept(draft) or rule.complete):
                break
            try:
                rows.append(self._row(drafts[:place], rule))
            except ModelError:  # where no token may follow a draft, that is said when it was chosen
                break
        return rows

    def take(self, token: int) -> None:
        """The token of the next draw was chosen."""
        self._numbers.pop(0)
        self._chosen += 1
        if self._counts is not None:
            self._counts[token] += 1
        if self._constraint is not None and not self.complete:
            self._constraint.accept(token)

    def _row(self, drafts: Sequence[int], rule: TokenRule | None) -> SampleRow:
        params, place = self._params, len(drafts)
        while len(self._numbers) <= place:
            self._numbers.append(float(self._generator.random(dtype=np.float32)))
        return SampleRow(
            self._numbers[place],
            *self._limits,
            self._bias(place, rule),
            self._prompt_counts,
            None if self._counts is None else self._counts + _counted(drafts, self._size),
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.logprobs,
            None if rule is None else rule.by_logits,
        )

    def _given_bias(self) -> np.ndarray | None:
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

    def _bias(self, drafts: int, rule: TokenRule | None) -> np.ndarray | None:
        """What is added to the logits behind so many drafts, which `rule` has followed."""
        masks_ends = bool(self._ends) and self._chosen + drafts < self._params.min_tokens
        if self._fixed_bias is None and rule is None and not masks_ends:
            return None
        bias = np.zeros(self._size, np.float32) if self._fixed_bias is None else self._fixed_bias.copy()
        if masks_ends:
            bias[self._ends] = np.nan
        if rule is not None and not rule.complete:
            bias[~rule.allowed()] = np.nan
        if not np.isfinite(bias).any():
            raise ModelError("allowed_token_ids, min_tokens and structured_outputs leave no token to choose")
        return bias


def choose(draws: Sequence[tuple[SampleRow, StepOutput]], decode: Decode) -> Sequence[Choice | BaseException]:
    """Return the choice of each row: the token that the device drew, or a draw of the host from the logits.

    A row whose draw raises has its exception instead, as has one whose largest logit is not finite (ModelError).
    """
    on_host = [index for index, (_, answer) in enumerate(draws) if answer.drawn is None]
    tokens: dict[int, int | BaseException] = {}
    try:
        tokens = dict(zip(on_host, _drawn_tokens([draws[index] for index in on_host])))
    except BaseException as error:
        contain(error)
        for index in on_host:  # a row draws alone what it draws among others
            try:
                (tokens[index],) = _drawn_tokens([draws[index]])
            except BaseException as of_row:
                tokens[index] = contain(of_row)
    choices: list[Choice | BaseException] = []
    for index, (row, answer) in enumerate(draws):
        try:
            choices.append(_choice(row, answer, tokens.get(index), decode))
        except BaseException as error:
            choices.append(contain(error))
    return choices


def _drawn_tokens(draws: Sequence[tuple[SampleRow, StepOutput]]) -> list[int]:
    """Return the tokens that rows draw on the host."""
    if not draws:
        return []
    scores = np.stack([_masked(row, whole(answer.logits)) for row, answer in draws])
    tokens: list[int] = draw(scores, [row for row, _ in draws]).tolist()
    return tokens


def _choice(row: SampleRow, answer: StepOutput, token: int | BaseException | None, decode: Decode) -> Choice:
    """Return the choice of a row; `token` is the draw of the host. Raises what the draw raised."""
    largest = answer.largest
    if not np.isfinite(largest):
        raise ModelError(f"the model's largest logit is {largest}; its weights are too large or not finite")
    if answer.drawn is not None:
        found = None if row.logprobs is None else _logprobs_of(answer.drawn, row.logprobs, decode)
        return Choice(answer.drawn.token, found)
    if not isinstance(token, int):
        assert token is not None, "the host has drawn no token"
        raise token
    return Choice(
        token, None if row.logprobs is None else logprobs(whole(answer.logits), token, row.logprobs, decode)
    )


def _logprobs_of(drawn: Drawn, count: int, decode: Decode) -> dict[int, Logprob]:
    """As `logprobs`, of the candidates that the device found; the drawn one is among them."""
    found = dict(zip(drawn.ids.tolist(), drawn.logprobs.tolist()))
    wanted = dict.fromkeys([drawn.token, *drawn.ids[:count].tolist()])
    ranks = {each: int((drawn.logprobs > np.float32(found[each])).sum()) + 1 for each in wanted}
    return {each: Logprob(found[each], ranks[each], decode([each])) for each in wanted}


def logprobs(logits: np.ndarray, token: int, count: int, decode: Decode) -> dict[int, Logprob]:
    """The logarithms of probabilities of a token and the `count` likeliest ones, from logits [vocabulary]."""
    wide = logits.astype(np.float64)
    shares = wide - wide.max()
    shares -= np.log(np.exp(shares).sum())
    best = np.argsort(-shares, kind="stable")[:count]
    wanted = dict.fromkeys([token, *map(int, best)])
    ranks = {each: int((shares > shares[each]).sum()) + 1 for each in wanted}
    return {each: Logprob(float(shares[each]), ranks[each], decode([each])) for each in wanted}


def _masked(row: SampleRow, logits: np.ndarray) -> np.ndarray:
    """Logits without the tokens that a rule forbids by the logits that the row would draw from."""
    if row.by_logits is None:
        return logits
    changed = logits.astype(np.float32)
    if row.bias is not None:
        changed = np.where(np.isnan(row.bias), np.float32(-np.inf), changed + row.bias)
    row.by_logits(changed)
    return np.where(np.isneginf(changed), changed, logits)


def whole(logits: np.ndarray | None) -> np.ndarray:
    """The logits of the whole vocabulary."""
    assert logits is not None, "a step without logits"
    return logits


def _limits(params: SamplingParams, size: int) -> tuple[float, int, float, float]:
    """Return temperature, top_k, top_p and min_p in float32, in which host and device draw.

    A value that float32 cannot express so takes effect alike on both: a small temperature stays above 0, and a top_p
    that rounds to 1 keeps all tokens.
    """
    temperature = np.float32(params.temperature)
    if params.temperature > 0:
        temperature = max(temperature, LEAST_TEMPERATURE)
    top_k = params.top_k if 0 < params.top_k < size else 0
    return float(temperature), top_k, float(np.float32(params.top_p)), float(np.float32(params.min_p))


def _counted(tokens: Sequence[int], size: int) -> np.ndarray:
    """How often each token is among some, [vocabulary] float32."""
    return np.bincount(np.asarray(tokens, np.int64), minlength=size).astype(np.float32)
