"""How a model writes calls of functions, and how they are read while it writes.

A call is JSON, an object with the function's name and its arguments, in the form that the chat template taught the
model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

_HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([\w-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.ASCII
)
_BLANKS = " \t\r\n"


@dataclass(frozen=True)
class CallForm:
    """How a model writes calls: each between `opens` and `closes`, or, without these, from the begin of the answer on.

    `beside` are the characters that may stand between two calls.
    """

    opens: str = ""
    closes: str = ""
    beside: str = _BLANKS


CALL_LIST = CallForm(beside=_BLANKS + "[,;]")
"""Calls alone, or as a list."""
TOOL_CALL_PARSERS = {"hermes": CallForm("<tool_call>", "</tool_call>"), "llama3_json": CALL_LIST}
"""Hermes' form, which Qwen 2.5 and 3 have too, and the JSON of Llama 3.1 and 3.2; vLLM's names."""


@dataclass(frozen=True)
class CallPiece:
    """A piece of call `index`: at its begin the `name` and `id`, then more of the text of its `arguments`."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None

    def delta(self) -> dict[str, Any]:
        """As OpenAI's streams have it."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


class CallReader:
    """Takes an answer apart, piece by piece as it comes: text stays text, calls become `CallPiece`s.

    The arguments of a call go on as soon as it is known to be one. What looks like a call and is none is text. Blanks
    beside a call are no text. Where not `several`, the answer ends with its first call.
    """

    def __init__(self, form: CallForm, names: Collection[str], several: bool = True) -> None:
        self.calls = 0
        self._form = form
        self._names = names
        self._several = several
        self._text = ""  # not read yet
        self._opened = ""  # what stood before the object
        self._object: _Object | None = None
        self._sent: int | None = None  # characters of its arguments
        self._after_call = self._closes = self._spoke = False

    def push(self, text: str) -> list[str | CallPiece]:
        """What `text` adds."""
        self._text += text
        return list(self._read(last=False))

    def finish(self) -> list[str | CallPiece]:
        """What was held back until the end."""
        return list(self._read(last=True))

    def _read(self, last: bool) -> Iterator[str | CallPiece]:
        while self._several or not self.calls or self._object is not None:
            if self._object is None:
                if not self._is_past_end_of_call(last):
                    return
                start, end = self._place_of_call()
                if end is None:
                    yield from self._say(self._taken(len(self._text) if last else start))
                    return
                yield from self._say(self._taken(start))
                self._opened = self._taken(end - start)
                self._object, self._sent = _Object(), None
            self._text = self._object.push(self._text)
            yield from self._of_call(self._object)
            if not (self._object.ended or last):
                return
            if self._sent is None:
                yield from self._say(self._opened + self._object.text)
            else:
                self._after_call = self._closes = True
            self._object = None

    def _taken(self, count: int) -> str:
        """The next characters."""
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    def _say(self, text: str) -> Iterator[str]:
        if self._after_call:
            text = text.lstrip(self._form.beside)
        if text:
            self._after_call, self._spoke = False, True
            yield text

    def _is_past_end_of_call(self, last: bool) -> bool:
        """Whether the mark that closes the call before was read, or does not come."""
        if self._closes:
            rest = self._text.lstrip(_BLANKS)
            if rest.startswith(self._form.closes):
                self._text = rest[len(self._form.closes) :]
            elif self._form.closes.startswith(rest) and not last:
                return False
            self._closes = False
        return True

    def _place_of_call(self) -> tuple[int, int | None]:
        """Where the next call's mark begins, blanks before it included, and ends; without one, how much is text."""
        text, mark = self._text, self._form.opens
        if not mark:
            first = len(text) - len(text.lstrip(self._form.beside))
            if self._spoke or (first < len(text) and text[first] != "{"):
                return len(text), None
            return 0, first if first < len(text) else None
        place = text.find(mark)
        if place >= 0:
            return len(text[:place].rstrip(_BLANKS)), place + len(mark)
        begun = next(size for size in range(len(mark) - 1, -1, -1) if text.endswith(mark[:size]))
        return len(text[: len(text) - begun].rstrip(_BLANKS)), None

    def _of_call(self, read: _Object) -> Iterator[CallPiece]:
        """What is new of a call, once it is known to be one of the functions'."""
        name, arguments = read.call()
        if name not in self._names:
            return
        if self._sent is None:
            self.calls += 1
            yield CallPiece(self.calls - 1, arguments, f"call_{uuid4().hex}", name)
        elif len(arguments) > self._sent:
            yield CallPiece(self.calls - 1, arguments[self._sent :])
        self._sent = len(arguments)


class _Object:
    """A JSON object on its way; it ends with its last brace, or at once where the text is no object."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._inner_end: int | None = None  # of the first object in it

    def push(self, text: str) -> str:
        """Take what belongs to the object; the rest comes back."""
        for place, char in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
                continue
            self._in_string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            if self._depth == 1 and char in "}]" and self._inner_end is None:
                self._inner_end = len(self.text) + place + 1
            if self._depth <= 0 and char not in _BLANKS:
                self.ended = True
                self.text += text[: place + 1]
                return text[place + 1 :]
        self.text += text
        return ""

    def call(self) -> tuple[str | None, str]:
        """The function that it calls, and its arguments so far; without a name it is no call, or not yet."""
        found = _HEADER.match(self.text)
        if found:
            return found[1], self.text[found.end() : self._inner_end]
        try:
            whole = json.loads(self.text) if self.ended else None
        except (ValueError, RecursionError):
            whole = None
        if not isinstance(whole, dict):
            return None, ""
        name, arguments = whole.get("name"), whole.get("arguments", whole.get("parameters", {}))
        return (
            (name, json.dumps(arguments))
            if isinstance(name, str) and isinstance(arguments, dict)
            else (None, "")
        )
