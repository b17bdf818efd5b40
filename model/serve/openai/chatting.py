"""`/v1/chat/completions`: answers of a conversation, in which the model may call functions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from model.engine import Logprob
from model.engine.async_engine import Stream
from model.serve.errors import ApiError
from model.serve.openai import answers
from model.serve.openai.calls import CallPiece, CallReader
from model.serve.openai.generation import Answering, Continuation, Service
from model.serve.openai.messages import CalledFunction, ToolCall
from model.serve.openai.requests import ChatRequest
from model.serve.openai.tools import ToolUse


class Chatting(Answering[ChatRequest]):
    """One conversation on its way."""

    tool_use: ToolUse | None

    @classmethod
    async def prepared(cls, service: Service, asked: ChatRequest) -> Chatting:
        """With the conversation as ids; ApiError or ModelError for what cannot be."""
        service.check_model(asked.model)
        self = cls(service, asked, "chatcmpl")
        self.tool_use = asked.tool_use()
        if self.tool_use is not None and not self.tool_use.held and service.tool_parser is None:
            raise ApiError(
                400,
                "the chat template teaches no known form of calls: tool_choice may be none, required or a function, "
                "or the server gets a --tool-call-parser",
                param="tool_choice",
            )
        self.params = asked.params()
        service.engine.check_places(self.params.n)
        self.prompts = [await service.conversation(asked.messages, asked.variables())]
        await self.compile_grammar()
        return self

    async def answer(self, stream: Stream) -> answers.ChatCompletion:
        """The whole answer."""
        choices = [self._choice(index, each) for index, each in enumerate(await self.whole(stream))]
        return answers.ChatCompletion(**self.head, choices=choices, usage=self.usage(stream))

    async def events(self, stream: Stream) -> AsyncIterator[str]:
        """The pieces as JSON: of each choice first its role, then its text and its calls."""
        readers: dict[int, CallReader | None] = {}
        async for update in self.updates(stream):
            index = self.place(update)
            if index not in readers:
                readers[index] = self._reader()
                first = answers.ChatPiece(index=index, delta={"role": "assistant", "content": ""})
                yield self._chunk([first])
            reader, delta = readers[index], dict[str, Any]()
            text, calls = _read(reader, update.text, update.finish_reason is not None)
            if text:
                delta["content"] = text
            if calls:
                delta["tool_calls"] = [each.delta() for each in calls]
            logprobs = self._logprobs(update.token_ids, update.logprobs)
            if delta or logprobs is not None or update.finish_reason is not None:
                piece = answers.ChatPiece(
                    index=index,
                    delta=delta,
                    logprobs=logprobs,
                    finish_reason=_reason(reader, update.finish_reason),
                    stop_reason=update.stop_reason,
                )
                yield self._chunk([piece])
        if self.asked.include_usage:
            yield self._chunk([], self.usage(stream))

    def _choice(self, index: int, found: Continuation) -> answers.ChatChoice:
        reader = self._reader()
        text, pieces = _read(reader, found.text, True)
        calls = [
            ToolCall(
                id=str(each.id),
                type="function",
                function=CalledFunction(name=str(each.name), arguments=each.arguments),
            )
            for each in pieces
        ]
        return answers.ChatChoice(
            index=index,
            message=answers.AnswerMessage(
                content=None if calls and not text else text, tool_calls=calls or None
            ),
            logprobs=self._logprobs(found.token_ids, found.logprobs),
            finish_reason=_reason(reader, found.finish_reason),
            stop_reason=found.stop_reason,
        )

    def _reader(self) -> CallReader | None:
        return None if self.tool_use is None else self.tool_use.reader(self.service.tool_parser)

    def _chunk(self, choices: list[answers.ChatPiece], usage: answers.Usage | None = None) -> str:
        return answers.ChatChunk(**self.head, choices=choices, usage=usage).model_dump_json()

    def _logprobs(
        self, token_ids: Sequence[int], found: Sequence[dict[int, Logprob]]
    ) -> answers.ChatLogprobs | None:
        count = self.params.logprobs
        return None if count is None else answers.chat_logprobs(token_ids, found, count)


def _read(reader: CallReader | None, text: str, last: bool) -> tuple[str, list[CallPiece]]:
    """What is text of a piece, and the pieces of calls in it."""
    if reader is None:
        return text, []
    pieces = reader.push(text) + (reader.finish() if last else [])
    said = "".join(each for each in pieces if isinstance(each, str))
    return said, [each for each in pieces if not isinstance(each, str)]


def _reason(reader: CallReader | None, reason: Any) -> Any:
    """Why the answer ended; one that stopped after a call waits for what it returns."""
    return "tool_calls" if reason == "stop" and reader is not None and reader.calls else reason
