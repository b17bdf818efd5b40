"""From a request for texts to the engine and back: prompts in, whole answers or events of a stream out.

`Service` is the state of all routes. A handler belongs to one request: `prepare` checks and encodes it, and `submit`
gives it to the engine. `answer` or `stream_events` turn the engine's stream of updates into OpenAI's format. A choice
is one continuation in an answer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar
from uuid import uuid4

from model.engine import CompletionOutput, SamplingParams
from model.engine.async_engine import AsyncEngine, EngineFailed, Stream, TokenPrompt, Update
from model.engine.grammars import CompiledGrammar
from model.serve.errors import ApiError, check_model_name, server_stopping_error
from model.serve.log import LOG
from model.serve.openai import answers
from model.serve.openai.audio.speech_model import SpeechModel
from model.serve.openai.messages import ChatMessage
from model.serve.openai.requests import CompletionRequest
from model.serve.text_jobs import Texts

T = TypeVar("T")
Output = TypeVar("Output", CompletionOutput, Update)
Receive = Callable[[], Awaitable[Any]]


@dataclass
class Service:
    """State shared by all HTTP routes.

    `model` is the name by which clients ask for the model. `tool_parser` is a name of TOOL_CALL_PARSERS, or None if
    calls are not read from answers. `speech_model` is None for a model of texts. `draining` is True once the server
    takes no further requests.
    """

    engine: AsyncEngine
    texts: Texts
    model: str
    tool_parser: str | None
    speech_model: SpeechModel | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether the engine computes steps."""
        return self.engine.alive

    @property
    def max_model_len(self) -> int:
        """Length of the longest sequence."""
        return self.engine.limits.max_model_len

    def drain(self) -> None:
        """Set `draining`, and cancel chat templates and grammars, whose requests have not been submitted."""
        self.draining = True
        self.texts.drain()

    def check_model(self, name: str | None) -> None:
        """Refuse a name that is not this server's model; None stands for the model.

        Raises:
            ApiError: The name is another one (404).
        """
        check_model_name(name, self.model)

    def check_texts(self) -> None:
        """Raise ApiError if the model is a speech model, which does not continue texts."""
        if self.speech_model is not None:
            raise ApiError(
                400,
                "this model transcribes speech: send recordings to /v1/audio/transcriptions",
                "unsupported",
            )

    def check_speech(self) -> SpeechModel:
        """Return the speech model.

        Raises:
            ApiError: The model is a model of texts.
        """
        if self.speech_model is None:
            raise ApiError(
                400,
                "this model continues texts and transcribes no recordings: send texts to /v1/completions or "
                "/v1/chat/completions",
                "unsupported",
            )
        return self.speech_model

    def check_max_tokens(self, max_tokens: int | None, name: str = "max_tokens") -> None:
        """Refuse more new tokens than the context has, as vLLM does; None is accepted.

        An accepted number that does not fit after the prompt is cut, and the answer then ends with the reason "length".

        Args:
            max_tokens: The number of new tokens.
            name: The name of the argument, for the message.

        Raises:
            ApiError: The number exceeds the context.
        """
        context = self.engine.limits.max_model_len
        if max_tokens is not None and max_tokens > context:
            raise ApiError(
                400,
                f"{name} is {max_tokens}; the context has {context} tokens, prompt included: ask for fewer, or leave "
                f"{name} out",
                param=name,
            )

    async def encode_conversation(
        self,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, Any],
        continue_final_message: bool = False,
    ) -> TokenPrompt:
        """Return the prompt that the chat template makes of messages; the template writes the special tokens.

        Args:
            messages: The conversation.
            variables: Further variables of the template.
            continue_final_message: Whether the prompt ends with the last message's content, without what the template
            writes after it, so that the answer continues the message.

        Raises:
            ApiError: The last message is to be continued, and the template leaves it out or changes it.
            ModelError: The template refuses the conversation, or the prompt is too long.
        """
        conversation = [message.for_template() for message in messages]
        text = await self.texts.render(conversation, variables)
        if continue_final_message:
            content = conversation[-1]["content"]
            start, stripped = text.rfind(content.strip()), content.strip()
            if start < 0 or not stripped:
                raise ApiError(
                    400,
                    "the prompt does not have the last message, so it cannot be continued: leave out "
                    "continue_final_message",
                    param="continue_final_message",
                )
            has_blanks = text.startswith(content.lstrip(), start)
            text = text[: start + len(content.lstrip() if has_blanks else stripped)]
        return TokenPrompt(await self.texts.encode(text, special_tokens=False), text)


