"""Traces of real requests for `nkw traffic --trace`, in their published formats.

The Azure LLM inference traces are CSV files with the columns TIMESTAMP, ContextTokens and GeneratedTokens. A file in
ShareGPT's format is a JSON list of conversations, without times. The first two turns of a conversation are a prompt and
its answer, whose tokens the model's tokenizer counts.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from datetime import datetime, timezone
from operator import itemgetter
from pathlib import Path
from typing import Any

from model.errors import ModelError, read_text_file
from model.traffic.lengths import LONGEST
from model.traffic.workload import MOST_REQUESTS, SECOND_NS, Query, Workload

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

_MOST_BYTES = 2**30
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?\Z")

CountTokens = Callable[[str], int]
"""Function from a text to its number of tokens."""


def read_trace(
    path: Path, limit: int | None, load_counter: Callable[[], CountTokens]
) -> Workload | list[Query]:
    """Read the requests of a trace.

    Args:
        path: CSV file of an Azure trace, or JSON file of conversations.
        limit: Most requests to read; None reads up to `MOST_REQUESTS`.
        load_counter: Called for a file of conversations, to count the tokens of its texts.

    Returns:
        A workload with the times of the trace, or the requests of conversations in their order.

    Raises:
        ModelError: If the file cannot be read, has another form or has no request.
    """
    text = read_text_file(path, "NKW-MODEL-OPTION", _MOST_BYTES).removeprefix("\ufeff")
    limit = min(MOST_REQUESTS, limit or MOST_REQUESTS)
    if text.lstrip()[:1] in ("[", "{"):
        return _read_conversations(path, text, limit, load_counter)
    try:
        return _read_azure(path, text, limit)
    except csv.Error as error:
        raise ModelError(f"the trace {path} is not CSV: {error}") from None


def _read_azure(path: Path, text: str, limit: int) -> Workload:
    """Return the workload of an Azure trace: at most `limit` requests, sorted by time, with times from 0.

    Rows without prompt or generated tokens are skipped and counted in `left_out`.

    Raises:
        ModelError: If a column is missing, a row is short, a time or a number is unreadable, or no request remains.
    """
    rows = csv.reader(text.splitlines())
    head = [name.strip() for name in next(rows, [])]
    missing = [name for name in COLUMNS if name not in head]
    if missing:
        raise ModelError(
            f"the trace {path} has no column {missing[0]}; a trace is a CSV file with {', '.join(COLUMNS)}, or a JSON "
            "list of conversations"
        )
    columns = [head.index(name) for name in COLUMNS]
    requests: list[tuple[int, Query]] = []
    left_out = 0
    for row in filter(None, rows):
        source = f"line {rows.line_num} of the trace {path}"
        if len(row) <= max(columns):
            raise ModelError(
                f"{source} has {len(row)} columns, and the first line names {len(head)}; give every row a value for "
                f"{', '.join(COLUMNS)}"
            )
        time, prompt, new = (row[column].strip() for column in columns)
        arrival_ns = _parse_time(time, source)
        query = Query(_parse_tokens(prompt, source), _parse_tokens(new, source))
        if not query.prompt_tokens or not query.new_tokens:
            left_out += 1
        elif len(requests) < limit:
            requests.append((arrival_ns, query))
        else:
            break
    if not requests:
        raise ModelError(
            f"the trace {path} has no request; give at least one row with prompt tokens and generated tokens"
        )
    times_ns, queries = zip(*sorted(requests, key=itemgetter(0)))
    return Workload(queries, tuple(time_ns - times_ns[0] for time_ns in times_ns), left_out=left_out)


def _parse_time(text: str, source: str) -> int:
    """Return a time of a trace in ns since 1970; a time without an offset is UTC.

    Args:
        text: A time such as 2023-11-16 18:15:46.6805900.
        source: Line and file of the time, for the message.

    Raises:
        ModelError: If the text has another form.
    """
    match = _TIME.match(text)
    day, clock, fraction, offset = match.groups() if match else ("", "", "", "")
    try:
        time = datetime.fromisoformat(f"{day} {clock}{'+00:00' if offset in (None, 'Z') else offset}")
        since = time - datetime(1970, 1, 1, tzinfo=timezone.utc)
    except ValueError:
        raise ModelError(
            f"{source} has the time {text!r:.60}; a time is written as 2023-11-16 18:15:46.6805900"
        ) from None
    return (since.days * 86_400 + since.seconds) * SECOND_NS + int((fraction or "0").ljust(9, "0"))


def _parse_tokens(text: str, source: str) -> int:
    """Return a number of tokens as an integer.

    Args:
        text: Digits.
        source: Line and file of the number, for the message.

    Raises:
        ModelError: If the text is no whole number from 0 to 2^20.
    """
    tokens = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if not 0 <= tokens <= LONGEST:
        raise ModelError(f"{source} has {text!r:.60} tokens; write a whole number from 0 to {LONGEST:,}")
    return tokens


def _read_conversations(
    path: Path, text: str, limit: int, load_counter: Callable[[], CountTokens]
) -> list[Query]:
    """Return the lengths of at most `limit` conversations: the first turn is the prompt, the second turn the answer.

    Conversations with fewer than two turns, or with an empty one, are skipped.

    Raises:
        ModelError: If the text is not a JSON list of conversations, a turn has no text, or no conversation remains.
    """
    try:
        conversations = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"the trace {path} is not JSON: {error}") from None
    if not isinstance(conversations, list):
        raise ModelError(f"the trace {path} is a JSON object; a trace is a list of conversations")
    count_tokens, queries = load_counter(), list[Query]()
    for index, conversation in enumerate(conversations):
        if len(queries) == limit:
            break
        source = f"conversation {index} of the trace {path}"
        turns = conversation.get("conversations") if isinstance(conversation, dict) else None
        if not isinstance(turns, list):
            raise ModelError(
                f"{source} is no object with a list `conversations`; give its turns as that list"
            )
        texts = [_read_turn(turn, source) for turn in turns[:2]]
        # vLLM's benchmark leaves out conversations of fewer than two turns as well.
        if len(texts) == 2 and all(texts):
            queries.append(Query(*(max(1, count_tokens(text)) for text in texts)))
    if not queries:
        raise ModelError(
            f"the trace {path} has no request; give at least one conversation of two turns with text"
        )
    return queries


def _read_turn(turn: Any, source: str) -> str:
    """Return the text of a turn, its field `value`.

    Args:
        turn: The turn as parsed from JSON.
        source: Conversation and file, for the message.

    Raises:
        ModelError: If the turn is no object or has no text.
    """
    text = turn.get("value") if isinstance(turn, dict) else None
    if not isinstance(text, str):
        raise ModelError(f"{source} has a turn without text; give each turn its text as the string `value`")
    return text
