"""The keys of clients, in a file."""

from __future__ import annotations

import stat
from pathlib import Path

from model.errors import ModelError
from simulate.files import read_text

_SHORTEST_KEY = 16


def others_may_read(path: Path | None) -> bool:
    """Whether every user of this machine may read a file of keys."""
    return path is not None and bool(path.stat().st_mode & stat.S_IROTH)


def read_keys(path: Path | None) -> list[str]:
    """The keys of a file, one on each line; ModelError for a file without keys, and for short ones."""
    if path is None:
        return []
    try:
        keys = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not text: {error}") from None
    if not keys:
        raise ModelError(f"{path} has no key; each line that is not empty is one")
    wrong = next((n for n, key in enumerate(keys, 1) if len(key) < _SHORTEST_KEY or not key.isascii()), None)
    if wrong is not None:
        raise ModelError(f"key {wrong} of {path} is no ASCII text of at least {_SHORTEST_KEY} characters")
    return keys
