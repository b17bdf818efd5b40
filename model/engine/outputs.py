"""What a request returns, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from model.engine.sampler import Logprob

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass
class CompletionOutput:
    """One continuation. `stop_reason` is the stop string or the token of stop_token_ids that ended it.

    With the finish reason error, it is the sentence that says why the request could not be computed.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        """Whether no token follows."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of a request in seconds of the engine's clock, and what it cost beside its tokens."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def time_in_queue(self) -> float | None:
        """From the arrival until the first step that computes a token of the request."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass
class RequestOutput:
    """A prompt and what followed it so far.

    `prompt_logprobs`, where asked for, fills up as the prompt is computed; it has None for the first token. `fault` is
    the exception that ended the request, where the fault is not in its arguments.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    fault: BaseException | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that pages held already when the request first started."""
        return self.metrics.num_cached_tokens

    @property
    def finished(self) -> bool:
        """Whether every continuation has ended."""
        return all(each.finished for each in self.outputs)
