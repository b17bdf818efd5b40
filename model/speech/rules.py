"""What a transcription begins with, and which tokens it never has: by a model's generation_config.json."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.config import Fields, ModelConfig
from model.errors import ModelError
from model.speech.timestamps import Timestamps

BEGINNING_TOKENS = 4
"""Of transcriptions by models of several languages: start, language, task, and that no times are written."""


@dataclass(frozen=True)
class Rules:
    """The ids of the `prompt`, ids that are never chosen (`suppressed`), and more that are never chosen first.

    With `timestamps` times are written, too.
    """

    prompt: tuple[int, ...]
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    timestamps: Timestamps | None = None

    def of_text(self, vocabulary: int) -> TranscriptionRule:
        """The rules as an engine keeps them for one text."""
        return TranscriptionRule(self, vocabulary)


class TranscriptionRule:
    """The rules while one text is written (a `TokenRule`)."""

    complete = False

    def __init__(self, rules: Rules, vocabulary: int) -> None:
        self._rules = rules
        self._written: list[int] = []
        self._later = np.ones(vocabulary, bool)
        self._later[list(rules.suppressed)] = False
        self._first = self._later.copy()
        self._first[list(rules.suppressed_first)] = False

    @property
    def by_logits(self) -> Callable[[np.ndarray], None] | None:
        """Times follow where all of them together are likelier than any text."""
        times, written = self._rules.timestamps, tuple(self._written)
        return None if times is None else lambda logits: times.allow(logits, written)

    def allowed(self) -> np.ndarray:
        """All but suppressed tokens."""
        return self._later if self._written else self._first

    def accept(self, token: int) -> bool:
        """A token was written."""
        allowed = bool(self.allowed()[token])
        self._written.append(token)
        return allowed

    def is_ready(self, now: float) -> bool:
        """Return True: the rules take no time."""
        return True

    def for_drafts(self) -> TranscriptionRule:
        """Return a copy that follows drafts from the same token on."""
        follower = copy(self)
        follower._written = [*self._written]
        return follower


def first_token(folder: Path, config: ModelConfig) -> int:
    """The token with which a transcription begins; a language follows where a model knows several."""
    return _Rules(folder, config).start


def previous_token(folder: Path, config: ModelConfig) -> int | None:
    """The token before a text that goes before a transcription, where generation_config.json names it."""
    return next(iter(_Rules(folder, config).ids("prev_sot_token_id")), None)


def read_languages(folder: Path, config: ModelConfig) -> dict[str, int]:
    """The languages that a model's folder names, such as en, and their tokens; none of a model of one language."""
    return {name.strip("<|>"): id for name, id in _Rules(folder, config).languages.items()}


def read_rules(
    folder: Path,
    config: ModelConfig,
    language: str | None = None,
    timestamps: bool = False,
    task: str | None = None,
) -> Rules:
    """The rules of a model's folder; ModelError where they name no language and none is given.

    Fields are those of generation_config.json, else of config.json, where earlier models have them. ModelError, too,
    where `timestamps` are asked for and the vocabulary has none, and for a `task` that the model does not know. Known
    are transcribe, mostly, and translate, to English.
    """
    fields = _Rules(folder, config)
    prompt = [fields.start, *fields.forced(language, task)]
    plain = fields.ids("no_timestamps_token_id")
    if timestamps:
        prompt = prompt[:-1] if prompt[-1] in plain else prompt
    elif plain and prompt[-1] not in plain:
        prompt.extend(plain)
    if len(prompt) >= config.context:
        raise ModelError(
            f"{folder}: a transcription begins with {len(prompt)} tokens; the context has {config.context}"
        )
    times = fields.timestamps() if timestamps else None
    return Rules(tuple(prompt), fields.ids("suppress_tokens"), fields.ids("begin_suppress_tokens"), times)


class _Rules:
    """Fields of both files."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._folder = folder
        self._vocabulary = config.vocab_size
        self._files = (
            Fields(folder / "generation_config.json", optional=True),
            Fields(folder / "config.json"),
        )

    def _file_with(self, name: str) -> Fields:
        return next((file for file in self._files if name in file), self._files[1])

    def ids(self, name: str) -> tuple[int, ...]:
        """The token ids of a field, none where it is absent."""
        file = self._file_with(name)
        return file.token_ids(name, self._vocabulary) if name in file else ()

    @property
    def start(self) -> int:
        """The id with which a transcription begins."""
        start = self.ids("decoder_start_token_id")
        if len(start) != 1:
            raise ModelError(
                f"{self._folder}: decoder_start_token_id is missing, with which a transcription begins"
            )
        return start[0]

    @property
    def languages(self) -> dict[str, int]:
        """The ids of languages by the names of their tokens."""
        return self._named("lang_to_id")

    def timestamps(self) -> Timestamps:
        """The tokens of times, which follow the one that says that there are none."""
        plain, ends = self.ids("no_timestamps_token_id"), self.ids("eos_token_id")
        if not plain or plain[0] + 1 >= self._vocabulary or not ends:
            raise ModelError(f"{self._folder}: --timestamps: this model's vocabulary has no times")
        name = "max_initial_timestamp_index"
        file = self._file_with(name)
        latest: Any = file.get(name, None)
        if latest is not None and (isinstance(latest, bool) or not isinstance(latest, int) or latest < 0):
            raise file.error(name, f"{latest!r:.60} is not a whole number from 0 on")
        return Timestamps(plain[0] + 1, latest, ends[0])

    def forced(self, language: str | None, task: str | None = None) -> list[int]:
        """The ids behind the first one: language and task."""
        places = self._forced_places()
        languages, tasks = self.languages, self._named("task_to_id")
        if not places and languages:
            places = [None, tasks.get("transcribe")]
        if task is not None and (task in tasks or task != "transcribe"):
            if task not in tasks or len(places) < 2:
                raise ModelError(f"this model does not {task}: it is trained to transcribe one language")
            places = [places[0], tasks[task], *places[2:]]
        if language is not None:
            if f"<|{language}|>" not in languages:
                known = ", ".join(sorted(name.strip("<|>") for name in languages)) or "none"
                raise ModelError(f"--language {language:.60}: this model knows {known:.400}")
            places = [languages[f"<|{language}|>"], *places[1:]]
        if None in places:
            raise ModelError(f"{self._folder} names no language or task of a transcription; give --language")
        return [each for each in places if each is not None]

    def _forced_places(self) -> list[int | None]:
        """The ids of forced_decoder_ids in the order of their places, None where a place is left open."""
        name = "forced_decoder_ids"
        file = self._file_with(name)
        value: Any = file.get(name, None) or []
        pairs = value if isinstance(value, list) else [value]
        if not all(isinstance(each, list) and len(each) == 2 for each in pairs):
            raise file.error(name, f"{value!r:.60} is not a list of places with token ids")
        if [place for place, _ in pairs] != list(range(1, len(pairs) + 1)):
            raise file.error(name, f"{value!r:.60} has not the places from 1 on, in order")
        return [self._id(file, name, token) for _, token in pairs]

    def _named(self, name: str) -> dict[str, int]:
        """The token ids of a field by their names."""
        file = self._file_with(name)
        value: Any = file.get(name, None) or {}
        if not isinstance(value, dict):
            raise file.error(name, f"{value!r:.60} is not an object of token ids")
        found = {key: self._id(file, name, each) for key, each in value.items()}
        return {key: each for key, each in found.items() if each is not None}

    def _id(self, file: Fields, name: str, value: Any) -> int | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < self._vocabulary:
            raise file.error(name, f"{value!r:.60} is not a token of a vocabulary of {self._vocabulary}")
        return value
