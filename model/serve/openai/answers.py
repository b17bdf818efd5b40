"""Answers in OpenAI's format as pydantic models, whole objects and chunks of streams, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, model_serializer

from model.engine import Logprob
from model.serve.openai.messages import ToolCall

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


PromptLogprobs = list[dict[int, dict[str, Any]] | None]
"""Log-probabilities of the tokens of a prompt, by token id, as in vLLM; None for the first token."""


class WithOptional(BaseModel):
    """Base of objects in which the fields named in `optional` are left out, instead of null, if they have no value."""

    optional: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _leave_out(self, serialize):  # type: ignore[no-untyped-def]
        document = serialize(self)
        for name in self.optional:
            if document[name] is None:
                del document[name]
        return document


class CachedTokens(BaseModel):
    """Number of prompt tokens whose keys and values were in the prefix cache."""

    cached_tokens: int


class Usage(WithOptional):
    """Numbers of tokens of all prompts and all continuations of a request.

    In the middle of a stream they are those of one choice so far.
    """

    optional = ("prompt_tokens_details",)
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities of tokens in the format of /v1/completions; each list has an entry for every token.

    `top_logprobs` has the most likely tokens by text. `text_offset` is the character of the text at which a token
    begins.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(WithOptional):
    """Continuation of a prompt, or its next piece in a stream. `stop_reason` is the stop text or token, as in vLLM."""

    optional = ("prompt_logprobs",)
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | None = None


class _Answer(BaseModel):
    """Fields of every answer that the engine computes."""

    id: str
    object: str
    created: int
    model: str


class Completion(_Answer):
    """Answer of /v1/completions, and every event of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """Candidate for a position: its text, natural log-probability and UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """Sampled token, and the most likely tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of the tokens of an answer, or of its next piece."""

    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(WithOptional):
    """Message with which the model answers: its text, and the calls of functions that it makes, if any."""

    optional = ("tool_calls",)
    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One of the `n` answers of a request."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None = None


class ChatCompletion(_Answer, WithOptional):
    """Answer of /v1/chat/completions."""

    optional = ("prompt_logprobs",)
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class ChatPiece(BaseModel):
    """Next piece of one answer in a stream.

    `delta` has its role, its text or pieces of its tool calls.
    """

    index: int
    delta: dict[str, Any]
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: str | int | None = None


class ChatChunk(_Answer):
    """Event of the stream of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatPiece]
    usage: Usage | None = None


class ModelCard(WithOptional):
    """Model of this server."""

    optional = ("max_model_len",)
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "nki-workbench"
    max_model_len: int | None = None


class ModelList(BaseModel):
    """List of all models of this server, which is one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(BaseModel):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class TokenizerInfo(BaseModel):
    """Answer of /tokenizer_info: the class of the tokenizer, its special tokens and the chat template, if known."""

    tokenizer_class: str | None
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None
    max_model_len: int


class Text(BaseModel):
    """Answer of /detokenize."""

    prompt: str


class Status(BaseModel):
    """Answer of /health and /ready."""

    status: str


class Version(BaseModel):
    """Answer of /version."""

    version: str


class ErrorDetail(BaseModel):
    """Reason of a refusal."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Answer of every request that is refused or fails."""

    error: ErrorDetail


def format_completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[dict[int, Logprob] | None],
    offset: int,
    first_token: str = "",
) -> CompletionLogprobs:
    """Return the log-probabilities of tokens in the format of /v1/completions.

    Args:
        token_ids: The tokens.
        logprobs: For each token the log-probabilities of the sampled and the most likely tokens, by token id. None is
        for the first token of a prompt, which has no probability.
        offset: The character of the text at which the first token begins.
        first_token: The text of the first token of a prompt, for which `logprobs` has None.
    """
    sampled = [None if by_id is None else by_id[token] for token, by_id in zip(token_ids, logprobs)]
    texts = [first_token if logprob is None else logprob.decoded_token for logprob in sampled]
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[None if logprob is None else logprob.logprob for logprob in sampled],
        top_logprobs=[
            None
            if by_id is None
            else {logprob.decoded_token: logprob.logprob for logprob in _sort_by_rank(by_id)}
            for by_id in logprobs
        ],
        text_offset=[offset + len("".join(texts[:index])) for index in range(len(texts))],
    )


def format_prompt_logprobs(logprobs: Sequence[dict[int, Logprob] | None]) -> PromptLogprobs:
    """Return the log-probabilities of a prompt's tokens in vLLM's format: logprob, rank and text by token id.

    An entry without log-probabilities, that of the first token, stays None.
    """
    return [
        None
        if by_id is None
        else {
            id: {"logprob": logprob.logprob, "rank": logprob.rank, "decoded_token": logprob.decoded_token}
            for id, logprob in by_id.items()
        }
        for by_id in logprobs
    ]


def format_chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], num_top_logprobs: int
) -> ChatLogprobs:
    """Return the log-probabilities of tokens in the format of /v1/chat/completions.

    Args:
        token_ids: The sampled tokens.
        logprobs: For each token the log-probabilities of the sampled and the most likely tokens, by token id.
        num_top_logprobs: The number of most likely tokens in the answer, for each position.
    """
    content = [
        TokenLogprob(
            **_describe_logprob(by_id[token]),
            top_logprobs=[
                TopLogprob(**_describe_logprob(logprob))
                for logprob in _sort_by_rank(by_id)[:num_top_logprobs]
            ],
        )
        for token, by_id in zip(token_ids, logprobs)
    ]
    return ChatLogprobs(content=content)


def _sort_by_rank(by_id: dict[int, Logprob]) -> list[Logprob]:
    return sorted(by_id.values(), key=lambda logprob: logprob.rank)


def _describe_logprob(logprob: Logprob) -> dict[str, Any]:
    return {
        "token": logprob.decoded_token,
        "logprob": logprob.logprob,
        "bytes": list(logprob.decoded_token.encode()),
    }
