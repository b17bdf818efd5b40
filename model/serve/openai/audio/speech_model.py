"""What the folder of a speech model says about transcriptions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from model.config import ModelConfig
from model.families import SPEECH, TEXT, load_config
from model.serve.errors import ApiError
from model.serve.texts import Texts
from model.speech.rules import Rules, first_token, previous_token, read_languages, read_rules

ENGLISH = "en"
"""The language of models that know one, and of translations."""
_PREVIOUS = "<|startofprev|>"


@dataclass(frozen=True)
class SpeechModel:
    """A model folder, whose encoder takes windows with spectra of so many bands and columns."""

    folder: Path
    config: ModelConfig
    spectrum: tuple[int, int]

    @classmethod
    def of(cls, folder: Path) -> SpeechModel | None:
        """That of a folder; None where the model continues texts."""
        config = load_config(folder, TEXT, SPEECH)
        return None if config.spectrum is None else cls(folder, config, config.spectrum)

    @cached_property
    def languages(self) -> dict[str, int]:
        """The languages that the model knows, and their tokens; none where it knows one."""
        return read_languages(self.folder, self.config)

    @cached_property
    def start(self) -> int:
        """The token behind which a language follows."""
        return first_token(self.folder, self.config)

    def check_language(self, language: str | None) -> None:
        """ApiError for a language that the model does not know."""
        if language is not None and language not in (self.languages or (ENGLISH,)):
            known = ", ".join(sorted(self.languages)) or ENGLISH
            raise ApiError(400, f"the language is not known; this model knows {known:.600}", param="language")

    def rules(self, language: str, timestamps: bool, task: str) -> Rules:
        """How a text begins, and what it never has."""
        named = language if self.languages else None
        return read_rules(self.folder, self.config, named, timestamps, task)

    async def before(self, prompt: str, texts: Texts, most: int) -> list[int]:
        """The tokens of a text that goes before a transcription: its last ones, at most so many, and their mark."""
        mark = previous_token(self.folder, self.config)
        marks = await texts.encode(_PREVIOUS, special_tokens=False) if mark is None else [mark]
        if len(marks) != 1:
            raise ApiError(
                400, "this model's vocabulary has no texts that go before", "unsupported", "prompt"
            )
        return [
            *marks,
            *(await texts.encode(f" {prompt}", special_tokens=False, must_fit_prompt=False))[-most:],
        ]
