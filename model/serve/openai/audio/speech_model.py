"""Speech model of a folder: its languages, its rules, and the tokens before a transcription."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from model.config import ModelConfig
from model.families import SPEECH, TEXT, load_config
from model.serve.errors import ApiError
from model.serve.text_jobs import Texts
from model.speech.rules import Rules, find_first_token, find_previous_token, read_languages, read_rules

ENGLISH = "en"
"""Language of models that know only one, and of translations."""
_PREVIOUS_TEXT_MARK = "<|startofprev|>"


@dataclass(frozen=True)
class SpeechModel:
    """Speech model in a folder; `spectrum` is the shape [bands, columns] of an encoder window."""

    folder: Path
    config: ModelConfig
    spectrum: tuple[int, int]

    @classmethod
    def from_folder(cls, folder: Path) -> SpeechModel | None:
        """Return the speech model of a folder, or None if the folder has a model of texts."""
        config = load_config(folder, TEXT, SPEECH)
        return None if config.spectrum is None else cls(folder, config, config.spectrum)

    @cached_property
    def languages(self) -> dict[str, int]:
        """Ids of the language tokens, by language such as "en"; empty for a model that knows one language."""
        return read_languages(self.folder, self.config)

    @cached_property
    def start(self) -> int:
        """Id of the token that begins a transcription, before the token of its language."""
        return find_first_token(self.folder, self.config)

    def check_language(self, language: str | None) -> None:
        """Refuse a language that the model does not know; None is accepted.

        Raises:
            ApiError: The language is not known.
        """
        if language is not None and language not in (self.languages or (ENGLISH,)):
            known = ", ".join(sorted(self.languages)) or ENGLISH
            raise ApiError(400, f"the language is not known; this model knows {known:.600}", param="language")

    def read_rules(self, language: str, timestamps: bool, task: str) -> Rules:
        """Return the rules of a transcription: the tokens with which it begins, and the tokens that it never has.

        Args:
            language: The language of the speech; without effect for a model that knows one language.
            timestamps: Whether segments get timestamp tokens.
            task: "transcribe" or "translate".
        """
        return read_rules(self.folder, self.config, language if self.languages else None, timestamps, task)

    async def encode_previous_text(self, text: str, texts: Texts, max_tokens: int) -> list[int]:
        """Return the token ids of a text before a transcription: a mark, and the last `max_tokens` ids of the text.

        Raises:
            ApiError: The vocabulary of the model has no such mark.
        """
        mark = find_previous_token(self.folder, self.config)
        marks = await texts.encode(_PREVIOUS_TEXT_MARK, special_tokens=False) if mark is None else [mark]
        if len(marks) != 1:
            raise ApiError(
                400,
                f"the vocabulary has no token {_PREVIOUS_TEXT_MARK}, so the model takes no prompt: leave it out",
                "unsupported",
                "prompt",
            )
        ids = await texts.encode(f" {text}", special_tokens=False, must_fit_prompt=False)
        return [*marks, *ids[-max_tokens:]]
