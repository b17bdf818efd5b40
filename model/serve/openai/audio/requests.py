"""Requests for transcriptions as a pydantic model: OpenAI's arguments and vLLM's further ones, as fields of a form."""

from __future__ import annotations

from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from model.engine import SamplingParams
from model.serve.errors import ApiError
from model.serve.openai.audio.form import FormField
from model.serve.openai.fields import drop_known_fields

_GRANULARITIES = "timestamp_granularities[]"


class AudioRequest(BaseModel):
    """Fields of `POST /v1/audio/transcriptions` and `/v1/audio/translations` besides `file`, parsed from texts."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    language: str | None = None
    prompt: str = ""
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    timestamp_granularities: list[Literal["word", "segment"]] = Field([], alias="timestamp_granularities[]")
    stream: bool = False
    stream_include_usage: bool = False
    stream_continuous_usage_stats: bool = False
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
    def include_continuous_usage(self) -> bool:
        """Whether every event of the stream has the numbers of prompt and new tokens so far, as in vLLM."""
        return self.stream_include_usage and self.stream_continuous_usage_stats

    @property
    def has_timestamps(self) -> bool:
        """Whether the answer has the times of segments, so that windows are transcribed with timestamps."""
        return self.response_format in ("verbose_json", "srt", "vtt")

    def to_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that every window of the recording has.

        Raises:
            ApiError: The format of the answer excludes another argument, or times of words are asked for.
            ModelError: An argument is out of range.
        """
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise ApiError(
                400, "timestamp_granularities[] needs the response_format verbose_json", param=_GRANULARITIES
            )
        if "word" in self.timestamp_granularities:
            raise ApiError(
                400,
                "times of words are not computed: set timestamp_granularities[] to segment",
                "unsupported",
                _GRANULARITIES,
            )
        if not self.stream and (self.stream_include_usage or self.stream_continuous_usage_stats):
            raise ApiError(
                400,
                "stream_include_usage and stream_continuous_usage_stats need stream to be true",
                param="stream_include_usage",
            )
        if self.stream and self.response_format not in ("json", "text"):
            raise ApiError(
                400,
                f"a stream has no response_format {self.response_format}: set it to json or text, or stream to false",
                param="stream",
            )
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
            logprobs=0 if self.has_timestamps else None,
        )


def read_audio_request(fields: list[FormField]) -> tuple[AudioRequest, bytes]:
    """Return the arguments of a form, and the bytes of its file.

    Raises:
        ApiError: The form does not have exactly one file, has another field twice, or has a field that would change
        the transcription and is not computed.
        RequestValidationError: A field has an unknown name or a wrong value.
    """
    files = [field for field in fields if field.name == "file"]
    if len(files) != 1 or not files[0].is_file:
        raise ApiError(
            400, "the form needs exactly one file: send a recording in the field file", param="file"
        )
    arguments: dict[str, Any] = {}
    for field in fields:
        if field.name == _GRANULARITIES:
            arguments.setdefault(field.name, []).append(field.text)
        elif field.name in arguments:
            raise ApiError(400, "the form has a field twice: send it once", "invalid_form", field.name)
        elif field.name != "file":
            arguments[field.name] = field.text
    declared = {field.alias or name: field for name, field in AudioRequest.model_fields.items()}
    arguments = drop_known_fields("transcriptions", arguments, declared)
    try:
        return AudioRequest.model_validate(arguments), files[0].content
    except ValidationError as invalid:
        errors = [{**error, "loc": ("body", *error["loc"])} for error in invalid.errors(include_url=False)]
        raise RequestValidationError(errors) from None


def build_form_schema() -> dict[str, Any]:
    """Return the OpenAPI request body of the form: the fields of `AudioRequest`, and the required file."""
    schema = AudioRequest.model_json_schema()
    schema["properties"] = {"file": {"type": "string", "format": "binary"}, **schema["properties"]}
    schema["required"] = ["file"]
    return {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
