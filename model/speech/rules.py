"""Rules of transcriptions from generation_config.json: the tokens at the beginning, and suppressed tokens."""

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
"""First tokens of a transcription by a model of several languages: start, language, task, no timestamps."""


@dataclass(frozen=True)
class Rules:
    """Rules of a transcription.

    prompt            ids with which the transcription begins
    suppressed        ids that are never sampled
    suppressed_first  ids that are not sampled as the first token either
    timestamps        timestamp tokens; None for a transcription without timestamps
    """

    prompt: tuple[int, ...]
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    timestamps: Timestamps | None = None


class TranscriptionRule:
    """Rules during the generation of one text (a `TokenRule`) with a vocabulary of so many tokens."""

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
        """Function that sets logits that break the rules of timestamps to -inf; None without timestamps."""
        times, written = self._rules.timestamps, tuple(self._written)
        return None if times is None else lambda logits: times.allow(logits, written)

    def allowed(self) -> np.ndarray:
        """Return a mask [vocabulary] bool of the tokens that are not suppressed."""
        return self._later if self._written else self._first

    def accept(self, token: int) -> bool:
        """Append a sampled token and return whether it was allowed."""
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
    """Return the token with which a transcription begins, before a language token.

    Raises:
        ModelError: The files name no such token.
    """
    return _GenerationFields(folder, config).start


def previous_token(folder: Path, config: ModelConfig) -> int | None:
    """Return the token that introduces text before a transcription; None if generation_config.json names none."""
    return next(iter(_GenerationFields(folder, config).ids("prev_sot_token_id")), None)


def read_languages(folder: Path, config: ModelConfig) -> dict[str, int]:
    """Return the tokens of the languages that a model knows, by names such as en; empty for a model of one language."""
    return {name.strip("<|>"): id for name, id in _GenerationFields(folder, config).languages.items()}


def read_rules(
    folder: Path,
    config: ModelConfig,
    language: str | None = None,
    timestamps: bool = False,
    task: str | None = None,
) -> Rules:
    """Read the rules of a model's folder from generation_config.json, else from config.json of earlier models.

    Args:
        folder: The model's folder.
        config: The model.
        language: Language of the recording, such as en; by default the language of the files.
        timestamps: Whether the transcription has timestamps.
        task: "transcribe", or "translate" for a translation to English; by default the task of the files.

    Raises:
        ModelError: The language is missing or unknown, the model does not know the task, the vocabulary has no
            timestamps, the prompt fills the context, or a field has the wrong type.
    """
    fields = _GenerationFields(folder, config)
    prompt = [fields.start, *fields.read_prompt(language, task)]
    plain = fields.ids("no_timestamps_token_id")
    if timestamps:
        prompt = prompt[:-1] if prompt[-1] in plain else prompt
    elif plain and prompt[-1] not in plain:
        prompt.extend(plain)
    if len(prompt) >= config.context:
        raise ModelError(
            f"{folder}: a transcription begins with {len(prompt)} tokens; the context has {config.context}"
        )
    times = fields.read_timestamps() if timestamps else None
    return Rules(tuple(prompt), fields.ids("suppress_tokens"), fields.ids("begin_suppress_tokens"), times)


class _GenerationFields:
    """Fields of generation_config.json and config.json; the first file takes precedence."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._folder = folder
        self._vocabulary = config.vocab_size
        self._files = (
            Fields(folder / "generation_config.json", optional=True),
            Fields(folder / "config.json"),
        )

    def _find_file(self, name: str) -> Fields:
        return next((file for file in self._files if name in file), self._files[1])

    def ids(self, name: str) -> tuple[int, ...]:
        """Return the token ids of a field; none if the field is absent."""
        return self._find_file(name).token_ids(name, self._vocabulary)

    @property
    def start(self) -> int:
        """Id with which a transcription begins."""
        start = self.ids("decoder_start_token_id")
        if len(start) != 1:
            raise ModelError(
                f"{self._folder}: decoder_start_token_id is missing, with which a transcription begins"
            )
        return start[0]

    @property
    def languages(self) -> dict[str, int]:
        """Ids of languages by the names of their tokens."""
        return self._read_ids_by_name("lang_to_id")

    def read_timestamps(self) -> Timestamps:
        """Read the timestamp tokens, which follow the token for "no timestamps" in the vocabulary."""
        plain, ends = self.ids("no_timestamps_token_id"), self.ids("eos_token_id")
        if not plain or plain[0] + 1 >= self._vocabulary or not ends:
            raise ModelError(f"{self._folder}: --timestamps: this model's vocabulary has no times")
        name = "max_initial_timestamp_index"
        file = self._find_file(name)
        latest: Any = file.get(name, None)
        if latest is not None and (isinstance(latest, bool) or not isinstance(latest, int) or latest < 0):
            raise file.error(name, f"{latest!r:.60} is not a whole number from 0 on")
        return Timestamps(plain[0] + 1, latest, ends[0])

    def read_prompt(self, language: str | None, task: str | None) -> list[int]:
        """Read the ids after the first one: language and task; both are absent from a model of one language."""
        ids = self._read_forced_ids()
        languages, tasks = self.languages, self._read_ids_by_name("task_to_id")
        if not ids and languages:
            ids = [None, tasks.get("transcribe")]
        if task is not None and (task in tasks or task != "transcribe"):
            if task not in tasks or len(ids) < 2:
                raise ModelError(f"this model does not {task}: it is trained to transcribe one language")
            ids[1] = tasks[task]
        if language is not None:
            if f"<|{language}|>" not in languages:
                known = ", ".join(sorted(name.strip("<|>") for name in languages)) or "none"
                raise ModelError(f"--language {language:.60}: this model knows {known:.400}")
            ids[:1] = [languages[f"<|{language}|>"]]
        if None in ids:
            raise ModelError(f"{self._folder} names no language or task of a transcription; give --language")
        return [id for id in ids if id is not None]

    def _read_forced_ids(self) -> list[int | None]:
        """Read the ids of forced_decoder_ids in the order of their positions; None is an id that is left open."""
        name = "forced_decoder_ids"
        file = self._find_file(name)
        value: Any = file.get(name, None) or []
        pairs = value if isinstance(value, list) else [value]
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise file.error(name, f"{value!r:.60} is not a list of places with token ids")
        if [position for position, _ in pairs] != list(range(1, len(pairs) + 1)):
            raise file.error(name, f"{value!r:.60} has not the places from 1 on, in order")
        return [self._check_id(file, name, token) for _, token in pairs]

    def _read_ids_by_name(self, name: str) -> dict[str, int]:
        """Read an object of token ids by name; entries that are null are left out."""
        file = self._find_file(name)
        value: Any = file.get(name, None) or {}
        if not isinstance(value, dict):
            raise file.error(name, f"{value!r:.60} is not an object of token ids")
        ids = {key: self._check_id(file, name, id) for key, id in value.items()}
        return {key: id for key, id in ids.items() if id is not None}

    def _check_id(self, file: Fields, name: str, value: Any) -> int | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < self._vocabulary:
            raise file.error(name, f"{value!r:.60} is not a token of a vocabulary of {self._vocabulary}")
        return value
