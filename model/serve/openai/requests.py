"""Requests for texts as pydantic models: OpenAI's arguments and vLLM's further ones, checked for names and types.

`SamplingParams` and the engine check ranges. `fields.py` has the arguments that are known and not computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from model.engine import SamplingParams
from model.engine.structured import StructuredOutputsParams
from model.serve.errors import ApiError
from model.serve.openai.messages import ChatMessage, Checked, NamedTool, Tool, build_template_variables
from model.serve.openai.tools import ToolUse

_MAX_STOPS = 16


class StreamOptions(Checked):
    """What the events of a stream have besides the text."""

    known_as = "stream_options"
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


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
    """Structured output in vLLM's format; exactly one field may be set, which `StructuredOutputsParams` checks."""

    known_as = "structured_outputs"
    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class TextRequest(Checked):
    """Arguments that all requests for texts share."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class _GenerationRequest(TextRequest):
    """Further arguments that completions and chat completions share."""

    n: int | None = None
    allowed_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    prompt_logprobs: int | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a last event with the numbers of tokens follows the answer in a stream."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def include_continuous_usage(self) -> bool:
        """Whether every event of the stream has the numbers of tokens of its choice so far, as in vLLM.

        This needs both `include_usage` and `continuous_usage_stats` in the stream options.
        """
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def _to_sampling_params(
        self,
        max_tokens: int | None,
        logprobs: int | None,
        structured_outputs: StructuredOutputsParams | None,
    ) -> SamplingParams:
        """Return the sampling parameters of the request.

        Args:
            max_tokens: Most new tokens, or None for as many as the context has room for.
            logprobs: Number of most likely tokens whose log-probabilities are returned; None for no log-probabilities.
            structured_outputs: Form of the text, or None for any text.

        Raises:
            ApiError: Two arguments contradict each other, or `stop`, `logit_bias` or `prompt_logprobs` is refused.
            ModelError: An argument is out of range.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(
                400,
                "prompt_logprobs are not streamed: set stream to false, or ask for echo with logprobs",
                param="prompt_logprobs",
            )
        if isinstance(self.stop, list) and len(self.stop) > _MAX_STOPS:
            raise ApiError(
                400,
                f"stop has {len(self.stop)} texts; it takes at most {_MAX_STOPS}: give fewer",
                param="stop",
            )
        names = (
            "n temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty min_tokens "
            "stop stop_token_ids include_stop_str_in_output ignore_eos skip_special_tokens allowed_token_ids "
            "prompt_logprobs"
        ).split()
        logit_bias = self.logit_bias or {}
        if not all(name.isascii() and name.isdigit() and len(name) < 10 for name in logit_bias):
            raise ApiError(
                400,
                "logit_bias has a name that is not a token id: write token ids in decimal digits, as in /tokenize",
                param="logit_bias",
            )
        arguments = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return SamplingParams(
            **arguments,
            max_tokens=max_tokens,
            logprobs=logprobs,
            logit_bias={int(name): bias for name, bias in logit_bias.items()} or None,
            structured_outputs=structured_outputs,
        )

    def _build_structured_outputs(self) -> StructuredOutputsParams | None:
        """Return the form of the text that `response_format` or `structured_outputs` asks for, or None for any text.

        The fields `guided_*`, which vLLM had before 0.12, are read as those of `structured_outputs`.

        Raises:
            ApiError: Two of these arguments are given, or `response_format` and its schema do not match.
            ModelError: `structured_outputs` does not have exactly one form.
        """
        response_format, outputs = self.response_format, self.structured_outputs
        guided = {
            name: form
            for name in ("json", "regex", "choice", "grammar")
            if (form := getattr(self, f"guided_{name}")) is not None
        }
        if guided and outputs is not None:
            raise ApiError(
                400,
                "the form of the text is given twice: give structured_outputs or guided_json, guided_regex, "
                "guided_choice or guided_grammar",
                param=f"guided_{next(iter(guided))}",
            )
        if guided:
            outputs = StructuredOutputs(**guided)
        if response_format is not None and response_format.type != "text":
            if outputs is not None:
                raise ApiError(
                    400,
                    "the form of the text is given twice: give response_format or structured_outputs",
                    param="structured_outputs",
                )
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

    known_as = "completions"
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def is_scoring(self) -> bool:
        """Whether the answer is the prompt alone, with its log-probabilities if they are asked for.

        This is so for `echo` with `max_tokens` 0.
        """
        return bool(self.echo) and self.max_tokens == 0

    def to_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters, with 16 new tokens by default.

        A prompt that is scored is continued by one token, which the answer counts and does not have, as in vLLM.

        Raises:
            ApiError: Two arguments contradict each other, or an argument is refused.
            ModelError: An argument is out of range.
        """
        max_tokens = 1 if self.is_scoring else 16 if self.max_tokens is None else self.max_tokens
        params = self._to_sampling_params(max_tokens, self.logprobs, self._build_structured_outputs())
        if self.echo and self.prompt_logprobs is None:
            return replace(params, prompt_logprobs=self.logprobs)
        return params

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """List of the prompts; a single text or a single list of token ids is a list of one."""
        is_single = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return [self.prompt] if is_single else self.prompt  # type: ignore[return-value, list-item]


class ChatRequest(_GenerationRequest):
    """Body of `POST /v1/chat/completions`: a conversation to answer."""

    known_as = "chat completions"
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def read_tool_use(self) -> ToolUse | None:
        """Return the functions that the answer may or must call, or None if it may call none.

        Raises:
            ApiError: Two tools have the same name, or `tool_choice` asks for a tool that is missing.
        """
        functions, choice = [tool.function for tool in self.tools or ()], self.tool_choice
        names = [function.name for function in functions]
        if len(set(names)) < len(names):
            raise ApiError(
                400, "two tools have the same name: give each function its own name", param="tools"
            )
        if isinstance(choice, NamedTool):
            if choice.function.name not in names:
                raise ApiError(
                    400,
                    "tool_choice names a function that is not in tools: add it to tools, or name one of them",
                    param="tool_choice",
                )
            return ToolUse(
                [functions[names.index(choice.function.name)]], is_required=True, is_parallel=False
            )
        if choice == "required" and not functions:
            raise ApiError(
                400,
                "tool_choice is required and there are no tools: give tools, or leave tool_choice out",
                param="tool_choice",
            )
        if choice == "none" or not functions:
            return None
        return ToolUse(functions, choice == "required", self.parallel_tool_calls is not False)

    def build_template_variables(self) -> dict[str, Any]:
        """Return the variables of the chat template besides the messages; without tools if none may be called.

        `reasoning_effort` is passed as vLLM passes it: under its name, and as `enable_thinking`.

        Raises:
            ApiError: The answer would both continue the last message and begin a new one, or the tools are refused.
        """
        tools = None if self.read_tool_use() is None else self.tools
        if self.continue_final_message and self.add_generation_prompt is not False:
            raise ApiError(
                400,
                "continue_final_message needs add_generation_prompt to be false",
                param="continue_final_message",
            )
        variables: dict[str, Any] = {}
        if self.add_generation_prompt is not None:
            variables["add_generation_prompt"] = self.add_generation_prompt
        if self.documents is not None:
            variables["documents"] = self.documents
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            variables["enable_thinking"] = self.reasoning_effort != "none"
        return variables | build_template_variables(tools, self.chat_template_kwargs)

    def to_sampling_params(self, tool_parser: str | None = None) -> SamplingParams:
        """Return the sampling parameters; by default the answer may be as long as the context allows.

        Args:
            tool_parser: Name of the parser of tool calls that are not required; None if such calls are not read.

        Raises:
            ApiError: Two arguments contradict each other, or an argument is refused.
            ModelError: An argument is out of range.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        form, tool_use = self._build_structured_outputs(), self.read_tool_use()
        return self._to_sampling_params(
            max_tokens,
            (self.top_logprobs or 0) if self.logprobs else None,
            form if tool_use is None else tool_use.build_structured_outputs(form, tool_parser),
        )


class TokenizeRequest(Checked):
    """Body of `POST /tokenize`: a text or a conversation."""

    known_as = "tokenize"
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(Checked):
    """Body of `POST /detokenize`: token ids."""

    model: str | None = None
    tokens: list[int]
