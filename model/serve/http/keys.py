"""Files of API keys: those of the server's clients, and the key that a client command sends."""

from __future__ import annotations

import re
import stat
from pathlib import Path

from model.errors import ModelError
from nkw.files import read_text

_MIN_LENGTH, _MAX_LENGTH = 16, 1024
_KEY = re.compile(r"[!-~]+", re.ASCII)


def others_may_read(path: Path | None) -> bool:
    """Return whether every user of this machine may read a file; False if `path` is None."""
    return path is not None and bool(path.stat().st_mode & stat.S_IROTH)


def read_keys(path: Path | None) -> list[str]:
    """Return the keys of a file, one on each line that is not blank; no keys if `path` is None.

    Raises:
        ModelError: The file cannot be read or has no key; or a key repeats, has a wrong length, or cannot be sent in an
        Authorization header. The message has the number of the line and never the key.
    """
    if path is None:
        return []
    try:
        text = read_text(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not text: {error}") from None
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        key = line.removesuffix("\r")
        if not key.strip():
            continue
        if not _MIN_LENGTH <= len(key) <= _MAX_LENGTH:
            raise ModelError(
                f"line {number} of {path} has {len(key):,} characters; a key has {_MIN_LENGTH} to {_MAX_LENGTH:,}"
            )
        if not _KEY.fullmatch(key):
            raise ModelError(
                f"line {number} of {path} has a character that a key cannot have; keys have letters, digits and "
                "punctuation of ASCII, without spaces and control characters"
            )
        if key in lines:
            raise ModelError(
                f"lines {lines[key]} and {number} of {path} have the same key; remove one of them"
            )
        lines[key] = number
    if not lines:
        raise ModelError(f"{path} has no key; each line that is not empty is one")
    return list(lines)
