"""Tool calls in the text of a model, read while the model writes.

A call is a JSON object with the name and the arguments of a function, in the format that the chat template taught the
model. `ChatHandler` pushes each new piece of an answer to a `CallReader`, which splits it into text and calls.
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
class CallFormat:
    """Format in which a model writes its calls.

    Each call is between the texts `opens` and `closes`, its marks. Without marks the answer begins with its calls.
    `separators` are the characters that may be between two calls.
    """

    opens: str = ""
    closes: str = ""
    separators: str = _BLANKS


CALL_LIST = CallFormat(separators=_BLANKS + "[,;]")
"""Calls alone, or as a list."""
TOOL_CALL_PARSERS = {"hermes": CallFormat("<tool_call>", "</tool_call>"), "llama3_json": CALL_LIST}
"""Formats by vLLM's names: Hermes' format, which Qwen 2.5 and 3 also have, and the JSON of Llama 3.1 and 3.2."""


@dataclass(frozen=True)
class CallPiece:
    """Piece of the call `index` of an answer, counted from 0.

    The first piece of a call has its `name` and `id`. Each piece has the next text of the call's `arguments`.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None

    def to_delta(self) -> dict[str, Any]:
        """Return the piece as an entry of `tool_calls` in a chunk of OpenAI's stream."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


class CallReader:
    """Reader that splits an answer, piece by piece, into text and pieces of calls.

    The arguments of a call are passed on as soon as its name is known. An object that turns out not to be a call is
    text; blanks around a call are not. `num_calls` counts the calls so far.

    Args:
        call_format: The format of the calls.
        names: The names of the functions that may be called.
        is_parallel: Whether the answer goes on after its first call; otherwise the text after that call is dropped.
    """

    def __init__(self, call_format: CallFormat, names: Collection[str], is_parallel: bool = True) -> None:
        self.num_calls = 0
        self._format = call_format
        self._names = names
        self._is_parallel = is_parallel
        self._text = ""
        """Text that was pushed and not read yet."""
        self._opening = ""
        """Text before the current object that belongs to its call."""
        self._object: _JsonObject | None = None
        self._num_sent: int | None = None
        """Number of characters of the current call's arguments that were passed on; None before its name is known."""
        self._is_after_call = self._expects_close = self._has_text = False

    def push(self, text: str, is_last: bool = False) -> list[str | CallPiece]:
        """Read the next piece of the answer; return the text and the pieces of calls that are now certain, in order.

        Text that may begin a call is held back until more text decides, or until the last piece.

        Args:
            text: The piece.
            is_last: Whether the answer ends with it.
        """
        self._text += text
        return list(self._read(is_last))

    def _read(self, is_last: bool) -> Iterator[str | CallPiece]:
        while self._is_parallel or not self.num_calls or self._object is not None:
            if self._object is None:
                if not self._skip_close(is_last):
                    return
                start, end = self._find_call()
                if end is None:
                    yield from self._pass_text(self._take(len(self._text) if is_last else start))
                    return
                yield from self._pass_text(self._take(start))
                self._opening = self._take(end - start)
                self._object, self._num_sent = _JsonObject(), None
            self._text = self._object.push(self._text)
            yield from self._pass_call(self._object)
            if not (self._object.has_ended or is_last):
                return
            if self._num_sent is None:
                yield from self._pass_text(self._opening + self._object.text)
            else:
                self._is_after_call = self._expects_close = True
            self._object = None

    def _take(self, count: int) -> str:
        """Remove the next `count` characters from the unread text and return them."""
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    def _pass_text(self, text: str) -> Iterator[str]:
        """Yield the text unless it is empty; right after a call, its leading separators are dropped."""
        if self._is_after_call:
            text = text.lstrip(self._format.separators)
        if text:
            self._is_after_call, self._has_text = False, True
            yield text

    def _skip_close(self, is_last: bool) -> bool:
        """Skip the mark that closes the previous call, if it comes next.

        Returns:
            False if more text has to show whether the mark comes; True otherwise.
        """
        if self._expects_close:
            text = self._text.lstrip(_BLANKS)
            if text.startswith(self._format.closes):
                self._text = text[len(self._format.closes) :]
            elif self._format.closes.startswith(text) and not is_last:
                return False
            self._expects_close = False
        return True

    def _find_call(self) -> tuple[int, int | None]:
        """Return two indices into the unread text: the end of the text before the next call, and its object's start.

        The start is None without a call. Blanks before a call belong to the call. The text ends before characters that
        may begin a call.
        """
        text, mark = self._text, self._format.opens
        if not mark:
            start = len(text) - len(text.lstrip(self._format.separators))
            if self._has_text or (start < len(text) and text[start] != "{"):
                return len(text), None
            return 0, start if start < len(text) else None
        index = text.find(mark)
        if index >= 0:
            return len(text[:index].rstrip(_BLANKS)), index + len(mark)
        partial = next(size for size in range(len(mark) - 1, -1, -1) if text.endswith(mark[:size]))
        return len(text[: len(text) - partial].rstrip(_BLANKS)), None

    def _pass_call(self, json_object: _JsonObject) -> Iterator[CallPiece]:
        """Yield the new piece of a call; nothing before its name is known to be one of the allowed functions."""
        name, arguments = json_object.read_call()
        if name not in self._names:
            return
        if self._num_sent is None:
            self.num_calls += 1
            yield CallPiece(self.num_calls - 1, arguments, f"call_{uuid4().hex}", name)
        elif len(arguments) > self._num_sent:
            yield CallPiece(self.num_calls - 1, arguments[self._num_sent :])
        self._num_sent = len(arguments)


class _JsonObject:
    """JSON object of which perhaps only the beginning is known. Text that begins with anything but `{` ends at once."""

    def __init__(self) -> None:
        self.text = ""
        self.has_ended = False
        self._depth = 0
        self._is_in_string = self._is_escaped = False
        self._inner_end: int | None = None
        """Index after the first object within this one, such as the arguments of a call."""

    def push(self, text: str) -> str:
        """Append text up to the end of the object, and return the text after the object; empty if the object goes on.

        `has_ended` becomes True at the end of the object.
        """
        for index, char in enumerate(text):
            if self._is_in_string:
                self._is_in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
                continue
            self._is_in_string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            if self._depth == 1 and char in "}]" and self._inner_end is None:
                self._inner_end = len(self.text) + index + 1
            if self._depth <= 0 and char not in _BLANKS:
                self.has_ended = True
                self.text += text[: index + 1]
                return text[index + 1 :]
        self.text += text
        return ""

    def read_call(self) -> tuple[str | None, str]:
        """Return the name of the called function, and the text of its arguments so far.

        The name is None, and the text empty, if the object is no call or the name is not known yet.
        """
        header = _HEADER.match(self.text)
        if header:
            return header[1], self.text[header.end() : self._inner_end]
        try:
            call = json.loads(self.text) if self.has_ended else None
        except (ValueError, RecursionError):
            call = None
        if not isinstance(call, dict):
            return None, ""
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
        if not (isinstance(name, str) and isinstance(arguments, dict)):
            return None, ""
        return name, json.dumps(arguments)
