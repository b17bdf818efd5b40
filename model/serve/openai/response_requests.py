"""Requests of OpenAI's Responses API, which are translated to conversations of /v1/chat/completions.

The server is stateless: `store`, whose default is true, is accepted, and nothing is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from model.serve.errors import ApiError
from model.serve.openai.messages import Checked
from model.serve.openai.requests import ChatRequest, TextRequest

_LOGPROBS = "message.output_text.logprobs"


class TextFormat(Checked):
    """Form of the text of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_object: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Checked):
    """Options of the text of an answer; `verbosity` has no effect."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Checked):
    """Options of the thoughts before an answer.

    `effort` is passed to the chat template; the other fields have no effect.
    """

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseRequest(TextRequest):
    """Body of `POST /v1/responses`: the items of a conversation to answer."""

    known_as = "responses"
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None

    @property
    def include_logprobs(self) -> bool:
        """Whether the request asks for the log-probabilities of the answer's tokens."""
        return _LOGPROBS in (self.include or ())

    def to_chat(self) -> ChatRequest:
        """Return the request as a request for /v1/chat/completions.

        Raises:
            ApiError: An item, a tool or a choice of tools asks for state or for tools of OpenAI's servers; or the input
                is
            empty, or a schema is missing.
            ValidationError: An argument of an item or a tool has a wrong type.
        """
        names = {*TextRequest.model_fields, "chat_template_kwargs", "parallel_tool_calls"}
        arguments = {name: getattr(self, name) for name in names - {"structured_outputs", "stream_options"}}
        arguments |= {
            "messages": self._read_messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [_read_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": _read_tool_choice(self.tool_choice) if self.tools else None,
            "logprobs": self.include_logprobs,
            "top_logprobs": self.top_logprobs if self.include_logprobs else None,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "response_format": self._read_format(),
        }
        if self.structured_outputs is not None:
            arguments["structured_outputs"] = self.structured_outputs.model_dump(by_alias=True)
        return ChatRequest.model_validate(
            {name: argument for name, argument in arguments.items() if argument is not None}
        )

    def _read_format(self) -> dict[str, Any] | None:
        form = None if self.text is None else self.text.format
        if form is None or form.type != "json_schema":
            return None if form is None else {"type": form.type}
        if form.schema_object is None:
            raise ApiError(
                400,
                "text.format of the type json_schema has no schema: give text.format.schema",
                param="text.format",
            )
        return {
            "type": form.type,
            "json_schema": {"name": form.name or "answer", "schema": form.schema_object},
        }

    def _read_messages(self) -> list[dict[str, Any]]:
        """Return the instructions as a system message, and the messages of all items of the input.

        Raises:
            ApiError: An item is refused, or there are neither instructions nor items.
        """
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        for number, item in enumerate(items):
            _add_item(messages, item, f"input.{number}")
        if not messages:
            raise ApiError(400, "input is empty: give a text or at least one item", param="input")
        return messages


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], location: str) -> None:
    """Append the message of an item to `messages`, or add its call to the assistant's message before it.

    An item with the thoughts of an earlier answer is skipped.

    Args:
        messages: Messages of chat completions, which are changed.
        item: An item of the request's input.
        location: The item's location in the request, for a refusal.

    Raises:
        ApiError: The item is not a message, a call of a function, its output, or the thoughts of an earlier answer.
    """
    item_type = item.get("type", "message")
    if item_type == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif item_type == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant"})
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)
    elif item_type == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    elif item_type == "item_reference":
        raise ApiError(400, "this server stores no items: send the item itself", "unsupported", location)
    elif item_type != "reasoning":
        raise ApiError(
            400,
            "an item of input is not a message, a function_call, a function_call_output or reasoning: leave it out",
            "unsupported",
            location,
        )


def _read_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function of the Responses API in the format of /v1/chat/completions.

    Raises:
        ApiError: The tool is not a function but one that OpenAI's servers run.
    """
    if tool.get("type") != "function":
        raise ApiError(
            400, "this server runs no tools of its own: give functions in tools", "unsupported", "tools"
        )
    return {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}}


def _read_tool_choice(choice: str | Mapping[str, Any] | None) -> Any:
    """Return a tool choice of the Responses API in the format of /v1/chat/completions.

    Raises:
        ApiError: The choice is an object of another type than function.
    """
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise ApiError(
            400,
            "tool_choice is none, auto, required or a function: leave other tools out of tools",
            "unsupported",
            "tool_choice",
        )
    return {"type": "function", "function": {"name": choice.get("name")}}
