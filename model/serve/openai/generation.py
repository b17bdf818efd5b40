"""From a request to the engine and back: prompts in, whole answers or events of a stream out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from uuid import uuid4

from model.engine import Logprob, SamplingParams
from model.engine.async_engine import AsyncEngine, EngineFailed, Stream, TokenPrompt, Update
from model.engine.grammars import CompiledGrammar
from model.serve.errors import ApiError, stopping_now
from model.serve.log import LOG
from model.serve.openai import answers
from model.serve.openai.audio.speech_model import SpeechModel
from model.serve.openai.messages import ChatMessage
from model.serve.openai.requests import CompletionRequest
from model.serve.texts import Texts

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]


@dataclass
class Service:
    """What the routes share. `draining` is set when the server takes no further requests.

    `speech_model` is what the folder of a speech model says; None of others.
    """

    engine: AsyncEngine
    texts: Texts
    model: str
    tool_parser: str | None
    speech_model: SpeechModel | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    def drain(self) -> None:
        """Take no further requests; cancel chat templates and grammars, whose requests have not begun."""
        self.draining = True
        self.texts.drain()

    def check_model(self, name: str | None) -> None:
        """ApiError for another model than the one that is served."""
        if name not in (None, self.model):
            raise ApiError(
                404, f"the model does not exist; this server has {self.model}", "model_not_found", "model"
            )

    def check_texts(self) -> None:
        """ApiError where the model does not continue texts."""
        if self.speech_model is not None:
            raise ApiError(
                400,
                "this model transcribes speech: send recordings to /v1/audio/transcriptions",
                "unsupported",
            )

    def check_speech(self) -> SpeechModel:
        """The speech model; ApiError where the model takes no speech."""
        if self.speech_model is None:
            raise ApiError(400, "this model continues texts: it transcribes no recordings", "unsupported")
        return self.speech_model

    async def conversation(
        self, messages: Sequence[ChatMessage], variables: Mapping[str, Any]
    ) -> TokenPrompt:
        """The prompt that the chat template makes of messages, whose special tokens it writes itself."""
        text = await self.texts.render([each.for_template() for each in messages], variables)
        return TokenPrompt(await self.texts.encode(text, special_tokens=False), text)


@dataclass
class Continuation:
    """One continuation so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: Any = None
    stop_reason: str | int | None = None

    def add(self, update: Update) -> None:
        """Take in what a step added."""
        self.text += update.text
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason


@dataclass
class Answering(Generic[T]):
    """One request on its way."""

    service: Service
    asked: T
    prefix: str
    params: SamplingParams = field(init=False)
    prompts: Sequence[TokenPrompt] = field(init=False, default=())
    grammar: CompiledGrammar | None = None
    completion_tokens: int = 0

    def __post_init__(self) -> None:
        self.head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid4().hex}",
            "created": int(time.time()),
            "model": self.service.model,
        }

    async def open(self, priority: int | None, cache_salt: str | None = None) -> Stream:
        """Submit the prompts and return their stream. Raises ApiError while the server is stopping."""
        if self.service.draining:
            raise stopping_now()
        return await self.service.engine.submit(
            *(self.head["id"], self.prompts, self.params, priority or 0, cache_salt, self.grammar)
        )

    async def compile_grammar(self) -> None:
        """Compile the form that the parameters ask for, if they ask for one."""
        form = self.params.structured_outputs
        if form is not None:
            self.grammar = await self.service.texts.grammar(form)

    def place(self, update: Update) -> int:
        """The index of a choice: continuations of the first prompt, then those of the second one."""
        return update.prompt * self.params.n + update.index

    async def updates(self, stream: Stream) -> AsyncIterator[Update]:
        """The updates, whose tokens are counted."""
        try:
            async for update in stream:
                if update.fault is not None:  # its sentence is for the log, as it may hold what a client sent
                    LOG.error("a request failed", exc_info=update.fault)
                    raise ApiError(500, "the model could not compute this request", "request_failed")
                if update.finish_reason == "error":
                    raise ApiError(400, str(update.stop_reason))
                self.completion_tokens += len(update.token_ids)
                yield update
        except EngineFailed as error:  # the sentence of its cause may hold what a client sent
            LOG.error("the engine has failed", exc_info=error.__cause__)
            raise ApiError(500, "the model could not compute the answer", "engine_failed") from None

    async def whole(self, stream: Stream) -> list[Continuation]:
        """All continuations, in the order of their places."""
        found = [Continuation() for _ in range(len(self.prompts) * self.params.n)]
        async for update in self.updates(stream):
            found[self.place(update)].add(update)
        return found

    def usage(self, stream: Stream) -> answers.Usage:
        """Tokens, once the stream has ended."""
        prompts = sum(len(each.ids) for each in self.prompts)
        cached = sum(each.metrics.num_cached_tokens for each in stream.requests)
        return answers.Usage(
            prompt_tokens=prompts,
            completion_tokens=self.completion_tokens,
            total_tokens=prompts + self.completion_tokens,
            prompt_tokens_details=answers.CachedTokens(cached_tokens=cached),
        )


