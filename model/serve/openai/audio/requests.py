"""What clients ask of a recording: OpenAI's arguments, and vLLM's further ones, as the fields of a form."""

from __future__ import annotations

from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from model.engine import SamplingParams
from model.serve.errors import ApiError
from model.serve.openai.audio.form import FormPart

_GRANULARITIES = "timestamp_granularities[]"
_LISTS = (_GRANULARITIES,)
_WITH_TIMES = ("verbose_json", "srt", "vtt")


class AudioRequest(BaseModel):
    """`POST /v1/audio/transcriptions` and `/v1/audio/translations`, beside the `file`; values come as texts."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    language: str | None = None
    prompt: str = ""
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    timestamp_granularities: list[Literal["word", "segment"]] = Field([], alias="timestamp_granularities[]")
    stream: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_completion_tokens: int | None = None

    @property
    def timestamps(self) -> bool:
        """Whether the answer has the times of segments."""
        return self.response_format in _WITH_TIMES

    def params(self) -> SamplingParams:
        """How to choose tokens of a window; ApiError or ModelError for what cannot be."""
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise ApiError(
                400, "timestamp_granularities[] needs the response_format verbose_json", param=_GRANULARITIES
            )
        if "word" in self.timestamp_granularities:
            raise ApiError(
                400, "times of words are not computed, those of segments are", "unsupported", _GRANULARITIES
            )
        if self.stream and self.response_format not in ("json", "text"):
            raise ApiError(400, "a stream has the response_format json or text", param="stream")
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            max_tokens=self.max_completion_tokens,
            logprobs=0 if self.timestamps else None,
        )


def audio_request(parts: list[FormPart]) -> tuple[AudioRequest, bytes]:
    """The arguments and the file of a form; ApiError or RequestValidationError for what cannot be."""
    given: dict[str, Any] = {}
    files = [each for each in parts if each.name == "file"]
    if len(files) != 1 or not files[0].is_file:
        raise ApiError(400, "the form needs one file, a recording", param="file")
    for each in parts:
        if each.name in _LISTS:
            given.setdefault(each.name, []).append(each.text)
        elif each.name in given:
            raise ApiError(400, "the form has a field twice", "invalid_form", each.name)
        elif each.name != "file":
            given[each.name] = each.text
    try:
        return AudioRequest.model_validate(given), files[0].content
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        raise RequestValidationError(found) from None


def form_schema() -> dict[str, Any]:
    """The body of such a request, for the schema of the routes."""
    schema = AudioRequest.model_json_schema()
    schema["properties"] = {"file": {"type": "string", "format": "binary"}, **schema["properties"]}
    schema["required"] = ["file"]
    return {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
