"""Answers of transcriptions: OpenAI's objects, subtitles, and the events of a stream.

A window is a piece of the recording of at most 30 seconds, which the model transcribes at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import BaseModel

from model.serve.openai.answers import WithOptional


class Duration(BaseModel):
    """Usage of a transcription: the seconds of the recording, rounded up."""

    type: Literal["duration"] = "duration"
    seconds: int


class TokensUsed(BaseModel):
    """Usage of a streamed transcription: tokens of the prompts of all windows, and of the transcription."""

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
    """Text that is pushed in pieces, without the blanks at its start and its end; `text` is all of it so far."""

    def __init__(self) -> None:
        self.text = ""
        self._blanks = ""

    def push(self, text: str) -> str:
        """Append the next piece, and return what `text` has gained.

        Blanks are held back until more text follows, and dropped at the start.
        """
        text = self._blanks + text if self.text else text.lstrip()
        stripped = text.rstrip()
        self._blanks = text[len(stripped) :]
        self.text += stripped
        return stripped


def compute_compression_ratio(text: str) -> float:
    """Return the UTF-8 bytes of a text divided by its bytes compressed with zlib; repetitions make the ratio large."""
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
    """Return the times and the text of a segment as one cue of SubRip or WebVTT, with an empty line after it.

    Line breaks in the text become blanks and an arrow is shortened, because either would end the cue.

    Args:
        segment: The segment.
        point: Decimal separator of seconds.
    """
    text = " ".join(segment.text.split()).replace("-->", "->")
    return f"{_format_time(segment.start, point)} --> {_format_time(segment.end, point)}\n{text}\n\n"


def _format_time(seconds: float, point: str) -> str:
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
