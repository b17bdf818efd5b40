"""Tokenizer of a model folder: tokenizer.json through the `tokenizers` library, and a decoder of token streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import tokenizers

from model.errors import ModelError, read_text_file
from nkw.process import Limits, quiet, survives

T = TypeVar("T")

_LIMITS = Limits(cpu_seconds=30, memory_bytes=2**32)
"""Limits of a trial call; the largest published tokenizers take a few seconds and a few hundred megabytes."""
CODE = "NKW-MODEL-TOKENIZER"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """Tokenizer of a model folder."""

    def __init__(self, folder: Path | str, vocab_size: int, isolated: bool = True) -> None:
        """Read the tokenizer.json of a folder; its truncation and padding are switched off.

        Args:
            folder: the model folder.
            vocab_size: rows of the model's embedding; ids must be below it.
            isolated: try calls that may abort or never end in a forked process first. A job process that has limits
                needs no such trial.

        Raises:
            ModelError: the file is missing or damaged, or has ids of `vocab_size` or above.
        """
        path = Path(folder) / "tokenizer.json"
        self._load(read_text_file(path, CODE), path, vocab_size, isolated)

    @classmethod
    def from_text(cls, text: str, path: Path, vocab_size: int) -> Tokenizer:
        """Return the tokenizer that the text of a tokenizer.json describes.

        Args:
            text: the text.
            path: the file of which it was made, for messages.
            vocab_size: rows of the model's embedding; ids must be below it.

        Raises:
            ModelError: the text describes no tokenizer, or has ids of `vocab_size` or above.
        """
        tokenizer = cls.__new__(cls)
        tokenizer._load(text, path, vocab_size, isolated=True)
        return tokenizer

    def _load(self, text: str, path: Path, vocab_size: int, isolated: bool) -> None:
        """Set the fields of a new tokenizer; arguments and errors of `from_text` and of the constructor."""
        self._isolated = isolated
        self._path = path
        self._vocab_size = vocab_size
        self._inner = self._try_call(lambda: tokenizers.Tokenizer.from_str(text), "is not a tokenizer")
        ids = self._inner.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise self._error("has an empty vocabulary")
        self._check(ids)
        self._inner.no_truncation()
        self._inner.no_padding()

    @property
    def folder(self) -> Path:
        """Folder that contains the files of the tokenizer."""
        return self._path.parent

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: The text.
            special_tokens: Add the special tokens that tokenizer.json adds to a text, such as the first token.

        Raises:
            ModelError: The text has lone surrogates, the library fails, or an id is not below the vocabulary's size.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ModelError(
                f"the prompt is not Unicode text: {error.reason} at character {error.start}"
            ) from None
        ids: list[int] = self._try_call(
            lambda: self._inner.encode(text, add_special_tokens=special_tokens).ids,
            "cannot encode the prompt",
        )
        self._check(ids)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids without special tokens. Raises ModelError if the tokenizers library fails."""
        return self._call(
            lambda: self._inner.decode(list(ids), skip_special_tokens=True), "cannot decode its ids"
        )

    def find_id(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary, added tokens included; None for an unknown one."""
        id: int | None = self._inner.token_to_id(token)
        return id

    def shown(self, id: int) -> str:
        """Return the text of a token decoded alone; if that is empty, as for special tokens, its name, or ""."""
        return self.decode([id]) or str(self._inner.id_to_token(id) or "")

    def as_json(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
        return str(self._inner.to_str())

    def stream(self, context: Iterable[int] = ()) -> TokenStream:
        """Return a decoder that takes one token at a time; `context` has the ids before the first of them."""
        return TokenStream(self, context)

    def _check(self, ids: Iterable[int]) -> None:
        """Raise ModelError if an id is not below the model's vocab_size."""
        largest = max(ids, default=0)
        if largest >= self._vocab_size:
            raise self._error(f"has token id {largest}; config.json has a vocab_size of {self._vocab_size}")

    def _try_call(self, action: Callable[[], T], failure: str) -> T:
        """Return the result of `action`, which calls the tokenizers library, after a trial in a forked process.

        The trial is made if the tokenizer is `isolated`, because the call may abort the process or never end.

        Raises:
            ModelError: The trial or the call fails. The message has the path, `failure` and the reason.
        """
        if self._isolated and not survives(action, _LIMITS):
            raise self._error(
                f"{failure}: the tokenizers library aborts, or takes too long or too much memory"
            )
        return self._call(action, failure)

    def _call(self, action: Callable[[], T], failure: str) -> T:
        """Return the result of `action`, which calls the tokenizers library, with the library's output suppressed.

        Raises:
            ModelError: The library raises or panics; a panic is a BaseException. The message has `failure`.
        """
        try:
            with quiet():
                return action()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise self._error(f"{failure}: {error}") from None

    def _error(self, problem: str) -> ModelError:
        """Return, without raising it, the error "<path of tokenizer.json> <problem>" with the code for tokenizers."""
        return ModelError(f"{self._path} {problem}", CODE)


class TokenStream:
    """Decoder of a growing sequence of token ids. It returns complete characters only.

    A character may extend over several tokens (byte-level BPE, byte fallback). The text of a token may depend on the
    token before it: a leading blank is dropped at the start of a text. So the ids since the last complete character are
    decoded together with the ids before them. New text is kept back while it ends in the replacement character, which
    marks an incomplete character.
    """

    def __init__(self, tokenizer: Tokenizer, context: Iterable[int] = ()) -> None:
        """Start after the ids of `context`, whose text is not returned."""
        self._tokenizer = tokenizer
        self._before = list(context)
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Append a token and return the text that it completes; "" while a character is incomplete."""
        self._pending.append(token)
        text = self._decode_pending()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._before, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """Return the text that `push` kept back, with a replacement character for an incomplete character; or ""."""
        text = self._decode_pending()
        self._before, self._pending = self._pending, []
        return text

    def _decode_pending(self) -> str:
        """Return the text that the ids since the last complete character add to the text of the ids before them."""
        known = self._tokenizer.decode(self._before)
        return self._tokenizer.decode([*self._before, *self._pending])[len(known) :]
