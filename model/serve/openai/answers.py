"""What clients get: OpenAI's objects, whole or in the pieces of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from model.engine import Logprob
from model.serve.openai.messages import ToolCall

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class CachedTokens(BaseModel):
    """Tokens of prompts whose keys and values were there already."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of all prompts and of all continuations."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(BaseModel):
    """Tokens, the logarithms of their probabilities, those of the likeliest ones, and where in the text they begin."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """A continuation, or the next piece of it. `stop_reason` is what ended it, as vLLM says it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Completion(BaseModel):
    """The answer of /v1/completions, and each event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """A token that might have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A chosen token and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The tokens of an answer, or of a piece of it."""

    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(BaseModel):
    """An answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None = None


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatPiece(BaseModel):
    """The next piece of one answer: in `delta`, its role, text, or pieces of calls."""

    index: int
    delta: dict[str, Any]
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: str | int | None = None


class ChatChunk(BaseModel):
    """An event of the stream of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatPiece]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "nki-workbench"
    max_model_len: int


class ModelList(BaseModel):
    """All models: one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(BaseModel):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class Text(BaseModel):
    """The answer of /detokenize."""

    prompt: str


class Status(BaseModel):
    """The answer of /health and /ready."""

    status: str


class Version(BaseModel):
    """The answer of /version."""

    version: str


class ErrorDetail(BaseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every answer that is no success."""

    error: ErrorDetail


def completion_logprobs(
    token_ids: Sequence[int], found: Sequence[dict[int, Logprob] | None], offset: int, first: str = ""
) -> CompletionLogprobs:
    """The columns of /v1/completions; the first token begins at `offset` characters.

    Where None is found, as for the `first` token of a prompt, there is no probability.
    """
    chosen = [None if each is None else each[token] for token, each in zip(token_ids, found)]
    texts = [first if each is None else each.decoded_token for each in chosen]
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[None if each is None else each.logprob for each in chosen],
        top_logprobs=[
            None if each is None else {one.decoded_token: one.logprob for one in _by_rank(each)}
            for each in found
        ],
        text_offset=[offset + len("".join(texts[:number])) for number in range(len(texts))],
    )


def chat_logprobs(token_ids: Sequence[int], found: Sequence[dict[int, Logprob]], count: int) -> ChatLogprobs:
    """The rows of /v1/chat/completions, with the `count` likeliest tokens."""
    content = [
        TokenLogprob(
            **_entry(each[token]), top_logprobs=[TopLogprob(**_entry(one)) for one in _by_rank(each)[:count]]
        )
        for token, each in zip(token_ids, found)
    ]
    return ChatLogprobs(content=content)


def _by_rank(found: dict[int, Logprob]) -> list[Logprob]:
    return sorted(found.values(), key=lambda each: each.rank)


def _entry(each: Logprob) -> dict[str, Any]:
    return {"token": each.decoded_token, "logprob": each.logprob, "bytes": list(each.decoded_token.encode())}
