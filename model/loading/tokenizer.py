"""Text to token ids and back: tokenizer.json through the `tokenizers` library, and a decoder for streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import tokenizers

from model.errors import ModelError
from nkw.files import read_text
from nkw.process import Limits, quiet, trial

T = TypeVar("T")

_LIMITS = Limits(cpu_seconds=30, memory_bytes=2**32)
"""Loading the largest published tokenizers takes a few seconds and a few hundred megabytes."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, folder: Path | str, vocab_size: int, isolated: bool = True) -> None:
        """Read tokenizer.json; ModelError if it is missing, damaged, or has ids that the model has no row for.

        Calls that may abort or never end are tried in a forked process first, where `isolated`. A job process that has
        limits already needs no such trial.
        """
        self._isolated = isolated
        self._path = path = Path(folder) / "tokenizer.json"
        self._vocab_size = vocab_size
        try:
            text = read_text(path)
        except FileNotFoundError:
            raise self._error("is missing") from None
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise self._error(f"is not a tokenizer: {error}") from None
        self._inner = self._tried(lambda: tokenizers.Tokenizer.from_str(text), "is not a tokenizer")
        ids = self._inner.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise self._error("has an empty vocabulary")
        self._check(ids)
        self._inner.no_truncation()
        self._inner.no_padding()

    @property
    def folder(self) -> Path:
        """Folder of the tokenizer.json."""
        return self._path.parent

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """The ids of a text, with the special tokens that tokenizer.json adds unless `special_tokens` is False."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ModelError(
                f"the prompt is not Unicode text: {error.reason} at character {error.start}"
            ) from None
        ids: list[int] = self._tried(
            lambda: self._inner.encode(text, add_special_tokens=special_tokens).ids,
            "cannot encode the prompt",
        )
        self._check(ids)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, without special tokens."""
        return self._called(
            lambda: self._inner.decode(list(ids), skip_special_tokens=True), "cannot decode its ids"
        )

    def shown(self, id: int) -> str:
        """The text of an id alone; of a special token, the name that the vocabulary gives it."""
        return self.decode([id]) or str(self._inner.id_to_token(id) or "")

    def as_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        return str(self._inner.to_str())

    def stream(self, context: Iterable[int] = ()) -> TokenStream:
        """A decoder that takes one id after the other; `context` holds the ids before the first."""
        return TokenStream(self, context)

    def _check(self, ids: Iterable[int]) -> None:
        largest = max(ids, default=0)
        if largest >= self._vocab_size:
            raise self._error(f"has token id {largest}; config.json has a vocab_size of {self._vocab_size}")

    def _tried(self, action: Callable[[], T], failure: str) -> T:
        """The result of a call into the library that is tried in another process first: it may abort or never end."""
        if self._isolated and not trial(action, _LIMITS):
            raise self._error(
                f"{failure}: the tokenizers library aborts, or takes too long or too much memory"
            )
        return self._called(action, failure)

    def _called(self, action: Callable[[], T], failure: str) -> T:
        """The result of a call into the library; its panics are no Exceptions, and it prints them as well."""
        try:
            with quiet():
                return action()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise self._error(f"{failure}: {error}") from None

    def _error(self, what: str) -> ModelError:
        return ModelError(f"{self._path} {what}", "NKW-MODEL-TOKENIZER")


class TokenStream:
    """Decodes a growing sequence of ids and gives out complete characters only.

    A character may be spread over several tokens (byte-level BPE, byte fallback), and the text of a token may depend
    on the one before it (a leading blank is dropped at the start of a text). So the ids since the last complete
    character are decoded together with the ids before, and what is new is held back while it ends in the replacement
    character that stands for a broken one.
    """

    def __init__(self, tokenizer: Tokenizer, context: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._before = list(context)
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes; "" while a character is unfinished."""
        self._pending.append(token)
        text = self._new_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._before, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """The text still held back, with a replacement character for a character that was never finished."""
        text = self._new_text()
        self._before, self._pending = self._pending, []
        return text

    def _new_text(self) -> str:
        known = self._tokenizer.decode(self._before)
        return self._tokenizer.decode([*self._before, *self._pending])[len(known) :]
