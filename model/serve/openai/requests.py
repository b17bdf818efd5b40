"""What clients send: OpenAI's arguments, checked for names and types; vLLM's further ones under its names.

Ranges are checked where they are meant, in `SamplingParams` and in the engine. An unsupported
argument that would change the answer is refused by name; one that changes nothing is accepted.
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
"""Arguments of OpenAI's that say nothing about the answer's text."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "modalities": (["text"],),
    "suffix": ("",),
}
"""Values that ask for nothing, of arguments that are refused otherwise."""

_MOST_STOPS = 16


class StreamOptions(Checked):
    """What a stream holds beside the text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Checked):
    """The schema of an answer."""

    name: str
    form: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Checked):
    """The form of an answer in OpenAI's words."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Checked):
    """The form of a text in vLLM's words: one of these."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class _Generation(Checked):
    """The arguments that both ways of asking share."""

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
    def _without_what_says_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if name in cls.model_fields
            or not (name in _IGNORED or value is None or value in _NEUTRAL.get(name, ()))
        }

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with the number of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def _params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """How to choose tokens; ModelError for values out of range."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
        if isinstance(self.stop, list) and len(self.stop) > _MOST_STOPS:
            raise ApiError(400, f"stop has {len(self.stop)} texts; at most {_MOST_STOPS}", param="stop")
        same = (
            "n temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty min_tokens "
            "stop stop_token_ids include_stop_str_in_output ignore_eos skip_special_tokens allowed_token_ids"
        ).split()
        given = {name: value for name in same if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **given,
            max_tokens=max_tokens,
            logprobs=logprobs,
            logit_bias=_biases(self.logit_bias),
            structured_outputs=self._form(),
        )

    def _form(self) -> StructuredOutputsParams | None:
        """The form that the text must have; one argument may ask for it."""
        asked, form = self.response_format, self.structured_outputs
        if asked is not None and asked.type != "text":
            if form is not None:
                raise ApiError(400, "give response_format or structured_outputs", param="structured_outputs")
            if (asked.type == "json_schema") != (asked.json_schema is not None):
                raise ApiError(
                    400, "json_schema goes with the type json_schema, and only there", param="response_format"
                )
            schema = None if asked.json_schema is None else asked.json_schema.form
            return StructuredOutputsParams(json=schema, json_object=schema is None or None)
        return None if form is None else StructuredOutputsParams(**form.model_dump(by_alias=True))


class CompletionRequest(_Generation):
    """`POST /v1/completions`: texts, or token ids, to continue."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None

    def params(self) -> SamplingParams:
        """How to choose tokens; 16 of them where the request does not say."""
        params = self._params(16 if self.max_tokens is None else self.max_tokens, self.logprobs)
        return replace(params, prompt_logprobs=self.logprobs) if self.echo else params

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, where one may stand alone."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class ChatRequest(_Generation):
    """`POST /v1/chat/completions`: a conversation to answer."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def tool_use(self) -> ToolUse | None:
        """The functions that may or must be called; None where none is given or none may be."""
        functions, choice = [each.function for each in self.tools or ()], self.tool_choice
        names = [each.name for each in functions]
        if len(set(names)) < len(names):
            raise ApiError(400, "two tools have the same name", param="tools")
        several = self.parallel_tool_calls is not False
        if isinstance(choice, NamedTool):
            if choice.function.name not in names:
                raise ApiError(400, "tool_choice names a function that is not in tools", param="tool_choice")
            one = functions[names.index(choice.function.name)]
            return ToolUse([one], held=True, several=False)
        if choice == "required" and not functions:
            raise ApiError(400, "tool_choice is required and there are no tools", param="tool_choice")
        if choice == "none" or not functions:
            return None
        return ToolUse(functions, choice == "required", several)

    def _form(self) -> StructuredOutputsParams | None:
        """The form of required calls, or the one that is asked for."""
        form, use = super()._form(), self.tool_use()
        if form is not None and use is not None:
            raise ApiError(400, "an answer that may call tools takes no other form", param="response_format")
        return form if use is None else use.form()

    def variables(self) -> dict[str, Any]:
        """What the chat template reads beside the messages."""
        return template_variables(None if self.tool_use() is None else self.tools, self.chat_template_kwargs)

    def params(self) -> SamplingParams:
        """How to choose tokens; as many as the context allows where the request does not say."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._params(most, (self.top_logprobs or 0) if self.logprobs else None)


class TokenizeRequest(Checked):
    """`POST /tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True

    def variables(self) -> dict[str, Any]:
        """What the chat template reads beside the messages."""
        return template_variables(self.tools, self.chat_template_kwargs)


class DetokenizeRequest(Checked):
    """`POST /detokenize`: token ids."""

    model: str | None = None
    tokens: list[int]


def _biases(given: Mapping[str, float] | None) -> dict[int, float] | None:
    """JSON's names are texts; here they are token ids."""
    if not given:
        return None
    wrong = next((each for each in given if not (each.isascii() and each.isdigit() and len(each) < 10)), None)
    if wrong is not None:
        raise ApiError(400, "logit_bias has a name that is no token id", param="logit_bias")
    return {int(name): bias for name, bias in given.items()}
