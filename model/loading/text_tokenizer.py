"""Tokenizers of text encoders: texts become padded rows of token ids, and the numbers of tokens without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from model.config.fields import Fields
from model.config.folder import check_inside
from model.errors import ModelError
from model.loading.tokenizer import CODE, Tokenizer

FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json vocab.json merges.txt spiece.model".split()
)
"""Files that are read; none may be a link out of the folder."""
_EXPECTED = {
    "padding_side": "right",
    "truncation_side": "right",
    "add_eos_token": True,
    "split_special_tokens": False,
}
"""Values of fields of tokenizer_config.json that change ids, of all classes."""
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
_FLAGS = ("lstrip", "normalized", "rstrip", "single_word")


@dataclass(frozen=True)
class TextTokenizer:
    """Tokenizer whose rows all have `rows` ids: `start`, the text, `end` and padding."""

    tokenizer: Tokenizer
    rows: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    padding: int

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of texts, int32 [texts, rows], and the numbers of their tokens, int32 [texts, 1].

        Special tokens count, padding does not. The last tokens of a text that is too long are left out.

        Raises:
            ModelError: A text has lone surrogates, or the tokenizers library fails.
        """
        ids = np.full((len(texts), self.rows), self.padding, np.int32)
        lengths = np.zeros((len(texts), 1), np.int32)
        most = self.rows - len(self.start) - len(self.end)
        for number, text in enumerate(texts):
            tokens = self.tokenizer.encode(text, special_tokens=False)[:most]
            encoded = (*self.start, *tokens, *self.end)
            ids[number, : len(encoded)] = encoded
            lengths[number] = len(encoded)
        return ids, lengths


@dataclass
class SpecialTokens:
    """Special tokens of a tokenizer's folder.

    names  contents of bos_token, eos_token, unk_token and pad_token, as far as the files or the class name them
    added  tokens at which texts are split, by content in order, as entries of a tokenizer.json without their ids
    """

    names: dict[str, str] = field(default_factory=dict)
    added: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, content: str, **flags: bool) -> None:
        """Add a token unless one with its content is there; without flags it is matched in a text as it is written."""
        self.added.setdefault(
            content, {"content": content, **dict.fromkeys(_FLAGS, False), **flags, "special": True}
        )

    def number(self, vocabulary: Mapping[str, int]) -> list[dict[str, Any]]:
        """Return the tokens with their ids in a vocabulary; tokens that it lacks follow its last id."""
        lacking = [content for content in self.added if content not in vocabulary]
        ids = {content: len(vocabulary) + index for index, content in enumerate(lacking)}
        return [
            {"id": vocabulary.get(content, ids.get(content)), **token}
            for content, token in self.added.items()
        ]


def read_special_tokens(
    folder: Path,
    classes: Sequence[str],
    defaults: Mapping[str, str],
    expected: Mapping[str, object],
) -> SpecialTokens:
    """Return the special tokens of tokenizer_config.json and special_tokens_map.json, as transformers reads them.

    Args:
        folder: The folder of the tokenizer.
        classes: Names of the classes that the tokenizer may have.
        defaults: Tokens of the class by the names of their fields.
        expected: Values of fields of tokenizer_config.json that change ids, where they are present and not null.

    Raises:
        ModelError: A file is damaged, the tokenizer has another class, or a field asks for other ids than are made.
    """
    for file in FILES:
        check_inside(folder / file)
    config = Fields(folder / "tokenizer_config.json", optional=True)
    name = config.get("tokenizer_class", classes[0])
    if name not in classes:
        raise config.error("tokenizer_class", f"{name!r:.60}; read is {' or '.join(classes)}")
    for field_name, computed in {**_EXPECTED, **expected}.items():
        if config.get(field_name, computed) != computed:
            problem = f"{config.get(field_name, None)!r:.60}; only {computed!r} is computed"
            raise config.error(field_name, problem)
    listed = config.get("added_tokens_decoder", None)
    sources = [config]
    if listed is None:
        sources.insert(0, Fields(folder / "special_tokens_map.json", optional=True))
    elif not isinstance(listed, dict):
        raise config.error("added_tokens_decoder", f"{listed!r:.60} is not an object")
    special = SpecialTokens()
    for number in sorted(listed or {}, key=lambda number: (len(number), number)):
        _add_token(config, f"added_tokens_decoder.{number}", listed[number], special)
    for field_name in _NAMED:
        source = next((source for source in sources if field_name in source), None)
        token = defaults.get(field_name) if source is None else source.get(field_name, None)
        if token is not None:
            special.names[field_name] = _add_token(source or config, field_name, token, special)
    for field_name in ("additional_special_tokens", "extra_special_tokens"):
        for source in sources:
            tokens = source.get(field_name, [])
            for token in tokens if isinstance(tokens, list) else [tokens]:
                _add_token(source, field_name, token, special)
    return special


def _add_token(fields: Fields, name: str, token: object, special: SpecialTokens) -> str:
    """Add a token of the field `name`, a string or an object with flags, to `special`, and return its content.

    Raises:
        ModelError: The token is neither a string nor an object with a content and flags.
    """
    described = {"content": token} if isinstance(token, str) else token
    content = described.get("content") if isinstance(described, dict) else None
    flags = {flag: described.get(flag, False) for flag in _FLAGS} if isinstance(described, dict) else {}
    if (
        not isinstance(content, str)
        or not content
        or not all(isinstance(flag, bool) for flag in flags.values())
    ):
        raise fields.error(name, f"{token!r:.60} is not a token")
    special.add(content, **flags)
    return content


def create_text_tokenizer(
    tokenizer: Tokenizer,
    folder: Path,
    rows: int,
    names: dict[str, str],
    start: Sequence[str],
    end: Sequence[str],
) -> TextTokenizer:
    """Return the tokenizer of padded texts.

    Args:
        tokenizer: The tokenizer without padding.
        folder: The folder of the tokenizer, for messages.
        rows: Ids of a text with padding.
        names: Contents of the special tokens by the names of their fields.
        start: Names of the tokens before a text.
        end: Names of the tokens after a text.

    Raises:
        ModelError: A special token is not in the vocabulary, or `rows` has no place for a token of a text.
    """
    ids = {}
    for name in (*start, *end, "pad_token"):
        token = tokenizer.find_id(names[name]) if name in names else None
        if token is None:
            raise ModelError(f"{folder}: {name}, {names.get(name)!r:.60}, is not in the vocabulary", CODE)
        ids[name] = token
    if rows <= len(start) + len(end):
        raise ModelError(
            f"{rows} ids of a padded text; it has {len(start) + len(end)} special tokens and a text"
        )
    before, after = tuple(ids[name] for name in start), tuple(ids[name] for name in end)
    return TextTokenizer(tokenizer, rows, before, after, ids["pad_token"])
