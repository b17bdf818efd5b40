"""Traces of real requests, in their published formats.

The Azure LLM inference traces are CSV files with the columns TIMESTAMP, ContextTokens and GeneratedTokens. A file of
ShareGPT's form is a JSON list of conversations; of each, the first two turns are a prompt and its answer, whose tokens
are counted by the model's tokenizer. It has no times.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from model.errors import ModelError
from model.traffic.lengths import LONGEST
from model.traffic.workload import LARGEST, SECOND_NS, Query, Workload
from nkw.files import read_text

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

_MOST_BYTES = 2**30
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?\Z")

CountTokens = Callable[[str], int]
"""How many tokens a text has."""


def read_trace(path: Path, most: int | None, counted: Callable[[], CountTokens]) -> Workload | list[Query]:
    """The requests of a trace, at most `most` of them: with their times, or, where it has none, in their order.

    `counted` gives what counts the tokens of texts; it is called for a file of texts only. ModelError for a file that
    cannot be read, that is neither kind of trace, or that has no request.
    """
    try:
        text = read_text(path, _MOST_BYTES)
    except OSError as error:
        raise ModelError(f"the trace {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ModelError(f"the trace {path} is not UTF-8 text") from None
    text = text.removeprefix("\ufeff")
    most = min(LARGEST, most or LARGEST)
    if text.lstrip()[:1] in ("[", "{"):
        return _conversations(path, text, most, counted)
    try:
        return _azure(path, text, most)
    except csv.Error as error:
        raise ModelError(f"the trace {path} is not CSV: {error}") from None


def _azure(path: Path, text: str, most: int) -> Workload:
    rows = csv.reader(text.splitlines())
    head = [each.strip() for each in next(rows, [])]
    missing = [name for name in COLUMNS if name not in head]
    if missing:
        raise ModelError(
            f"the trace {path} has no column {missing[0]}; a trace is a CSV file with {', '.join(COLUMNS)}, or a JSON "
            "list of conversations"
        )
    places = [head.index(name) for name in COLUMNS]
    found: list[tuple[int, Query]] = []
    left_out = 0
    for row in rows:
        if not row:
            continue
        where = f"line {rows.line_num} of the trace {path}"
        if len(row) <= max(places):
            raise ModelError(f"{where} has {len(row)} columns; its first line names {len(head)}")
        time, *lengths = (row[place].strip() for place in places)
        arrival, (prompt, new) = _nanoseconds(time, where), (_tokens(each, where) for each in lengths)
        if not prompt or not new:
            left_out += 1
        elif len(found) < most:
            found.append((arrival, Query(prompt, new)))
        else:
            break
    if not found:
        raise ModelError(f"the trace {path} has no request")
    found.sort(key=lambda each: each[0])
    first = found[0][0]
    times = tuple(time - first for time, _ in found)
    return Workload(tuple(query for _, query in found), times, left_out=left_out)


def _nanoseconds(text: str, where: str) -> int:
    """Since 1970; a time without an offset is UTC."""
    match = _TIME.match(text)
    try:
        if match is None:
            raise ValueError
        day, hour, fraction, offset = match.groups()
        whole = datetime.fromisoformat(f"{day} {hour}{'+00:00' if offset in (None, 'Z') else offset}")
        since = whole - datetime(1970, 1, 1, tzinfo=timezone.utc)
    except ValueError:
        raise ModelError(
            f"{where} has the time {text!r:.60}; a time is written as 2023-11-16 18:15:46.6805900"
        ) from None
    return (since.days * 86_400 + since.seconds) * SECOND_NS + int((fraction or "0").ljust(9, "0"))


def _tokens(text: str, where: str) -> int:
    tokens = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if not 0 <= tokens <= LONGEST:
        raise ModelError(f"{where} has {text!r:.60} tokens; a number of tokens is from 0 to {LONGEST:,}")
    return tokens


def _conversations(path: Path, text: str, most: int, counted: Callable[[], CountTokens]) -> list[Query]:
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"the trace {path} is not JSON: {error}") from None
    if not isinstance(listed, list):
        raise ModelError(f"the trace {path} is a JSON object; a trace is a list of conversations")
    count, found = counted(), list[Query]()
    for number, each in enumerate(listed):
        if len(found) == most:
            break
        turns = each.get("conversations") if isinstance(each, dict) else None
        if not isinstance(turns, list):
            raise ModelError(f"conversation {number} of the trace {path} has no list of conversations")
        texts = [_turn(turn, number, path) for turn in turns[:2]]
        # Peers leave out conversations without a prompt and an answer as well.
        if len(texts) == 2 and all(texts):
            found.append(Query(max(1, count(texts[0])), max(1, count(texts[1]))))
    if not found:
        raise ModelError(f"the trace {path} has no request")
    return found


def _turn(turn: Any, number: int, path: Path) -> str:
    value = turn.get("value") if isinstance(turn, dict) else None
    if not isinstance(value, str):
        raise ModelError(f"conversation {number} of the trace {path} has a turn without the text value")
    return value
