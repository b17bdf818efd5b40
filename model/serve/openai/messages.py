"""Messages of conversations as clients send them, the tools that an answer may call, and calls that were made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from model.serve.errors import ApiError

_NAME = "^[A-Za-z0-9_-]{1,64}$"


class Checked(BaseModel):
    """Arguments with exactly these names and types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class FunctionDefinition(Checked):
    """Function that the client can run. `strict` has no effect: the tool choice decides whether `parameters` bind."""

    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Checked):
    """Tool that an answer may call; every tool is a function."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Checked):
    """Name of a function."""

    name: str


class NamedTool(Checked):
    """Choice of one tool."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(FunctionName):
    """Function that an answer called, with its arguments as the text of a JSON object."""

    arguments: str


class ToolCall(Checked):
    """Call that an answer made; `index` counts the calls of a stream."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates read it, with its arguments as an object.

        Raises:
            ApiError: The arguments are not the text of a JSON object.
        """
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ApiError(400, "the arguments of a tool call are no JSON object", param="messages")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class TextPart(Checked):
    """Text in the content of a message; images and recordings are refused."""

    type: Literal["text"]
    text: str


class ChatMessage(Checked):
    """Message of a conversation; one of the role `tool` is the output of a function that an earlier answer called."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, arguments: Any) -> Any:
        """Drop names with null: clients send answers back unchanged, with names of OpenAI that are null here."""
        if not isinstance(arguments, dict):
            return arguments
        return {name: argument for name, argument in arguments.items() if argument is not None}

    @model_validator(mode="after")
    def _check_role(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant has tool_calls")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("a message of the role tool has a tool_call_id, and no other has one")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it, with its content as one text."""
        content = self.content or ""
        message = {
            "role": self.role,
            "content": content if isinstance(content, str) else "".join(text.text for text in content),
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()] or None,
        }
        return {name: argument for name, argument in message.items() if argument is not None}


def template_variables(tools: Sequence[Tool] | None, kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the variables of a chat template besides the messages.

    Args:
        tools: Tools, which the template gets with exactly the fields that the client sent.
        kwargs: Further variables, such as `enable_thinking`.
    """
    tool_variables = {"tools": [tool.model_dump(exclude_unset=True) for tool in tools]} if tools else {}
    return {**(kwargs or {}), **tool_variables}
