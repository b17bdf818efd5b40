"""Text to token ids and back: tokenizer.json through the `tokenizers` library, and a decoder for streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from model.errors import ModelError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, folder: Path | str, vocab_size: int) -> None:
        """Read tokenizer.json; ModelError if it is missing, damaged, or has ids that the model has no row for."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path} is missing")
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise ModelError(f"{path} is not a tokenizer: {error}") from None
        largest = max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest < 0:
            raise ModelError(f"{path} has an empty vocabulary")
        if largest >= vocab_size:
            raise ModelError(f"{path} has token id {largest}; config.json has a vocab_size of {vocab_size}")
        self._inner.no_truncation()
        self._inner.no_padding()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with the special tokens that tokenizer.json adds."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ModelError(
                f"the prompt is not Unicode text: {error.reason} at character {error.start}"
            ) from None
        return list(self._inner.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, without special tokens."""
        return self._inner.decode(list(ids), skip_special_tokens=True)

    def stream(self, context: Iterable[int] = ()) -> TokenStream:
        """A decoder that takes one id after the other; `context` holds the ids before the first."""
        return TokenStream(self, context)


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
