"""Batch files of `nkw run-batch`: requests as OpenAI's API takes them, answers as `vllm run-batch` 0.33.0 writes them.

Answers are collected in a hidden file in the output's folder, in the order of the requests. The output appears once all
of them are there. Until then a run with the same command continues after the last collected answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from model.errors import ModelError, read_text_file
from nkw.files import OutputFile

ROUTES = ("/v1/completions", "/v1/chat/completions")
_FIELDS = {"custom_id": str, "method": str, "url": str, "body": dict}


@dataclass(frozen=True)
class BatchRequest:
    """Request of one line of a batch file: the client's id, the path of the route, and the body."""

    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def refusal(self) -> str | None:
        """Why the request cannot be in a batch, as a sentence for its answer; None if it can."""
        if self.url not in ROUTES:
            return f"nkw run-batch answers {' and '.join(ROUTES)}; the url is another one"
        if self.body.get("stream"):
            return "an answer of a batch is no stream: leave out stream"
        return None


def parse_batch(text: str, path: Path) -> list[BatchRequest]:
    """Return the requests of a batch file, one on each line that is not blank.

    Args:
        text: The file's text.
        path: The file's path, for messages.

    Raises:
        ModelError: A line is no request, two requests have the same custom_id, or there is no request. The message has
        the number of the line.
    """
    requests: list[BatchRequest] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        request = _parse_request(line, f"line {number} of {path}")
        first = lines.setdefault(request.custom_id, number)
        if first != number:
            raise ModelError(
                f"lines {first} and {number} of {path} have the same custom_id; give each request its own"
            )
        requests.append(request)
    if not requests:
        raise ModelError(f"{path} has no request; each line that is not empty is one")
    return requests


def _parse_request(line: str, location: str) -> BatchRequest:
    """Return the request of a line.

    Args:
        line: The line.
        location: Line and file, with which a message begins.

    Raises:
        ModelError: The line is no JSON object with the fields of a request, or its method is not POST.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ModelError(f"{location} is no JSON object")
    for name, field_type in _FIELDS.items():
        if not isinstance(fields.get(name), field_type):
            raise ModelError(
                f"{location} has no {name} that is {'an object' if field_type is dict else 'a text'}"
            )
    if fields["method"] != "POST":
        raise ModelError(f"{location} has the method {fields['method']!r:.40}; requests of a batch are POST")
    return BatchRequest(fields["custom_id"], fields["url"], fields["body"])


def format_answer(request: BatchRequest, status: int, body: Any, error: Any) -> str:
    """Return the line of an answer, a JSON object without a line break.

    Args:
        request: The request.
        status: HTTP status.
        body: Body of the answer, or None if the request failed.
        error: Body of the refusal, or None.
    """
    response = {"status_code": status, "request_id": f"nkw-batch-{uuid4().hex}", "body": body}
    answer = {
        "id": f"nkw-{uuid4().hex}",
        "custom_id": request.custom_id,
        "response": response,
        "error": error,
    }
    return json.dumps(answer)


class AnswerFile:
    """Answers so far of a batch, in a hidden file in the output's folder.

    The file belongs to one input and its options: its name has their fingerprint.

    Args:
        output: File of the output.
        requests: Requests of the batch, in order.
        fingerprint: Digest of the input and of the options that answers depend on.
    """

    def __init__(self, output: OutputFile, requests: Sequence[BatchRequest], fingerprint: str) -> None:
        """Read the answers that an earlier run of the same command has left, and cut off an incomplete last line."""
        self._output = output
        self._requests = requests
        self.path = output.path.with_name(f".{output.path.name}.{fingerprint[:12]}.part")
        self._lines = list(self._read_answers())
        if self.path.exists():  # its last line may be torn
            self.path.write_text("".join(self._lines), encoding="utf-8")
        self._waiting: dict[int, str] = {}

    @property
    def count(self) -> int:
        """Number of answers in the file; they answer the first requests."""
        return len(self._lines)

    def add(self, index: int, line: str) -> None:
        """Write the answer of request `index`, but keep it until the answers of all requests before it are written."""
        self._waiting[index] = f"{line}\n"
        with open(self.path, "a", encoding="utf-8") as file:
            while (next_line := self._waiting.pop(self.count, None)) is not None:
                file.write(next_line)
                self._lines.append(next_line)

    def finish(self) -> None:
        """Write the output from the collected answers, and remove the hidden file.

        Raises:
            InvalidArgument: The output cannot be written.
        """
        with self._output.writing() as file:
            file.writelines(self._lines)
        with suppress(FileNotFoundError):
            self.path.unlink()

    def _read_answers(self) -> Iterator[str]:
        """Yield the complete lines of the file, up to the first that does not answer the request of its number."""
        if not self.path.is_file():
            return
        lines = read_text_file(self.path, "NKW-MODEL-OPTION").splitlines(keepends=True)
        for request, line in zip(self._requests, lines):
            try:
                is_answer = line.endswith("\n") and json.loads(line)["custom_id"] == request.custom_id
            except (ValueError, LookupError, TypeError):
                is_answer = False
            if not is_answer:
                return
            yield line


def fingerprint(text: str, options: dict[str, Any]) -> str:
    """Return a SHA-256 digest of an input's text and of the options that its answers depend on."""
    settings = json.dumps(options, sort_keys=True, default=str)
    return hashlib.sha256(f"{settings}\n{text}".encode(errors="surrogatepass")).hexdigest()
