"""Requests for texts: OpenAI's arguments and vLLM's further ones, checked for names and types.

`SamplingParams` and the engine check ranges. An unsupported argument that would change the answer is refused by name;
one that changes nothing is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, model_validator

from model.engine import SamplingParams
from model.engine.structured import StructuredOutputsParams
from model.serve.errors import ApiError
from model.serve.openai.messages import ChatMessage, Checked, NamedTool, Tool, template_variables
from model.serve.openai.tools import ToolUse

_IGNORED = (
    "metadata",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Arguments of OpenAI's API that have no effect on the text of an answer."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "modalities": (["text"],),
    "suffix": ("",),
}
"""The only accepted values of some arguments, which have no effect."""
_MAX_STOPS = 16


class StreamOptions(Checked):
    """Options of a stream besides its text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Checked):
    """JSON schema of an answer."""

    name: str
    schema_object: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Checked):
    """Structured output in OpenAI's format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Checked):
    """Structured output in vLLM's format; one field is set."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class _GenerationRequest(Checked):
    """Arguments that completions and chats share."""

    model: str
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_arguments_without_effect(cls, arguments: Any) -> Any:
        if not isinstance(arguments, dict):
            return arguments
        return {
            name: argument
            for name, argument in arguments.items()
            if name in cls.model_fields
            or not (name in _IGNORED or argument is None or argument in _NEUTRAL.get(name, ()))
        }

    @property
    def include_usage(self) -> bool:
        """Whether the last event of the stream has the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def _to_sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters of the request.

        Raises:
            ApiError: Two arguments contradict each other, or `stop` or `logit_bias` is refused.
            ModelError: An argument is out of range.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
        if isinstance(self.stop, list) and len(self.stop) > _MAX_STOPS:
            raise ApiError(400, f"stop has {len(self.stop)} texts; at most {_MAX_STOPS}", param="stop")
        names = (
            "n temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty min_tokens "
            "stop stop_token_ids include_stop_str_in_output ignore_eos skip_special_tokens allowed_token_ids"
        ).split()
        logit_bias = self.logit_bias or {}
        if not all(name.isascii() and name.isdigit() and len(name) < 10 for name in logit_bias):
            raise ApiError(400, "logit_bias has a name that is not a token id", param="logit_bias")
        arguments = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return SamplingParams(
            **arguments,
            max_tokens=max_tokens,
            logprobs=logprobs,
            logit_bias={int(name): bias for name, bias in logit_bias.items()} or None,
            structured_outputs=self._build_structured_outputs(),
        )

    def _build_structured_outputs(self) -> StructuredOutputsParams | None:
        """Return the structured output of the text, for which `response_format` or `structured_outputs` may ask."""
        response_format, outputs = self.response_format, self.structured_outputs
        if response_format is not None and response_format.type != "text":
            if outputs is not None:
                raise ApiError(400, "give response_format or structured_outputs", param="structured_outputs")
            schema = response_format.json_schema
            if (response_format.type == "json_schema") != (schema is not None):
                raise ApiError(
                    400,
                    "response_format needs json_schema if its type is json_schema, and only then",
                    param="response_format",
                )
            if schema is None:
                return StructuredOutputsParams(json_object=True)
            return StructuredOutputsParams(json=schema.schema_object)
        return None if outputs is None else StructuredOutputsParams(**outputs.model_dump(by_alias=True))


class CompletionRequest(_GenerationRequest):
    """Body of `POST /v1/completions`: texts or token ids to continue."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None

    def to_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters, with 16 tokens by default; raise as `_to_sampling_params`."""
        params = self._to_sampling_params(16 if self.max_tokens is None else self.max_tokens, self.logprobs)
        return replace(params, prompt_logprobs=self.logprobs) if self.echo else params

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """List of the prompts; a single text or a single list of token ids is a list of one."""
        is_single = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return [self.prompt] if is_single else self.prompt  # type: ignore[return-value, list-item]


class ChatRequest(_GenerationRequest):
    """Body of `POST /v1/chat/completions`: a conversation to answer."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def read_tool_use(self) -> ToolUse | None:
        """Return the functions that the answer may or must call, or None if it may call none.

        Raises:
            ApiError: Two tools have the same name, or `tool_choice` asks for a tool that is missing.
        """
        functions, choice = [tool.function for tool in self.tools or ()], self.tool_choice
        names = [function.name for function in functions]
        if len(set(names)) < len(names):
            raise ApiError(400, "two tools have the same name", param="tools")
        if isinstance(choice, NamedTool):
            if choice.function.name not in names:
                raise ApiError(400, "tool_choice names a function that is not in tools", param="tool_choice")
            return ToolUse(
                [functions[names.index(choice.function.name)]], is_required=True, is_parallel=False
            )
        if choice == "required" and not functions:
            raise ApiError(400, "tool_choice is required and there are no tools", param="tool_choice")
        if choice == "none" or not functions:
            return None
        return ToolUse(functions, choice == "required", self.parallel_tool_calls is not False)

    def _build_structured_outputs(self) -> StructuredOutputsParams | None:
        """Return the grammar of required tool calls, or else the structured output that is asked for."""
        params, tool_use = super()._build_structured_outputs(), self.read_tool_use()
        if params is not None and tool_use is not None:
            raise ApiError(
                400,
                "tools exclude another structured output: leave out tools, or the other output",
                param="response_format",
            )
        return params if tool_use is None else tool_use.build_structured_outputs()

    def template_variables(self) -> dict[str, Any]:
        """Return the variables of the chat template besides the messages; without tools if none may be called."""
        return template_variables(
            None if self.read_tool_use() is None else self.tools, self.chat_template_kwargs
        )

    def to_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters, by default up to the end of the context; raise as `_to_sampling_params`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._to_sampling_params(max_tokens, (self.top_logprobs or 0) if self.logprobs else None)


class TokenizeRequest(Checked):
    """Body of `POST /tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Checked):
    """Body of `POST /detokenize`: token ids."""

    model: str | None = None
    tokens: list[int]