@dataclass
class GenerationHandler(Generic[T]):
    """Handler of one request that the engine computes; subclasses set `params` and `prompts` when they prepare it.

    Args:
        service: State shared by all routes.
        request: The parsed request.
        id_prefix: The beginning of the answer's id, such as "cmpl".
    """

    service: Service
    request: T
    id_prefix: str
    params: SamplingParams = field(init=False)
    prompts: Sequence[TokenPrompt] = field(init=False, default=())
    grammar: CompiledGrammar | None = None
    completion_tokens: int = 0
    choice_tokens: dict[int, int] = field(default_factory=dict)
    """Number of tokens of each choice so far, by its index."""

    def __post_init__(self) -> None:
        self.answer_fields: dict[str, Any] = {
            "id": f"{self.id_prefix}-{uuid4().hex}",
            "created": int(time.time()),
            "model": self.service.model,
        }
        """Fields of the answer and of every event."""

    async def submit(self, priority: int | None, cache_salt: str | None = None) -> Stream:
        """Submit the prompts to the engine, and return the stream of their updates.

        Args:
            priority: The request's priority; None is 0.
            cache_salt: Salt of the prefix cache, or None.

        Raises:
            ApiError: The server is stopping.
            EngineFull: The queue has too few places.
        """
        if self.service.draining:
            raise server_stopping_error()
        return await self.service.engine.submit(
            *(self.answer_fields["id"], self.prompts, self.params, priority or 0, cache_salt, self.grammar)
        )

    async def compile_grammar(self) -> None:
        """Set `grammar` to the compiled structured output of the sampling parameters; do nothing if they ask for none.

        Raises:
            ModelError: The form is invalid or exceeds a limit.
            ApiError: The queue of grammars is full, or the server is stopping.
        """
        outputs = self.params.structured_outputs
        if outputs is not None:
            self.grammar = await self.service.texts.compile_grammar(outputs)

    def find_choice_index(self, update: Update) -> int:
        """Return the index in the answer of an update's continuation.

        The `params.n` continuations of the first prompt come first, then those of the second prompt, and so on.
        """
        return update.prompt * self.params.n + update.index

    async def iterate_updates(self, stream: Stream) -> AsyncIterator[Update]:
        """Yield the updates of a stream, and count their tokens in `completion_tokens` and `choice_tokens`.

        Raises:
            ApiError: The engine failed or could not compute the request; the cause is in the log only.
        """
        try:
            async for update in stream:
                if update.fault is not None:  # its message is for the log, because it may quote a client
                    LOG.error("a request failed", exc_info=update.fault)
                    raise ApiError(500, "the model could not compute this request", "request_failed")
                if update.finish_reason == "error":
                    raise ApiError(400, str(update.stop_reason))
                self.completion_tokens += len(update.token_ids)
                index = self.find_choice_index(update)
                self.choice_tokens[index] = self.choice_tokens.get(index, 0) + len(update.token_ids)
                yield update
        except EngineFailed as error:  # the message of its cause may quote a client
            LOG.error("the engine has failed", exc_info=error.__cause__)
            raise ApiError(500, "the model could not compute the answer", "engine_failed") from None

    async def collect_outputs(self, stream: Stream) -> list[CompletionOutput]:
        """Wait for the end of a stream, and return all continuations in the order of their choice indices.

        Raises:
            ApiError: The engine failed or could not compute the request.
        """
        async for _ in self.iterate_updates(stream):
            pass
        return [output for request in stream.requests for output in request.outputs]

    def format_event(self, event: str) -> bytes:
        """Return an event, which is JSON text, as the bytes of a server-sent event."""
        return f"data: {event}\n\n".encode()

    def format_end(self, error: ApiError | None) -> bytes:
        """Return the bytes that end a stream: an event with the error, if there is one, and [DONE]."""
        return (b"" if error is None else self.format_event(json.dumps(error.document))) + b"data: [DONE]\n\n"

    def describe_prompt_logprobs(self, stream: Stream, index: int) -> answers.PromptLogprobs | None:
        """Return the log-probabilities of the prompt of choice `index`, or None if the request asks for none."""
        if self.request.prompt_logprobs is None:  # type: ignore[attr-defined]
            return None
        return answers.format_prompt_logprobs(stream.requests[index // self.params.n].prompt_logprobs or [])

    def build_usage_so_far(self, index: int) -> answers.Usage:
        """Return the numbers of tokens of choice `index` in a stream that has not ended."""
        prompt_tokens = len(self.prompts[index // self.params.n].ids)
        completion_tokens = self.choice_tokens.get(index, 0)
        return answers.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )

    def build_usage(self, stream: Stream) -> answers.Usage:
        """Return the numbers of tokens of a whole request whose stream has ended, with its cached prompt tokens."""
        prompt_tokens = sum(len(prompt.ids) for prompt in self.prompts)
        cached_tokens = sum(request.metrics.num_cached_tokens for request in stream.requests)
        return answers.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=prompt_tokens + self.completion_tokens,
            prompt_tokens_details=answers.CachedTokens(cached_tokens=cached_tokens),
        )


class CompletionHandler(GenerationHandler[CompletionRequest]):
    """Handler of a request for `/v1/completions`."""

    first_tokens: Sequence[str] = ()
    """Texts of the prompts' first tokens, if prompts are echoed with log-probabilities."""

    @classmethod
    async def prepare(cls, service: Service, request: CompletionRequest) -> CompletionHandler:
        """Check a request, encode its prompts, compile its grammar, and return its handler; nothing is submitted yet.

        Raises:
            ApiError: The request contradicts itself, or the server cannot take it now.
            ModelError: An argument is out of range, or a prompt is too long.
            EngineFull: The queue has too few places for the continuations.
        """
        service.check_model(request.model)
        service.check_max_tokens(request.max_tokens)
        self = cls(service, request, "cmpl")
        self.params = request.to_sampling_params()
        service.engine.check_capacity(len(request.prompts) * self.params.n)
        self.prompts = [await self._encode(prompt) for prompt in request.prompts]
        if request.echo and self.params.prompt_logprobs is not None:
            self.first_tokens = [await service.texts.decode(prompt.ids[:1]) for prompt in self.prompts]
        if not self.prompts:
            raise ApiError(400, "prompt is an empty list: give at least one text", param="prompt")
        await self.compile_grammar()
        return self

    async def answer(self, stream: Stream) -> answers.Completion:
        """Wait for the end of the stream, and return the whole completion.

        Raises:
            ApiError: The engine failed or could not compute the request.
        """
        choices = [
            answers.CompletionChoice(
                index=index,
                text=self._echo(index) + output.text,
                logprobs=self._describe_logprobs(stream, index, output, None),
                finish_reason=output.finish_reason,  # type: ignore[arg-type]
                stop_reason=output.stop_reason,
                prompt_logprobs=self.describe_prompt_logprobs(stream, index),
            )
            for index, output in enumerate(map(self._drop_unasked, await self.collect_outputs(stream)))
        ]
        return answers.Completion(**self.answer_fields, choices=choices, usage=self.build_usage(stream))

    async def stream_events(self, stream: Stream) -> AsyncIterator[str]:
        """Yield the chunks of the completion as JSON.

        A chunk with the usage follows at the end if the request asks for it.

        Raises:
            ApiError: The engine failed or could not compute the request.
        """
        offsets: dict[int, int] = {}
        async for counted in self.iterate_updates(stream):
            update = self._drop_unasked(counted)
            index = self.find_choice_index(update)
            text = ("" if index in offsets else self._echo(index)) + update.text
            logprobs = self._describe_logprobs(stream, index, update, offsets.get(index))
            offsets.setdefault(index, 0)
            if logprobs is not None and logprobs.tokens:
                offsets[index] = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
            if text or logprobs is not None or update.finish_reason is not None:
                choice = answers.CompletionChoice(
                    index=index,
                    text=text,
                    logprobs=logprobs,
                    finish_reason=update.finish_reason,  # type: ignore[arg-type]
                    stop_reason=update.stop_reason,
                )
                usage = self.build_usage_so_far(index) if self.request.include_continuous_usage else None
                yield answers.Completion(
                    **self.answer_fields, choices=[choice], usage=usage
                ).model_dump_json()
        if self.request.include_usage:
            usage = self.build_usage(stream)
            yield answers.Completion(**self.answer_fields, choices=[], usage=usage).model_dump_json()

    async def _encode(self, prompt: str | list[int]) -> TokenPrompt:
        if isinstance(prompt, str):
            special_tokens = self.request.add_special_tokens is not False
            return TokenPrompt(await self.service.texts.encode(prompt, special_tokens), prompt)
        text = await self.service.texts.decode(prompt) if self.request.echo else None
        return TokenPrompt(prompt, text)

    def _echo(self, index: int) -> str:
        """Return the prompt of choice `index` if the request asks to echo prompts, and otherwise an empty text."""
        return (self.prompts[index // self.params.n].text or "") if self.request.echo else ""

    def _drop_unasked(self, output: Output) -> Output:
        """Return an output without tokens if the request only scores its prompt; otherwise the output itself.

        The engine samples one token after a scored prompt, which the answer must not have.
        """
        return replace(output, text="", token_ids=[], logprobs=[]) if self.request.is_scoring else output

    def _describe_logprobs(
        self, stream: Stream, index: int, output: CompletionOutput | Update, offset: int | None
    ) -> answers.CompletionLogprobs | None:
        """Return the log-probabilities of tokens of a choice, or None if the request asks for none.

        Args:
            stream: The request's stream, which has the log-probabilities of prompts.
            index: Index of the choice.
            output: The tokens, and their log-probabilities.
            offset: The character of the text at which the tokens begin; None for the first tokens of the choice, before
            which the tokens of an echoed prompt are put.
        """
        if self.params.logprobs is None:
            return None
        token_ids, logprobs = output.token_ids, output.logprobs or []
        prompt_index = index // self.params.n
        prompt_logprobs = stream.requests[prompt_index].prompt_logprobs
        if offset is not None or prompt_logprobs is None or not self.request.echo:
            return answers.format_completion_logprobs(token_ids, logprobs, offset or 0)
        ids = [*self.prompts[prompt_index].ids, *token_ids]
        likely = [
            by_id
            and {
                id: logprob
                for id, logprob in by_id.items()
                if id == token or logprob.rank <= self.params.logprobs
            }
            for token, by_id in zip(ids, [*prompt_logprobs, *logprobs])
        ]
        return answers.format_completion_logprobs(ids, likely, 0, self.first_tokens[prompt_index])


class ClientGone(Exception):
    """The client disconnected before its answer."""


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine and return its result; cancel it if the client disconnects.

    Args:
        receive: ASGI's channel from the client, whose body has been read.
        work: The coroutine.

    Raises:
        ClientGone: The client disconnected before the coroutine ended.
    """

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(wait_for_disconnect()), asyncio.ensure_future(work)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[1].done():
            return tasks[1].result()
        raise ClientGone
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
