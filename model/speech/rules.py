"""Rules of transcriptions from generation_config.json: the tokens at the beginning, and suppressed tokens.

`nkw transcribe` and the HTTP routes of audio read `Rules` once, and give every request a `TranscriptionRule`, which the
engine asks before each token.
"""

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
    """Rules during the generation of one text with a vocabulary of `vocabulary` tokens, as the engine's `TokenRule`."""

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
        """Function that sets logits [vocabulary] of tokens against the rules of timestamps to -inf, in place.

        None without timestamps. The function follows the tokens that are accepted so far.
        """
        times, written = self._rules.timestamps, tuple(self._written)
        return None if times is None else lambda logits: times.allow(logits, written)

    def allowed(self) -> np.ndarray:
        """Return a mask [vocabulary] bool of the tokens that may follow: not suppressed, or not as the first token.

        The rules of timestamps are not in the mask (`by_logits`). The array must not be changed.
        """
        return self._later if self._written else self._first

    def accept(self, token: int) -> bool:
        """Append a sampled token to the text, in every case, and return whether `allowed` had it."""
        allowed = bool(self.allowed()[token])
        self._written.append(token)
        return allowed

    def is_ready(self, now: float) -> bool:
        """Return True: the rules take no time."""
        return True

    def for_drafts(self) -> TranscriptionRule:
        """Return a copy with the same tokens that can accept draft tokens without changing this object."""
        follower = copy(self)
        follower._written = [*self._written]
        return follower


def find_first_token(folder: Path, config: ModelConfig) -> int:
    """Return the id of the token with which a transcription begins, before a language token.

    It is decoder_start_token_id of generation_config.json, or else of config.json.

    Raises:
        ModelError: The files name no such token, or a file cannot be read.
    """
    return _GenerationFields(folder, config).start


def find_previous_token(folder: Path, config: ModelConfig) -> int | None:
    """Return prev_sot_token_id, the id of the token that introduces text before a transcription; None if absent."""
    return next(iter(_GenerationFields(folder, config).read_ids("prev_sot_token_id")), None)


def read_languages(folder: Path, config: ModelConfig) -> dict[str, int]:
    """Return the token ids of the languages that a model knows, by names such as "en"; empty if it knows only one."""
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
    plain = fields.read_ids("no_timestamps_token_id")
    if timestamps:
        prompt = prompt[:-1] if prompt[-1] in plain else prompt
    elif plain and prompt[-1] not in plain:
        prompt.extend(plain)
    if len(prompt) >= config.context:
        raise ModelError(
            f"{folder}: a transcription begins with {len(prompt)} tokens; the context has {config.context}"
        )
    times = fields.read_timestamps() if timestamps else None
    return Rules(
        tuple(prompt), fields.read_ids("suppress_tokens"), fields.read_ids("begin_suppress_tokens"), times
    )


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

    def read_ids(self, name: str) -> tuple[int, ...]:
        """Return the token ids of the field `name`, which has one id or a list; () if both files lack it.

        Raises:
            ModelError: An id is not a token of the vocabulary.
        """
        return self._find_file(name).token_ids(name, self._vocabulary)

    @property
    def start(self) -> int:
        """Id with which a transcription begins, decoder_start_token_id; ModelError if it is missing."""
        start = self.read_ids("decoder_start_token_id")
        if len(start) != 1:
            raise ModelError(
                f"{self._folder}: decoder_start_token_id, with which a transcription begins, is missing; add it to "
                "generation_config.json"
            )
        return start[0]

    @property
    def languages(self) -> dict[str, int]:
        """Ids of languages by the names of their tokens, such as "<|en|>"; empty for a model of one language.

        Raises:
            ModelError: `lang_to_id` is not an object of token ids.
        """
        return self._read_ids_by_name("lang_to_id")

    def read_timestamps(self) -> Timestamps:
        """Return the timestamp tokens, which follow the token for "no timestamps" in the vocabulary.

        Raises:
            ModelError: The files do not name this token and an end token, no token follows it, or
                max_initial_timestamp_index is not a whole number.
        """
        plain, ends = self.read_ids("no_timestamps_token_id"), self.read_ids("eos_token_id")
        if not plain or plain[0] + 1 >= self._vocabulary or not ends:
            raise ModelError(f"{self._folder}: --timestamps: this model's vocabulary has no times")
        name = "max_initial_timestamp_index"
        file = self._find_file(name)
        latest: Any = file.get(name, None)
        if latest is not None and (isinstance(latest, bool) or not isinstance(latest, int) or latest < 0):
            raise file.error(name, f"{latest!r:.60} is not a whole number from 0 on")
        return Timestamps(plain[0] + 1, latest, ends[0])

    def read_prompt(self, language: str | None, task: str | None) -> list[int]:
        """Return the ids after the first one: language, task and others of forced_decoder_ids.

        `language` and `task` replace the ones of the files. A model of one language has neither.

        Raises:
            ModelError: The language is unknown, the model does not have the task, or an id is open and not given.
        """
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
        """Return the ids of forced_decoder_ids in the order of their positions; None for an id that is null.

        Raises:
            ModelError: The field is not a list of [position, id] with the positions 1, 2, 3 and so on.
        """
        name = "forced_decoder_ids"
        file = self._find_file(name)
        value: Any = file.get(name, None) or []
        pairs = value if isinstance(value, list) else [value]
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise file.error(name, f"{value!r:.60} is not a list of pairs [position, token id]")
        if [position for position, _ in pairs] != list(range(1, len(pairs) + 1)):
            raise file.error(
                name, f"{value!r:.60} does not have the positions 1, 2, 3 and so on, in this order"
            )
        return [self._check_id(file, name, token) for _, token in pairs]

    def _read_ids_by_name(self, name: str) -> dict[str, int]:
        """Return the token ids of the JSON object in the field `name`, without null entries; empty if it is absent.

        Raises:
            ModelError: The field is not an object, or an id is not a token of the vocabulary.
        """
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
