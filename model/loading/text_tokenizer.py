"""Tokenizers of text encoders: texts become padded rows of token ids, and the numbers of tokens without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.config.fields import Fields
from model.config.folder import check_inside
from model.errors import ModelError
from model.loading.tokenizer import CODE, Tokenizer

FILES = "tokenizer.json tokenizer_config.json special_tokens_map.json vocab.json merges.txt".split()
"""Files that are read; none may be a link out of the folder."""
_EXPECTED = {
    "padding_side": "right",
    "truncation_side": "right",
    "add_bos_token": True,
    "add_eos_token": True,
    "split_special_tokens": False,
}
"""Values of fields of tokenizer_config.json that change ids, where they are present."""
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


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens of a tokenizer's folder.

    names  contents of bos_token, eos_token, unk_token and pad_token, as far as the files or the class name them
    added  entries of `added_tokens` of a tokenizer.json without ids, which texts are split at, in order
    """

    names: dict[str, str]
    added: list[dict[str, Any]]


def read_special_tokens(folder: Path, classes: Sequence[str], defaults: dict[str, str]) -> SpecialTokens:
    """Return the special tokens of tokenizer_config.json and special_tokens_map.json, as transformers reads them.

    Args:
        folder: The folder of the tokenizer.
        classes: Names of the classes that the tokenizer may have.
        defaults: Tokens of the class by the names of their fields.

    Raises:
        ModelError: A file is damaged, the tokenizer has another class, or a field asks for other ids than are made.
    """
    for file in FILES:
        check_inside(folder / file)
    config = Fields(folder / "tokenizer_config.json", optional=True)
    name = config.get("tokenizer_class", classes[0])
    if name not in classes:
        raise config.error("tokenizer_class", f"{name!r:.60}; read is {' or '.join(classes)}")
    for field, expected in _EXPECTED.items():
        if config.get(field, expected) != expected:
            raise config.error(field, f"{config.get(field, None)!r:.60}; only {expected!r} is computed")
    listed = config.get("added_tokens_decoder", None)
    sources = [config]
    if listed is None:
        sources.insert(0, Fields(folder / "special_tokens_map.json", optional=True))
    elif not isinstance(listed, dict):
        raise config.error("added_tokens_decoder", f"{listed!r:.60} is not an object")
    added: dict[str, dict[str, Any]] = {}
    for number in sorted(listed or {}, key=lambda number: (len(number), number)):
        _add_token(config, f"added_tokens_decoder.{number}", listed[number], added)
    names = {}
    for field in _NAMED:
        source = next((source for source in sources if field in source), None)
        token = defaults.get(field) if source is None else source.get(field, None)
        if token is not None:
            names[field] = _add_token(source or config, field, token, added)
    for field in ("additional_special_tokens", "extra_special_tokens"):
        for source in sources:
            tokens = source.get(field, [])
            for token in tokens if isinstance(tokens, list) else [tokens]:
                _add_token(source, field, token, added)
    return SpecialTokens(names, list(added.values()))


def _add_token(fields: Fields, name: str, token: object, added: dict[str, dict[str, Any]]) -> str:
    """Add a token of the field `name` to `added` unless it is there; return its content.

    A string is a token that is matched before a text is normalised; an object says so itself.

    Raises:
        ModelError: The token is neither a string nor an object with a content and flags.
    """
    values = {"content": token} if isinstance(token, str) else token
    content = values.get("content") if isinstance(values, dict) else None
    flags = {flag: values.get(flag, False) for flag in _FLAGS} if isinstance(values, dict) else {}
    if (
        not isinstance(content, str)
        or not content
        or not all(isinstance(flag, bool) for flag in flags.values())
    ):
        raise fields.error(name, f"{token!r:.60} is not a token")
    added.setdefault(content, {"content": content, **flags, "special": True})
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