class Completing(Answering[CompletionRequest]):
    """`/v1/completions`; where prompts are echoed with log-probabilities, the texts of their `first_tokens`."""

    first_tokens: Sequence[str] = ()

    @classmethod
    async def prepared(cls, service: Service, asked: CompletionRequest) -> Completing:
        """With prompts as ids; ApiError or ModelError for what cannot be."""
        service.check_model(asked.model)
        self = cls(service, asked, "cmpl")
        self.params = asked.params()
        service.engine.check_places(len(asked.prompts) * self.params.n)
        self.prompts = [await self._encoded(each) for each in asked.prompts]
        if self.params.prompt_logprobs is not None:
            self.first_tokens = [await service.texts.decode(each.ids[:1]) for each in self.prompts]
        if not self.prompts:
            raise ApiError(400, "prompt is an empty list", param="prompt")
        await self.compile_grammar()
        return self

    async def answer(self, stream: Stream) -> answers.Completion:
        """The whole answer."""
        choices = [
            answers.CompletionChoice(
                index=index,
                text=self._echoed(index) + each.text,
                logprobs=self._logprobs(stream, index, each.token_ids, each.logprobs, None),
                finish_reason=each.finish_reason,
                stop_reason=each.stop_reason,
            )
            for index, each in enumerate(await self.whole(stream))
        ]
        return answers.Completion(**self.head, choices=choices, usage=self.usage(stream))

    async def events(self, stream: Stream) -> AsyncIterator[str]:
        """The pieces as JSON."""
        offsets: dict[int, int] = {}
        async for update in self.updates(stream):
            index = self.place(update)
            first = index not in offsets
            logprobs = self._logprobs(stream, index, update.token_ids, update.logprobs, offsets.get(index))
            offsets.setdefault(index, 0)
            if logprobs is not None and logprobs.tokens:
                offsets[index] = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
            text = (self._echoed(index) if first else "") + update.text
            if text or logprobs is not None or update.finish_reason is not None:
                choice = answers.CompletionChoice(
                    index=index,
                    text=text,
                    logprobs=logprobs,
                    finish_reason=update.finish_reason,  # type: ignore[arg-type]
                    stop_reason=update.stop_reason,
                )
                yield answers.Completion(**self.head, choices=[choice]).model_dump_json()
        if self.asked.include_usage:
            yield answers.Completion(**self.head, choices=[], usage=self.usage(stream)).model_dump_json()

    async def _encoded(self, prompt: str | list[int]) -> TokenPrompt:
        if isinstance(prompt, str):
            return TokenPrompt(await self.service.texts.encode(prompt), prompt)
        text = await self.service.texts.decode(prompt) if self.asked.echo else None
        return TokenPrompt(prompt, text)

    def _echoed(self, index: int) -> str:
        return (self.prompts[index // self.params.n].text or "") if self.asked.echo else ""

    def _logprobs(
        self,
        stream: Stream,
        index: int,
        token_ids: Sequence[int],
        found: Sequence[dict[int, Logprob]],
        offset: int | None,
    ) -> answers.CompletionLogprobs | None:
        """The columns of some tokens from an offset on; without one they begin with those of an echoed prompt."""
        if self.params.logprobs is None:
            return None
        number = index // self.params.n
        prompt = stream.requests[number].prompt_logprobs
        if offset is not None or prompt is None:
            return answers.completion_logprobs(token_ids, found, offset or 0)
        ids = [*self.prompts[number].ids, *token_ids]
        return answers.completion_logprobs(ids, [*prompt, *found], 0, self.first_tokens[number])


class ClientGone(Exception):
    """The client left before its answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is cancelled with ClientGone when the client leaves."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watching, working = asyncio.ensure_future(gone()), asyncio.ensure_future(work)
    try:
        await asyncio.wait({watching, working}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (watching, working):
            task.cancel()
        await asyncio.gather(watching, working, return_exceptions=True)
