"""Outputs of requests, with vLLM's names; the engine fills them while it computes steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from model.engine.sampler import Logprob

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass
class CompletionOutput:
    """One continuation (generated text) of a prompt.

    `finish_reason` is None until it has ended. `stop_reason` is then the stop string or the token of `stop_token_ids`
    that ended it, or None. With the finish reason "error" it is the message about the fault.
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
        """Whether the continuation has ended."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of a request in seconds of the engine's clock, None until they are known, and counts.

    `num_cached_tokens` counts prompt tokens found in the prefix cache at the first start, and `num_preemptions` the
    preemptions of all continuations.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass
class RequestOutput:
    """Prompt and its continuations so far.

    `prompt_logprobs`, if requested, has None for the first token and grows while the prompt is computed. `fault` is the
    exception that ended the request; None if the user's arguments were wrong.
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
        """Number of prompt tokens that were in the prefix cache when the request first started."""
        return self.metrics.num_cached_tokens

    @property
    def finished(self) -> bool:
        """Whether every continuation has ended."""
        return all(output.finished for output in self.outputs)
