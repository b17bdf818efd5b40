"""Load of `nkw bench serve`: sends requests at their arrival times and records when the pieces of answers arrive.

A piece is an event of a stream that has new tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from model.commands.api_client import ApiClient, RequestFailed
from model.commands.bench.datasets import Prompt

CHAT_BACKEND = "openai-chat"


@dataclass
class Record:
    """Times of one request in seconds; `start` is on the clock of `time.perf_counter`.

    Attributes:
        prompt_len: Tokens of the prompt, as the server counts them if it does.
        output_len: New tokens, as the server counts them; 0 if it does not.
        ttft: Time to the first piece.
        itls: Times between pieces.
        latency: Time to the last piece.
        queue_time: Time in which --max-concurrency held the request back.
        text: Text of the answer.
        error: Why there is no answer, or "".
    """

    prompt_len: int
    start: float = 0.0
    output_len: int = 0
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    latency: float = 0.0
    queue_time: float = 0.0
    text: str = ""
    error: str = ""

    def count_piece(self) -> None:
        """Record that a piece of the answer arrives now: in `ttft` for the first one, in `itls` for others.

        `latency` becomes the time of the piece.
        """
        latency = time.perf_counter() - self.start
        if self.ttft:
            self.itls.append(latency - self.latency)
        else:
            self.ttft = latency
        self.latency = latency


@dataclass(frozen=True)
class Target:
    """Route of a server, and the fields that all requests have in their bodies.

    `is_chat` is True for chat completions and False for completions.
    """

    client: ApiClient
    path: str
    is_chat: bool
    fields: dict[str, Any]

    async def send(self, prompt: Prompt) -> Record:
        """Send one request, wait for the end of its stream, and return its record.

        Nothing is raised for a failed request; its record has the `error`.
        """
        record = Record(prompt.length, time.perf_counter())
        try:
            async with aclosing(self.client.stream(self.path, self._make_body(prompt))) as events:
                async for event in events:
                    self._read_event(event, record)
            if not record.ttft:
                record.error = "the stream ended without a piece of the answer"
        except RequestFailed as failed:
            record.error = failed.message
        return record

    def _make_body(self, prompt: Prompt) -> dict[str, Any]:
        """Return the JSON body of a streamed request for a prompt; the route's fields replace equal ones."""
        if self.is_chat:
            limits = {
                "messages": [{"role": "user", "content": prompt.text}],
                "max_completion_tokens": prompt.output_len,
            }
        else:
            limits = {"prompt": prompt.text, "max_tokens": prompt.output_len}
        return {"stream": True, "stream_options": {"include_usage": True}, **limits, **self.fields}

    def _read_event(self, event: dict[str, Any], record: Record) -> None:
        """Add an event of the stream to the record: a piece of the answer, or the numbers of tokens."""
        choices = event.get("choices")
        if choices:
            delta = choices[0].get("delta") or {}
            text = delta.get("content") if self.is_chat else choices[0].get("text")
            # The first event of a chat has the role and no token.
            if not self.is_chat or (any(map(delta.get, _PIECES)) or (text == "" and "role" not in delta)):
                record.count_piece()
                record.text += text or ""
        if usage := event.get("usage"):
            record.output_len = usage.get("completion_tokens") or 0
            record.prompt_len = usage.get("prompt_tokens") or record.prompt_len


_PIECES = ("content", "reasoning", "reasoning_content", "tool_calls")
"""Fields of a chat's delta that come with new tokens."""


def draw_arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the arrival times of `count` requests in seconds from the start; all are 0 at an infinite rate.

    Intervals follow a gamma distribution whose shape is `burstiness`; with 1 the arrivals are a Poisson process. As in
    vLLM they are scaled so that the last request arrives after `count / rate` seconds.
    """
    if rate == float("inf"):
        return [0.0] * count
    arrivals = np.random.default_rng(seed).gamma(burstiness, 1.0, count).cumsum()
    return [float(arrival) for arrival in arrivals * (count / rate / arrivals[-1])]


async def send_load(
    target: Target,
    prompts: Sequence[Prompt],
    arrivals: Sequence[float],
    max_concurrency: int | None,
    on_answer: Callable[[], None],
) -> tuple[list[Record], float]:
    """Send all prompts at their arrival times, and wait for all answers.

    Args:
        target: The route.
        prompts: The prompts.
        arrivals: Arrival time of each prompt in seconds from now.
        max_concurrency: Most requests in progress; further ones wait. None for any number.
        on_answer: Called after each answer or failure.

    Returns:
        The records in the order of the prompts, and the seconds of the whole load.
    """
    slots = asyncio.Semaphore(max_concurrency or len(prompts))
    begin = time.perf_counter()

    async def send_at(prompt: Prompt, arrival: float) -> Record:
        await asyncio.sleep(begin + arrival - time.perf_counter())
        arrived = time.perf_counter()
        async with slots:
            record = await target.send(prompt)
        record.queue_time = record.start - arrived
        on_answer()
        return record

    sent: list[Awaitable[Record]] = [send_at(prompt, arrival) for prompt, arrival in zip(prompts, arrivals)]
    records = await asyncio.gather(*sent)
    return records, time.perf_counter() - begin
