"""What was said, as clients get it: OpenAI's objects, texts, subtitles, and the events of a stream."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from math import ceil
from typing import Literal

from pydantic import BaseModel


class Duration(BaseModel):
    """Seconds of a recording, begun ones included."""

    type: Literal["duration"] = "duration"
    seconds: int

    @classmethod
    def of(cls, seconds: float) -> Duration:
        """Of so many seconds."""
        return cls(seconds=ceil(seconds))


class TokensUsed(BaseModel):
    """Tokens of the beginnings of all windows, and of what was said."""

    type: Literal["tokens"] = "tokens"
    input_tokens: int
    output_tokens: int
    total_tokens: int


class Transcription(BaseModel):
    """What was said."""

    text: str
    usage: Duration


class SpokenSegment(BaseModel):
    """What is said in one stretch, in seconds from the begin of the recording; `seek` is its window's, in 10 ms.

    `tokens` have those of times. The probability that nobody speaks is not computed.
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
    """What was said, segment by segment."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[SpokenSegment]
    usage: Duration


class TextDelta(BaseModel):
    """An event of a stream: more of the text."""

    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    delta: str


class TextDone(BaseModel):
    """The last event of a stream: all of the text."""

    type: Literal["transcript.text.done"] = "transcript.text.done"
    text: str
    usage: TokensUsed


class StrippedText:
    """Takes the blanks before and behind a text away, as it comes."""

    def __init__(self) -> None:
        self.text = ""
        self._blanks = ""

    def push(self, text: str) -> str:
        """What `text` adds."""
        text = self._blanks + text if self.text else text.lstrip()
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        self.text += kept
        return kept


def compression_ratio(text: str) -> float:
    """The bytes of a text over its bytes compressed by zlib. Repetitions make the ratio large."""
    content = text.encode()
    return len(content) / len(zlib.compress(content))


def srt(segments: Sequence[SpokenSegment]) -> str:
    """Subtitles as SubRip has them."""
    return "".join(f"{number}\n{_cue(each, ',')}" for number, each in enumerate(segments, 1))


def vtt(segments: Sequence[SpokenSegment]) -> str:
    """Subtitles as WebVTT has them."""
    return "WEBVTT\n\n" + "".join(_cue(each, ".") for each in segments)


SUBTITLES: dict[str, Callable[[Sequence[SpokenSegment]], str]] = {"srt": srt, "vtt": vtt}


def _cue(segment: SpokenSegment, point: str) -> str:
    """The times of a segment and its text, in which no line is empty and nothing looks like times."""
    text = " ".join(segment.text.split()).replace("-->", "->")
    return f"{_clock(segment.start, point)} --> {_clock(segment.end, point)}\n{text}\n\n"


def _clock(seconds: float, point: str) -> str:
    minutes, rest = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"
