"""Chat completions: checks of a request, and the engine's outputs as answers in which the model may call functions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import cache
from typing import Any, TypeVar

from model.engine import CompletionOutput
from model.engine.async_engine import Stream, Update
from model.serve.log import LOG
from model.serve.openai import answers
from model.serve.openai.calls import CallPiece, CallReader
from model.serve.openai.generation import GenerationHandler, Service
from model.serve.openai.messages import CalledFunction, ToolCall
from model.serve.openai.requests import ChatRequest
from model.serve.openai.tools import ToolUse

Handler = TypeVar("Handler", bound="ChatHandler")


class ChatHandler(GenerationHandler[ChatRequest]):
    """Handler of a request for `/v1/chat/completions`; `tool_use` is None if calls are not read from the answer."""

    tool_use: ToolUse | None

    @classmethod
    async def prepare(cls: type[Handler], service: Service, request: ChatRequest) -> Handler:
        """Check a request, encode its conversation, compile its grammar, and return its handler.

        Nothing is submitted to the engine yet.

        Raises:
            ApiError: The request contradicts itself, or the server cannot take it now.
            ModelError: An argument is out of range, or the conversation is too long or refused by the chat template.
            EngineFull: The queue has too few places for the continuations.
        """
        service.check_model(request.model)
        service.check_max_tokens(request.max_completion_tokens, "max_completion_tokens")
        service.check_max_tokens(request.max_tokens)
        self = cls(service, request, "chatcmpl")
        self.tool_use = request.read_tool_use()
        if self.tool_use is not None and not self.tool_use.is_required and service.tool_parser is None:
            self.tool_use = None
            _log_unread_calls()
        self.params = request.to_sampling_params(service.tool_parser)
        service.engine.check_capacity(self.params.n)
        variables = request.build_template_variables()
        self.prompts = [
            await service.encode_conversation(
                request.messages, variables, bool(request.continue_final_message)
            )
        ]
        await self.compile_grammar()
        return self

    async def answer(self, stream: Stream) -> answers.ChatCompletion:
        """Wait for the end of the stream, and return the whole chat completion.

        Raises:
            ApiError: The engine failed or could not compute the request.
        """
        choices = [
            self._make_choice(index, output)
            for index, output in enumerate(await self.collect_outputs(stream))
        ]
        return answers.ChatCompletion(
            **self.answer_fields,
            choices=choices,
            usage=self.build_usage(stream),
            prompt_logprobs=self.describe_prompt_logprobs(stream, 0),
        )

    async def stream_events(self, stream: Stream) -> AsyncIterator[str]:
        """Yield the chunks of the answer as JSON: of each choice first its role, then its text and its calls.

        A chunk with the usage follows at the end if the request asks for it.

        Raises:
            ApiError: The engine failed or could not compute the request.
        """
        readers: dict[int, CallReader | None] = {}
        async for update in self.iterate_updates(stream):
            index = self.find_choice_index(update)
            if index not in readers:
                readers[index] = self._make_reader()
                role = answers.ChatPiece(index=index, delta={"role": "assistant", "content": ""})
                yield self._encode_chunk([role], self._continuous_usage(index, has_tokens=False))
            reader, delta = readers[index], dict[str, Any]()
            text, calls = _split(reader, update.text, update.finish_reason is not None)
            if text:
                delta["content"] = text
            if calls:
                delta["tool_calls"] = [call.to_delta() for call in calls]
            logprobs = self._describe_logprobs(update)
            if delta or logprobs is not None or update.finish_reason is not None:
                piece = answers.ChatPiece(
                    index=index,
                    delta=delta,
                    logprobs=logprobs,
                    finish_reason=_find_finish_reason(reader, update.finish_reason),
                    stop_reason=update.stop_reason,
                )
                yield self._encode_chunk([piece], self._continuous_usage(index))
        if self.request.include_usage:
            yield self._encode_chunk([], self.build_usage(stream))

    def _make_choice(self, index: int, output: CompletionOutput) -> answers.ChatChoice:
        reader = self._make_reader()
        text, pieces = _split(reader, output.text, is_last=True)
        calls = [
            ToolCall(
                id=str(piece.id),
                type="function",
                function=CalledFunction(name=str(piece.name), arguments=piece.arguments),
            )
            for piece in pieces
        ]
        return answers.ChatChoice(
            index=index,
            message=answers.AnswerMessage(
                content=None if calls and not text else text, tool_calls=calls or None
            ),
            logprobs=self._describe_logprobs(output),
            finish_reason=_find_finish_reason(reader, output.finish_reason),
            stop_reason=output.stop_reason,
        )

    def _make_reader(self) -> CallReader | None:
        return None if self.tool_use is None else self.tool_use.make_reader(self.service.tool_parser)

    def _continuous_usage(self, index: int, has_tokens: bool = True) -> answers.Usage | None:
        """Return the numbers of tokens of a choice so far, or None if the request does not ask for them in every event.

        Args:
            index: Index of the choice.
            has_tokens: Whether the event follows tokens of the choice; the first event, which has its role, does not.
        """
        if not self.request.include_continuous_usage:
            return None
        usage = self.build_usage_so_far(index)
        if not has_tokens:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage

    def _encode_chunk(self, choices: list[answers.ChatPiece], usage: answers.Usage | None = None) -> str:
        return answers.ChatChunk(**self.answer_fields, choices=choices, usage=usage).model_dump_json()

    def _describe_logprobs(self, output: CompletionOutput | Update) -> answers.ChatLogprobs | None:
        if self.params.logprobs is None:
            return None
        return answers.format_chat_logprobs(output.token_ids, output.logprobs or [], self.params.logprobs)


@cache
def _log_unread_calls() -> None:
    """Log, once in a process, that tool calls are not read from answers because their format is unknown."""
    LOG.warning(
        "the chat template has no known format of tool calls, so answers with tools have no calls unless tool_choice "
        "requires one: start the server with --tool-call-parser"
    )


def split_answer(reader: CallReader | None, text: str, is_last: bool) -> list[str | CallPiece]:
    """Return the text and the pieces of calls, in their order, that the next piece of an answer adds.

    Args:
        reader: Reader of the answer's calls; with None the piece is returned as text.
        text: The piece.
        is_last: Whether the answer ends with it.
    """
    if reader is None:
        return [text] if text else []
    return reader.push(text, is_last)


def _split(reader: CallReader | None, text: str, is_last: bool) -> tuple[str, list[CallPiece]]:
    """Return the joined text, and the pieces of calls, that the next piece of an answer adds."""
    pieces = split_answer(reader, text, is_last)
    spoken = "".join(piece for piece in pieces if isinstance(piece, str))
    return spoken, [piece for piece in pieces if not isinstance(piece, str)]


def _find_finish_reason(reader: CallReader | None, reason: Any) -> Any:
    """Return "tool_calls" if the answer stopped after a call, and otherwise the engine's reason, which may be None."""
    return "tool_calls" if reason == "stop" and reader is not None and reader.num_calls else reason
