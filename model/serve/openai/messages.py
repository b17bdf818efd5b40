"""Messages of conversations as clients send them, the tools that an answer may call, and calls of earlier answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from model.serve.errors import ApiError
from model.serve.openai.fields import drop_known_fields

_NAME = "^[A-Za-z0-9_-]{1,64}$"


class Checked(BaseModel):
    """Base of request objects: arguments with exactly the declared names and types.

    Known fields of the object `known_as` that are not computed are dropped before the check, or refused.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    known_as: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _drop_known_fields(cls, arguments: Any) -> Any:
        """Return the object without known fields that have no effect; anything but an object is returned unchanged.

        Raises:
            ApiError: A known field would change the answer and is not computed.
        """
        if cls.known_as is None or not isinstance(arguments, dict):
            return arguments
        declared = {field.alias or name: field for name, field in cls.model_fields.items()}
        return drop_known_fields(cls.known_as, arguments, declared)


class FunctionDefinition(Checked):
    """Function that the client can run.

    `strict` has no effect: the tool choice decides whether the schema in `parameters` binds.
    """

    known_as = "tool"
    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Checked):
    """Tool that an answer may call; every tool is a function."""

    known_as = "tool"
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Checked):
    """Name of a function."""

    name: str


class NamedTool(Checked):
    """Tool choice that requires a call of one function by its name."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(FunctionName):
    """Function that an answer called, with its arguments as the text of a JSON object."""

    arguments: str


class ToolCall(Checked):
    """Call that an answer made."""

    known_as = "call"
    id: str
    type: Literal["function"]
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates read it, with its arguments as an object.

        Arguments that are not the text of a JSON object are read as an empty object, as in vLLM: a call that was cut by
        `max_tokens` leaves such a text in the conversation.
        """
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        function = {
            "name": self.function.name,
            "arguments": arguments if isinstance(arguments, dict) else {},
        }
        return {"id": self.id, "type": "function", "function": function}


class TextPart(Checked):
    """Part of a message's content with a text. The text of a refusal in an earlier answer is such a part too."""

    known_as = "part"
    type: Literal["text", "input_text", "output_text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, content_part: Any) -> Any:
        """Return a part of the type refusal as a text part, and any other part unchanged.

        Raises:
            ApiError: The part is an image, a recording or another part without text.
        """
        part_type = content_part.get("type") if isinstance(content_part, dict) else None
        if part_type == "refusal":
            return {"type": "text", "text": content_part.get("refusal")}
        if isinstance(part_type, str) and part_type not in ("text", "input_text", "output_text"):
            raise ApiError(
                400,
                "a message has a part that is not a text: this server's models read texts only, so describe images and "
                "recordings in words, or send recordings to a speech model's /v1/audio/transcriptions",
                "unsupported",
                "messages",
            )
        return content_part


class ChatMessage(Checked):
    """Message of a conversation; one with the role `tool` is the output of a function that an earlier answer called.

    `reasoning` and `reasoning_content` are two names of the thoughts that preceded an earlier answer.
    """

    known_as = "message"
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

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
        """Return the message as chat templates read it, with its content as one text and without fields that are None.

        Thoughts are passed under both names that templates and clients have for them, as in vLLM.
        """
        content = self.content or ""
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        message = {
            "role": self.role,
            "content": content if isinstance(content, str) else "".join(text.text for text in content),
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()] or None,
            "reasoning": reasoning,
            "reasoning_content": reasoning,
        }
        return {name: argument for name, argument in message.items() if argument is not None}


def build_template_variables(tools: Sequence[Tool] | None, kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the variables of a chat template besides the messages.

    Args:
        tools: Tools, which the template gets with exactly the fields that the client sent; none if None or empty.
        kwargs: Further variables, such as `enable_thinking`; the tools replace a variable `tools`.
    """
    tool_variables = {"tools": [tool.model_dump(exclude_unset=True) for tool in tools]} if tools else {}
    return {**(kwargs or {}), **tool_variables}
