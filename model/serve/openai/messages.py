"""Conversations as clients send them: messages, the functions that an answer may call, and calls that were made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from model.serve.errors import ApiError

_NAME = "^[A-Za-z0-9_-]{1,64}$"


class Checked(BaseModel):
    """Arguments of exactly these names and types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class FunctionDefinition(Checked):
    """A function that the client can run. `strict` is advice: what holds calls to `parameters` is the tool choice."""

    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Checked):
    """A tool; all are functions."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Checked):
    """A function by its name."""

    name: str


class NamedTool(Checked):
    """The choice of one tool."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Checked):
    """A function that an answer called, and the arguments as the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(Checked):
    """A call that an answer made; `index` is its place in a stream."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: the arguments are an object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ApiError(400, "the arguments of a tool call are no JSON object", param="messages")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class TextPart(Checked):
    """A part of a message; only text is read."""

    type: Literal["text"]
    text: str


class ChatMessage(Checked):
    """One message of a conversation; `tool` tells what a call of an earlier answer returned."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Clients send answers back as they came, with the names of OpenAI that are null here."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}

    @model_validator(mode="after")
    def _of_its_role(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant has tool_calls")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("a message of the role tool has a tool_call_id, and no other has one")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: the content is one text."""
        parts = self.content or ""
        content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        given: dict[str, Any] = {"role": self.role, "content": content}
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                given[name] = getattr(self, name)
        if self.tool_calls:
            given["tool_calls"] = [each.for_template() for each in self.tool_calls]
        return given


def template_variables(tools: Sequence[Tool] | None, further: dict[str, Any] | None) -> dict[str, Any]:
    """What a chat template reads beside the messages: the tools as the client gave them, and further names."""
    given = {"tools": [each.model_dump(exclude_unset=True) for each in tools]} if tools else {}
    return {**(further or {}), **given}
