"""Answers of transcriptions: OpenAI's objects, subtitles, and the events of a stream."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import BaseModel

from model.serve.openai.answers import WithOptional


class Duration(BaseModel):
    """Seconds of a recording, rounded up."""

    type: Literal["duration"] = "duration"
    seconds: int


class TokensUsed(BaseModel):
    """Numbers of tokens of the prompts of all windows, and of the transcription."""

    type: Literal["tokens"] = "tokens"
    input_tokens: int
    output_tokens: int
    total_tokens: int


class Transcription(BaseModel):
    """Transcription as one text."""

    text: str
    usage: Duration


class SpokenSegment(BaseModel):
    """Segment of a transcription, with times in seconds of the recording.

    `seek` is the start of the segment's window in units of 10 ms. `tokens` include timestamp tokens. The probability
    of no speech is not computed.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: None = None


class VerboseTranscription(BaseModel):
    """Transcription with its segments."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[SpokenSegment]
    usage: Duration


class TextDelta(WithOptional):
    """Event of a stream: the next piece of the text, with the tokens so far if the request asks for them."""

    optional = ("usage",)
    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    delta: str
    usage: TokensUsed | None = None


class TextDone(BaseModel):
    """Last event of a stream: the whole text."""

    type: Literal["transcript.text.done"] = "transcript.text.done"
    text: str
    usage: TokensUsed


class StrippedText:
    """Text that is pushed in pieces, without the blanks at its start and its end."""

    def __init__(self) -> None:
        self.text = ""
        self._blanks = ""

    def push(self, text: str) -> str:
        """Append the next piece and return the new text; blanks are held back until more text follows."""
        text = self._blanks + text if self.text else text.lstrip()
        stripped = text.rstrip()
        self._blanks = text[len(stripped) :]
        self.text += stripped
        return stripped


def compression_ratio(text: str) -> float:
    """Return the bytes of a text divided by its bytes compressed with zlib; repetitions make the ratio large."""
    content = text.encode()
    return len(content) / len(zlib.compress(content))


def _format_srt(segments: Sequence[SpokenSegment]) -> str:
    """Return segments as subtitles in the SubRip format."""
    return "".join(f"{number}\n{_format_cue(segment, ',')}" for number, segment in enumerate(segments, 1))


def _format_vtt(segments: Sequence[SpokenSegment]) -> str:
    """Return segments as subtitles in the WebVTT format."""
    return "WEBVTT\n\n" + "".join(_format_cue(segment, ".") for segment in segments)


SUBTITLES: dict[str, Callable[[Sequence[SpokenSegment]], str]] = {"srt": _format_srt, "vtt": _format_vtt}


def _format_cue(segment: SpokenSegment, point: str) -> str:
    """Return the times and the text of a segment; the text has no line breaks and no arrow, which would end the cue."""
    text = " ".join(segment.text.split()).replace("-->", "->")
    return f"{_format_time(segment.start, point)} --> {_format_time(segment.end, point)}\n{text}\n\n"


def _format_time(seconds: float, point: str) -> str:
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
