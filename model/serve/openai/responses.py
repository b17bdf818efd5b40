"""Answers of OpenAI's Responses API: response objects, and the events of a stream, as in openai-python 3.54.

A response has items: messages with text, and calls of functions.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from model.engine import CompletionOutput
from model.engine.async_engine import Stream, Update
from model.serve.errors import ApiError
from model.serve.openai.calls import CallPiece
from model.serve.openai.chat import ChatHandler, split_answer
from model.serve.openai.generation import Service
from model.serve.openai.response_requests import ResponseRequest

Event = dict[str, Any]
"""Event of a stream without its sequence number."""


class ResponseHandler(ChatHandler):
    """Handler of a request for `/v1/responses`, which the engine computes as a chat completion."""

    response_request: ResponseRequest
    num_events: int = 0

    @classmethod
    async def prepare_response(cls, service: Service, response_request: ResponseRequest) -> ResponseHandler:
        """Check a request, encode its conversation, compile its grammar, and return its handler.

        Nothing is submitted to the engine yet.

        Raises:
            ApiError: The request asks for state or for tools of OpenAI's servers, or the server cannot take it now.
            RequestValidationError: An argument of an item or a tool has a wrong type.
            ModelError: An argument is out of range, or the conversation is too long or refused by the chat template.
            EngineFull: The queue has no place for the request.
        """
        service.check_max_tokens(response_request.max_output_tokens, "max_output_tokens")
        try:
            request = response_request.to_chat()
        except ValidationError as error:
            raise RequestValidationError(
                [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
            ) from None
        self = await cls.prepare(service, request)
        self.response_request = response_request
        self.answer_fields["id"] = f"resp_{uuid4().hex}"
        return self

    async def answer(self, stream: Stream) -> dict[str, Any]:  # type: ignore[override]
        """Wait for the end of the stream, and return the whole response as a JSON object.

        Raises:
            ApiError: The engine failed or could not compute the request.
        """
        (output,) = await self.collect_outputs(stream)
        items, reader = _Items(), self._make_reader()
        for piece in split_answer(reader, output.text, is_last=True):
            for _ in items.push(piece):
                pass
        items.add_logprobs(self._describe_response_logprobs(output))
        for _ in items.end(output.finish_reason == "length"):
            pass
        return self._describe(items, output.finish_reason, stream)

    async def stream_events(self, stream: Stream) -> AsyncIterator[str]:
        """Yield the events of the response as JSON, each with its type and its sequence number.

        Raises:
            ApiError: The engine failed or could not compute the request.
        """
        items, reader = _Items(), self._make_reader()
        for name in ("created", "in_progress"):
            yield self._encode({"type": f"response.{name}", "response": self._describe(items, None, None)})
        finish_reason = None
        async for update in self.iterate_updates(stream):
            finish_reason = update.finish_reason
            logprobs = self._describe_response_logprobs(update)
            for piece in split_answer(reader, update.text, finish_reason is not None):
                for event in items.push(piece, logprobs):
                    yield self._encode(event)
            items.add_logprobs(logprobs)
        for event in items.end(finish_reason == "length"):
            yield self._encode(event)
        response = self._describe(items, finish_reason, stream)
        yield self._encode({"type": f"response.{response['status']}", "response": response})

    def format_event(self, event: str) -> bytes:
        """Return an event, which is JSON text, as the bytes of a server-sent event with its type."""
        return f"event: {json.loads(event)['type']}\ndata: {event}\n\n".encode()

    def format_end(self, error: ApiError | None) -> bytes:
        """Return the bytes that end the stream: an event with the error, or nothing without one.

        OpenAI's streams of responses have no [DONE].
        """
        if error is None:
            return b""
        detail = error.document["error"]
        event = {
            "type": "error",
            "code": detail["code"],
            "message": detail["message"],
            "param": detail["param"],
        }
        return self.format_event(self._encode(event))

    def _encode(self, event: Event) -> str:
        """Return an event as JSON with the next sequence number, which is counted from 0."""
        self.num_events += 1
        return json.dumps({**event, "sequence_number": self.num_events - 1}, ensure_ascii=False)

    def _describe_response_logprobs(self, output: CompletionOutput | Update) -> list[dict[str, Any]]:
        logprobs = self._describe_logprobs(output)
        return [] if logprobs is None else [logprob.model_dump() for logprob in logprobs.content]

    def _describe(self, items: _Items, finish_reason: str | None, stream: Stream | None) -> dict[str, Any]:
        """Return the response so far as a JSON object.

        Args:
            items: The items so far.
            finish_reason: Why the engine ended the answer, or None before its end.
            stream: The stream that has ended, for the usage; with None the status is in_progress.
        """
        response_request, is_cut = self.response_request, finish_reason == "length"
        status = "in_progress" if stream is None else "incomplete" if is_cut else "completed"
        return {
            "id": self.answer_fields["id"],
            "object": "response",
            "created_at": self.answer_fields["created"],
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": response_request.instructions,
            "max_output_tokens": response_request.max_output_tokens,
            "metadata": {},
            "model": self.service.model,
            "output": items.output,
            "parallel_tool_calls": response_request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": response_request.reasoning and response_request.reasoning.effort,
                "summary": None,
            },
            "store": False,
            "temperature": self.params.temperature,
            "text": {"format": self._describe_format()},
            "tool_choice": response_request.tool_choice or "auto",
            "tools": response_request.tools or [],
            "top_logprobs": response_request.top_logprobs or 0,
            "top_p": self.params.top_p,
            "truncation": "disabled",
            "usage": None if stream is None else self._describe_usage(stream),
        }

    def _describe_format(self) -> dict[str, Any]:
        form = None if self.response_request.text is None else self.response_request.text.format
        return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)

    def _describe_usage(self, stream: Stream) -> dict[str, Any]:
        usage = self.build_usage(stream)
        details = usage.prompt_tokens_details
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0 if details is None else details.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        }


@dataclass
class _Items:
    """Items of a response so far: messages, and calls of functions.

    Methods that add to the items yield the events of the stream that describe the change. At most the last item is
    open, with the status in_progress.
    """

    output: list[dict[str, Any]] = field(default_factory=list)
    _logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Log-probabilities of tokens that no message has yet."""

    def add_logprobs(self, logprobs: list[dict[str, Any]]) -> None:
        """Keep the log-probabilities of tokens; the message that is closed next gets them."""
        self._logprobs += logprobs

    def push(self, piece: str | CallPiece, logprobs: list[dict[str, Any]] | None = None) -> Iterator[Event]:
        """Append a piece of text or of a call to the items, and yield the events that describe it.

        A piece of another kind than the last item, or of a new call, closes the last item and opens a new one.

        Args:
            piece: The text, or the piece of a call.
            logprobs: The log-probabilities of the tokens of a piece of text, for its event.
        """
        if isinstance(piece, str):
            if not self._is_open("message"):
                yield from self.close()
                yield from self._open_message()
            item = self.output[-1]
            item["content"][0]["text"] += piece
            yield {
                **self._locate("response.output_text.delta"),
                "content_index": 0,
                "delta": piece,
                "logprobs": logprobs or [],
            }
            return
        if piece.id is not None:
            yield from self.close()
            yield from self._open(
                {
                    "id": f"fc_{uuid4().hex}",
                    "type": "function_call",
                    "status": "in_progress",
                    "call_id": piece.id,
                    "name": piece.name,
                    "arguments": "",
                }
            )
        if piece.arguments:
            self.output[-1]["arguments"] += piece.arguments
            yield {
                **self._locate("response.function_call_arguments.delta"),
                "delta": piece.arguments,
            }

    def end(self, is_cut: bool) -> Iterator[Event]:
        """Close the last item, and yield the events that describe it; an answer without items gets an empty message.

        Args:
            is_cut: Whether the last item is incomplete, because the limit of tokens was reached.
        """
        if not self.output:
            yield from self._open_message()
        yield from self.close("incomplete" if is_cut else "completed")

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Give the last item a final status, and yield the events that describe it; do nothing if no item is open."""
        if not self.output or self.output[-1]["status"] != "in_progress":
            return
        item = self.output[-1]
        if item["type"] == "message":
            content_part = item["content"][0]
            content_part["logprobs"], self._logprobs = self._logprobs, []
            yield {
                **self._locate("response.output_text.done"),
                "content_index": 0,
                "text": content_part["text"],
                "logprobs": content_part["logprobs"],
            }
            yield {**self._locate("response.content_part.done"), "content_index": 0, "part": content_part}
        else:
            yield {
                **self._locate("response.function_call_arguments.done"),
                "name": item["name"],
                "arguments": item["arguments"],
            }
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.output) - 1, "item": item}

    def _is_open(self, item_type: str) -> bool:
        return (
            bool(self.output)
            and self.output[-1]["type"] == item_type
            and self.output[-1]["status"] == "in_progress"
        )

    def _open(self, item: dict[str, Any]) -> Iterator[Event]:
        self.output.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.output) - 1, "item": item}

    def _open_message(self) -> Iterator[Event]:
        content_part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        message = {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": list[Any](),
        }
        yield from self._open(message)
        message["content"] = [content_part]
        yield {**self._locate("response.content_part.added"), "content_index": 0, "part": content_part}

    def _locate(self, event_type: str) -> Event:
        """Return an event with its type, the id of the last item and the index of that item."""
        return {"type": event_type, "item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}
