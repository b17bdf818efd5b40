"""Files that appear complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from simulate.errors import InvalidArgument


@contextmanager
def complete(path: str | os.PathLike[str], what: str, code: str) -> Iterator[TextIO]:
    """A text file, UTF-8, that takes its place when the block ends without an error.

    Through a link, the file it stands for is replaced. Raises InvalidArgument under `code` where it cannot be written;
    `what` names it in the sentence.
    """
    target = _regular(path, what, code)
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with open(partial, "w", encoding="utf-8", newline="\n") as file:
            yield file
        os.replace(partial, target)
    except OSError as error:
        raise InvalidArgument(
            code, f"the {what} cannot be written to {path}: {error.strerror or error}"
        ) from None
    finally:
        with suppress(OSError):
            partial.unlink()


def claim(path: str | os.PathLike[str], what: str, code: str) -> Path:
    """Find out, before the work that fills it begins, whether a file can be written; returns its absolute path.

    Raises InvalidArgument as `complete` does.
    """
    target = _regular(path, what, code)
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        partial.open("w").close()
        partial.unlink()
    except OSError as error:
        raise InvalidArgument(
            code, f"the {what} cannot be written to {path}: {error.strerror or error}"
        ) from None
    return target


def _regular(path: str | os.PathLike[str], what: str, code: str) -> Path:
    """Where a file of this name lies or will lie. Nothing else may lie there: a rename would take a device's place."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise InvalidArgument(code, f"the {what} cannot be written to {path}: it is a folder")
    if os.path.lexists(target) and not target.is_file():
        raise InvalidArgument(code, f"the {what} cannot be written to {path}: it is not a regular file")
    return target
